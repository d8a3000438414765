"""All-reduces that XLA moves out of loops on TPUs and GPUs (while-loop all-reduce code motion).

A gradient that `scan` only accumulates is all-reduced once, after the loop. XLA's CPU backend has no such pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardfn.ir.model import Graph, Op, Spec
from shardfn.ir.partitioned import Communication, PartitionedProgram
from shardfn.partition.rebuild import ProgramBuilder


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """A value that a loop adds to one it carries, and does nothing else with, or rows that it scatters into one."""

    value: int
    """The value that each iteration adds, before any view of it; the sum over devices of what rows were scattered into."""
    loop: int
    """Index of the loop's op."""
    result: int
    """The result of the loop that holds the sum."""


_VIEWS = frozenset({"transpose", "reshape", "convert", "all_slice"})


def loop_accumulations(graph: Graph, specs: Sequence[Spec] = ()) -> list[Accumulation]:
    """The accumulations of a program, in the order of its loops; with `specs`, a slice that shards is no view."""
    loops = [i for i, op in enumerate(graph.ops) if op.seen and op.carries]
    if not loops:
        return []
    made, count = graph.makers, graph.read_counts

    def origin(value: int) -> int:
        while value in made and (op := graph.ops[made[value]]).name in _VIEWS and count[op.inputs[0]] == 1:
            if op.name == "all_slice" and (not specs or specs[op.inputs[0]] != specs[value]):
                break
            value = op.inputs[0]
        return value

    found = []
    for i in loops:
        op = graph.ops[i]
        for _, seen, out, result in op.carries:
            if (total := origin(out) if count[out] == 1 else -1) in made and _sums_rows(graph, total, seen):
                found.append(Accumulation(total, i, result))
                continue
            add = graph.ops[made.get(out, i)]
            if add.name != "add" or add.trips <= op.trips or count[out] != 1 or len({*add.inputs}) != 2:
                continue
            for held, value in (add.inputs, add.inputs[::-1]):
                first = origin(value) if count[value] == 1 else -1
                is_made = first in made and graph.ops[made[first]].trips == add.trips
                if held == seen and is_made and count[held] == 1:
                    found.append(Accumulation(first, i, result))
    return found


def _sums_rows(graph: Graph, total: int, held: int) -> bool:
    """Whether a value is the sum over devices of rows that are scattered into a value, which nothing else reads."""
    reduced, count = graph.maker(total, "all_reduce"), graph.read_counts
    scatter = reduced and graph.maker(reduced.inputs[0], "scatter")
    if not scatter or scatter.combines != "add" or count[scatter.outputs[0]] != 1:
        return False
    return scatter.inputs[0] == held and count[held] == 1


def all_reduces_after_loops(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Move the all-reduces of accumulations behind their loops."""
    sent = {c.result: c for c in partitioned.communications}
    while moved := [
        a
        for a in loop_accumulations(partitioned.graph, partitioned.specs)
        if a.value in sent and sent[a.value].kind == "all-reduce"
    ]:
        partitioned = _after(partitioned, moved, sent)
        sent = {c.result: c for c in partitioned.communications}
    return partitioned


def _after(
    partitioned: PartitionedProgram, moved: Sequence[Accumulation], known: Mapping[int, Communication]
) -> PartitionedProgram:
    graph, builder, sent = partitioned.graph, ProgramBuilder(partitioned), dict(known)
    parts = {a.value: sent[a.value].operand for a in moved}
    reduced: dict[int, int] = {}  # of a loop's result, its sum over the devices
    for i, op in enumerate(graph.ops):
        if parts.keys().isdisjoint(op.outputs):
            builder.ops.append(op.of(tuple([reduced.get(v, parts.get(v, v)) for v in op.inputs])))
        for a in (a for a in moved if a.loop == i):
            c = sent.pop(a.value)
            reduced[a.result] = total = builder.like(a.result)
            builder.ops.append(Op("all_reduce", (a.result,), (total,), None, op.trips, c.where))
            sent[total] = dataclasses.replace(c, operand=a.result, result=total, trips=op.trips)
    made = graph.makers
    ties = tuple(
        (a, b) if a in made and b in reduced else (reduced.get(a, a), reduced.get(b, b)) for a, b in graph.ties
    )
    outputs = tuple(reduced.get(v, v) for v in graph.outputs)
    return builder.built(sent, ties=ties, outputs=outputs)
