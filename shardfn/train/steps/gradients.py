"""The gradients of a loss: on the whole batch at once, or on each device's part and then reduced; in one go, or
micro-batch by micro-batch. All of it is one function from a state's parts to gradients, and each line of it shows in HLO.

Two roads. `whole`: the loss is called once on the global batch, and XLA's partitioner makes the reductions. `parts`: a
`jax.shard_map` over the axes that cut the batch calls it on each device's part, the gradients are summed by a collective
that stands here. The second is what data parallelism means elsewhere (a batch statistic sees its own part), and the
only way to say when gradients are reduced and in which dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, tree_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.frontend.paths import join
from shardfn.train.collectives import flat_collectives
from shardfn.train.collectives.buckets import BucketMember, FusionOptions, buckets
from shardfn.train.remat import PARAMETER, keep_but_parameters

Loss = Callable[[Any, Any, tuple[Any, ...]], tuple[jax.Array, tuple[Any, Any]]]
"""(trained, carried, batch) -> (loss, (auxiliary output, carried))."""


At = tuple[int, tuple[str, ...]] | None
"""A dim, and the axes that cut it."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the gradients of the parts become one."""

    mean: bool = True
    """Divide their sum by the number of parts: the gradient of a loss that is a mean over the batch."""
    fp32: bool = True
    """Sum gradients of 16 bits in float32."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Over what the batch is cut, and where each gradient goes.

    `scattered` holds for each trained leaf the dim and the axes along which each device keeps a piece of its reduced
    gradient, None where all keep the whole; `gathered` the same of the leaf itself, which is put together for use; `own`
    says of each whether it is a device's own (layerwise parallel), with a leading dim of one, and not reduced at all.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    scattered: tuple[At, ...]
    gathered: tuple[At, ...]
    own: tuple[bool, ...]
    paths: tuple[str, ...] = ()
    cuts: tuple[PartitionSpec, ...] = ()
    """How each trained leaf lies along the axes that do not cut the batch."""
    fusion: FusionOptions | None = None
    """Which collectives travel together; None leaves that to XLA."""
    again: bool = False
    """Put pieces together a second time, for the backward pass, in place of keeping the whole."""

    @property
    def count(self) -> int:
        """The number of parts."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    @property
    def is_partial(self) -> bool:
        """Whether there are axes that do not cut the batch, along which XLA's partitioner works."""
        return set(self.axes) != set(self.mesh.axis_names)

    def tensors(self, leaves: Sequence[Any], reduction: Reduction, gathers: bool) -> list[BucketMember | None]:
        """What each trained leaf puts into a collective: its gradient, or the piece that is gathered; None for none."""
        found: list[BucketMember | None] = []
        for leaf, path, own, gathered, scattered, cut in zip(
            leaves, self.paths, self.own, self.gathered, self.scattered, self.cuts, strict=True
        ):
            at = gathered if gathers else scattered
            kind = "all-gather" if gathers else "reduce-scatter" if at else "all-reduce"
            dtype = leaf.dtype if gathers else _wire(leaf.dtype, reduction, self.is_partial)
            axes = at[1] if at else self.axes
            is_none = own or (gathers and at is None)
            found.append(None if is_none else BucketMember(path, self._piece(leaf.shape, cut), str(dtype), kind, axes))
        return found

    def _piece(self, shape: Sequence[int], cut: PartitionSpec) -> tuple[int, ...]:
        """What a device holds of an array, where XLA cuts it along the other axes."""
        ways = [math.prod(self.mesh.shape[a] for a in _axes(entry)) for entry in cut]
        return tuple(n // w for n, w in itertools.zip_longest(shape, ways, fillvalue=1))


def whole(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """Loss, auxiliary output, gradients and carried leaves of the global batch."""
    (value, (aux, carried)), grads = jax.value_and_grad(loss, has_aux=True)(trained, carried, batch)
    return value, aux, grads, carried


def again(loss: Loss, pieces: Any, put: Callable[[Any], Any], slot: Callable[[Any], jax.Array]) -> tuple[Loss, Any]:
    """A loss of parameters that are put together for the forward pass, forgotten, and put together for the backward one.

    Args:
      loss: of whole parameters.
      pieces: the parameters as they lie.
      put: makes the whole of them.
      slot: makes zeros of a shape, which stand for a whole parameter; nothing reads them, and they get its gradient.

    Returns:
      That loss, as a function of those, and those.
    """

    whole = lambda pieces: tree_util.tree_map(lambda x: checkpoint_name(x, PARAMETER), put(pieces))  # noqa: E731

    @jax.custom_vjp
    def through(slots: Any, pieces: Any) -> Any:
        return whole(pieces)

    through.defvjp(lambda slots, pieces: (whole(pieces), None), lambda _, grads: (grads, None))

    def called(slots: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        run = lambda slots, pieces, *rest: loss(through(slots, pieces), *rest)  # noqa: E731
        return jax.checkpoint(run, policy=keep_but_parameters)(slots, pieces, carried, batch)

    return called, tree_util.tree_map(slot, jax.eval_shape(put, pieces))


def micro(loss: Loss, count: int, growing: Any, each: Callable[[Any], Any], first: Callable[[Any], Any]) -> Any:
    """As `whole`, on `count` micro-batches one after the other, whose gradients are added up in a scan.

    Args:
      loss: a mean over the batch it is given.
      count: how many; it divides dim 0 of every array of the batch that has one (scalars go to all).
      growing: for each leaf of the auxiliary output the dim that grows with the batch, -1 for a mean.
      each: what is done with the gradients of a micro-batch before they are added (reduced, where sums are kept in
        pieces).
      first: the zeros that the sums start from, for the trained leaves.
    """

    def run(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        leaves, treedef = tree_util.tree_flatten(batch)
        cut = [x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else None for x in leaves]

        def body(held: tuple[Any, Any], now: list[Any]) -> tuple[tuple[Any, Any], Any]:
            carried, sums = held
            part = treedef.unflatten([x if mine is None else mine for x, mine in zip(leaves, now, strict=True)])
            value, aux, grads, carried = whole(loss, trained, carried, part)
            sums = tree_util.tree_map(lambda s, g: s + g.astype(s.dtype), sums, each(grads))
            return (carried, sums), (value, aux)

        (carried, sums), (values, auxes) = lax.scan(body, (carried, first(trained)), cut)
        grads = tree_util.tree_map(lambda s: s / count, sums)
        return jnp.mean(values), _together(auxes, growing, _stacked), grads, carried

    return run


def by_parts(
    loss: Loss,
    how: Parts,
    reduction: Reduction,
    micro_batches: int,
    early: bool,
    growing: Any,
    micro_growing: Any,
    moving: Sequence[bool],
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """As `whole`, by a shard_map over the axes that cut the batch.

    Args:
      loss: a mean over the batch it is given.
      how: the axes and what becomes of each gradient.
      reduction: mean or sum, and in which dtype.
      micro_batches: the loss is called on so many micro-batches of each part; gradients are reduced once, after all.
      early: where there are micro-batches, reduce each one's gradients, so that their sums are kept in pieces.
      growing: for each leaf of the auxiliary output the dim that grows with the batch, -1 for one that is averaged.
      micro_growing: the same within a part.
      moving: which carried leaves the loss changes: of these the parts agree on one value, the others stay.
    """
    return lambda trained, carried, batch: _mapped(
        loss, how, reduction, micro_batches, early, growing, micro_growing, moving, trained, carried, batch
    )


def _mapped(
    loss: Loss, how: Parts, reduction: Reduction, micro_batches: int, early: bool, growing: Any, micro_growing: Any,
    moving: Sequence[bool], trained: Any, carried: Any, batch: tuple[Any, ...],
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    treedef = tree_util.tree_structure(trained)
    cut = PartitionSpec(how.axes)
    batch_spec = tree_util.tree_map(lambda x: cut if x.ndim else PartitionSpec(), batch)
    early = early and micro_batches > 1

    def summed(grads: Any, now: Callable[[At], bool] = lambda at: True, riders: Sequence[jax.Array] = ()) -> Any:
        """The gradients with those reduced whose `scattered` dim says that it is time."""
        leaves = tree_util.tree_leaves(grads)
        if how.fusion is not None:
            chosen = [now(d) and not own for d, own in zip(how.scattered, how.own, strict=True)]
            leaves, sums = _reduced_together(leaves, chosen, how, reduction, riders)
            return tree_util.tree_unflatten(treedef, leaves), sums
        leaves = [
            _reduced(g, how, reduction, d) if now(d) and not own else g
            for g, d, own in zip(leaves, how.scattered, how.own, strict=True)
        ]
        return tree_util.tree_unflatten(treedef, leaves), ()

    def started(full: Any) -> Any:
        """Zeros of what `summed` gives, or of the gradients themselves."""
        leaves = []
        for leaf, at in zip(tree_util.tree_leaves(full), how.scattered, strict=True):
            shape = list(leaf.shape)
            if early and at is not None:
                shape[at[0]] //= math.prod(how.mesh.shape[a] for a in at[1])
            leaves.append(lax.pcast(jnp.zeros(shape, wide(leaf.dtype)), how.axes, to="varying"))
        return tree_util.tree_unflatten(treedef, leaves)

    def put(trained: Any) -> Any:
        return tree_util.tree_unflatten(treedef, _all_full(tree_util.tree_leaves(trained), how, reduction))

    def on_part(trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        slot = lambda x: lax.pcast(jnp.zeros(x.shape, x.dtype), how.axes, to="varying")  # noqa: E731
        called, full = again(loss, trained, put, slot) if how.again else (loss, put(trained))
        carried = tree_util.tree_map(lambda x: lax.pcast(x, how.axes, to="varying"), carried)
        batch = tree_util.tree_map(lambda x: x if x.ndim else lax.pcast(x, how.axes, to="varying"), batch)
        if micro_batches == 1:
            value, aux, grads, carried = whole(called, full, carried, batch)
        else:
            each = (lambda g: summed(g, lambda d: d is not None)[0]) if early else lambda g: g
            value, aux, grads, carried = micro(called, micro_batches, micro_growing, each, started)(
                full, carried, batch
            )
        now = (lambda d: d is None) if early else (lambda d: True)
        changed = [x for x, moves in zip(tree_util.tree_leaves(carried), moving, strict=True) if moves]
        rest, whole_of = tree_util.tree_flatten((value, aux, changed))
        dims = [-1, *tree_util.tree_leaves(growing), *[-1] * len(changed)]
        rides = [how.fusion is not None and d < 0 and _is_float(x) for x, d in zip(rest, dims, strict=True)]
        grads, sums = summed(grads, now, [_widened(x) for x, r in zip(rest, rides, strict=True) if r])
        grads = tree_util.tree_unflatten(
            treedef, [g[None] if own else g for g, own in zip(tree_util.tree_leaves(grads), how.own, strict=True)]
        )
        arrived = iter(sums)
        rest = [
            (next(arrived) / how.count).astype(x.dtype) if r else _agreed(x, how.axes) if d < 0 else x
            for x, r, d in zip(rest, rides, dims, strict=True)
        ]
        value, aux, changed = tree_util.tree_unflatten(whole_of, rest)
        if not reduction.mean:
            value = value * how.count
        return value, aux, grads, changed

    own_spec = [cut if own else _spec(at) for at, own in zip(how.gathered, how.own, strict=True)]
    out_spec = [cut if own else _spec(at) for at, own in zip(how.scattered, how.own, strict=True)]
    aux_spec = _together(growing, growing, lambda _, dim: _spec(None if dim is None else (dim, how.axes)))
    mapped = jax.shard_map(
        on_part,
        mesh=how.mesh,
        in_specs=(tree_util.tree_unflatten(treedef, own_spec), PartitionSpec(), batch_spec),
        out_specs=(PartitionSpec(), aux_spec, tree_util.tree_unflatten(treedef, out_spec), PartitionSpec()),
        axis_names=set(how.axes),
    )
    value, aux, grads, changed = mapped(trained, carried, batch)
    new = iter(changed)
    leaves, structure = tree_util.tree_flatten(carried)
    kept = [next(new) if moves else x for x, moves in zip(leaves, moving, strict=True)]
    return value, aux, grads, tree_util.tree_unflatten(structure, kept)


def part_of(batch: Any, pieces: int) -> Any:
    """The shapes of one of so many parts of a batch; a scalar goes to each."""
    return tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // pieces, *x.shape[1:]) if x.ndim else (), x.dtype), batch
    )


def growing_dims(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...], pieces: int) -> Any:
    """For each leaf of the auxiliary output, the dim that grows with the batch, -1 for none.

    Found by shapes: those of the whole batch against those of one of its `pieces`.

    Raises:
      StrategyError: a leaf can be neither put together nor averaged.
    """
    large = jax.eval_shape(loss, trained, carried, batch)[1][0]
    small = jax.eval_shape(loss, trained, carried, part_of(batch, pieces))[1][0]

    def dim(key: Any, a: Any, b: Any) -> int:
        grown = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m == n * pieces and m != n]
        is_count = pieces > 1 and not grown and jnp.issubdtype(a.dtype, jnp.integer)
        if len(grown) > 1 or is_count or (jnp.issubdtype(a.dtype, jnp.bool_) and not grown and pieces > 1):
            name = f"`{join('', key)}`" if key else "it"
            why = "it grows with the batch along several dims" if grown else "whole numbers have no mean"
            fail(StrategyError, f"the auxiliary output {name} cannot be put together from {pieces} parts",
                 where=f"{a.dtype}{list(a.shape)}", why=why,
                 fix="give one value for each example, or a float that is a mean over the batch")  # fmt: skip
        return grown[0] if grown else -1

    return tree_util.tree_map_with_path(dim, large, small)


def wide(dtype: Any) -> Any:
    """The dtype that sums are kept in: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def moving(loss: Loss, trained: Any, carried: Any, batch: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which carried leaves the loss changes: those it does not give back as they came."""
    found: list[bool] = []

    def look(*args: Any) -> None:
        after = tree_util.tree_leaves(loss(*args)[1][1])
        found[:] = [a is not b for a, b in zip(after, tree_util.tree_leaves(args[1]), strict=True)]

    jax.eval_shape(look, trained, carried, batch)
    return tuple(found)


def _together(values: Any, dims: Any, rule: Callable[[Any, int | None], Any]) -> Any:
    return tree_util.tree_map(lambda d, x: rule(x, None if d < 0 else d), dims, values)


def _stacked(x: jax.Array, dim: int | None) -> jax.Array:
    """What a scan stacked, as one array: along the dim that grows with the batch, else the mean (the last of ints)."""
    if dim is None:
        return jnp.mean(x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _full(x: jax.Array, how: Parts, at: At, own: bool, done: tuple[str, ...] = ()) -> jax.Array:
    """A trained leaf as the loss takes it on a device; along the axes `done` it has been gathered."""
    if own:
        return x[0]
    if at is not None:
        x = lax.all_gather(x, at[1], axis=at[0], tiled=True)
    missing = tuple(a for a in how.axes if (at is None or a not in at[1]) and a not in done)
    return lax.pcast(x, missing, to="varying") if missing else x


def _all_full(leaves: Sequence[jax.Array], how: Parts, reduction: Reduction) -> list[jax.Array]:
    """The trained leaves as the loss takes them on a device; gathered together where that was asked for."""
    if how.fusion is None or how.is_partial:
        return [_full(x, how, at, own) for x, at, own in zip(leaves, how.gathered, how.own, strict=True)]
    gathered = _gathered_together(leaves, how, reduction)
    return [
        _full(gathered.get(i, x), how, None, own, () if at is None else at[1])
        for i, (x, at, own) in enumerate(zip(leaves, how.gathered, how.own, strict=True))
    ]


def put_together(trained: Any, how: Parts) -> Any:
    """Trained leaves of which each device has a piece, `how.gathered`, made whole on all; bucket by bucket."""
    leaves, treedef = tree_util.tree_flatten(trained)
    places = [i for i, (at, own) in enumerate(zip(how.gathered, how.own, strict=True)) if at and not own]
    if not places:
        return trained
    few = dataclasses.replace(how, **{
        name: tuple(getattr(how, name)[i] for i in places)
        for name in ("scattered", "gathered", "own", "paths", "cuts")
    })  # fmt: skip

    def on_part(*pieces: jax.Array) -> tuple[jax.Array, ...]:
        found = _gathered_together(pieces, few, Reduction())
        return tuple(found[i] for i in range(len(pieces)))

    specs = tuple(_spec(at) for at in few.gathered)
    mapped = jax.shard_map(
        on_part, mesh=how.mesh, in_specs=specs, out_specs=(PartitionSpec(),) * len(specs), check_vma=False
    )
    for i, x in zip(places, mapped(*(leaves[i] for i in places)), strict=True):
        leaves[i] = x
    return tree_util.tree_unflatten(treedef, leaves)


def _gathered_together(leaves: Sequence[jax.Array], how: Parts, reduction: Reduction) -> dict[int, jax.Array]:
    """The whole of each leaf of which a device has a piece, by its place."""
    assert how.fusion is not None
    tensors = how.tensors(leaves, reduction, gathers=True)
    places = [i for i, t in enumerate(tensors) if t is not None]
    joined = buckets([t for t in tensors if t is not None], how.fusion)
    jobs: list[Any] = []
    for bucket in joined:
        members = [places[m] for m in bucket.members]
        dims = [_dim(how.gathered[i]) for i in members]
        gather = functools.partial(flat_collectives.all_gathered, dims=dims, axes=bucket.axes)
        jobs.append(([leaves[i] for i in members], gather))
    done = flat_collectives.in_turn(jobs, backwards=False)
    return {
        places[m]: x for b, arrays in zip(joined, done, strict=True) for m, x in zip(b.members, arrays, strict=True)
    }


def _reduced(g: jax.Array, how: Parts, reduction: Reduction, at: At) -> jax.Array:
    g = g.astype(_wire(g.dtype, reduction, how.is_partial))
    if at is not None:
        g = lax.psum_scatter(g, at[1], scatter_dimension=at[0], tiled=True)
    rest = tuple(a for a in how.axes if at is None or a not in at[1])
    g = lax.psum(g, rest) if rest else g
    return g / how.count if reduction.mean else g


def _reduced_together(
    leaves: Sequence[jax.Array], chosen: Sequence[bool], how: Parts, reduction: Reduction, riders: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The leaves with the chosen ones reduced bucket by bucket; the sums of the riders, which go with the last of them."""
    assert how.fusion is not None
    tensors = how.tensors(leaves, reduction, gathers=False)
    places = [i for i, (t, c) in enumerate(zip(tensors, chosen, strict=True)) if c and t is not None]
    joined = buckets([t for i in places if (t := tensors[i]) is not None], how.fusion)
    takes = [
        i for i, b in enumerate(joined)
        if b.kind == "all-reduce" and b.axes == how.axes and all(str(x.dtype) == b.dtype for x in riders)
    ]  # fmt: skip
    jobs: list[Any] = []
    for i, bucket in enumerate(joined):
        arrays = [leaves[places[m]].astype(bucket.dtype) for m in bucket.members]
        dims = [_dim(how.scattered[places[m]]) for m in bucket.members]
        rest = tuple(a for a in how.axes if a not in bucket.axes)
        cuts = [how.cuts[places[m]] for m in bucket.members]
        arrays += riders if takes and i == takes[-1] else []
        jobs.append((arrays, functools.partial(_sums, bucket.kind, how, dims, bucket.axes, rest, cuts)))
    if riders and not takes:
        jobs.append((list(riders), functools.partial(_sums, "all-reduce", how, [], how.axes, (), [])))
    done = flat_collectives.in_turn(jobs, backwards=True)
    found = list(leaves)
    for bucket, arrays in zip(joined, done, strict=False):
        for member, g in zip(bucket.members, arrays, strict=False):
            found[places[member]] = g / how.count if reduction.mean else g
    if not riders:
        return found, []
    return found, done[takes[-1] if takes else -1][-len(riders) :]


def _sums(
    kind: str, how: Parts, dims: Sequence[int], axes: tuple[str, ...], rest: tuple[str, ...],
    cuts: Sequence[PartitionSpec], arrays: Sequence[jax.Array],
) -> list[jax.Array]:  # fmt: skip
    """Sums over the parts; what comes after the members of a bucket are scalars, which nothing cuts."""
    if how.is_partial:
        others = frozenset(how.mesh.axis_names) - set(how.axes)
        cuts = [*cuts, *[PartitionSpec()] * (len(arrays) - len(cuts))]
        return flat_collectives.all_reduced_in_pieces(arrays, axes, cuts, others)
    found = flat_collectives.reduce_scattered(arrays, dims, axes) if kind == "reduce-scatter" else None
    found = flat_collectives.all_reduced(arrays, axes) if found is None else found
    return flat_collectives.all_reduced(found, rest) if rest else found


def _wire(dtype: Any, reduction: Reduction, is_partial: bool) -> Any:
    """The dtype in which a gradient is summed."""
    is_wide = dtype.itemsize < 4 and (reduction.fp32 or is_partial)  # XLA's CPU compiler dies of the partial ones
    return jnp.dtype(jnp.float32) if is_wide else dtype


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _dim(at: At) -> int:
    return -1 if at is None else at[0]


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _average(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The mean over the parts; of ints, which have none, the largest."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.pmax(x, tuple(axes))
    return lax.pmean(x.astype(wide(x.dtype)), tuple(axes)).astype(x.dtype)


def _agreed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """One value of a carried leaf for all parts: of a statistic the mean, of a counter the largest."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = lax.pmax(jax.random.key_data(x), tuple(axes))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _average(x, axes)


def _spec(at: At) -> PartitionSpec:
    return PartitionSpec() if at is None else PartitionSpec(*([None] * at[0]), at[1])
