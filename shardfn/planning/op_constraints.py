"""Layouts of ops inside a function: which equation of the jaxpr is which op of the module, and holding it there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfn.errors import StrategyError, fail
from shardfn.frontend.meshes import partition_spec
from shardfn.ir.model import Graph, OpConstraint, Spec
from shardfn.ir.op_traits import CONSTRAINABLE
from shardfn.ir.rewrite import bind_one, equations, rebind
from shardfn.planning.layout_rules import LayoutFile, printable
from shardfn.planning.plan import Constraint

_KIND_OF = {primitive: kind for kind, primitives in CONSTRAINABLE.items() for primitive in primitives}

VIEWS = ("reshape", "transpose")
"""Kinds that a compiler may leave out or put in: without them more programs can be told op by op."""

_Seen = tuple[str, tuple[int, ...]]
"""The kind of an op and the shape of its result."""


def anchors(jaxpr: Any, graph: Graph) -> dict[int, int]:
    """For each op that can be held, by its index in `graph.ops`, the number of its equation (`rebind.equations`).

    Equations become ops in program order, and some ops are JAX's own. An equation is an op where there is only one way to
    find all equations among the ops: of all kinds together, or else of one kind after the other.
    """
    rows = [row for number, eqn, is_reached in equations(jaxpr) for row in _made_by(number, eqn, is_reached)]
    ops = [(index, (op.name, graph.values[op.outputs[0]].shape)) for index, op in enumerate(graph.ops)
           if op.name in CONSTRAINABLE and op.site >= 0 and _counts(op.name, graph.values[op.outputs[0]].shape)]  # fmt: skip
    for left_out in ((), VIEWS):
        found = _matched(
            [row for row in rows if row[1][0] not in left_out], [op for op in ops if op[1][0] not in left_out]
        )
        if found is not None:
            return found
    found = {}
    for kind in CONSTRAINABLE:
        found |= _matched([row for row in rows if row[1][0] == kind], [op for op in ops if op[1][0] == kind]) or {}
    return found


def _matched(rows: Sequence[tuple[int | None, _Seen]], ops: Sequence[tuple[int, _Seen]]) -> dict[int, int] | None:
    """The number of each op's equation, where there is only one way; None if the rows are not among the ops."""
    places = only_way([seen for _, seen in rows], [seen for _, seen in ops])
    if places is None:
        return None
    pairs = zip(places, (number for number, _ in rows), strict=True)
    return {ops[place][0]: number for place, number in pairs if place is not None and number is not None}


def _made_by(number: int, eqn: Any, is_reached: bool) -> Iterator[tuple[int | None, _Seen]]:
    """The ops that an equation becomes, and its number for the one that can be held."""
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
    if name == "integer_pow":  # by squares
        y = abs(eqn.params["y"])
        count = y.bit_length() + y.bit_count() - 2 if _counts("multiply", shape) else 0
        yield from [(None, ("multiply", shape))] * (count - 1)
        if count > 0:
            yield number if is_reached and eqn.params["y"] > 0 else None, ("multiply", shape)
    elif name in _KIND_OF and _counts(_KIND_OF[name], shape):
        yield number if is_reached else None, (_KIND_OF[name], shape)


def only_way(part: Sequence[Any], whole: Sequence[Any]) -> list[int | None] | None:
    """Where each of some things stands in a longer row that holds them in that order: None for one that may stand in several
    places; None for all if they are not there in that order.

    >>> only_way("ac", "abc"), only_way("ab", "aab"), only_way("ba", "ab")
    ([0, 2], [None, 2], None)
    """

    def leftmost(part: Sequence[Any], whole: Sequence[Any]) -> list[int]:
        there = iter(enumerate(whole))
        return [next((at for at, other in there if other == one), -1) for one in part]

    first, last = leftmost(part, whole), leftmost(part[::-1], whole[::-1])
    if -1 in first:
        return None
    return [a if a == len(whole) - 1 - b else None for a, b in zip(first, reversed(last), strict=True)]


def _counts(kind: str, shape: Sequence[int]) -> bool:
    """Small sums and products are not counted: JAX puts in its own, of indices and counters."""
    return kind not in ("add", "multiply", "subtract", "divide", "dynamic_slice") or math.prod(shape) > 1


def held_in(
    layout: LayoutFile, anchored: Mapping[int, int], graph: Graph, axes: Sequence[tuple[str, int]]
) -> tuple[dict[int, OpConstraint], list[str]]:
    """What a layout file holds inside, by the op's index; and in words what this program has no place for.

    Args:
      anchored: as `anchors` gives it.
      axes: the grid.
    """
    op_of = {number: index for index, number in anchored.items()}
    known = {name for name, _ in axes}
    found: dict[int, OpConstraint] = {}
    diagnostics: list[str] = []
    for held in layout.constraints:
        op = graph.ops[op_of[held.number]] if held.number in op_of else None
        ends = (*held.operands, *held.results)
        values = (*op.inputs, *op.outputs) if op is not None else ()
        fits = (
            op is not None
            and op.name == held.kind
            and (len(held.operands), len(held.results)) == (len(op.inputs), len(op.outputs))
            and all(s is None or len(s) == len(graph.values[v].shape) for s, v in zip(ends, values, strict=True))
            and all(axis in known for s in ends for dim in s or () for axis in dim)
        )
        if fits:
            found[op_of[held.number]] = OpConstraint(held.operands, held.results)
        else:
            diagnostics.append(
                f"{layout.name} holds equation {held.number}, a {printable(held.kind)} at {printable(held.where)}, and this "
                "program has no such one: it is laid out as it follows. Plan again and save, or take it out of [[constraints]]"
            )
    return found, diagnostics


def held(
    function: Callable[..., Any],
    constraints: Sequence[Constraint],
    mesh: Any,
    parts: Mapping[str, tuple[str, ...]],
    static_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`function` with the operands and results of chosen equations held to their layouts.

    Args:
      constraints: what is held; their axes are those of a plan.
      mesh: the mesh to name layouts on.
      parts: for each axis of the plan the axes of `mesh` that make it up.
      static_argnums: as in `jax.jit`.

    Raises:
      StrategyError: the function does not trace as it did when it was planned.
    """
    wanted = {c.number: c for c in constraints}

    def layout(value: Any, spec: Spec | None) -> Any:
        if spec is None or len(spec) != value.ndim:
            return value
        rows = zip(value.shape, spec, strict=True)  # the module's operand may be a broadcast of the equation's
        fine = tuple(tuple(part for axis in dim if n > 1 for part in parts[axis]) for n, dim in rows)
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, partition_spec(fine)))

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        found = wanted[number]
        if _KIND_OF.get(eqn.primitive.name) != found.kind:
            fail(StrategyError, f"equation {number} is a {eqn.primitive.name}, and was a {found.kind} when planned",
                 why="the function does not trace to the same program twice",
                 fix="make it a pure function of its arguments")  # fmt: skip
        operands = found.operands[: len(inputs)]  # a module's reduce has its start value as an operand
        outs = bind_one(eqn, [layout(x, s) for x, s in zip(inputs, operands, strict=True)])
        results = found.results[-len(outs) :]  # an argmax's has the maximum beside the index
        return [layout(x, s) for x, s in zip(outs, results, strict=True)]

    return rebind(function, lambda eqn, number: number in wanted, bind, static_argnums)
