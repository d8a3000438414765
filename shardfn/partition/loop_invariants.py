"""Loop invariants that XLA computes before the loop: its while-loop-invariant-code-motion.

What a loop's body computes only from values that the loop does not change is computed once. Layout changes and
broadcasts move only with an op that needs them.

- On CPU, XLA moves them whatever their sizes.
- On TPU an op stays in the loop if its result is larger than its operands, as that of an all-gather is. A matmul or a
  reduction takes such ops along if its own result is no larger than what all of them read from outside the loop.
- XLA's GPU backend has no such pass. The partitioner itself emits other resharding than gathers before the loop
  (`CollectiveRules.hoists_gathers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from shardfn.ir.model import Graph, Op, first_of_body
from shardfn.ir.op_traits import CONTRACTIONS, HOISTED_ALONG, NEVER_HOISTED
from shardfn.ir.partitioned import Communication, PartitionedProgram
from shardfn.partition.platforms import collective_rules
from shardfn.partition.rebuild import ProgramBuilder

_MOVED_WITH_OPERANDS = CONTRACTIONS | {"reduce"}
"""Ops that on TPU move together with operands that are too large to move by themselves."""


def hoist_invariants(partitioned: PartitionedProgram) -> PartitionedProgram:
    """The program with its loop invariants before their loops, inner loops first."""
    graph = partitioned.graph
    if not collective_rules(partitioned.platform).hoists_invariants or not any(op.seen for op in graph.ops):
        return partitioned
    builder, sent = ProgramBuilder(partitioned), {c.result: c for c in partitioned.communications}
    copied_from: dict[int, int] = {}  # by a value that an inner loop's rearrangement added

    def size_of(value: int) -> int:
        return partitioned.local_bytes(copied_from.get(value, value))

    found: list[Op] = []
    for op in graph.ops:
        if op.seen:
            first = first_of_body(found, op)
            body = found[first:]
            invariants = _Invariants(graph, body, op, partitioned.platform, size_of)
            found[first:] = _rearranged(body, op, invariants, builder, sent, copied_from)
        found.append(op)
    if all(a is b for a, b in zip(found, graph.ops, strict=False)):
        return partitioned
    builder.ops = found
    return builder.built(sent)


def with_hoisted_trips(graph: Graph, platform: str, size_of: Callable[[int], int]) -> Graph:
    """The graph in which loop invariants run as often as their loops' own ops; all ops stay in their places.

    Args:
      graph: the traced function, not partitioned.
      platform: whose XLA backend compiles it.
      size_of: bytes of a value.
    """
    ops = list(graph.ops)
    for i, op in enumerate(graph.ops if collective_rules(platform).hoists_invariants else ()):
        if op.seen:
            first = first_of_body(ops[:i], op)
            for at in _Invariants(graph, ops[first:i], op, platform, size_of).moved:
                ops[first + at] = _outside(ops[first + at], op)
    return (
        graph
        if all(a is b for a, b in zip(ops, graph.ops, strict=True))
        else dataclasses.replace(graph, ops=tuple(ops))
    )


def _outside(op: Op, loop: Op) -> Op:
    form = op.form and loop.form and (op.form[0], loop.form[1])
    return dataclasses.replace(op, trips=loop.trips, form=form)


class _Invariants:
    """The invariants of one loop: `moved` are the positions in its body of the ops that XLA moves, with those they need."""

    def __init__(self, graph: Graph, body: Sequence[Op], loop: Op, platform: str, size_of: Callable[[int], int]):
        self.body, self.loop, self.size_of = body, loop, size_of
        self.maker = {v: i for i, op in enumerate(body) for v in op.outputs}
        self.carried = {seen for _, seen, _, _ in loop.carries} - self.maker.keys()
        self.computed = graph.computed
        self.moved: list[int] = []
        if self.has_invariants():
            region = self.region()
            worth = self.worth_moving(region, may_grow=collective_rules(platform).hoists_gathers)
            self.moved = sorted({at for i in worth for at in self.needed(i)})

    def has_invariants(self) -> bool:
        """Whether the body reads an array that the loop does not change; XLA looks no further otherwise."""
        if any(op.name == "shard_map" for op in self.body):  # what goes into it cannot be followed
            return False
        return any(
            v in self.computed and v not in self.carried and v not in self.maker for op in self.body for v in op.inputs
        )

    def region(self) -> int:
        """The number of the body, which branches and inner loops in it do not have."""
        back = self.loop.inputs[len(self.loop.seen) :]
        forms = (self.body[self.maker[v]].form for v in back if v in self.maker)
        return next((form[1] for form in forms if form), -1)

    def worth_moving(self, region: int, may_grow: bool) -> list[int]:
        """The positions of the invariant ops that move by themselves.

        Args:
          region: the number of the body.
          may_grow: whether a result may be larger than its operands.
        """
        read: dict[int, int] = {}  # by invariant op the bytes that it and those before it read from outside the loop
        legal: set[int] = set()
        worth: list[int] = []
        for i, op in enumerate(self.body):
            if (
                not op.outputs
                or op.name in NEVER_HOISTED
                or "custom_call" in op.name
                or not op.form
                or op.form[1] != region
            ):
                continue
            before = {self.maker[v] for v in op.inputs if v in self.maker}
            if not self.carried.isdisjoint(op.inputs) or not before <= read.keys():
                continue
            read[i] = sum(
                read[self.maker[v]] if v in self.maker else self.outer_size(v) for v in dict.fromkeys(op.inputs)
            )
            size = sum(map(self.size_of, op.outputs))
            if before <= legal and (may_grow or size <= sum(map(self.size_of, op.inputs))):
                legal.add(i)
                if op.name not in HOISTED_ALONG:
                    worth.append(i)
            elif op.name in _MOVED_WITH_OPERANDS and size <= read[i]:
                legal.add(i)
                worth.append(i)
        return worth

    def outer_size(self, value: int) -> int:
        return self.size_of(value) if value in self.computed else 0

    def needed(self, i: int) -> Iterator[int]:
        """Op `i`, and those in the body that it is computed from."""
        stack, met = [i], {i}
        while stack:
            at = stack.pop()
            yield at
            for v in self.body[at].inputs:
                before = self.maker.get(v)
                if before is not None and before not in met:
                    met.add(before)
                    stack.append(before)


def _rearranged(
    body: Sequence[Op],
    loop: Op,
    invariants: _Invariants,
    builder: ProgramBuilder,
    sent: dict[int, Communication],
    copied_from: dict[int, int],
) -> list[Op]:
    """The ops of a loop's body with those that move in front. Layout changes that others read too are made in both places."""
    moved = set(invariants.moved)
    staying = [op for i, op in enumerate(body) if i not in moved]
    read = {v for op in (*staying, loop) for v in op.inputs}
    again: list[Op] = []
    for i in sorted(moved, reverse=True):
        op = body[i]
        if op.name in HOISTED_ALONG and not read.isdisjoint(op.outputs):
            again.append(op)
            read.update(op.inputs)
    twice = {v: builder.like(v) for op in again for v in op.outputs}
    copied_from.update((new, copied_from.get(v, v)) for v, new in twice.items())
    front = []
    for i in sorted(moved):
        op = _outside(body[i], loop)
        front.append(op.of(tuple(twice.get(v, v) for v in op.inputs), tuple(twice.get(v, v) for v in op.outputs)))
        for v in op.outputs:
            if v in sent:
                sent[v] = dataclasses.replace(sent[v], trips=loop.trips)
    for c in [c for c in sent.values() if c.operand in twice and c.trips == loop.trips]:
        sent[c.result] = dataclasses.replace(c, operand=twice[c.operand])
    kept = {v for op in again for v in op.outputs}
    stay = [op for i, op in enumerate(body) if i not in moved or not kept.isdisjoint(op.outputs)]
    return [*front, *stay]
