"""Tested attribution: a minimal set of shardings, and of the plan's own constraints, whose removal removes a collective.

`attribution` follows mesh axes through the program to likely causes. This module tests each one: it partitions the program
again without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from shardfn.cost.collectives import communication_bytes
from shardfn.ir.model import Op, Spec, axis_name
from shardfn.ir.partitioned import USER_WRITTEN, Communication, PartitionedProgram
from shardfn.planning.call import memoized
from shardfn.planning.layout_rules import Constraint
from shardfn.planning.plan import Decision, Plan
from shardfn.planning.questions.attribution import attribute

OPS_BUDGET = 12_000
"""The work to test the causes of one plan, in ops of partitioned programs: one or two seconds, for the largest collectives first.
Those whose test it does not finish have the causes of `attribution`."""

T = TypeVar("T")

_Subject = tuple[bool, object]
"""Identifies a collective in programs with other shardings: whether it reduces, and what makes its operand. That is an op of
the module, by its site, or an input."""

Dims = tuple[tuple[int, int], ...]
"""Dimensions of arrays, as (number among arguments and then results, dimension)."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why there is a collective.

    Attributes:
      shardings: the sharded dimensions of arrays; without all of them together the collective is gone.
      constraints: constraints that the plan puts on ops, without which it is gone too.
    """

    shardings: tuple[tuple[Decision, int], ...] = ()
    constraints: tuple[Constraint, ...] = ()


def causes(plan: Plan) -> tuple[Cause, ...]:
    """The cause of each collective of a plan, in their order; none for what the user wrote. In a pickled plan none is tested."""
    partitioned = plan.partitioned
    sent = [c for c in partitioned.communications if communication_bytes(partitioned, c)]  # as `plan.collectives`
    together: dict[_Subject, list[int]] = {}  # the steps of one resharding, largest first
    for i in sorted(range(len(sent)), key=lambda i: -sent[i].trips * communication_bytes(partitioned, sent[i])):
        if sent[i].cause != USER_WRITTEN:
            together.setdefault(_subject(partitioned, sent[i]), []).append(i)
    test = _Test(plan) if plan._answered is not None else None
    likely_of = attribute(partitioned, len(plan.inputs), sent)
    found = dict.fromkeys(range(len(sent)), Cause())
    for subject, steps in together.items():
        axes = frozenset(axis_name(axis) for i in steps for axis in sent[i].axes)
        likely = tuple(dict.fromkeys(pair for i in steps for pair in likely_of[i]))
        cause = test.cause(subject, axes, likely) if test is not None else _named(plan, likely, ())
        found |= dict.fromkeys(steps, cause)
    return tuple(found[i] for i in range(len(sent)))


def _named(plan: Plan, dims: Iterable[tuple[int, int]], constraints: Sequence[int]) -> Cause:
    every = (*plan.inputs, *plan.outputs)
    return Cause(tuple((every[n], dim) for n, dim in dims), tuple(plan.constraints[k] for k in constraints))


class _Test:
    """Partitions a plan's program without some shardings or constraints, up to a limit of work."""

    def __init__(self, plan: Plan):
        assert plan._answered is not None
        posed, self.answer = plan._answered.posed, plan._answered.answer
        self.plan, self.tests_left = plan, OPS_BUDGET // max(1, len(plan.partitioned.graph.ops))
        self.is_spent = False  # whether the budget left a test of the present cause undone
        self.given = posed.propagation.given
        self.partition = memoized(posed.propagation)
        self.indices = sorted(self.answer.constraints)  # in the order of `Plan.constraints`
        self.known: dict[object, PartitionedProgram] = {}

    def cause(self, subject: _Subject, axes: frozenset[str], likely: Dims) -> Cause:
        """The cause of the collectives of a subject over some mesh axes: the dimensions that they likely come from, where the
        budget ends before a minimal cause is found."""

        def is_gone(dims: Sequence[tuple[int, int]], constraints: Sequence[int]) -> bool:
            partitioned = self.without(tuple(dims), tuple(constraints), axes)
            return partitioned is not None and not any(
                axes & {axis_name(a) for a in c.axes} and _subject(partitioned, c) == subject
                for c in partitioned.communications
                if c.group_size > 1
            )

        self.is_spent = False
        over = [k for k, index in enumerate(self.indices) if axes & self.axes_of(index)]
        needed = self.least(over, lambda some: is_gone((), some)) if over and is_gone((), over) else ()
        dims = next((some for some in (likely, self.every(axes)) if some and is_gone(some, over)), ())
        if dims:
            parts = self.least(self.tied(dims), lambda some: is_gone(_flat(some), over))
            dims = self.least(_flat(parts), lambda some: is_gone(some, over))
        if self.is_spent:
            return _named(self.plan, likely, ())
        return _named(self.plan, sorted(dims) if dims or needed else likely, needed)

    def least(self, every: Sequence[T], is_enough: Callable[[Sequence[T]], bool]) -> tuple[T, ...]:
        """A minimal subset that is enough (QuickXplain); the first ones if there is a choice.

        All of `every` together are enough.
        """

        def needed(kept: Sequence[T], is_new: bool, rest: Sequence[T]) -> list[T]:
            if is_new and is_enough(kept):
                return []
            if len(rest) <= 1 or self.is_spent:
                return list(rest)
            half = len(rest) // 2
            later = needed([*kept, *rest[:half]], True, rest[half:])
            return [*needed([*kept, *later], bool(later), rest[:half]), *later]

        return tuple(needed((), False, every)) if len(every) > 1 else tuple(every)

    def tied(self, dims: Dims) -> list[Dims]:
        """The dimensions by the dimension group that they are tied in, those of the most bytes first."""
        arrays = (*self.plan.inputs, *self.plan.outputs)
        group = {member: n for n, one in enumerate(self.plan.dimension_groups) for member in one.members}
        found: dict[object, list[tuple[int, int]]] = {}
        for n, dim in sorted(dims, key=lambda pair: -arrays[pair[0]].local_bytes):
            found.setdefault(group.get(f"{arrays[n].path}.{dim}", (n, dim)), []).append((n, dim))
        return sorted(map(tuple, found.values()), key=lambda some: -sum(arrays[n].local_bytes for n, _ in some))

    def every(self, axes: frozenset[str]) -> Dims:
        """All dimensions of arguments and of results with an entry that are sharded over some of the axes."""
        rows = [(n, d) for n, d in enumerate(self.plan.inputs)]
        rows += [(len(self.plan.inputs) + i, d) for i, d in enumerate(self.plan.outputs)
                 if self.given[i] is not None or i in self.answer.result_specs]  # fmt: skip
        return tuple((n, i) for n, d in rows for i, dim in enumerate(d.spec) if axes & set(dim))

    def axes_of(self, index: int) -> set[str]:
        """The mesh axes that a constraint shards anything over."""
        constraint = self.answer.constraints[index]
        return {axis_name(a) for spec in (*constraint.operands, *constraint.results) for dim in spec or () for a in dim}

    def without(self, dims: Dims, constraints: tuple[int, ...], axes: frozenset[str]) -> PartitionedProgram | None:
        """The program with some dimensions unsharded over the axes, and without some constraints; None if the budget is spent."""
        key = dims, constraints, axes
        if key not in self.known:
            self.is_spent = not self.tests_left
            if self.is_spent:
                return None
            self.tests_left -= 1
            count, answer = len(self.plan.inputs), self.answer
            specs: list[Spec] = list(answer.specs)
            results = dict(answer.result_specs)
            for n, dim in dims:
                if n < count:
                    specs[n] = _unsharded(specs[n], dim, axes)
                else:
                    own = results.get(n - count, self.given[n - count])
                    results[n - count] = (
                        _unsharded(own, dim, axes) if own is not None else self.plan.outputs[n - count].spec
                    )
            dropped = {self.indices[k] for k in constraints}
            kept = {index: constraint for index, constraint in answer.constraints.items() if index not in dropped}
            self.known[key] = self.partition(answer.axes, tuple(specs), kept, results)
        return self.known[key]


def _flat(parts: Iterable[Dims]) -> Dims:
    """The dimensions of all parts."""
    return tuple(pair for part in parts for pair in part)


def _unsharded(spec: Spec, dim: int, axes: frozenset[str]) -> Spec:
    return tuple(tuple(a for a in own if a not in axes) if i == dim else own for i, own in enumerate(spec))


def _subject(partitioned: PartitionedProgram, c: Communication) -> _Subject:
    value, graph = c.operand, partitioned.graph
    seen: set[int] = set()
    while value in graph.makers and value not in seen:
        seen.add(value)
        op: Op = graph.ops[graph.makers[value]]
        if (op.site >= 0 and op.name != "reshard") or not op.inputs:
            return "reduce" in c.kind, op.site
        value = op.inputs[0]
    return "reduce" in c.kind, ("input", value)
