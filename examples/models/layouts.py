"""Layouts written by hand for a training step: rules from the paths of arrays to named axes, and hints for activations.

A grid has the axis `data`, over which the batch is cut, and often `model`, over which weights are. The models mark their
activations with `hint`: it holds them to what the hand-written layout says, as one does where propagation from the
arguments alone goes astray (fully sharded weights), and is the identity in a function that was not `written` so.
"""

from __future__ import annotations

import contextvars
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardfn.mindspore import Layout

Dims = tuple[str | None, ...]
"""For leading dims the axis that cuts each."""


class Expert(NamedTuple):
    """A layout written by hand: what `shard` takes, the grid, and by role what activations are held to."""

    in_strategy: tuple[Any, ...]
    axes: Mapping[str, int]
    hints: Mapping[str, Dims]

    def written(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with its activations held to the hints."""

        @functools.wraps(fn)
        def hinted(*args: Any) -> Any:
            token = _EXPERT.set(self)
            try:
                return fn(*args)
            finally:
                _EXPERT.reset(token)

        return hinted


_EXPERT: contextvars.ContextVar[Expert | None] = contextvars.ContextVar("expert", default=None)


def hint(x: jax.Array, role: str = "batch") -> jax.Array:
    """An activation of a role ("batch": its leading dim is the batch), held to what the hand-written layout says."""
    expert = _EXPERT.get()
    if expert is None or not any(dims := expert.hints.get(role, ())):
        return x
    sizes = expert.axes
    dims = tuple(a if a and n % sizes.get(a, n + 1) == 0 else None for a, n in zip(dims, x.shape, strict=False))
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))


Cuts = Mapping[str, tuple[str | None, ...]]
"""For a glob of paths the axis of each dim, counted from the last dim; dims before those are unsharded."""


def lay_out(
    args: Sequence[Any],
    axes: Mapping[str, int],
    cuts: Cuts | None = None,
    *,
    pieces: str = "",
    state_pieces: str = "",
    batch: Dims = ("data",),
    experts: Dims = (),
    trained: int = 2,
) -> Expert:
    """One layout of a training step's arguments.

    Args:
      args: the arguments or their shapes: first `trained` trees (parameters, then the optimizer's state and the like),
        then the arrays of a batch.
      axes: name and size of each mesh axis.
      cuts: the mesh axis of each dim by path glob; the first glob that fits counts. An axis that does not divide is left out.
      pieces: an axis over which each array of the first `trained` trees is also sharded, along its largest unsharded dim
        that divides (fully sharded data parallel).
      state_pieces: the same for all but the parameters (ZeRO-1).
      batch: the axes of the leading dims of the batch's arrays, and of activations.
      experts: the same for tokens that were sent to the experts of a mixture, [experts, ...].
      trained: the number of trees before the batch.

    >>> import jax.numpy as jnp
    >>> lay_out(({"w": jnp.ones((4, 6))}, jnp.ones((8, 2))), {"data": 4}, pieces="data", trained=1).in_strategy
    ({'w': Layout((4,), ('data',))('data', 'None')}, Layout((4,), ('data',))('data', 'None'))
    """
    whole = Layout(tuple(axes.values()), tuple(axes))

    def entry(place: int, key: Any, leaf: Any) -> Layout:
        dims: list[tuple[str, ...]] = [() for _ in leaf.shape]
        if place >= trained:
            wanted = (*batch, *(None,) * len(dims))[: len(dims)]
        else:
            path = "/".join((str(place), jax.tree_util.keystr(key, simple=True, separator="/")))
            found = next((c for glob, c in (cuts or {}).items() if fnmatch.fnmatch(path, glob)), ())
            wanted = (*(None,) * (len(dims) - len(found)), *found) if len(found) <= len(dims) else (None,) * len(dims)
        for d, (axis, size) in enumerate(zip(wanted, leaf.shape, strict=True)):
            if axis is not None and size % axes.get(axis, size + 1) == 0:
                dims[d] = (axis,)
        extra = pieces or (state_pieces if place else "")
        if place < trained and extra:
            _cut_into_pieces(dims, leaf.shape, extra, axes)
        return whole(*("None" if not d else d[0] if len(d) == 1 else d for d in dims))

    entries = tuple(
        jax.tree_util.tree_map_with_path(lambda key, leaf, i=i: entry(i, key, leaf), arg) for i, arg in enumerate(args)
    )
    return Expert(entries, axes, {"batch": batch, "experts": experts})


def _cut_into_pieces(dims: list[tuple[str, ...]], shape: Sequence[int], axis: str, axes: Mapping[str, int]) -> None:
    """Give the axis to the largest free dim that it divides, else to what is left of a cut one."""
    if any(axis in d for d in dims):
        return
    left = [n // math.prod(axes[a] for a in d) for n, d in zip(shape, dims, strict=True)]
    fitting = [i for i, n in enumerate(left) if n and n % axes[axis] == 0]
    if fitting:
        best = max(fitting, key=lambda i: (not dims[i], left[i], -i))
        dims[best] = (*dims[best], axis)


def data_axes(batch: int, devices: int) -> dict[str, int]:
    """A grid for pure data parallel: what of the devices the batch cannot use is left over, as `rest`."""
    data = math.gcd(batch, devices)
    return {"data": data, "rest": devices // data} if data < devices else {"data": data}


def mixes(devices: int, batch: int, most: int) -> Iterable[dict[str, int]]:
    """Grids `data` x `model` that people try: up to 8 devices on `model`, as they stand in one node."""
    for model in (2, 4, 8):
        if model < devices and devices % model == 0 and most % model == 0 and batch % (devices // model) == 0:
            yield {"data": devices // model, "model": model}


def usual_experts(
    args: Sequence[Any],
    devices: int,
    batch: int,
    most: int,
    tensor: Cuts,
    variants: Mapping[str, Cuts] | None = None,
    *,
    trained: int = 2,
) -> dict[str, Expert]:
    """Data parallel, FSDP, ZeRO-1 (where there is a state), tensor parallel and their mixes, by name.

    Args:
      args: shapes of the step's arguments, as in `lay_out`.
      devices: the device count.
      batch: size of the batch.
      most: how many ways tensor parallel can go (heads).
      tensor: the shardings over the axis `model`.
      variants: other shardings over `model`, mixed with data parallel and FSDP on the last of the mixed meshes.
      trained: as in `lay_out`.
    """
    alone = data_axes(batch, devices)
    found = {
        "data parallel": lay_out(args, alone, trained=trained),
        "FSDP": lay_out(args, alone, pieces="data", trained=trained),
    }
    if trained > 1:
        found["ZeRO-1"] = lay_out(args, alone, state_pieces="data", trained=trained)
    if most % devices == 0:
        found["tensor parallel"] = lay_out(args, {"model": devices}, tensor, trained=trained)
    grids = list(mixes(devices, batch, most))
    for axes in grids:
        size = f"{axes['data']} x {axes['model']}"
        found[f"data x tensor, {size}"] = lay_out(args, axes, tensor, trained=trained)
        found[f"FSDP x tensor, {size}"] = lay_out(args, axes, tensor, pieces="data", trained=trained)
    for name, cuts in (variants or {}).items():
        for axes in grids[-1:]:
            size = f"{axes['data']} x {axes['model']}"
            found[f"data x tensor, {name}, {size}"] = lay_out(args, axes, cuts, trained=trained)
            found[f"FSDP x tensor, {name}, {size}"] = lay_out(args, axes, cuts, pieces="data", trained=trained)
    return found
