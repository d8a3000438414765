"""Where XLA computes wrong values, keep it from there; the report says so.

Seen on JAX 0.10.2 and 0.12.0.1 (CPU): a convolution with a window larger than 1 and a spatial dim cut gives wrong
results, in value or in gradient, if the image leaves some grid axis unused, or if the kernel is cut over an axis that
cuts the image's spatial dims. With whole spatial dims it is right, and so it is where the image is cut over all axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.graph.model import Flow, Graph
from shardfn.rebind import bind_one, rebound

CHANGES = frozenset({"all_gather", "all_slice", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter"})
CONVOLUTION = frozenset({"conv_general_dilated"})


def wrong_convolutions(graph: Graph, flow: Flow) -> tuple[str, ...]:
    """The convolutions (`file:line`) that XLA would compute wrongly in this layout."""
    ruled = [op for op in graph.ops if op.name == "convolution"]
    laid = [op for op in flow.graph.ops if op.name == "convolution"]
    if len(ruled) != len(laid):  # cannot tell which is which
        return tuple(dict.fromkeys(op.where for op in laid)) if flow.axes else ()
    # XLA may leave out the changes of layout around a convolution: judge it by what comes and what is wanted.
    moves = [(op.inputs[0], op.outputs[0]) for op in flow.graph.ops if op.name in CHANGES]
    moved_to: dict[int, int] = {}
    moved_from: dict[int, int] = {}
    for before, after in moves:
        moved_from[after] = moved_from.get(before, before)
    for before, after in reversed(moves):
        moved_to[before] = moved_to.get(after, after)
    every = {axis for axis, size in flow.axes.items() if size > 1}
    found: dict[str, None] = {}
    for op, at in zip(ruled, laid, strict=True):
        if op.rule is None or not op.rule.permuted:
            continue
        kernel = graph.values[op.inputs[1]].shape
        window = [n for n, factors in zip(kernel, op.rule.operands[1], strict=True) if _is_window(factors, op.rule)]
        image, weights = (flow.specs[moved_from.get(v, v)] for v in at.inputs)
        result = flow.specs[moved_to.get(at.outputs[0], at.outputs[0])]
        spatial = {
            _name(axis)
            for dims, spec in ((op.rule.operands[0], image), (op.rule.results[0], result))
            for factors, axes in zip(dims, spec, strict=True)
            if set(factors) & op.rule.permuted
            for axis in axes
        }
        used = {_name(axis) for dim in image for axis in dim}
        cut_kernel = {_name(axis) for dim in weights for axis in dim}
        if max(window, default=1) > 1 and spatial and (used != every or cut_kernel & spatial):
            found.setdefault(op.where)
    return tuple(found)


def convolution_finding(where: tuple[str, ...]) -> str:
    """What the report says of a mended plan."""
    return (
        f"the spatial dims of the convolutions at {', '.join(where)} are made whole first: XLA computes them wrongly in "
        "the layout asked for. Cut the image over all devices, and the kernel over none that cut the image, to avoid it"
    )


def _is_window(factors: tuple[int, ...], rule: Any) -> bool:
    """Whether a kernel dim is one of the window: its factors stand in no other tensor."""
    others = {f for dim in (*rule.operands[0], *rule.results[0]) for f in dim}
    return not set(factors) & others


def _name(axis: str) -> str:
    return axis.partition(":")[0]


def whole_convolutions(
    function: Callable[..., Any], mesh: Any, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` with the spatial dims of every windowed convolution's image and result whole."""

    def whole(x: Any, spec: tuple[int, ...]) -> Any:
        dims: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        for spatial in spec[2:]:
            dims[spatial] = None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))

    def bind(eqn: Any, inputs: list[Any]) -> list[Any]:
        numbers = eqn.params["dimension_numbers"]
        if max((inputs[1].shape[d] for d in numbers.rhs_spec[2:]), default=1) == 1:
            return bind_one(eqn, inputs)
        (out,) = bind_one(eqn, [whole(inputs[0], numbers.lhs_spec), inputs[1]])
        return [whole(out, numbers.out_spec)]

    def refuse(eqn: Any) -> None:
        fail(StrategyError, f"a convolution inside a `{eqn.primitive.name}` would be computed wrongly by XLA",
             why="its image is cut along a spatial dim in a way that XLA mistakes, and derivative rules of your own hide it",
             fix="leave the spatial dims of the image whole, or cut the image over all devices")  # fmt: skip

    return rebound(function, CONVOLUTION, bind, static_argnums, refuse)
