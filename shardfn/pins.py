"""Layouts of ops inside a function: which equation of the jaxpr is which op of the module, and holding it there.

Equations become ops in program order. A kind of op is trusted only where the shapes of all its ops are, one by one,
those of the equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfn.errors import StrategyError, fail
from shardfn.graph.model import Graph, Pin, Spec
from shardfn.layoutrules import LayoutFile, printable
from shardfn.meshes import partition_spec
from shardfn.plan import Constraint
from shardfn.rebind import bind_one, equations, rebound

KINDS: Mapping[str, frozenset[str]] = {
    "dot_general": frozenset({"dot_general"}),
    "convolution": frozenset({"conv_general_dilated"}),
    "gather": frozenset({"gather"}),
    "scatter": frozenset({"scatter-add", "scatter_add", "scatter", "scatter-mul", "scatter_mul", "scatter-min", "scatter-max"}),
    "reduce": frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and", "argmax", "argmin"}),
    "concatenate": frozenset({"concatenate"}),
    "dynamic_slice": frozenset({"dynamic_slice"}),
    "add": frozenset({"add", "add_any"}),
    "multiply": frozenset({"mul"}),
}  # fmt: skip
"""Module ops that can be held, and the primitives that become them."""

_KIND_OF = {primitive: kind for kind, primitives in KINDS.items() for primitive in primitives}


def anchors(jaxpr: Any, graph: Graph) -> dict[int, int]:
    """For each op that can be held, by its index in `graph.ops`, the number of its equation (`rebind.equations`)."""
    numbers: dict[str, list[tuple[int, tuple[int, ...], bool]]] = {}
    for number, eqn, is_reached in equations(jaxpr):
        kind = _KIND_OF.get(eqn.primitive.name)
        if kind is not None and _counts(kind, eqn.outvars[0].aval.shape):
            numbers.setdefault(kind, []).append((number, tuple(eqn.outvars[0].aval.shape), is_reached))
        elif eqn.primitive.name == "integer_pow" and _counts("multiply", eqn.outvars[0].aval.shape):
            made = (number, tuple(eqn.outvars[0].aval.shape), False)
            numbers.setdefault("multiply", []).extend([made] * multiplied(eqn.params["y"]))
    ops: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.name in KINDS and op.site >= 0 and _counts(op.name, graph.values[op.outputs[0]].shape):
            ops.setdefault(op.name, []).append(index)
    found: dict[int, int] = {}
    for kind, indices in ops.items():
        shapes = [graph.values[graph.ops[i].outputs[0]].shape for i in indices]
        if shapes == [shape for _, shape, _ in numbers.get(kind, ())]:
            pairs = zip(indices, numbers[kind], strict=True)
            found |= {index: number for index, (number, _, is_reached) in pairs if is_reached}
    return found


def multiplied(power: int) -> int:
    """How many products JAX makes of a power: it squares again and again.

    >>> [multiplied(power) for power in (0, 1, 2, 3, -2, 8)]
    [0, 0, 1, 2, 1, 3]
    """
    n = abs(power)
    return n.bit_length() + n.bit_count() - 2 if n else 0


def _counts(kind: str, shape: Sequence[int]) -> bool:
    """Small sums and products are not counted: JAX puts in its own, of indices and counters."""
    return kind not in ("add", "multiply", "dynamic_slice") or math.prod(shape) > 1


def held_in(
    layout: LayoutFile, anchored: Mapping[int, int], graph: Graph, axes: Sequence[tuple[str, int]], findings: list[str]
) -> dict[int, Pin]:
    """What a layout file holds inside, by the op's index; `findings` receives what this program has no place for.

    Args:
      anchored: as `anchors` gives it.
      axes: the grid.
    """
    op_of = {number: index for index, number in anchored.items()}
    known = {name for name, _ in axes}
    found: dict[int, Pin] = {}
    for held in layout.inside:
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
            found[op_of[held.number]] = Pin(held.operands, held.results)
        else:
            findings.append(
                f"{layout.name} holds equation {held.number}, a {printable(held.kind)} at {printable(held.where)}, and this "
                "program has no such one: it is laid out as it follows. Plan again and save, or take it out of [[inside]]"
            )
    return found


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

    return rebound(function, lambda eqn, number: number in wanted, bind, static_argnums)
