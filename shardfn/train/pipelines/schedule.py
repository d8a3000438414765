"""The order in which pipeline stages work, as data: beats in which all devices do the same kind of thing.

A beat is "forward" or "backward" on every device at once, on one micro-batch each; after it, what was computed goes to
the neighbour, which uses it in its next beat of that kind. One program runs on all devices, so a beat lasts as long as
its kind does, and no device waits in a forward for another's backward. With `s` devices, `m` micro-batches and `v`
chunks of the model on each device there are `v m + s - 1` beats of each kind, and a device is idle in `s - 1` of them:
the bubble is (s - 1) / (v m + s - 1), whatever a forward and a backward cost.

In exchange, the 1F1B order here has up to 2 s - 1 micro-batches under way on the first device (2 (s - d) - 1 on device d),
where devices with programs of their own need s: either is a number that does not grow with `m`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

FORWARD = "forward"
BACKWARD = "backward"
SCHEDULES = ("1f1b", "gpipe")


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one device does in a beat: a micro-batch through one of its chunks of the model."""

    micro: int
    chunk: int
    slot: int = 0
    """Where the chunk's input is kept from the forward to the backward."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """What all devices do at a time; None for one that is idle."""

    kind: str
    units: tuple[Unit | None, ...]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Beats whose kinds repeat: `rounds` rows, each with a beat for each of `kinds`."""

    kinds: tuple[str, ...]
    rounds: tuple[tuple[Tick, ...], ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who works on what, beat by beat.

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
    def beats(self) -> tuple[Tick, ...]:
        """All of them in order."""
        return tuple(beat for phase in self.phases for one in phase.rounds for beat in one)

    @property
    def bubble(self) -> float:
        """The part of the devices' beats in which they are idle."""
        beats = self.beats
        idle = sum(unit is None for beat in beats for unit in beat.units)
        return idle / (len(beats) * self.devices)

    @property
    def slots(self) -> int:
        """How many inputs of chunks a device has to keep at a time."""
        return 1 + max((unit.slot for beat in self.beats for unit in beat.units if unit), default=0)

    def __str__(self) -> str:
        rows = []
        for device in range(self.devices):
            cells = [_cell(beat, device, self.chunks) for beat in self.beats]
            rows.append(f"device {device}: " + " ".join(cells))
        ideal, whole = self.devices - 1, self.chunks * self.micro_size + self.devices - 1
        chunks = f"{self.chunks} chunk{'s' if self.chunks > 1 else ''}"
        said = (
            f"bubble {ideal}/{whole} = {self.bubble:.1%}"
            if self.bubble * whole == ideal
            else f"bubble {self.bubble:.1%}"
        )
        return "\n".join([*rows, f"{self.name}, {self.devices} devices x {chunks}, {self.micro_size} micro-batches: "
                                 f"{said}, at most {self.slots} inputs kept"])  # fmt: skip


def _cell(beat: Tick, device: int, chunks: int) -> str:
    unit = beat.units[device]
    if unit is None:
        return "--"
    return f"{beat.kind[0].upper()}{unit.micro}" + (f".{unit.chunk}" if chunks > 1 else "")


@functools.lru_cache(maxsize=64)
def schedule(name: str, devices: int, micro_size: int, chunks: int = 1) -> Schedule:
    """The schedule of a training step.

    Args:
      name: "gpipe", all forwards before all backwards, or "1f1b", a backward as soon as there is one.
      devices: how many stages work at the same time.
      micro_size: how many micro-batches, as many as devices at least.
      chunks: how many stages each device holds; more than one interleaves them: device d holds the stages d,
        d + devices, d + 2 devices and so on.

    >>> schedule("gpipe", 2, 4).slots, schedule("1f1b", 2, 4).slots, schedule("1f1b", 2, 400).slots
    (4, 3, 3)
    >>> schedule("1f1b", 4, 8).bubble == 3 / 11, schedule("1f1b", 4, 8, chunks=2).bubble == 3 / 19
    (True, True)
    """
    forwards, backwards = (list(_beats(kind, devices, micro_size, chunks)) for kind in (FORWARD, BACKWARD))
    alone = len(forwards) if name == "gpipe" else chunks * devices - 1  # forwards before the first backward can be
    both = len(forwards) - alone
    order = [
        ((FORWARD,), [(beat,) for beat in forwards[:alone]]),
        ((FORWARD, BACKWARD), list(zip(forwards[alone:], backwards[:both], strict=True))),
        ((BACKWARD,), [(beat,) for beat in backwards[both:]]),
    ]
    return _kept(Schedule(name, devices, micro_size, chunks, tuple(Phase(k, tuple(r)) for k, r in order if r)))


@functools.lru_cache(maxsize=64)
def forward_only(devices: int, micro_size: int, chunks: int = 1) -> Schedule:
    """The schedule of a loss without gradients: nothing is kept.

    >>> print(forward_only(2, 2))
    device 0: F0 F1 --
    device 1: -- F0 F1
    forward, 2 devices x 1 chunk, 2 micro-batches: bubble 1/3 = 33.3%, at most 1 inputs kept
    """
    rounds = tuple((beat,) for beat in _beats(FORWARD, devices, micro_size, chunks))
    return Schedule(FORWARD, devices, micro_size, chunks, (Phase((FORWARD,), rounds),))


def _beats(kind: str, devices: int, micro_size: int, chunks: int) -> Iterator[Tick]:
    """The beats of a kind. Micro-batches go in groups of as many as devices: a group through one chunk after another."""
    order = [_unit(k, kind, devices, micro_size, chunks) for k in range(-(-micro_size // devices) * devices * chunks)]
    while order and order[-1] is None:
        order.pop()
    for i in range(len(order) + devices - 1):
        lags = (d if kind == FORWARD else devices - 1 - d for d in range(devices))
        yield Tick(kind, tuple(order[i - lag] if 0 <= i - lag < len(order) else None for lag in lags))


def _unit(k: int, kind: str, devices: int, micro_size: int, chunks: int) -> Unit | None:
    group, within = divmod(k, devices * chunks)
    chunk, j = divmod(within, devices)
    micro = group * devices + j
    return Unit(micro, chunk if kind == FORWARD else chunks - 1 - chunk) if micro < micro_size else None


def _kept(made: Schedule) -> Schedule:
    """With a slot for each input, taken from its forward to its backward."""
    free: list[list[int]] = [[] for _ in range(made.devices)]
    count = [0] * made.devices
    held: dict[tuple[int, int, int], int] = {}

    def placed(beat: Tick) -> Tick:
        units = []
        for device, unit in enumerate(beat.units):
            if unit is not None:
                key = device, unit.micro, unit.chunk
                if beat.kind == FORWARD:
                    if not free[device]:
                        free[device].append(count[device])
                        count[device] += 1
                    held[key] = free[device].pop()
                    unit = dataclasses.replace(unit, slot=held[key])
                else:
                    unit = dataclasses.replace(unit, slot=held.pop(key))
                    free[device].append(unit.slot)
            units.append(unit)
        return Tick(beat.kind, tuple(units))

    phases = tuple(
        Phase(phase.kinds, tuple(tuple(placed(beat) for beat in one) for one in phase.rounds)) for phase in made.phases
    )
    return dataclasses.replace(made, phases=phases)
