"""Gradients of a loss, on the global batch or per device, in one go or by micro-batches.

`global_gradients` calls the loss once on the global batch, and XLA's partitioner inserts the reductions.
`per_device_gradients` calls it on each device's part of the batch, in a `jax.shard_map` over the batch axes, and reduces the
gradients by explicit collectives. A batch statistic then sees one device's part, and the step controls when gradients are
reduced, in which dtype and in which buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.frontend.paths import join
from shardfn.train.collectives import flat_collectives
from shardfn.train.collectives.buckets import Bucket, BucketMember, FusionOptions, buckets
from shardfn.train.remat import PARAMETER, keep_but_parameters

Loss = Callable[[Any, Any, tuple[Any, ...]], tuple[jax.Array, tuple[Any, Any]]]
"""(trained, carried, batch) -> (loss, (auxiliary output, carried))."""

Gradients = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any, Any, Any]]
"""(trained, carried, batch) -> (loss, auxiliary output, gradients, carried)."""

ShardedDim = tuple[int, tuple[str, ...]] | None
"""A dimension and the mesh axes that shard it."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the devices' gradients become one."""

    mean: bool = True
    """Divide the sum by the number of parts, for a loss that is a mean over the batch."""
    fp32: bool = True
    """Sum 16-bit gradients in float32."""


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """The collectives of gradients and parameters over the mesh axes of the batch; a field per trained leaf.

    `scattered` is the dimension along which each device keeps a shard of the reduced gradient, None for an all-reduce.
    `gathered` is the dimension along which the parameter itself is sharded. `own` says that each device has a parameter of
    its own (layerwise parallel), with a leading dimension of one, whose gradient is not reduced.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    scattered: tuple[ShardedDim, ...]
    gathered: tuple[ShardedDim, ...]
    own: tuple[bool, ...]
    paths: tuple[str, ...]
    other_specs: tuple[PartitionSpec, ...]
    """The sharding over the mesh axes that do not shard the batch."""
    fusion: FusionOptions | None
    """Which collectives are fused; None leaves that to XLA."""
    regathers: bool
    """Gather sharded parameters again for the backward pass instead of keeping them."""
    reduction: Reduction

    @property
    def count(self) -> int:
        """The number of parts of the batch."""
        return _size(self.mesh, self.axes)

    @property
    def is_partial(self) -> bool:
        """Whether XLA partitions the loss over other mesh axes."""
        return set(self.axes) != set(self.mesh.axis_names)

    def members(self, leaves: Sequence[Any], gathers: bool) -> list[BucketMember | None]:
        """For each trained leaf the operand of its gather or of its gradient's reduction, None for no collective."""
        found: list[BucketMember | None] = []
        dims = self.gathered if gathers else self.scattered
        for leaf, path, own, at, spec in zip(leaves, self.paths, self.own, dims, self.other_specs, strict=True):
            if own or (gathers and at is None):
                found.append(None)
                continue
            shards = [_size(self.mesh, _axes(entry)) for entry in spec]
            shape = tuple(n // k for n, k in itertools.zip_longest(leaf.shape, shards, fillvalue=1))
            kind = "all-gather" if gathers else "reduce-scatter" if at else "all-reduce"
            dtype = leaf.dtype if gathers else self.sum_dtype(leaf.dtype)
            found.append(BucketMember(path, shape, str(dtype), kind, at[1] if at else self.axes))
        return found

    def sum_dtype(self, dtype: Any) -> Any:
        """The dtype in which a gradient is summed."""
        # XLA's CPU compiler crashes on 16-bit sums over some of the mesh axes.
        widens = dtype.itemsize < 4 and (self.reduction.fp32 or self.is_partial)
        return jnp.dtype(jnp.float32) if widens else dtype

    def averaged(self, x: jax.Array) -> jax.Array:
        """A sum of gradients as the mean, where that is the reduction."""
        return x / self.count if self.reduction.mean else x


def global_gradients(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """Loss, auxiliary output, gradients and carried leaves of the global batch."""
    (value, (aux, carried)), grads = jax.value_and_grad(loss, has_aux=True)(trained, carried, batch)
    return value, aux, grads, carried


def regathering_loss(
    loss: Loss, shards: Any, gather: Callable[[Any], Any], zeros: Callable[[Any], jax.Array]
) -> tuple[Loss, Any]:
    """A loss that gathers parameters in the forward pass, drops them, and gathers them again in the backward pass.

    Args:
      loss: of full parameters.
      shards: the sharded parameters.
      gather: makes the full parameters.
      zeros: zeros of a shape, in place of a full parameter; nothing reads them, and they get its gradient.

    Returns:
      The loss as a function of those zeros, and the zeros.
    """
    full = lambda shards: tree_util.tree_map(lambda x: checkpoint_name(x, PARAMETER), gather(shards))  # noqa: E731

    @jax.custom_vjp
    def through(zeros: Any, shards: Any) -> Any:
        return full(shards)

    through.defvjp(lambda zeros, shards: (full(shards), None), lambda _, grads: (grads, None))

    def called(zeros: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        run = lambda zeros, shards, *rest: loss(through(zeros, shards), *rest)  # noqa: E731
        return jax.checkpoint(run, policy=keep_but_parameters)(zeros, shards, carried, batch)

    return called, tree_util.tree_map(zeros, jax.eval_shape(gather, shards))


def micro_batched(
    loss: Loss, count: int, growing: Any, each: Callable[[Any], Any], zeros: Callable[[Any], Any]
) -> Gradients:
    """As `global_gradients`, on `count` micro-batches, whose gradients a scan accumulates.

    Args:
      loss: a mean over the batch that it gets.
      count: divides dimension 0 of every array of the batch; every micro-batch gets the scalars.
      growing: for each leaf of the auxiliary output the dimension that grows with the batch, -1 for a mean.
      each: maps the gradients of a micro-batch before they are added.
      zeros: the first sums, from the trained leaves.
    """

    def run(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        leaves, treedef = tree_util.tree_flatten(batch)
        split = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else None for x in leaves]

        def body(carry: tuple[Any, Any], now: list[Any]) -> tuple[tuple[Any, Any], Any]:
            carried, sums = carry
            part = treedef.unflatten([x if own is None else own for x, own in zip(leaves, now, strict=True)])
            value, aux, grads, carried = global_gradients(loss, trained, carried, part)
            sums = tree_util.tree_map(lambda s, g: s + g.astype(s.dtype), sums, each(grads))
            return (carried, sums), (value, aux)

        (carried, sums), (values, auxes) = lax.scan(body, (carried, zeros(trained)), split)
        grads = tree_util.tree_map(lambda s: s / count, sums)
        return jnp.mean(values), tree_util.tree_map(_unstacked, growing, auxes), grads, carried

    return run


def _unstacked(dim: int, x: jax.Array) -> jax.Array:
    """What a scan stacked, joined along `dim`; for -1 the mean, of integers the last."""
    if dim < 0:
        return jnp.mean(x, 0) if _is_inexact(x) else x[-1]
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def per_device_gradients(
    loss: Loss, sync: GradientSync, micro_batches: int, early: bool, growing: Any, micro_growing: Any,
    changing: Sequence[bool], trained: Any, carried: Any, batch: tuple[Any, ...],
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """As `global_gradients`, in a shard_map over the mesh axes of the batch.

    Args:
      loss: a mean over the batch that it gets.
      sync: the axes, and the collectives of each gradient.
      micro_batches: how many on each device; gradients are reduced once, after all.
      early: reduce-scatter the gradients of each micro-batch, so that the sums stay sharded.
      growing: for each leaf of the auxiliary output the dimension that grows with the batch, -1 for a mean.
      micro_growing: the same within one device's part.
      changing: which carried leaves the loss changes; the devices agree on one value for these.
      trained: the arguments of `loss`.
      carried: the arguments of `loss`.
      batch: the arguments of `loss`.
    """
    treedef = tree_util.tree_structure(trained)
    per_device = PartitionSpec(sync.axes)
    batch_spec = tree_util.tree_map(lambda x: per_device if x.ndim else PartitionSpec(), batch)
    early = early and micro_batches > 1
    varying = lambda tree: tree_util.tree_map(lambda x: lax.pcast(x, sync.axes, to="varying"), tree)  # noqa: E731

    def reduce(grads: Any, now: Sequence[bool], extra: Sequence[jax.Array] = ()) -> tuple[Any, list[jax.Array]]:
        """The gradients, those in `now` reduced; and the sums of `extra` scalars, if collectives are fused."""
        leaves = treedef.flatten_up_to(grads)
        chosen = [here and not own for here, own in zip(now, sync.own, strict=True)]
        if sync.fusion is not None:
            leaves, sums = _reduce_buckets(leaves, chosen, sync, extra)
        else:
            dims = zip(leaves, sync.scattered, chosen, strict=True)
            leaves, sums = [_reduce(g, sync, at) if here else g for g, at, here in dims], []
        return treedef.unflatten(leaves), sums

    def zeros(full: Any) -> Any:
        """Sums to start from, sharded where each micro-batch's gradients are."""
        leaves = []
        for leaf, at in zip(tree_util.tree_leaves(full), sync.scattered, strict=True):
            shape = list(leaf.shape)
            if early and at is not None:
                shape[at[0]] //= _size(sync.mesh, at[1])
            leaves.append(varying(jnp.zeros(shape, wide(leaf.dtype))))
        return treedef.unflatten(leaves)

    def gather(trained: Any) -> Any:
        return treedef.unflatten(_gather_all(treedef.flatten_up_to(trained), sync))

    def on_device(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        if sync.regathers:
            called, full = regathering_loss(loss, trained, gather, lambda x: varying(jnp.zeros(x.shape, x.dtype)))
        else:
            called, full = loss, gather(trained)
        carried = varying(carried)
        batch = tree_util.tree_map(lambda x: x if x.ndim else varying(x), batch)
        is_scattered = [at is not None for at in sync.scattered]
        if micro_batches == 1:
            value, aux, grads, carried = global_gradients(called, full, carried, batch)
        else:
            each = (lambda g: reduce(g, is_scattered)[0]) if early else lambda g: g
            value, aux, grads, carried = micro_batched(called, micro_batches, micro_growing, each, zeros)(
                full, carried, batch
            )
        changed = [x for x, changes in zip(tree_util.tree_leaves(carried), changing, strict=True) if changes]
        rest, structure = tree_util.tree_flatten((value, aux, changed))
        dims = [-1, *tree_util.tree_leaves(growing), *[-1] * len(changed)]
        joins = [sync.fusion is not None and d < 0 and _is_inexact(x) for x, d in zip(rest, dims, strict=True)]
        extra = [x.astype(wide(x.dtype)) for x, join in zip(rest, joins, strict=True) if join]
        grads, sums = reduce(grads, [not (early and s) for s in is_scattered], extra)
        leaves = zip(treedef.flatten_up_to(grads), sync.own, strict=True)
        grads = treedef.unflatten([g[None] if own else g for g, own in leaves])
        arrived = iter(sums)
        rest = [
            (next(arrived) / sync.count).astype(x.dtype) if join else _agreed(x, sync.axes) if d < 0 else x
            for x, join, d in zip(rest, joins, dims, strict=True)
        ]
        value, aux, changed = structure.unflatten(rest)
        return value if sync.reduction.mean else value * sync.count, aux, grads, changed

    specs = lambda dims: treedef.unflatten(  # noqa: E731
        [per_device if own else _spec(at) for at, own in zip(dims, sync.own, strict=True)]
    )
    aux_spec = tree_util.tree_map(lambda dim: _spec(None if dim < 0 else (dim, sync.axes)), growing)
    mapped = jax.shard_map(
        on_device,
        mesh=sync.mesh,
        in_specs=(specs(sync.gathered), PartitionSpec(), batch_spec),
        out_specs=(PartitionSpec(), aux_spec, specs(sync.scattered), PartitionSpec()),
        axis_names=set(sync.axes),
    )
    value, aux, grads, changed = mapped(trained, carried, batch)
    new = iter(changed)
    leaves, structure = tree_util.tree_flatten(carried)
    kept = [next(new) if changes else x for x, changes in zip(leaves, changing, strict=True)]
    return value, aux, grads, structure.unflatten(kept)


def part_shapes(batch: Any, parts: int) -> Any:
    """The shapes of one of `parts` parts of a batch; every part gets the scalars."""
    return tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype), batch
    )


def growing_dims(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...], parts: int) -> Any:
    """For each leaf of the auxiliary output the dimension that grows with the batch, -1 for none; from shapes.

    Raises:
      StrategyError: a leaf can be neither joined from `parts` parts nor averaged.
    """
    large = jax.eval_shape(loss, trained, carried, batch)[1][0]
    small = jax.eval_shape(loss, trained, carried, part_shapes(batch, parts))[1][0]

    def dim(key: Any, a: Any, b: Any) -> int:
        grown = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m == n * parts and m != n]
        has_no_mean = parts > 1 and not grown and (a.dtype == jnp.bool_ or jnp.issubdtype(a.dtype, jnp.integer))
        if len(grown) > 1 or has_no_mean:
            name = f"`{join('', key)}`" if key else "it"
            fail(StrategyError, f"the auxiliary output {name} cannot be joined from {parts} parts",
                 where=f"{a.dtype}{list(a.shape)}",
                 why="it grows with the batch along several dims" if grown else "integers have no mean",
                 fix="return one value for each example, or a float that is a mean over the batch")  # fmt: skip
        return grown[0] if grown else -1

    return tree_util.tree_map_with_path(dim, large, small)


def changing_leaves(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which carried leaves the loss changes."""
    found: list[bool] = []

    def look(*args: Any) -> None:
        after = tree_util.tree_leaves(loss(*args)[1][1])
        found[:] = [a is not b for a, b in zip(after, tree_util.tree_leaves(args[1]), strict=True)]

    jax.eval_shape(look, trained, carried, batch)
    return tuple(found)


def wide(dtype: Any) -> Any:
    """The dtype of sums, at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


# ---- collectives on a device


def _gather_all(leaves: Sequence[jax.Array], sync: GradientSync) -> list[jax.Array]:
    """The full parameters on a device, gathered in buckets where collectives are fused."""
    gathered = {} if sync.fusion is None or sync.is_partial else _gather_buckets(leaves, sync)
    found = []
    for i, (x, at, own) in enumerate(zip(leaves, sync.gathered, sync.own, strict=True)):
        if own:
            found.append(x[0])
            continue
        if at is not None:
            x = gathered[i] if i in gathered else lax.all_gather(x, at[1], axis=at[0], tiled=True)
        missing = tuple(a for a in sync.axes if at is None or a not in at[1])
        found.append(lax.pcast(x, missing, to="varying") if missing else x)
    return found


def gather_updated(trained: Any, sync: GradientSync) -> Any:
    """Gather updated parameters of which each device has a shard, in buckets."""
    leaves, treedef = tree_util.tree_flatten(trained)
    places = [i for i, (at, own) in enumerate(zip(sync.gathered, sync.own, strict=True)) if at and not own]
    if not places:
        return trained
    fields = ("scattered", "gathered", "own", "paths", "other_specs")
    few = dataclasses.replace(sync, **{name: tuple(getattr(sync, name)[i] for i in places) for name in fields})

    def on_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        found = _gather_buckets(shards, few)
        return tuple(found[i] for i in range(len(shards)))

    specs = tuple(map(_spec, few.gathered))
    mapped = jax.shard_map(
        on_device, mesh=sync.mesh, in_specs=specs, out_specs=(PartitionSpec(),) * len(specs), check_vma=False
    )
    for i, x in zip(places, mapped(*(leaves[i] for i in places)), strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _buckets(
    members: Sequence[BucketMember | None], fusion: FusionOptions | None, chosen: Sequence[bool] | None = None
) -> Iterator[tuple[Bucket, list[int]]]:
    """The buckets of the chosen leaves' collectives, each with the places of its leaves."""
    assert fusion is not None
    pairs = [(i, m) for i, m in enumerate(members) if m is not None and (chosen is None or chosen[i])]
    for bucket in buckets([m for _, m in pairs], fusion):
        yield bucket, [pairs[k][0] for k in bucket.members]


def _gather_buckets(leaves: Sequence[jax.Array], sync: GradientSync) -> dict[int, jax.Array]:
    """Each full leaf of which a device has a shard, by its place."""
    jobs: list[Any] = []
    joined = list(_buckets(sync.members(leaves, gathers=True), sync.fusion))
    for bucket, places in joined:
        dims = [_dim(sync.gathered[i]) for i in places]
        gather = functools.partial(flat_collectives.all_gathered, dims=dims, axes=bucket.axes)
        jobs.append(([leaves[i] for i in places], gather))
    done = flat_collectives.in_turn(jobs, backwards=False)
    return {i: x for (_, places), arrays in zip(joined, done, strict=True) for i, x in zip(places, arrays, strict=True)}


def _reduce(g: jax.Array, sync: GradientSync, at: ShardedDim) -> jax.Array:
    g = g.astype(sync.sum_dtype(g.dtype))
    if at is not None:
        g = lax.psum_scatter(g, at[1], scatter_dimension=at[0], tiled=True)
    rest = tuple(a for a in sync.axes if at is None or a not in at[1])
    return sync.averaged(lax.psum(g, rest) if rest else g)


def _reduce_buckets(
    leaves: Sequence[jax.Array], chosen: Sequence[bool], sync: GradientSync, extra: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The leaves, the chosen ones reduced by bucket; and the sums of `extra`, which join the last fitting bucket."""
    joined = list(_buckets(sync.members(leaves, gathers=False), sync.fusion, chosen))
    fitting = [
        i for i, (b, _) in enumerate(joined)
        if b.kind == "all-reduce" and b.axes == sync.axes and all(str(x.dtype) == b.dtype for x in extra)
    ]  # fmt: skip
    jobs: list[Any] = []
    for i, (bucket, places) in enumerate(joined):
        arrays = [leaves[place].astype(bucket.dtype) for place in places]
        arrays += extra if fitting and i == fitting[-1] else []
        dims, specs = [_dim(sync.scattered[p]) for p in places], [sync.other_specs[p] for p in places]
        jobs.append((arrays, functools.partial(_sum_bucket, bucket.kind, sync, dims, bucket.axes, specs)))
    if extra and not fitting:
        jobs.append((list(extra), functools.partial(_sum_bucket, "all-reduce", sync, [], sync.axes, [])))
    done = flat_collectives.in_turn(jobs, backwards=True)
    found = list(leaves)
    for (_, places), arrays in zip(joined, done, strict=False):
        for place, g in zip(places, arrays, strict=False):
            found[place] = sync.averaged(g)
    return found, done[fitting[-1] if fitting else -1][-len(extra) :] if extra else []


def _sum_bucket(
    kind: str, sync: GradientSync, dims: Sequence[int], axes: tuple[str, ...], specs: Sequence[PartitionSpec],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:  # fmt: skip
    """Sums over the parts of the batch; arrays after the bucket's members are scalars."""
    if sync.is_partial:
        others = frozenset(sync.mesh.axis_names) - set(sync.axes)
        specs = [*specs, *[PartitionSpec()] * (len(arrays) - len(specs))]
        return flat_collectives.all_reduced_shards(arrays, axes, specs, others)
    if kind != "reduce-scatter":
        found = flat_collectives.all_reduced(arrays, axes)
    else:
        found = flat_collectives.reduce_scattered(arrays, dims, axes)
    rest = tuple(a for a in sync.axes if a not in axes)
    return flat_collectives.all_reduced(found, rest) if rest else found


def _size(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _dim(at: ShardedDim) -> int:
    return -1 if at is None else at[0]


def _spec(at: ShardedDim) -> PartitionSpec:
    return PartitionSpec() if at is None else PartitionSpec(*([None] * at[0]), at[1])


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _agreed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """One value for all parts: the mean, or the largest of integers and random keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = lax.pmax(jax.random.key_data(x), tuple(axes))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not _is_inexact(x):
        return lax.pmax(x, tuple(axes))
    return lax.pmean(x.astype(wide(x.dtype)), tuple(axes)).astype(x.dtype)
