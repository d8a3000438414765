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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.frontend.meshes import spec_of
from shardfn.frontend.paths import array_paths, few, join
from shardfn.ir.purposes import purpose
from shardfn.train import collectives
from shardfn.train.collectives import UNFUSED, Bucket, BucketMember, FusionOptions, buckets
from shardfn.train.remat import PARAMETER, keep_but_parameters
from shardfn.train.steps.batches import part_shapes

Loss = Callable[[Any, Any, tuple[Any, ...]], tuple[jax.Array, tuple[Any, Any]]]
"""(trained, carried, batch) -> (loss, (auxiliary output, carried))."""

Gradients = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any, Any, Any]]
"""(trained, carried, batch) -> (loss, auxiliary output, gradients, carried)."""

Collective = Callable[[Sequence[jax.Array]], list[jax.Array]]

ShardedDim = tuple[int, tuple[str, ...]] | None
"""A dimension and the mesh axes that shard it."""


@dataclasses.dataclass(frozen=True)
class LeafSync:
    """The collectives of a trained leaf and its gradient."""

    path: str
    own: bool
    """Each device has a parameter of its own (layerwise parallel), with a leading dimension of one, whose gradient is not
    reduced."""
    scattered: ShardedDim
    """The dimension along which each device keeps a shard of the reduced gradient; None for an all-reduce."""
    gathered: ShardedDim
    """The dimension along which the parameter itself is sharded; None for a replicated one."""
    other_spec: PartitionSpec
    """The sharding over the mesh axes that do not shard the batch."""


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """The collectives of gradients and parameters over the mesh axes of the batch."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    leaves: tuple[LeafSync, ...]
    """Of the trained leaves."""
    fusion: FusionOptions | None
    """Which collectives are fused; None leaves that to XLA."""
    regathers: bool
    """Gather sharded parameters again for the backward pass instead of keeping them."""
    mean: bool
    """Divide summed gradients by the number of parts, for a loss that is a mean over the batch."""
    fp32: bool
    """Sum 16-bit gradients in float32."""

    @property
    def count(self) -> int:
        """The number of parts of the batch."""
        return _size(self.mesh, self.axes)

    @property
    def is_partial(self) -> bool:
        """Whether XLA partitions the loss over other mesh axes."""
        return set(self.axes) != set(self.mesh.axis_names)

    def members(self, arrays: Sequence[Any], gathers: bool) -> dict[int, BucketMember]:
        """By the trained leaf's number, the operands of gathers or of gradients' reductions; some leaves need neither."""
        found = {}
        for i, (x, leaf) in enumerate(zip(arrays, self.leaves, strict=True)):
            at = leaf.gathered if gathers else leaf.scattered
            if leaf.own or (gathers and at is None):
                continue
            shards = [_size(self.mesh, axes) for axes in spec_of(leaf.other_spec, x.ndim)]
            shape = tuple(n // k for n, k in zip(x.shape, shards, strict=True))
            kind = "all-gather" if gathers else "reduce-scatter" if at else "all-reduce"
            dtype = x.dtype if gathers else self.sum_dtype(x.dtype)
            found[i] = BucketMember(leaf.path, shape, str(dtype), kind, at[1] if at else self.axes)
        return found

    def shard_shape(self, shape: tuple[int, ...], at: ShardedDim) -> tuple[int, ...]:
        """The shape of a shard along a dimension."""
        if at is None:
            return shape
        dim, axes = at
        return (*shape[:dim], shape[dim] // _size(self.mesh, axes), *shape[dim + 1 :])

    def sum_dtype(self, dtype: Any) -> Any:
        """The dtype in which a gradient is summed."""
        # XLA's CPU compiler crashes on 16-bit sums over some of the mesh axes.
        widens = dtype.itemsize < 4 and (self.fp32 or self.is_partial)
        return jnp.dtype(jnp.float32) if widens else dtype

    def paths(self, places: Sequence[int], extra: Sequence[str] = ()) -> str:
        """The names of some trained leaves in the step's arguments."""
        return few([*("/".join(filter(None, ("state/params", self.leaves[i].path))) for i in places), *extra], 2)

    def averaged(self, x: jax.Array) -> jax.Array:
        """A sum of gradients as the mean, where that is the reduction."""
        return x / self.count if self.mean else x


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
    """As `global_gradients`, on `count` micro-batches, whose gradients a scan accumulates; one is the batch itself.

    Args:
      loss: a mean over the batch that it gets.
      count: divides dimension 0 of every array of the batch; every micro-batch gets the scalars.
      growing: for each leaf of the auxiliary output the dimension that grows with the batch, -1 for a mean; None for one.
      each: maps the gradients of a micro-batch before they are added.
      zeros: the first sums, from the trained leaves.
    """
    if count == 1:
        return functools.partial(global_gradients, loss)

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
    loss: Loss, sync: GradientSync, micro_batches: int, early: bool, shapes: tuple[Any, Any, tuple[Any, ...]]
) -> Gradients:
    """As `global_gradients`, in a shard_map over the mesh axes of the batch.

    Args:
      loss: a mean over the batch that it gets.
      sync: the axes, and the collectives of each gradient.
      micro_batches: how many on each device; gradients are reduced once, after all.
      early: reduce-scatter the gradients of each micro-batch, so that the sums stay sharded.
      shapes: of the arguments of the loss, for the global batch.
    """
    trained, carried, batch = shapes
    treedef = tree_util.tree_structure(trained)
    pairs = zip(treedef.flatten_up_to(trained), sync.leaves, strict=True)
    local = treedef.unflatten(jax.ShapeDtypeStruct(x.shape[leaf.own :], x.dtype) for x, leaf in pairs)
    part = part_shapes(batch, sync.count)
    growing = growing_dims(loss, local, carried, batch, sync.count)
    micro_growing = growing_dims(loss, local, carried, part, micro_batches) if micro_batches > 1 else None
    changing = _changing_leaves(loss, local, carried, part)  # the devices agree on one value for these
    per_device = PartitionSpec(sync.axes)
    batch_spec = tree_util.tree_map(lambda x: per_device if x.ndim else PartitionSpec(), batch)
    early = early and micro_batches > 1
    is_early = [early and leaf.scattered is not None for leaf in sync.leaves]

    def reduce(grads: Any, chosen: Sequence[bool], extra: Sequence[jax.Array] = ()) -> tuple[Any, list[jax.Array]]:
        """The gradients, the chosen ones reduced; and the sums of `extra` scalars."""
        reduced, sums = _reduce_all(treedef.flatten_up_to(grads), chosen, sync, extra)
        return treedef.unflatten(reduced), sums

    def zeros(full: Any) -> Any:
        """Sums to start from, sharded where each micro-batch's gradients are."""
        pairs = zip(tree_util.tree_leaves(full), sync.leaves, strict=True)
        shapes = ((sync.shard_shape(x.shape, leaf.scattered if early else None), wide(x.dtype)) for x, leaf in pairs)
        return treedef.unflatten(jnp.zeros(shape, dtype) for shape, dtype in shapes)

    def gather(trained: Any) -> Any:
        return treedef.unflatten(_gather_all(treedef.flatten_up_to(trained), sync))

    names = [*_rest_names(growing), *itertools.compress(array_paths("state/params", carried), changing)]

    def on_device(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        if sync.regathers:
            called, full = regathering_loss(loss, trained, gather, lambda x: jnp.zeros(x.shape, x.dtype))
        else:
            called, full = loss, gather(trained)
        each = (lambda g: reduce(g, is_early)[0]) if early else lambda g: g
        run = micro_batched(called, micro_batches, micro_growing, each, zeros)
        value, aux, grads, carried = run(full, carried, batch)
        changed = [x for x, changes in zip(tree_util.tree_leaves(carried), changing, strict=True) if changes]
        rest, structure = tree_util.tree_flatten((value, aux, changed))
        dims = [-1, *tree_util.tree_leaves(growing), *[-1] * len(changed)]
        joins = [sync.fusion is not None and d < 0 and _is_inexact(x) for x, d in zip(rest, dims, strict=True)]
        extra = [x.astype(wide(x.dtype)) for x, join in zip(rest, joins, strict=True) if join]
        grads, sums = reduce(grads, [not done for done in is_early], extra)
        reduced = zip(treedef.flatten_up_to(grads), sync.leaves, strict=True)
        grads = treedef.unflatten(g[None] if leaf.own else g for g, leaf in reduced)
        arrived = iter(sums)
        rest = [
            (next(arrived) / sync.count).astype(x.dtype) if join else _agreed(x, sync.axes, name) if d < 0 else x
            for x, join, d, name in zip(rest, joins, dims, names, strict=True)
        ]
        value, aux, changed = structure.unflatten(rest)
        return value if sync.mean else value * sync.count, aux, grads, changed

    stored, reduced = (
        treedef.unflatten(per_device if leaf.own else _spec(getattr(leaf, name)) for leaf in sync.leaves)
        for name in ("gathered", "scattered")
    )
    aux_spec = tree_util.tree_map(lambda dim: _spec(None if dim < 0 else (dim, sync.axes)), growing)
    mapped = jax.shard_map(
        on_device,
        mesh=sync.mesh,
        in_specs=(stored, PartitionSpec(), batch_spec),
        out_specs=(PartitionSpec(), aux_spec, reduced, PartitionSpec()),
        axis_names=set(sync.axes),
        check_vma=False,  # a loss does not say which of its arrays vary: loops start from constants, kernels have no rule
    )

    def run(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        value, aux, grads, changed = mapped(trained, carried, batch)
        new = iter(changed)
        leaves, structure = tree_util.tree_flatten(carried)
        kept = [next(new) if changes else x for x, changes in zip(leaves, changing, strict=True)]
        return value, aux, grads, structure.unflatten(kept)

    return run


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


def _changing_leaves(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[bool, ...]:
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
    """The full parameters on a device."""
    gathered = _gather_buckets(leaves, sync, "gather of {} (level3)")
    pairs = enumerate(zip(leaves, sync.leaves, strict=True))
    return [x[0] if leaf.own else gathered.get(i, x) for i, (x, leaf) in pairs]


def gather_updated(trained: Any, sync: GradientSync) -> Any:
    """Gather updated parameters of which each device has a shard, in buckets."""
    leaves, treedef = tree_util.tree_flatten(trained)
    places = [i for i, leaf in enumerate(sync.leaves) if leaf.gathered and not leaf.own]
    if not places:
        return trained
    sharded = dataclasses.replace(sync, leaves=tuple(sync.leaves[i] for i in places))

    def on_device(*shards: jax.Array) -> tuple[jax.Array, ...]:
        found = _gather_buckets(shards, sharded, "gather of {} after the update")
        return tuple(found[i] for i in range(len(shards)))

    specs = tuple(_spec(leaf.gathered) for leaf in sharded.leaves)
    mapped = jax.shard_map(
        on_device, mesh=sync.mesh, in_specs=specs, out_specs=(PartitionSpec(),) * len(specs), check_vma=False
    )
    for i, x in zip(places, mapped(*(leaves[i] for i in places)), strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _buckets(members: Mapping[int, BucketMember], fusion: FusionOptions | None) -> list[tuple[Bucket, list[int]]]:
    """The buckets of some leaves' collectives, each with the numbers of its leaves."""
    numbers = list(members)
    found = buckets(list(members.values()), UNFUSED if fusion is None else fusion)
    return [(bucket, [numbers[k] for k in bucket.members]) for bucket in found]


def _run(jobs: Sequence[collectives.Job], sync: GradientSync, backwards: bool) -> list[list[jax.Array]]:
    """The results of collectives; XLA must not join fused ones."""
    if sync.fusion is None:
        return [collective(arrays) for arrays, collective in jobs]
    return collectives.in_turn(jobs, backwards)


def _named(text: str, collective: Collective) -> Collective:
    """A collective with what it is for."""

    def named(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with purpose(text):
            return collective(arrays)

    return named


def _gather_buckets(leaves: Sequence[jax.Array], sync: GradientSync, what: str) -> dict[int, jax.Array]:
    """Each full leaf of which a device has a shard, by its number; `what` it is done for, with a place for names."""
    joined = _buckets(sync.members(leaves, gathers=True), sync.fusion)
    jobs: list[collectives.Job] = []
    for bucket, places in joined:
        dims = [_dim(sync.leaves[i].gathered) for i in places]
        gather = functools.partial(collectives.all_gathered, dims=dims, axes=bucket.axes)
        jobs.append(([leaves[i] for i in places], _named(what.format(sync.paths(places)), gather)))
    done = _run(jobs, sync, backwards=False)
    return {i: x for (_, places), arrays in zip(joined, done, strict=True) for i, x in zip(places, arrays, strict=True)}


def _reduce_all(
    leaves: Sequence[jax.Array], chosen: Sequence[bool], sync: GradientSync, extra: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The leaves, the chosen ones reduced by bucket; and the sums of `extra`, which join the last fitting bucket."""
    members = sync.members(leaves, gathers=False)
    joined = _buckets({i: member for i, member in members.items() if chosen[i]}, sync.fusion)
    fitting = [
        i for i, (b, _) in enumerate(joined)
        if b.kind == "all-reduce" and b.axes == sync.axes and all(str(x.dtype) == b.dtype for x in extra)
    ]  # fmt: skip
    jobs: list[collectives.Job] = []
    for i, (bucket, places) in enumerate(joined):
        arrays = [leaves[place].astype(bucket.dtype) for place in places]
        arrays += extra if fitting and i == fitting[-1] else []
        more = ["the loss"] if extra and fitting and i == fitting[-1] else []
        what = "gradient" if len(places) == 1 else "gradients"
        reduce = functools.partial(_sum_bucket, bucket, [sync.leaves[p] for p in places], sync)
        jobs.append((arrays, _named(f"{what} of {sync.paths(places, more)}", reduce)))
    if extra and not fitting:
        alone = Bucket("all-reduce", sync.axes, str(extra[0].dtype), (), 0)
        jobs.append((list(extra), _named("mean of the loss", functools.partial(_sum_bucket, alone, [], sync))))
    done = _run(jobs, sync, backwards=True)
    found = list(leaves)
    for (_, places), arrays in zip(joined, done, strict=False):
        for place, g in zip(places, arrays, strict=False):
            found[place] = sync.averaged(g)
    return found, done[fitting[-1] if fitting else -1][-len(extra) :] if extra else []


def _sum_bucket(
    bucket: Bucket, leaves: Sequence[LeafSync], sync: GradientSync, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Sums over the parts of the batch; arrays after those of the leaves are scalars."""
    if sync.is_partial and len(arrays) > 1:
        others = frozenset(sync.mesh.axis_names) - set(sync.axes)
        specs = [leaf.other_spec for leaf in leaves] + [PartitionSpec()] * (len(arrays) - len(leaves))
        return collectives.all_reduced_shards(arrays, bucket.axes, specs, others)
    if bucket.kind == "reduce-scatter":
        found = collectives.reduce_scattered(arrays, [_dim(leaf.scattered) for leaf in leaves], bucket.axes)
    else:
        found = collectives.all_reduced(arrays, bucket.axes)
    rest = tuple(a for a in sync.axes if a not in bucket.axes)
    return collectives.all_reduced(found, rest) if rest else found


def _size(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def _dim(at: ShardedDim) -> int:
    return -1 if at is None else at[0]


def _spec(at: ShardedDim) -> PartitionSpec:
    return PartitionSpec() if at is None else PartitionSpec(*([None] * at[0]), at[1])


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _agreed(x: jax.Array, axes: Sequence[str], name: str) -> jax.Array:
    """One value for all parts: the mean, or the largest of integers and random keys."""
    with purpose(f"{'mean' if _is_inexact(x) else 'maximum'} of {name}"):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = lax.pmax(jax.random.key_data(x), tuple(axes))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if not _is_inexact(x):
            return lax.pmax(x, tuple(axes))
        return lax.pmean(x.astype(wide(x.dtype)), tuple(axes)).astype(x.dtype)


def _rest_names(aux: Any) -> list[str]:
    """What the loss and its auxiliary output are called in the step's results."""
    return ["the loss", *array_paths("aux", aux)]
