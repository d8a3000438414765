"""Rebuild a partitioned program with other ops, and keep its communications consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardfn.ir.model import Graph, Op, Spec, Value, body_start
from shardfn.ir.op_traits import RESHARDING_OPS
from shardfn.ir.partitioned import Communication, PartitionedProgram


class ProgramBuilder:
    """A partitioned program that is rebuilt: `values` and `specs` are its own and grow, `ops` are listed anew."""

    def __init__(self, given: PartitionedProgram):
        self.given = given
        self.values: list[Value] = list(given.graph.values)
        self.specs: list[Spec] = list(given.specs)
        self.ops: list[Op] = []

    def new(self, value: Value, spec: Spec) -> int:
        """Add a value."""
        self.values.append(value)
        self.specs.append(spec)
        return len(self.values) - 1

    def like(
        self, value: int, spec: Spec | None = None, shape: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> int:
        """Add a value of the same sharding, shape and dtype, but for those that are given."""
        was = self.values[value]
        form = Value(was.shape if shape is None else shape, was.dtype if dtype is None else dtype)
        return self.new(form if shape or dtype else was, self.specs[value] if spec is None else spec)

    def built(self, sent: Mapping[int, Communication] | None = None, **changes: Any) -> PartitionedProgram:
        """The program with these values and ops.

        Args:
          sent: its communications by result, where they change; they are put in the order of the ops.
          **changes: other fields of its graph.
        """
        graph = dataclasses.replace(self.given.graph, values=tuple(self.values), ops=tuple(self.ops), **changes)
        found = dataclasses.replace(self.given, graph=graph, specs=tuple(self.specs))
        if sent is None:
            return found
        turn = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        communications = sorted(sent.values(), key=lambda c: turn.get(c.result, len(self.ops)))
        return dataclasses.replace(found, communications=tuple(communications))


def live_ops(ops: Sequence[Op], live_out: Iterable[int], stays: Callable[[Op], bool]) -> list[Op]:
    """The ops that stay, and those on which they or the values `live_out` depend."""
    read = set(live_out)
    found = []
    for op in reversed(ops):
        if not read.isdisjoint(op.outputs) or stays(op):
            found.append(op)
            read.update(op.inputs)
    return found[::-1]


def loop_conditions(graph: Graph, ops: Sequence[Op]) -> list[int]:
    """The conditions of loops: scalar bools that no op reads."""
    read = {v for op in ops for v in op.inputs}
    return [v for op in ops for v in op.outputs if v not in read and graph.values[v] == Value((), "i1")]


def resolved_chains(following: Mapping[int, int]) -> dict[int, int]:
    """A mapping whose values are followed to the end: `{1: 2, 2: 3}` becomes `{1: 3, 2: 3}`."""
    found = dict(following)
    for start, end in following.items():
        while end in following:
            end = following[end]
        found[start] = end
    return found


def live_out_values(graph: Graph) -> list[int]:
    """The values that must exist though no op reads them: results, and the values that loops and branches carry."""
    return [*graph.outputs, *(v for tie in graph.ties for v in tie)]


def without_unread(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Drop reshards whose result nothing reads."""
    graph, builder = partitioned.graph, ProgramBuilder(partitioned)
    builder.ops = live_ops(graph.ops, live_out_values(graph), lambda op: op.name not in RESHARDING_OPS)
    if len(builder.ops) == len(graph.ops):
        return partitioned
    kept = {v for op in builder.ops for v in op.outputs}
    return builder.built({c.result: c for c in partitioned.communications if c.result in kept})


def before_loops(ops: Sequence[Op], trips: Sequence[int]) -> list[Op]:
    """Move ops that run less often than the loop body in which they are to the front of the loop.

    Args:
      ops: the ops of a program.
      trips: how often each value is made.
    """
    if not any(op.seen for op in ops):
        return list(ops)
    found: list[Op] = []
    for op in ops:
        if op.seen and min(trips[v] for v in op.seen) > op.trips:
            first = body_start(found, op)
            found[first:] = sorted(found[first:], key=lambda o: o.trips > op.trips)
        found.append(op)
    return found
