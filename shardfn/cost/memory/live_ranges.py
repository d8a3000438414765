"""Live ranges: when each stored value of a scheduled program has a buffer, by the rules that XLA's backends share.

A value has a buffer unless it is fused, from the op that makes it to its last reader. An elementwise op writes over an
operand that dies there, and a loop carries a value in one buffer or copies it. What one backend does differently is a subclass
(`platforms`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from shardfn.cost.schedule import Schedule
from shardfn.ir.op_traits import ELEMENTWISE, UPDATES


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is live in the closed interval `[start, end]`, two ticks for each op, with its values and bytes."""

    values: tuple[int, ...]
    start: int
    end: int
    bytes: int
    sooner: int | None = None
    """The end where the buffer reuses that of a result, if it is earlier: the result may be written over a value that dies."""


class ReusableBuffer(NamedTuple):
    """A buffer that temporaries may use: bytes, and the closed intervals in which it is taken."""

    bytes: int
    busy: list[tuple[int, int]]


class LiveRanges:
    """The first and the last tick of each stored value, which the methods refine one after the other.

    A backend's subclass overrides the methods from `add_own_buffers` to `may_write_over`, and `writes_over`.
    """

    writes_over: frozenset[str] = (ELEMENTWISE - {"copy"}).union(UPDATES, ("all_reduce",))
    """The ops whose result may be written over an operand."""

    def __init__(self, schedule: Schedule):
        self.partitioned, self.fusion = schedule.partitioned, schedule.fusion
        self.graph = schedule.partitioned.graph
        self.inputs, self.outputs = set(self.graph.inputs), set(self.graph.outputs)
        self.together = schedule.together
        self.loops = schedule.loops
        ties = set(self.graph.ties)  # what is resharded before a loop is apart
        carries = ((first, c) for i, first in self.loops.items() for c in self.graph.ops[i].carries if c[:2] in ties)
        self.carried = {c[1]: (first, *c) for first, c in carries}
        """By value that the body of a loop sees: the body's first op, and a row of `Op.carries`."""
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.copies: list[LiveBuffer] = []
        """Buffers of no value, such as copies that XLA makes."""
        self.sooner: dict[int, int] = {}
        """For each value, `LiveBuffer.sooner`."""

    def last_tick(self, i: int) -> int:
        """When op `i`, with those that are combined with it, has run."""
        return 2 * self.together.get(i, (i, i))[1]

    def buffers(self) -> tuple[list[LiveBuffer], list[LiveBuffer]]:
        """Live ranges of temporaries, and of results."""
        self.from_ops()
        copied = self.copied_carries()
        self.stay_through_loops()
        bound, updated = self.bound(), self.updated()
        self.write_over(bound)
        chained = {v for pair in updated for v in pair}
        temporaries, results = self.copies, []
        for members in self.colocated([*self.views(), *updated]):
            members = tuple(v for v in members if v in self.start and v not in self.inputs)
            if not members:
                continue
            is_result = not self.outputs.isdisjoint(members)
            ends = [self.end.get(v, self.start[v]) for v in members]
            buffer = LiveBuffer(
                members,
                min(self.start[v] for v in members),
                2 * len(self.graph.ops) if is_result else max(ends),
                max(map(self.held_bytes, members)),
            )
            is_chain = len(members) == 1 or chained.issuperset(members)
            if not is_result and is_chain and not self.sooner.keys().isdisjoint(members):
                sooner = max(self.sooner.get(v, end) for v, end in zip(members, ends, strict=True))
                buffer = dataclasses.replace(buffer, sooner=sooner)
            gaps = [(2 * self.carried[v][0], copied[v]) for v in members if v in copied and not is_result]
            for at, again in sorted(gaps):
                temporaries.append(dataclasses.replace(buffer, end=at))
                buffer = dataclasses.replace(buffer, start=max(again, at + 1))
            (results if is_result else temporaries).append(buffer)
        return temporaries, results

    def held_bytes(self, v: int) -> int:
        """Bytes that a value holds on one device."""
        return self.partitioned.local_bytes(v)

    def from_ops(self) -> None:
        """The ranges as ops make and read values; what a loop reads lives until it begins."""
        start, end = self.start, self.end
        for i, op in enumerate(self.graph.ops):
            if i in self.fusion.dead:
                continue
            made = 2 * self.together.get(i, (i, i))[0]
            start.update((v, made) for v in op.outputs if v in self.fusion.stored)
            if i in self.loops:
                first = 2 * self.loops[i]
                for v in self.fusion.reads[i]:
                    end[v] = max(end.get(v, 0), first - 1 if start.get(v, -1) < first else 2 * i - 1)
                continue
            for v in self.fusion.reads[i]:
                end[v] = max(end.get(v, 0), self.last_read(i, v))
            self.add_own_buffers(i)
        for op in map(self.graph.ops.__getitem__, self.loops):
            for source, returned, result in zip(op.inputs, op.inputs[len(op.seen) :], op.outputs, strict=False):
                if source == returned:  # it comes out as it went in
                    start.pop(result, None)
                    if result in end:
                        end[source] = max(end.get(source, 0), end[result])
        start.update((seen, 2 * first) for seen, (first, *_) in self.carried.items())

    def stay_through_loops(self) -> None:
        """What a loop reads from outside lives until the loop's end."""
        for v, until in self.end.items():
            if v in self.start and v not in self.carried:
                for last, first in self.loops.items():
                    if self.start[v] < 2 * first <= until < 2 * last:
                        until = self.end[v] = 2 * last

    def dies_in(self, v: int, i: int) -> bool:
        """Whether op `i` is the last reader of a temporary."""
        is_temporary = v in self.start and v not in self.inputs and v not in self.outputs
        return is_temporary and self.end.get(v) == self.last_tick(i)

    def add_own_buffers(self, i: int) -> None:
        """Add the buffers that op `i` needs for itself."""

    def last_read(self, i: int, v: int) -> int:
        """When op `i` reads an operand for the last time."""
        return self.last_tick(i)

    def copied_carries(self) -> dict[int, int]:
        """Carried values that XLA copies at the start of the body, each with the tick when the next one is made."""
        return {}

    def bound(self) -> frozenset[int]:
        """Values that share a buffer before XLA decides what may be written over."""
        return frozenset()

    def updated(self) -> list[tuple[int, int]]:
        """The results of updates in place that share the buffer of their operand, each with the operand."""
        return []

    def may_write_over(self, i: int, v: int) -> bool:
        """Whether op `i` may write over an operand of its own size that dies there; not if it is combined with others."""
        first, last = self.together.get(i, (i, i))
        return first == last

    def write_over(self, bound: frozenset[int]) -> None:
        """Let ops write over an operand of their own size that dies there, and updates over the array they update.

        Values in `bound`, which share a buffer with others already, are excluded. The earlier end that they would have is kept in
        `sooner`: it counts in the buffers of results.
        """
        partitioned = self.partitioned
        for i, op in enumerate(self.graph.ops):
            if len(op.outputs) != 1 or op.outputs[0] not in self.start or op.name not in self.writes_over:
                continue
            (made,) = op.outputs
            form = partitioned.local_shape(made), partitioned.local_bytes(made)
            written = op.inputs[:1] if op.name in UPDATES else self.fusion.reads[i]
            for v in written:
                if v not in self.fusion.reads[i] or not self.dies_in(v, i):
                    continue
                if (partitioned.local_shape(v), partitioned.local_bytes(v)) == form and self.may_write_over(i, v):
                    is_apart = op.name not in UPDATES and not bound.isdisjoint((v, made))
                    (self.sooner if is_apart else self.end)[v] = min(2 * i, self.start[made]) - 1
                    break

    def views(self) -> list[tuple[int, int]]:
        """Results that are views of a computed value, each with that value."""
        found: dict[int, int] = {}
        for i, op in enumerate(self.graph.ops):
            reads = self.fusion.reads[i]
            if (
                self.fusion.inside[i] is not None
                and len(op.outputs) == len(reads) == 1
                and self.partitioned.is_view(op)
            ):
                (source,) = reads
                if op.outputs[0] in self.outputs and source not in self.outputs and source not in self.inputs:
                    found.setdefault(source, op.outputs[0])
        return [(result, source) for source, result in found.items()]

    def branches(self) -> Iterable[tuple[int, list[int]]]:
        """The results of conditions, each with what branches make for it and nothing else reads."""
        for op in self.graph.ops:
            made = len(op.outputs)
            if op.name != "case" or not made or (len(op.inputs) - 1) % made:
                continue
            for at, result in enumerate(op.outputs):
                of = [v for v in op.inputs[1 + at :: made] if v in self.start and v not in self.inputs]
                if result in self.start:
                    yield result, [v for v in of if self.graph.read_counts[v] == 1]

    def colocated(self, views: Iterable[tuple[int, int]]) -> Iterable[tuple[int, ...]]:
        """Values that share a buffer: those that enter a loop, go round in it and leave it; a result and the value of which it
        is a view.
        """
        start, end = self.start, self.end
        parent: dict[int, int] = {}

        def find(v: int) -> int:
            while parent.setdefault(v, v) != v:
                v = parent[v]
            return v

        for result, source in views:
            if source in start and result in start:
                parent[find(result)] = find(source)
        given: set[int] = set()
        for result, branches in self.branches():
            for v in branches:
                parent[find(v)] = find(result)
        for _, operand, seen, back, result in self.carried.values():
            parent[find(result)] = find(seen)
            free = operand in start and operand not in self.inputs and operand not in given
            if free and end.get(operand, 0) < start[seen]:
                given.add(operand)
                parent[find(operand)] = find(seen)
            if back in start and start[back] >= end.get(seen, 0) - 1 and back not in given:
                given.add(back)
                parent[find(back)] = find(seen)
        groups: dict[int, list[int]] = {}
        for v in start:
            groups.setdefault(find(v), []).append(v)
        return map(tuple, groups.values())
