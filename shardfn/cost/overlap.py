"""How much of a call's communication can overlap with its compute.

`Cost.time_s` assumes that collectives and compute never overlap. XLA's backends for GPU and TPU start some kinds of collectives
early and compute meanwhile. Here the program is a graph of kernels and collectives. A list schedule (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969) of two machines, the cores and the links, gives the time of each: it starts as soon as
its operands are ready and its machine is free. If several can start, the first in program order does. A loop does not overlap
with the ops around it, because XLA moves no ops into or out of loops. A collective matmul is a loop that sends while it
multiplies.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Collection, Sequence

from shardfn.cost.compute import kernel_runs
from shardfn.cost.devices.chips import Hardware
from shardfn.cost.estimate import collective_s, collectives_by_result
from shardfn.cost.platforms import backend_of
from shardfn.cost.schedule import Schedule, lower_for_backend, schedule_ops
from shardfn.ir.op_traits import COLLECTIVE_OPS
from shardfn.ir.partitioned import PartitionedProgram


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Modelled seconds of one call, by which collectives overlap with compute."""

    none_s: float
    """None: the time by which plans are compared."""
    expected_s: float
    """Those of the kinds that the platform's XLA backend runs asynchronously (`Backend.asynchronous`)."""
    full_s: float
    """All, as far as data dependences allow."""


def overlap(partitioned: PartitionedProgram, hardware: Hardware) -> Overlap:
    """The time of one call if no, some or all collectives overlap with compute."""
    schedule = schedule_ops(lower_for_backend(partitioned, hardware.chip))
    steps = _steps(schedule, hardware)
    none_s = sum(step.taken(()) for step in steps)
    every = frozenset(step.kind for step in steps if step.kind not in ("", _LOOP))
    every |= {_PERMUTE for step in steps if step.sending_s}
    some = every & backend_of(partitioned.platform).asynchronous
    full_s = min(none_s, _seconds(schedule, steps, every)) if every else none_s
    expected_s = full_s if some == every else _seconds(schedule, steps, some) if some else none_s
    return Overlap(none_s, max(full_s, min(expected_s, none_s)), full_s)


_BOTH = "cores", "links"
_LOOP = "loop"
_PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class _Step:
    """A kernel or a collective: its seconds in all runs of one call."""

    at: int
    """Its last op: where it stands."""
    seconds: float
    reads: frozenset[int]
    writes: frozenset[int]
    kind: str = ""
    """Of a collective, or `_LOOP`."""
    sending_s: float = 0.0
    """What a collective matmul sends meanwhile."""

    def taken(self, overlapped: Collection[str]) -> float:
        """Its seconds if collectives of the kinds `overlapped` overlap with compute."""
        return (max if _PERMUTE in overlapped else sum)((self.seconds, self.sending_s))


def _steps(schedule: Schedule, hardware: Hardware) -> list[_Step]:
    """The kernels and collectives of a program, in its order."""
    partitioned, fusion = schedule.partitioned, schedule.fusion
    ops, axes = partitioned.graph.ops, tuple(partitioned.axes.items())
    sent = dict(collectives_by_result(partitioned, schedule))
    in_matmuls = {c.whole: sent.pop(c.result) for c in partitioned.communications if c.matmul_permutes}
    found = list[_Step]()
    for run in kernel_runs(partitioned, hardware.chip, fusion):
        kernel = run.kernel
        if kernel[-1] in schedule.loops:  # its body is counted by itself; a GPU copies what it carries
            found += [_Step(kernel[-1], run.total_s, frozenset(), frozenset())] if run.bytes_moved else []
            continue
        reads = frozenset(v for i in kernel for v in fusion.reads[i])
        writes = frozenset(v for i in kernel for v in ops[i].outputs)
        last = ops[kernel[-1]]
        c = sent.get(last.outputs[0]) if last.outputs else None
        if c is not None:  # on CPU, XLA copies some results into place: a kernel that reads the collective's result
            made = frozenset([~last.outputs[0]])
            found.append(_Step(kernel[-1], collective_s(c, hardware, axes), reads, made, c.kind))
            reads = made
        with_matmul = (in_matmuls[v] for v in in_matmuls.keys() & (reads | writes) if last.name not in COLLECTIVE_OPS)
        sending_s = sum(collective_s(c, hardware, axes) for c in with_matmul)
        kind = _LOOP if sending_s else ""
        found.append(_Step(kernel[-1], run.total_s, reads - writes, writes, kind, sending_s))
    return sorted(found, key=lambda step: step.at)


def _seconds(schedule: Schedule, steps: Sequence[_Step], overlapped: Collection[str]) -> float:
    """The end of the program's list schedule if collectives of the kinds `overlapped` overlap with compute."""
    graph, reads = schedule.partitioned.graph, schedule.fusion.reads
    inside: dict[int, list[_Step]] = collections.defaultdict(list)
    for step in steps:
        inside[graph.loop_of[step.at]].append(step)
    for at in sorted(schedule.loops):  # the inner ones first
        body = sorted(inside.pop(at, []), key=lambda step: step.at)
        outside = frozenset(v for step in body for v in step.reads).difference(*(step.writes for step in body))
        loop = _Step(at, _makespan(body, overlapped), outside.union(reads[at]), frozenset(graph.ops[at].outputs), _LOOP)
        inside[graph.loop_of[at]].append(loop)
    return _makespan(sorted(inside[-1], key=lambda step: step.at), overlapped)


def _makespan(steps: Sequence[_Step], overlapped: Collection[str]) -> float:
    """The end of a list schedule of two machines.

    Kernels run on the cores, collectives of the kinds `overlapped` on the links. Loops and other collectives take both. Of the
    steps that can start, the first in program order starts.
    """
    made = {v: n for n, step in enumerate(steps) for v in step.writes}
    needs = [{made[v] for v in step.reads if made.get(v, n) < n} for n, step in enumerate(steps)]
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for n, sources in enumerate(needs):
        for source in sources:
            readers[source].append(n)
    takes: list[tuple[str, ...]] = [
        ("cores",) if not step.kind else ("links",) if step.kind in overlapped else _BOTH for step in steps
    ]
    free: dict[str, float] = dict.fromkeys(_BOTH, 0.0)
    ready, waits = [0.0] * len(steps), list(map(len, needs))
    queues: dict[tuple[str, ...], _Queue] = {machines: _Queue() for machines in dict.fromkeys(takes)}
    for n, count in enumerate(waits):
        if not count:
            queues[takes[n]].put(n, 0.0)
    for _ in steps:
        starts = (
            (*queue.first(max(free[m] for m in machines)), machines) for machines, queue in queues.items() if queue
        )
        start, n, machines = min(starts)
        queues[machines].pop()
        end = start + steps[n].taken(overlapped)
        free.update(dict.fromkeys(machines, end))
        for reader in readers[n]:
            waits[reader] -= 1
            ready[reader] = max(ready[reader], end)
            if not waits[reader]:
                queues[takes[reader]].put(reader, ready[reader])
    return max(free.values())


class _Queue:
    """Steps that wait for the same machines, by the time at which their operands are ready."""

    def __init__(self) -> None:
        self._later: list[tuple[float, int]] = []
        self._now: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._later or self._now)

    def put(self, n: int, ready: float) -> None:
        heapq.heappush(self._later, (ready, n))

    def first(self, free: float) -> tuple[float, int]:
        """When the next step starts, and its number, once its machines are free."""
        start = free if self._now else max(free, self._later[0][0])
        while self._later and self._later[0][0] <= start:
            heapq.heappush(self._now, heapq.heappop(self._later)[1])
        return start, self._now[0]

    def pop(self) -> None:
        """Remove the step that `first` returned."""
        heapq.heappop(self._now)
