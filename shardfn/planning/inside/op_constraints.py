"""Sharding constraints on ops: which jaxpr equation is which op of the module, and the constraints written into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardfn.errors import StrategyError, fail
from shardfn.ir.model import Graph, OpConstraint, Spec
from shardfn.ir.op_traits import CONSTRAINABLE
from shardfn.ir.rewrite import bind_one, equations, rebind
from shardfn.planning.inside.detours import PlacedDetour, along, on_arguments
from shardfn.planning.layout_rules import Constraint, LayoutFile, printable
from shardfn.planning.meshes import PlanMesh

Kinds = Mapping[str, frozenset[str]]
"""Kinds of ops, each with the JAX primitives that become it."""

_ALSO_RESHARDED = {
    "abs": "abs", "cosine": "cos", "dynamic_update_slice": "dynamic_update_slice", "erf": "erf", "maximum": "max",
    "minimum": "min", "pad": "pad", "reverse": "rev", "select": "select_n", "sharding_constraint": "sharding_constraint",
    "sine": "sin", "slice": "slice", "sort": "sort",
}  # fmt: skip
RESHARDED: Kinds = {**CONSTRAINABLE, **{kind: frozenset({primitive}) for kind, primitive in _ALSO_RESHARDED.items()}}
"""The kinds whose operands and results can take a detour (`detours`): a search constrains fewer."""


def _kind_of(kinds: Kinds) -> dict[str, str]:
    """The kind of each primitive."""
    return {primitive: kind for kind, primitives in kinds.items() for primitive in primitives}


_KIND_OF = _kind_of(CONSTRAINABLE)

RESHAPING_KINDS = ("reshape", "transpose")
"""Kinds that lowering may remove or insert: without them, more programs can be matched op by op."""

_Seen = tuple[str, tuple[int, ...]]
"""The kind of an op and the shape of its result."""


def anchors(jaxpr: Any, graph: Graph, kinds: Kinds = CONSTRAINABLE) -> dict[int, int]:
    """For each op of these kinds, by its index in `graph.ops`, the number of its equation (`rewrite.equations`).

    Equations become ops in program order, and JAX inserts ops of its own. An equation is matched where only one assignment
    of all equations to ops exists: of all kinds together, or else kind by kind. One that becomes a tree of ops, such as a
    concatenation of many arrays, is left out: no op has all its operands.
    """
    kind_of, rows, operands = _kind_of(kinds), list[tuple[int | None, _Seen]](), dict[int, int]()
    for number, eqn, is_reached in equations(jaxpr):
        rows += _ops_of_equation(number, eqn, is_reached, kind_of)
        operands[number] = len(eqn.invars) if kind_of.get(eqn.primitive.name) == "concatenate" else 0
    ops = [(index, (op.name, graph.values[op.outputs[0]].shape)) for index, op in enumerate(graph.ops)
           if op.name in kinds and op.site >= 0 and _is_matched(op.name, graph.values[op.outputs[0]].shape)]  # fmt: skip
    for left_out in ((), RESHAPING_KINDS):
        found = _matched(
            [row for row in rows if row[1][0] not in left_out], [op for op in ops if op[1][0] not in left_out]
        )
        if found is not None:
            break
    else:
        found = {}
        for kind in kinds:
            found |= _matched([row for row in rows if row[1][0] == kind], [op for op in ops if op[1][0] == kind]) or {}
    return {op: number for op, number in found.items() if len(graph.ops[op].inputs) >= operands[number]}


def _matched(rows: Sequence[tuple[int | None, _Seen]], ops: Sequence[tuple[int, _Seen]]) -> dict[int, int] | None:
    """The equation number of each op with a unique match; None if the rows are not among the ops."""
    places = unique_positions([seen for _, seen in rows], [seen for _, seen in ops])
    if places is None:
        return None
    pairs = zip(places, (number for number, _ in rows), strict=True)
    return {ops[place][0]: number for place, number in pairs if place is not None and number is not None}


def _ops_of_equation(
    number: int, eqn: Any, is_reached: bool, kind_of: Mapping[str, str]
) -> Iterator[tuple[int | None, _Seen]]:
    """The ops that an equation becomes, with its number for the one that can be constrained."""
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
    if name == "integer_pow":  # by squares
        y = abs(eqn.params["y"])
        count = y.bit_length() + y.bit_count() - 2 if _is_matched("multiply", shape) else 0
        yield from [(None, ("multiply", shape))] * (count - 1)
        if count > 0:
            yield number if is_reached and eqn.params["y"] > 0 else None, ("multiply", shape)
    elif name in kind_of and _is_matched(kind_of[name], shape):
        yield number if is_reached else None, (kind_of[name], shape)


def unique_positions(part: Sequence[Any], whole: Sequence[Any]) -> list[int | None] | None:
    """The position of each item of `part` in `whole`, as a subsequence: None for an item with several possible positions,
    and None for all if `part` is no subsequence.

    >>> unique_positions("ac", "abc"), unique_positions("ab", "aab"), unique_positions("ba", "ab")
    ([0, 2], [None, 2], None)
    """

    def leftmost(part: Sequence[Any], whole: Sequence[Any]) -> list[int]:
        there = iter(enumerate(whole))
        return [next((at for at, other in there if other == one), -1) for one in part]

    first, last = leftmost(part, whole), leftmost(part[::-1], whole[::-1])
    if -1 in first:
        return None
    return [a if a == len(whole) - 1 - b else None for a, b in zip(first, reversed(last), strict=True)]


def _is_matched(kind: str, shape: Sequence[int]) -> bool:
    """Whether ops of a kind and shape are matched. Scalar arithmetic is not: JAX inserts its own, for indices and counters."""
    return kind not in ("add", "multiply", "subtract", "divide", "dynamic_slice") or math.prod(shape) > 1


def match_file_constraints(
    layout: LayoutFile, anchored: Mapping[int, int], graph: Graph, axes: Sequence[tuple[str, int]], shifts: bool
) -> tuple[dict[int, OpConstraint], list[str]]:
    """The op constraints of a layout file, by op index, and a note on each that the program has no op for.

    `shifts` tells whether the program has its movement as shifts: those constraints count its equations, others do not match.
    """
    op_of = {number: index for index, number in anchored.items()}
    known = {name for name, _ in axes}
    found: dict[int, OpConstraint] = {}
    diagnostics: list[str] = []
    for wanted in layout.constraints:
        is_here = wanted.shifts == shifts and wanted.number in op_of
        op = graph.ops[op_of[wanted.number]] if is_here else None
        specs = (*wanted.operands, *wanted.results)
        values = (*op.inputs, *op.outputs) if op is not None else ()
        fits = (
            op is not None
            and op.name == wanted.kind
            and (len(wanted.operands), len(wanted.results)) == (len(op.inputs), len(op.outputs))
            and all(s is None or len(s) == len(graph.values[v].shape) for s, v in zip(specs, values, strict=True))
            and all(axis in known for s in specs for dim in s or () for axis in dim)
        )
        if fits:
            found[op_of[wanted.number]] = OpConstraint(wanted.operands, wanted.results)
        else:
            op_text = f"a {printable(wanted.kind)}" + (f" at {printable(wanted.where)}" if wanted.where else "")
            diagnostics.append(
                f"{layout.name} constrains equation {wanted.number}, {op_text}, and this program has no such op: its sharding is "
                "propagated. Plan and save again, or remove it from [[constraints]]"
            )
    return found, diagnostics


def apply_constraints(
    function: Callable[..., Any],
    constraints: Sequence[Constraint],
    mesh: PlanMesh,
    static_argnums: tuple[int, ...] = (),
    detours: Sequence[PlacedDetour] = (),
) -> Callable[..., Any]:
    """`function` with sharding constraints on the operands and results of chosen equations.

    Args:
      function: the function.
      constraints: the constraints, over the mesh axes of a plan.
      mesh: the mesh to write them on.
      static_argnums: as in `jax.jit`.
      detours: the reshards by gathers of equations' operands and results, and of arguments.

    Raises:
      StrategyError: the function does not trace as it did when it was planned.
    """
    wanted = {c.number: c for c in constraints}
    around: dict[int, dict[int, tuple[Spec, ...]]] = {}
    for detour in detours:
        around.setdefault(detour.number, {})[detour.operand] = detour.path

    def resharded(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        paths = around.get(number, {})
        outs = bind_one(eqn, [along(x, paths.get(i, ()), mesh) for i, x in enumerate(inputs)])
        return [along(x, paths.get(-1, ()), mesh) for x in outs]

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        if number not in wanted:
            return resharded(eqn, inputs, number)
        found = wanted[number]
        if _KIND_OF.get(eqn.primitive.name) != found.kind:
            fail(StrategyError, f"equation {number} is a {eqn.primitive.name}, and was a {found.kind} when planned",
                 why="the function does not trace to the same program twice",
                 fix="make it a pure function of its arguments")  # fmt: skip
        # in the lowered module, a reduce has its initial value as an operand too
        operands = found.operands[: len(inputs)]
        outs = resharded(eqn, [along(x, [s], mesh) for x, s in zip(inputs, operands, strict=True)], number)
        results = found.results[-len(outs) :]  # in the lowered module, an argmax returns the maximum too
        return [along(x, [s], mesh) for x, s in zip(outs, results, strict=True)]

    numbers = wanted.keys() | around.keys() - {-1}
    found = rebind(function, lambda eqn, number: number in numbers, bind, static_argnums) if numbers else function
    return on_arguments(found, detours, mesh, static_argnums)
