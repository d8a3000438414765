"""Where XLA computes wrong values, or makes a program that cannot run, keep it from there; the report says so.

Convolutions: `graph.mistakes`. Seen on JAX 0.10.2 and 0.12.0.1 (CPU) too:
the gradient of a maximum over windows (max pooling) is wrong where a dim is cut and neighbouring windows overlap by
half or more: 3 rows each 1, 4 each 2, but not 3 each 2. It is judged where it stands in the function itself.
On CPU a Fourier transform of what is gathered along another dim than the first may come to read a transposed array, which
it refuses when it runs: with its operand and result whole by constraint, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.graph.mistakes import is_mistaken
from shardfn.graph.model import Flow, Op
from shardfn.rebind import bind_one, rebound

CHANGES = frozenset({"all_gather", "all_slice", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter"})


class Wrong(NamedTuple):
    """An op that XLA gets wrong: its `file:line`, and whether it is a Fourier transform, not a convolution or pooling."""

    where: str
    is_transform: bool = False


def wrong_convolutions(flow: Flow) -> tuple[Wrong, ...]:
    """The convolutions that XLA might compute wrongly, in value or gradient, and transforms that might not run, so laid out."""
    # XLA may leave out the changes of layout around a convolution: judge it by what comes and what is wanted.
    moves = [(op.inputs[0], op.outputs[0]) for op in flow.graph.ops if op.name in CHANGES]
    moved_to: dict[int, int] = {}
    moved_from: dict[int, int] = {}
    for before, after in moves:
        moved_from[after] = moved_from.get(before, before)
    for before, after in reversed(moves):
        moved_to[before] = moved_to.get(after, after)
    found: dict[Wrong, None] = {}
    for op in flow.graph.ops:
        if op.name == "select_and_scatter" and _is_wrong_pooling(op, flow):
            found.setdefault(Wrong(op.where))
        if op.name == "fft" and flow.platform == "cpu":
            before, after = flow.specs[moved_from.get(op.inputs[0], op.inputs[0])], flow.specs[op.inputs[0]]
            if before[1:] != after[1:]:
                found.setdefault(Wrong(op.where, is_transform=True))
        if op.convolution is None:
            continue
        image, kernel = (flow.specs[moved_from.get(v, v)] for v in op.inputs)
        result = flow.specs[moved_to.get(op.outputs[0], op.outputs[0])]
        window = [flow.graph.values[op.inputs[1]].shape[d] for d in op.convolution.kernel]
        if is_mistaken(op.convolution, (image, kernel, result), window, flow.axes):
            found.setdefault(Wrong(op.where))
    return tuple(found)


def _is_wrong_pooling(op: Op, flow: Flow) -> bool:
    """Whether windows that overlap by half or more run along a cut dim; in doubt, as padding may hide it, they do."""
    operand, source = (flow.graph.values[v].shape for v in op.inputs[:2])
    for tap in op.taps:
        overlap = -tap.low
        least_stride = (operand[tap.dim] - overlap) // (source[tap.dim] + 1) + 1
        if overlap >= least_stride and (flow.specs[op.inputs[0]][tap.dim] or flow.specs[op.outputs[0]][tap.dim]):
            return True
    return False


def convolution_finding(wrong: Sequence[Wrong]) -> str:
    """What the report says of a mended plan."""
    windows, transforms = (", ".join(w.where for w in wrong if w.is_transform == kind) for kind in (False, True))
    texts = []
    if windows:
        texts.append(
            f"the spatial dims of the convolutions, all dims of those in groups, or the gradients of poolings, at {windows} are "
            "made whole first: XLA computes them wrongly in the layout asked for, or their gradients. To avoid it, cut one "
            "spatial dim, and the image over all devices, or convolve with shardfn.halo.conv, which fetches borders itself"
        )
    if transforms:
        texts.append(
            f"what the Fourier transforms at {transforms} read and give is made whole first: in the layout asked for, XLA on "
            "CPU makes a program of them that may stop when it runs. To avoid it, leave all dims but the first whole"
        )
    return "; ".join(texts)


def whole_convolutions(
    function: Callable[..., Any], mesh: Any, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` with the dims of every window whole, of convolutions and gradients of a maximum; Fourier transforms wholly."""

    def whole(x: Any, windowed: Sequence[int]) -> Any:
        dims: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        for spatial in windowed:
            dims[spatial] = None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        if eqn.primitive.name == _POOLING:
            dims = [d for d, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
            (out,) = bind_one(eqn, [whole(x, dims) for x in inputs])
            return [whole(out, dims)]
        if eqn.primitive.name == _TRANSFORM or max(map(eqn.params.__getitem__, _GROUPS)) > 1:
            (out,) = bind_one(eqn, [whole(x, range(x.ndim)) for x in inputs])
            return [whole(out, range(out.ndim))]
        numbers = eqn.params["dimension_numbers"]
        if max((inputs[1].shape[d] for d in numbers.rhs_spec[2:]), default=1) == 1:
            return bind_one(eqn, inputs)
        (out,) = bind_one(eqn, [whole(inputs[0], numbers.lhs_spec[2:]), inputs[1]])
        return [whole(out, numbers.out_spec[2:])]

    def refuse(eqn: Any) -> None:
        fail(StrategyError, f"a convolution or pooling inside a `{eqn.primitive.name}` would be computed wrongly by XLA",
             why="its image is cut along a spatial dim in a way that XLA mistakes, and derivative rules of your own hide it",
             fix="leave its spatial dims whole, cut the image over all devices, or use shardfn.halo.conv")  # fmt: skip

    wanted = ("conv_general_dilated", _POOLING, _TRANSFORM)
    return rebound(function, lambda eqn, number: eqn.primitive.name in wanted, bind, static_argnums, refuse)


_POOLING = "select_and_scatter_add"
_TRANSFORM = "fft"
_GROUPS = ("feature_group_count", "batch_group_count")
