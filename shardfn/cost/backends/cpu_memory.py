"""How XLA's CPU backend assigns buffers: what it copies, and what it writes over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardfn.cost.backends.loop_copies import keeps_places
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges, ReusableBuffer
from shardfn.cost.schedule import Schedule
from shardfn.ir.op_traits import UPDATES

SMALL_CARRY = 1024
"""Bytes of what a loop carries below which its copies do not count."""


class CpuLiveRanges(LiveRanges):
    """Updates are in place, carried values are copied where ops still read them, and an elementwise op writes over an operand
    only if it reads each element for the one at its position.
    """

    writes_over = LiveRanges.writes_over - {"all_reduce"}

    def last_read(self, i: int, v: int) -> int:
        """A max pool's gradient reads the image once, as soon as it is there."""
        op = self.graph.ops[i]
        is_image = op.name == "select_and_scatter" and v == op.inputs[0]
        return self.start.get(v, -1) + 1 if is_image else self.last_tick(i)

    def add_own_buffers(self, i: int) -> None:
        """The temporaries of a max pool's gradient, in addition to operands and results; other ops have none.

        As soon as the image is there, indices of every element, made at the start, give those of the largest, to which the
        gradient is added at the end.
        """
        op = self.graph.ops[i]
        if op.name != "select_and_scatter":
            return
        at = self.start.get(op.inputs[0], 2 * i - 2) + 1
        image, pooled = (math.prod(self.partitioned.local_shape(v)) for v in op.inputs[:2])
        rank = len(self.partitioned.local_shape(op.inputs[0]))
        ranges = (0, at, rank * image), (at, at + 1, (rank + 1) * pooled), (at + 1, 2 * i, rank * pooled)
        self.copies += [LiveBuffer((), first, last, 4 * numbers) for first, last, numbers in ranges]
        self.start[op.outputs[0]] = 0

    def copied_carries(self) -> dict[int, int]:
        """Carried values that XLA copies at the start of the body, as an op reads them on which the next value does not
        depend; each with the tick when that is made.
        """
        partitioned, fusion, start, end = self.partitioned, self.fusion, self.start, self.end
        makers = self.graph.makers
        found: dict[int, int] = {}
        for first, _, seen, back, _ in self.carried.values():
            made, size = makers.get(back, -1), partitioned.local_bytes(seen)
            if made < first or back not in start or end.get(seen, -1) < 2 * first or size < SMALL_CARRY:
                continue
            readers = [i for i in range(first, end[seen] // 2 + 1) if seen in fusion.reads[i]]
            needed, ahead = {made}, [made]
            while ahead:
                for v in fusion.reads[ahead.pop()]:
                    i = makers.get(v, -1)
                    if i >= first and i not in needed:
                        needed.add(i)
                        ahead.append(i)
            if not needed.issuperset(readers):
                self.copies.append(LiveBuffer((), 2 * first, end[seen], size))
                found[seen] = start[back]
                end[seen] = 2 * first
            elif made in readers and not keeps_places(partitioned, fusion, made, seen):
                end[seen] = max(end[seen], start[back] + 2)  # the next value is made apart, and copied at the end
        return found

    def bound(self) -> frozenset[int]:
        """Values that share a buffer before XLA's CPU backend decides what may be written over.

        They are the operand and the result of an update in place, and the values that enter a loop, go round in it and leave it.
        """
        found: set[int] = set()
        for i, op in enumerate(self.graph.ops):
            if op.name in UPDATES and self.fusion.inside[i] is not None and op.inputs[0] in self.fusion.reads[i]:
                found.update((op.inputs[0], op.outputs[0]))
        for first, operand, seen, back, result in self.carried.values():
            found.update((seen, back, result))
            if self.end.get(operand, 0) < 2 * first:
                found.add(operand)
        return frozenset(found)

    def updated(self) -> list[tuple[int, int]]:
        """The results of updates in place, each with its operand: a temporary that nothing reads afterwards."""
        found = []
        for i, op in enumerate(self.graph.ops):
            if op.name in UPDATES and len(op.outputs) == 1 and op.outputs[0] in self.start:
                v = op.inputs[0]
                if v in self.fusion.reads[i] and self.dies_in(v, i):
                    found.append((op.outputs[0], v))
        return found

    def may_write_over(self, i: int, v: int) -> bool:
        """Not if the op calls a library for a sum, or reads elements for those at other positions."""
        is_library_call = any(self.graph.ops[j].name == "reduce" for j in self.fusion.inside[i] or ())
        return (
            not is_library_call and super().may_write_over(i, v) and keeps_places(self.partitioned, self.fusion, i, v)
        )


def donated_copies(
    schedule: Schedule, pairs: Sequence[tuple[int, LiveBuffer]]
) -> tuple[list[LiveBuffer], list[ReusableBuffer]]:
    """Copies of donated arguments, and the arguments' own buffers, which are free until the results in them are computed.

    XLA copies an argument at the start if an op reads it that need not run before the result in its buffer is computed. It
    decides so before it orders the ops.
    """
    graph, fusion = schedule.partitioned.graph, schedule.fusion
    inside = {i: last for last, first in schedule.loops.items() for i in range(first, last)}
    first_of = {i: first for i, (first, _) in schedule.together.items()}
    readers: dict[int, list[int]] = {v: [] for v, _ in pairs}
    maker: dict[int, int] = {}
    needs: dict[int, int] = {}  # of each op, what runs before it in any order, a bit for each
    for i, (op, reads) in enumerate(zip(graph.ops, fusion.reads, strict=True)):
        if fusion.inside[i] is None:
            continue
        node = inside.get(i, first_of.get(i, i))
        before = needs.get(node, 1 << node)
        for v in reads:
            if v in maker:
                before |= needs[maker[v]]
            if v in readers:
                readers[v].append(i)
        needs[node] = before
        maker.update(dict.fromkeys(op.outputs, node))
    copies, vacated = [], []
    for v, buffer in pairs:
        made = next((maker[w] for w in buffer.values if w in maker), None)
        if made is None or not readers[v]:
            continue
        if not all(needs[made] >> inside.get(i, first_of.get(i, i)) & 1 for i in readers[v]):
            copies.append(LiveBuffer((), 0, 2 * max(readers[v]), buffer.bytes))
            vacated.append(ReusableBuffer(buffer.bytes, [(0, 0), (buffer.start, buffer.end)]))
    return copies, vacated
