"""Derivative rules for functions that are differentiated from outside, where the gradient is no part of the plan.

JAX transposes the tangent program of each op. Some transposes meet bugs of XLA along a sharded dimension:

- A slice with strides becomes a pad between elements. One without becomes a pad, which does not compile for some uneven shards.
- A pad becomes a pad by negative numbers (a crop). With strides between windows a sum over windows becomes both.
- Max and min pooling becomes a `select_and_scatter`, which is wrong where windows overlap by half or more.
- A lookup becomes a scatter that combines, which is wrong where its rows are sharded unevenly.
- A dynamic slice and an update at a dynamic place become one another, and XLA forgets that their places are clamped.
- A Fourier transform may read a transposed array on CPU, and fail.
- A convolution becomes one with the shardings of image and result exchanged: where the result is unsharded and the image is not,
  it is wrong.
- A sort and a `top_k` become a scatter that combines. With uneven shards it is wrong, or ends the process where its index is of
  unsigned integers.
- A scatter or a lookup of one window becomes a scatter of one. Before JAX 0.12 XLA changes shards that it does not reach, if the
  array that it updates is sharded just before (`workarounds`), or is added to it. What is sharded just before is not known
  here: the program around the call decides it. So each such update, and each transpose, is between optimization barriers.
- A rotation becomes a sum of pads, which does not compile for some shards: its transpose is the rotation back.
- A resharding becomes the one back, which may end the process since JAX 0.12 (`partition.xla_bugs.ends_process`).

Here the tangents of strided slices, pads and sums are written with reshapes, slices and concatenations, whose transposes XLA
computes correctly for every sharding. Those of plain slices with uneven shards are along gathered dimensions, those of pooling
and of such convolutions along unsharded windows, those of lookups, sorts and `top_k` have even shards, and dynamic places are
clamped. Cumulative ops have tangents made of such ops. Where a resharding back would end the process, the tangents of results
are replicated; between constraints of the user's own inside, XLA reshards them as they say. The values of a function are
computed as without these rules.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import bind_one, equations, rebind
from shardfn.movement import is_rotation, rotated
from shardfn.planning.meshes import PlanMesh
from shardfn.planning.workarounds.even_scatters import even_lookup, rows_multiple, signed_index_dtype
from shardfn.planning.workarounds.rewrites import (
    clamped,
    has_one_place,
    transformed,
    transformed_dims,
    unsharded,
    updates_window,
)
from shardfn.planning.workarounds.wrong_ops import AT_PLACES, Shapes, ends_process_backwards, transposed_wrongly


class Risks(NamedTuple):
    """What decides which transposes XLA may compute wrongly."""

    devices: int
    multiple: int = 1
    """Of what the number of a lookup's rows must be a multiple for even shards (`even_scatters.rows_multiple`)."""
    convolutions: frozenset[Shapes] = frozenset()
    """`wrong_ops.transposed_wrongly`."""
    ends_process: bool = False
    """`wrong_ops.ends_process_backwards`."""
    rotations: Mapping[tuple[int, ...], NamedSharding | None] = types.MappingProxyType({})
    """By shape of an array that the plan rotates, its sharding; None where arrays of one shape have several."""


def risks_of(partitioned: PartitionedProgram, devices: int, mesh: PlanMesh) -> Risks:
    """Those of a program with its shardings over some devices, on a mesh of these."""
    graph = partitioned.graph
    specs: dict[tuple[int, ...], set[Spec]] = {}
    for op in graph.ops:
        if op.name == "rotate":
            specs.setdefault(tuple(graph.values[op.outputs[0]].shape), set()).add(partitioned.specs[op.outputs[0]])
    rotations: dict[tuple[int, ...], NamedSharding | None] = dict.fromkeys(specs)
    for shape, (spec, *others) in specs.items():
        if not others and all(axis in mesh.parts for dim in spec for axis in dim):  # and no part of an axis
            rotations[shape] = mesh.sharding(spec)
    lookups = (op for op in graph.ops if op.name == "gather")
    multiple = math.lcm(*(rows_multiple(op, partitioned, {}) for op in lookups))
    return Risks(devices, multiple, transposed_wrongly(partitioned), ends_process_backwards(partitioned),
                 rotations)  # fmt: skip


def correct_gradients(
    function: Callable[..., Any], mesh: Any, static_argnums: tuple[int, ...], risks: Risks
) -> Callable[..., Any]:
    """`function` with derivatives that XLA computes correctly when they are taken from outside. The ops of its values stay.

    Args:
      function: the function.
      mesh: the mesh of the constraints.
      static_argnums: as in `jax.jit`.
      risks: those of the plan.
    """

    devices, multiple = risks.devices, risks.multiple

    def linear(eqn: Any, own: Any, *others: Any) -> Any:
        """What a linear op makes of its first operand `own`, in a form that XLA transposes correctly; None for another op."""
        if cropped := _cropped(eqn, devices):
            return unsharded(mesh, _slice(eqn.params, unsharded(mesh, own, cropped)), cropped)
        if form := _LINEAR.get(eqn.primitive.name):
            return form(eqn.params, own, *others[-1:])
        if eqn.primitive.name == "fft":
            along = transformed_dims(eqn)
            return unsharded(mesh, transformed(eqn, unsharded(mesh, own, along)), along)
        if eqn.primitive.name != "gather":
            return None
        between = lax.optimization_barrier if _finds_window(eqn) else lambda x: x
        return between(even_lookup(eqn, between(own), others[0], multiple))

    def bind_linear(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        if _is_even_rotation(eqn, devices):
            return _rotated(eqn, inputs, risks.rotations, mesh)
        found = linear(eqn, *inputs)
        return bind_one(eqn, inputs) if found is None else [found]

    def is_chosen(eqn: Any, number: int) -> bool:
        return _is_at_risk(eqn, risks)

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        if _is_even_rotation(eqn, devices):
            return _rotated(eqn, inputs, risks.rotations, mesh)
        if eqn.primitive.name == "sort":
            return _sorted(eqn, mesh, devices)(*inputs)
        if eqn.primitive.name == "top_k":
            return _largest(eqn, mesh, devices)(*inputs)
        if _updates_window(eqn):
            return lax.optimization_barrier(bind_one(eqn, [lax.optimization_barrier(inputs[0]), *inputs[1:]]))
        if eqn.primitive.name in AT_PLACES:
            return bind_one(eqn, clamped(eqn, inputs))
        if eqn.primitive.name == _CONVOLUTION:
            return [_convolved(eqn, mesh)(*inputs)]

        def op(*operands: Any) -> Any:
            return bind_one(eqn, operands)[0]

        def tangent_of(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            own = jnp.zeros_like(primals[0]) if _is_zero(tangents[0]) else tangents[0]
            if (found := linear(eqn, own, *primals[1:], *tangents[1:])) is not None:
                return found
            dims = _overlapping(eqn)
            operand, tangent = (unsharded(mesh, x, dims) for x in (*primals, *tangents))
            derivative_of = rebind(lambda *of: jax.jvp(op, of[:1], of[1:])[1], is_chosen, bind_linear)
            return unsharded(mesh, derivative_of(operand, tangent), dims)

        corrected = jax.custom_jvp(op)
        corrected.defjvp(
            lambda primals, tangents: (corrected(*primals), tangent_of(primals, tangents)), symbolic_zeros=True
        )
        return [corrected(*inputs)]

    found = rebind(function, is_chosen, bind, static_argnums)
    return _with_replicated_tangents(found, mesh) if risks.ends_process else found


def _with_replicated_tangents(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`function`, whose results have replicated tangents and cotangents."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    same.defjvp(lambda xs, ts: (same(xs[0]), unsharded(mesh, ts[0], range(jnp.ndim(ts[0])))))

    def run(*args: Any) -> Any:
        results = function(*args)
        return jax.tree.map(
            lambda x: same(x) if jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact) else x, results
        )

    return run


def has_gradients_at_risk(jaxpr: Any, risks: Risks) -> bool:
    """Whether `correct_gradients` changes a function, by its jaxpr."""
    found = (_is_at_risk(eqn, risks) for _, eqn, is_reached in equations(jaxpr) if is_reached)
    return risks.devices > 1 and (risks.ends_process or any(found))


def _is_even_rotation(eqn: Any, devices: int) -> bool:
    """Whether an equation is a rotation, or a `jnp.roll` along dimensions of even shards, which XLA computes as one."""
    return is_rotation(eqn) or (any(turns := _turns(eqn)) and not any(size % devices for _, _, size in turns))


def _turns(eqn: Any) -> list[tuple[int, int, int]]:
    """Of a `jit` of rotations, and nothing else, their dimensions, the rows that become the first ones, and sizes.

    A rotation is two slices and their concatenation.
    """
    closed = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
    if closed is None or len(closed.jaxpr.invars) != 1 or not closed.jaxpr.eqns or len(closed.jaxpr.eqns) % 3:
        return []
    (value,), eqns, found = closed.jaxpr.invars, closed.jaxpr.eqns, []
    for end, start, whole in zip(eqns[::3], eqns[1::3], eqns[2::3], strict=True):
        parts = [one.outvars[0] for one in (end, start) if one.primitive.name == "slice" and one.invars[0] is value]
        if (
            whole.primitive.name != "concatenate"
            or whole.invars != parts
            or whole.outvars[0].aval.shape != value.aval.shape
        ):
            return []
        dim = whole.params["dimension"]
        found.append((dim, end.params["start_indices"][dim], value.aval.shape[dim]))
        (value,) = whole.outvars
    return found if closed.jaxpr.outvars[0] is value else []


def _rotated(
    eqn: Any, inputs: list[Any], shardings: Mapping[tuple[int, ...], NamedSharding | None], mesh: Any
) -> list[Any]:
    """The output of rotations, whose transpose is the rotations back, with cotangents that are sharded as the plan rotates.

    JAX's transpose is a sum of pads, of which XLA makes wrong shapes where a part has fewer rows than there are shards. So
    it does of a rotation whose operand and result are sharded otherwise.
    """
    turns = _turns(eqn)
    if not turns or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return bind_one(eqn, inputs)
    sharding = shardings.get(eqn.outvars[0].aval.shape)

    def placed(x: Any) -> Any:
        dims = [dim for dim, *_ in turns]
        return unsharded(mesh, x, dims) if sharding is None else lax.with_sharding_constraint(x, sharding)

    def back(x: Any) -> Any:
        for dim, first, _ in reversed(turns):
            x = rotated(x, first, dim)
        return x

    def there(_: Any, x: Any) -> Any:
        return bind_one(eqn, [x])[0]

    return [lax.custom_linear_solve(back, inputs[0], there, lambda _, x: placed(back(placed(x))))]


def _cropped(eqn: Any, devices: int) -> list[int]:
    """The dimensions that a slice without strides shortens, and that `devices` shards do not divide."""
    if eqn.primitive.name != "slice" or max(eqn.params["strides"] or (1,), default=1) > 1:
        return []
    sizes = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    return [d for d, (before, after) in enumerate(sizes) if before != after and (before % devices or after % devices)]


def _is_at_risk(eqn: Any, risks: Risks) -> bool:
    """Whether XLA may compute an equation's transpose, or the update of one window itself, wrongly."""
    name, params, (devices, multiple, convolutions, *_) = eqn.primitive.name, eqn.params, risks
    if _updates_window(eqn) or _is_even_rotation(eqn, devices):
        return True
    if name in ("sort", "top_k"):
        sizes = (n for v in (eqn.invars[0], eqn.outvars[0]) for n in v.aval.shape)
        return any(n % devices for n in sizes) and any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars)
    if name == "gather":
        is_found = multiple > 1 or _finds_window(eqn)
    elif name == "slice":
        is_found = max(params["strides"] or (1,), default=1) > 1 or bool(_cropped(eqn, devices))
    elif name == _CONVOLUTION:
        is_found = tuple(tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)) in convolutions
    elif name == "reduce_window_sum":
        rows = zip(*(params[n] for n in ("window_dimensions", "window_dilation", "padding")), strict=True)
        is_cropped = any(max(edges) > (size - 1) * spacing for size, spacing, edges in rows)
        is_found = is_cropped or max(*params["window_strides"], *params["base_dilation"], 1) > 1
    else:
        is_found = name in _AT_RISK or bool(_overlapping(eqn))
    return is_found and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)


def _updates_window(eqn: Any) -> bool:
    """Whether an equation is a scatter of one window, before JAX 0.12."""
    return IS_BEFORE_JAX_0_12 and updates_window(eqn)


def _finds_window(eqn: Any) -> bool:
    """Whether the transpose of a gather is a scatter of one window, before JAX 0.12."""
    return IS_BEFORE_JAX_0_12 and has_one_place(eqn)


def _overlapping(eqn: Any) -> list[int]:
    """The dimensions along which the windows of max or min pooling overlap by half or more."""
    if eqn.primitive.name not in _POOLS:
        return []
    names = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    rows = zip(*(eqn.params[name] for name in names), strict=True)
    return [
        d
        for d, (size, stride, spacing, base) in enumerate(rows)
        if (size > 1 and (size - 1) * spacing + 1 >= 2 * stride) or base > 1
    ]


def _convolved(eqn: Any, mesh: Any) -> Callable[..., Any]:
    """A convolution whose image has tangents with unsharded spatial dimensions."""
    _, _, *spatial = eqn.params["dimension_numbers"].lhs_spec

    @jax.custom_jvp
    def op(image: Any, kernel: Any) -> Any:
        return bind_one(eqn, [image, kernel])[0]

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (image, kernel), (of_image, of_kernel) = primals, tangents
        made = op(image, kernel)
        parts = [] if _is_zero(of_image) else [op(unsharded(mesh, of_image, spatial), kernel)]
        parts += [] if _is_zero(of_kernel) else [op(image, of_kernel)]
        return made, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(made)

    op.defjvp(derivative, symbolic_zeros=True)
    return op


def _sorted(eqn: Any, mesh: Any, devices: int) -> Callable[..., list[Any]]:
    """`lax.sort`, whose tangents are looked up at signed places."""
    dim, shape = eqn.params["dimension"], eqn.invars[0].aval.shape

    @jax.custom_jvp
    def op(*operands: Any) -> list[Any]:
        return bind_one(eqn, operands)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        place = lax.broadcasted_iota(signed_index_dtype(shape[dim]), shape, dim)
        *found, order = lax.sort(
            (*primals, place), dimension=dim, is_stable=eqn.params["is_stable"], num_keys=eqn.params["num_keys"]
        )
        moved = [
            np.zeros(shape, jax.dtypes.float0)
            if t.dtype == jax.dtypes.float0
            else _looked_up(t, order, dim, mesh, devices)
            for t in tangents
        ]
        return found, moved

    op.defjvp(derivative)
    return op


def _largest(eqn: Any, mesh: Any, devices: int) -> Callable[..., list[Any]]:
    """`lax.top_k`, whose tangent is looked up in even shards."""

    @jax.custom_jvp
    def op(x: Any) -> list[Any]:
        return bind_one(eqn, [x])

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        largest, order = op(*primals)
        found = _looked_up(tangents[0], order, eqn.params["axis"], mesh, devices)
        return [largest, order], [found, np.zeros(order.shape, jax.dtypes.float0)]

    op.defjvp(derivative)
    return op


def _looked_up(x: Any, order: Any, dim: int, mesh: Any, devices: int) -> Any:
    """`jnp.take_along_axis`, unsharded along uneven dimensions: its transpose is a scatter that combines."""
    uneven = [d for d, sizes in enumerate(zip(x.shape, order.shape, strict=True)) if any(n % devices for n in sizes)]
    x, order = (unsharded(mesh, each, uneven) for each in (x, order))
    return unsharded(mesh, jnp.take_along_axis(x, order, dim), uneven)


def _slice(params: dict[str, Any], x: Any) -> Any:
    """`lax.slice`."""
    strides = params["strides"] or (1,) * x.ndim
    for dim, place in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        x = _sliced(x, dim, *place)
    return x


def _sliced(x: Any, dim: int, start: int, limit: int, stride: int) -> Any:
    """A slice along one dimension. With a stride it is one element of each group of neighbours."""
    if stride == 1:
        return lax.slice_in_dim(x, start, limit, axis=dim)
    count = -(-(limit - start) // stride)
    x = _edged(x, dim, 0, max(count * stride - x.shape[dim], 0))
    first = min(start, x.shape[dim] - count * stride)
    x = lax.slice_in_dim(x, first, first + count * stride, axis=dim)
    x = x.reshape(*x.shape[:dim], count, stride, *x.shape[dim + 1 :])
    return lax.index_in_dim(x, start - first, axis=dim + 1, keepdims=False)


def _pad(params: dict[str, Any], x: Any, value: Any) -> Any:
    """`lax.pad`."""
    config = params["padding_config"]
    padded = _padded(x, config)
    if _is_zero(value):
        return padded
    return jnp.where(_padded(jnp.ones(x.shape, np.int8), config) == 1, padded, value)


def _padded(x: Any, config: Sequence[tuple[int, int, int]]) -> Any:
    """`x` padded with zeros."""
    for dim, (low, high, interior) in enumerate(config):
        rows = x.shape[dim]
        size = max(low + rows + max(rows - 1, 0) * interior + high, 0)
        if interior:
            x = _edged(jnp.expand_dims(x, dim + 1), dim + 1, 0, interior)
            x = x.reshape(*x.shape[:dim], rows * (interior + 1), *x.shape[dim + 2 :])
        before = min(max(low, 0), size)
        first = min(max(-low, 0), x.shape[dim])
        last = min(first + size - before, x.shape[dim])
        x = _edged(lax.slice_in_dim(x, first, last, axis=dim), dim, before, size - before - (last - first))
    return x


def _is_zero(value: Any) -> bool:
    return isinstance(value, SymbolicZero) or (isinstance(value, float | np.generic | np.ndarray) and value == 0)


def _edged(x: Any, dim: int, before: int, after: int) -> Any:
    """`x` with zeros before and after it along a dimension."""
    zeros = [jnp.zeros((*x.shape[:dim], rows, *x.shape[dim + 1 :]), x.dtype) for rows in (before, after)]
    return lax.concatenate([part for part in (zeros[0], x, zeros[1]) if part is x or part.shape[dim]], dim)


def _window_sum(params: dict[str, Any], x: Any) -> Any:
    """`lax.reduce_window` of sums."""
    window, strides, spacing = (params[name] for name in ("window_dimensions", "window_strides", "window_dilation"))
    x = _padded(x, [(*edges, base - 1) for edges, base in zip(params["padding"], params["base_dilation"], strict=True)])
    sums = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, "VALID", None, spacing)
    return _slice({"start_indices": (0,) * x.ndim, "limit_indices": sums.shape, "strides": strides}, sums)


_LINEAR: dict[str, Callable[..., Any]] = {"slice": _slice, "pad": _pad, "reduce_window_sum": _window_sum}
"""The tangents of linear ops, by the op's parameters and its operands' tangents."""
_AT_RISK = frozenset({"pad", *AT_PLACES, "fft", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_CONVOLUTION = "conv_general_dilated"
_POOLS = frozenset({"reduce_window_max", "reduce_window_min"})
