"""Pipeline schedules as data: ticks in which all devices do the same kind of work.

In a tick every device runs a forward, or every device runs a backward, on one micro-batch each. Then it sends its result
to a neighbour, which uses it in its next tick of that kind. All devices run one program, so no device's forward waits for
another's backward. With `s` devices, `m` micro-batches and `v` chunks of the model on each device there are `v m + s - 1`
ticks of each kind, and a device idles in `s - 1` of them: the bubble is (s - 1) / (v m + s - 1).

The price is memory: 1F1B keeps up to 2 (s - d) - 1 stage inputs on device d, where devices with programs of their own
keep s - d. Neither number grows with `m`. With `m + s - 1` ticks of each kind fewer are impossible: no tick can be missed, so
device d is in forward tick i + d and in backward tick i + s - 1 - d of micro-batch i. Backward tick i comes after forward tick
i + s - 1, in which the last device begins i. So when device d goes back through i, forward tick i + 2 (s - 1) - d is over, and
d has begun the micro-batches up to i + 2 (s - 1 - d).

Ticks of both kinds would keep s - d inputs, in as many ticks: F of i on d in tick 2 i + d, B in tick 2 i + 2 s - 1 - d. But
neighbours send to each other after each tick, and in each one of them runs a backward: all ticks last as long as a backward, so
a step takes 2 B / (F + B) times as long, 1.5 times with rematerialisation. Twice as many micro-batches halve the inputs' bytes
too, and make the bubble smaller.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from shardfn.draw import Picture, pipeline_picture
from shardfn.draw.picture import WIDTH
from shardfn.frontend.strategy import count

FORWARD = "forward"
BACKWARD = "backward"
SCHEDULES = ("1f1b", "gpipe")


@dataclasses.dataclass(frozen=True)
class Unit:
    """The work of one device in a tick: a micro-batch through one of its chunks of the model."""

    micro: int
    chunk: int
    slot: int = 0
    """The buffer that keeps the chunk's input from the forward to the backward."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """The work of all devices at a time; None for an idle device."""

    kind: str
    units: tuple[Unit | None, ...]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Ticks whose kinds repeat: each round has a tick for each of `kinds`."""

    kinds: tuple[str, ...]
    rounds: tuple[tuple[Tick, ...], ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of every device, tick by tick.

    >>> print(schedule("1f1b", 2, 3))
    device 0: F0 F1 -- F2 B0 -- B1 B2
    device 1: -- F0 B0 F1 B1 F2 B2 --
    1f1b, 2 devices x 1 chunk, 3 micro-batches: bubble 1/4 = 25.0%, at most 3 inputs kept
    """

    name: str
    devices: int
    micro_size: int
    chunks: int
    phases: tuple[Phase, ...]

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """All ticks in order."""
        return tuple(tick for phase in self.phases for one in phase.rounds for tick in one)

    @property
    def bubble(self) -> float:
        """The fraction of the devices' ticks in which they idle."""
        ticks = self.ticks
        return sum(unit is None for tick in ticks for unit in tick.units) / (len(ticks) * self.devices)

    @property
    def slots(self) -> int:
        """How many inputs of chunks a device keeps at most."""
        return 1 + max((unit.slot for tick in self.ticks for unit in tick.units if unit), default=0)

    def draw(self, width: float = WIDTH) -> Picture:
        """The schedule as a Gantt chart (SVG): a notebook shows it, `.save("schedule.svg")` writes it.

        Args:
          width: pixels.

        Raises:
          StrategyError: the width is too small or too large.

        >>> schedule("1f1b", 2, 3).draw()
        <Picture 'Pipeline schedule 1f1b', 760 x ...>
        """
        return pipeline_picture(self, width)

    def __str__(self) -> str:
        lines = [
            f"device {device}: " + " ".join(_cell(tick, device, self.chunks) for tick in self.ticks)
            for device in range(self.devices)
        ]
        idle, total = self.devices - 1, self.chunks * self.micro_size + self.devices - 1
        fraction = f"{idle}/{total} = " if self.bubble * total == idle else ""
        return "\n".join([
            *lines,
            f"{self.name}, {self.devices} devices x {self.chunks} chunk{'s' if self.chunks > 1 else ''}, "
            f"{count(self.micro_size, 'micro-batch', 'micro-batches')}: "
            f"bubble {fraction}{self.bubble:.1%}, at most {self.slots} inputs kept",
        ])  # fmt: skip


def _cell(tick: Tick, device: int, chunks: int) -> str:
    unit = tick.units[device]
    return f"{tick.kind[0].upper()}{unit.micro}" + (f".{unit.chunk}" if chunks > 1 else "") if unit else "--"


@functools.lru_cache(maxsize=64)
def schedule(name: str, devices: int, micro_size: int, chunks: int = 1) -> Schedule:
    """The schedule of a training step, or of a loss without gradients.

    Args:
      name: "gpipe", all forwards before all backwards, "1f1b", each backward as early as possible, or `FORWARD`.
      devices: how many stages run at the same time.
      micro_size: the number of micro-batches. With fewer than `devices`, some devices always idle.
      chunks: how many stages each device holds; with more than one, device d holds stages d, d + devices, ...

    >>> schedule("gpipe", 2, 4).slots, schedule("1f1b", 2, 4).slots, schedule("1f1b", 2, 400).slots
    (4, 3, 3)
    >>> schedule("1f1b", 4, 8).bubble == 3 / 11, schedule("1f1b", 4, 8, chunks=2).bubble == 3 / 19
    (True, True)
    >>> print(schedule(FORWARD, 2, 2))
    device 0: F0 F1 --
    device 1: -- F0 F1
    forward, 2 devices x 1 chunk, 2 micro-batches: bubble 1/3 = 33.3%, at most 1 inputs kept
    """
    forwards = list(_ticks(FORWARD, devices, micro_size, chunks))
    backwards = [] if name == FORWARD else list(_ticks(BACKWARD, devices, micro_size, chunks))
    alone = chunks * devices - 1 if name == "1f1b" else len(forwards)  # forwards before the first possible backward
    both = len(forwards) - alone
    phases = [
        ((FORWARD,), [(tick,) for tick in forwards[:alone]]),
        ((FORWARD, BACKWARD), list(zip(forwards[alone:], backwards[:both], strict=True))),
        ((BACKWARD,), [(tick,) for tick in backwards[both:]]),
    ]
    found = Schedule(name, devices, micro_size, chunks, tuple(Phase(k, tuple(r)) for k, r in phases if r))
    return found if name == FORWARD else _with_slots(found)


def _ticks(kind: str, devices: int, micro_size: int, chunks: int) -> Iterator[Tick]:
    """The ticks of a kind. Each group of `devices` micro-batches goes through one chunk after another."""
    order: list[Unit | None] = []
    for group, chunk, j in itertools.product(range(-(-micro_size // devices)), range(chunks), range(devices)):
        micro = group * devices + j
        unit = Unit(micro, chunk if kind == FORWARD else chunks - 1 - chunk)
        order.append(unit if micro < micro_size else None)
    while order and order[-1] is None:
        order.pop()
    for i in range(len(order) + devices - 1):
        lags = (d if kind == FORWARD else devices - 1 - d for d in range(devices))
        yield Tick(kind, tuple(order[i - lag] if 0 <= i - lag < len(order) else None for lag in lags))


def _with_slots(schedule: Schedule) -> Schedule:
    """Give each chunk's input a slot from its forward to its backward."""
    free: list[list[int]] = [[] for _ in range(schedule.devices)]
    unused = [itertools.count() for _ in range(schedule.devices)]
    used: dict[tuple[int, int, int], int] = {}

    def placed(tick: Tick) -> Tick:
        units: list[Unit | None] = []
        for device, unit in enumerate(tick.units):
            if unit is None:
                units.append(None)
                continue
            key = device, unit.micro, unit.chunk
            if tick.kind == BACKWARD:
                free[device].append(slot := used.pop(key))
            else:
                slot = used[key] = free[device].pop() if free[device] else next(unused[device])
            units.append(dataclasses.replace(unit, slot=slot))
        return Tick(tick.kind, tuple(units))

    phases = tuple(Phase(p.kinds, tuple(tuple(map(placed, one)) for one in p.rounds)) for p in schedule.phases)
    return dataclasses.replace(schedule, phases=phases)
