"""What XLA copies in each iteration of a loop: values that it cannot write over those of the iteration before."""

from __future__ import annotations

from shardfn.cost.fusion_walk import FusionPlan
from shardfn.ir.op_traits import ELEMENTWISE, UPDATES
from shardfn.ir.partitioned import PartitionedProgram


def keeps_places(partitioned: PartitionedProgram, fusion: FusionPlan, made: int, value: int) -> bool:
    """Whether op `made`, with what is fused into it, reads each element of a value only where it writes its own."""
    ops = partitioned.graph.ops
    if ops[made].name in UPDATES:
        return True
    moved = {value}
    for i in (*sorted(fusion.inside[made] or ()), made):
        op = ops[i]
        if not moved.isdisjoint(op.inputs):
            if op.name not in ELEMENTWISE and not partitioned.is_view(op):
                return False
            moved.update(op.outputs)
    return True


def loop_copies(partitioned: PartitionedProgram, fusion: FusionPlan) -> dict[int, list[tuple[int, int, int]]]:
    """By loop, the values that it carries and copies: as the body sees each, the next one, and how often the body runs.

    The op that makes the next value, with what is fused into it, reads the present one at several places, as a stencil does. XLA
    makes the next value apart and copies it at the end of the iteration (seen on an H100, JAX 0.11.2).
    """
    graph, found = partitioned.graph, dict[int, list[tuple[int, int, int]]]()
    for i, loop in enumerate(graph.ops):
        if not loop.seen or i in fusion.dead:
            continue
        for _, seen, back, _ in loop.carries:
            made = graph.makers.get(back, -1)
            if made < 0 or fusion.inside[made] is None or seen not in fusion.reads[made]:
                continue
            if graph.ops[made].trips > loop.trips and not keeps_places(partitioned, fusion, made, seen):
                found.setdefault(i, []).append((seen, back, graph.ops[made].trips))
    return found
