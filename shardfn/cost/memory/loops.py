"""Buffers of loops: a carried value stays in one buffer or is copied, and what a loop reads from outside lives until
its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shardfn.cost.fusion_walk import FusionPlan
from shardfn.ir.model import Graph, PartitionedProgram
from shardfn.ir.op_traits import ELEMENTWISE, UPDATES


@dataclasses.dataclass(frozen=True)
class LoopBuffers:
    """The loops of a graph in the order in which they run."""

    spans: dict[int, int]
    """Op of a loop -> its body's first op; the body's ops stand before the loop's own."""
    entered: dict[int, int]
    """What a loop carries, as its body sees it -> the body's first op."""
    carried: tuple[tuple[int, int, int, int], ...]
    """(what goes in, as the body sees it, as the body returns it, what comes out)."""
    unchanged: dict[int, int]
    """A loop's result -> what goes in and comes out as it is."""


def loop_buffers(graph: Graph, fusion: FusionPlan, bodies: Mapping[int, int]) -> LoopBuffers:
    """The loops whose results are needed; `bodies` is the number of ops in the body of each
    (`cost.schedule.ExecutionOrder`).
    """
    made = set(graph.inputs).union(*(op.outputs for op in graph.ops))
    inside: dict[int, list[int]] = {}
    for a, b in graph.ties:
        if b not in made:
            inside.setdefault(a, []).append(b)
    spans: dict[int, int] = {}
    entered: dict[int, int] = {}
    carried: list[tuple[int, int, int, int]] = []
    unchanged: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.name != "while" or not op.outputs or i in fusion.dead:
            continue
        first, count = i - bodies[op.outputs[0]], len(op.outputs)
        spans[i] = first
        for operand, back, result in zip(op.inputs[:count], op.inputs[count:], op.outputs, strict=True):
            if operand == back:
                unchanged[result] = operand
                continue
            seen = [v for v in inside.get(operand, ()) if v > max(op.outputs) and v not in entered]
            if seen:
                entered[seen[0]] = first
                carried.append((operand, seen[0], back, result))
    return LoopBuffers(spans, entered, tuple(carried), unchanged)


def loop_copies(
    partitioned: PartitionedProgram,
    fusion: FusionPlan,
    loops: LoopBuffers,
    start: Mapping[int, int],
    end: dict[int, int],
) -> dict[int, tuple[int, int]]:
    """Carried values that XLA copies at the start of the body, as an op reads them on which the next value does not
    depend.

    Returns for each when its copy is last read, and when the next value is made.
    """
    graph = partitioned.graph
    maker = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    found: dict[int, tuple[int, int]] = {}
    for _, seen, back, _ in loops.carried:
        first, made = loops.entered[seen], maker.get(back, -1)
        if made < first or back not in start or end.get(seen, -1) < 2 * first or partitioned.local_bytes(seen) < _SMALL:
            continue
        readers = [i for i in range(first, end[seen] // 2 + 1) if seen in fusion.reads[i]]
        needed, ahead = {made}, [made]
        while ahead:
            for v in fusion.reads[ahead.pop()]:
                i = maker.get(v, -1)
                if i >= first and i not in needed:
                    needed.add(i)
                    ahead.append(i)
        if not needed.issuperset(readers):
            found[seen] = end[seen], start[back]
            end[seen] = 2 * first
        elif made in readers and not keeps_places(partitioned, fusion, made, seen):
            end[seen] = max(end[seen], start[back] + 2)  # the next value is made apart, and copied at the end
    return found


def keeps_places(partitioned: PartitionedProgram, fusion: FusionPlan, made: int, value: int) -> bool:
    """Whether op `made`, with what is fused into it, reads each element of a value only where it writes its own."""
    graph = partitioned.graph
    if graph.ops[made].name in UPDATES:
        return True
    moved = {value}
    for i in (*sorted(fusion.inside[made] or ()), made):
        op = graph.ops[i]
        if not moved.isdisjoint(op.inputs):
            if op.name not in ELEMENTWISE and not partitioned.is_view(op):
                return False
            moved.update(op.outputs)
    return True


_SMALL = 1024
"""Bytes of what a loop carries below which its copies do not count."""


def stay_through(
    start: dict[int, int], end: dict[int, int], spans: Sequence[tuple[int, int]], entered: Collection[int]
) -> None:
    """What a loop reads from outside lives until the loop's end."""
    for v, until in end.items():
        if v in start and v not in entered:
            for first, last in spans:
                if start[v] < first <= until < last:
                    until = end[v] = last
