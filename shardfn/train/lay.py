"""From what was asked for and the shapes of a call to a laid-out step: the grid, a layout for every array, the function."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, tree_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardfn.api import shard
from shardfn.context import ParallelContext
from shardfn.cost import hardware
from shardfn.cost.hardware import Hardware
from shardfn.errors import Problem, raise_problems
from shardfn.graph.model import Spec
from shardfn.sharded import ShardedFunction
from shardfn.strategy import AUTO, join
from shardfn.train import gradients
from shardfn.train.fusion import Bucket, Fusion, buckets, check_ids, compiler_options, unheard
from shardfn.train.gradients import At, Parts
from shardfn.train.modes import Mode
from shardfn.train.optimizer_parallel import OptimizerParallel, cut_further, mirrored, optimizer_parallel_of
from shardfn.train.state import Anatomy, State


@dataclasses.dataclass(frozen=True)
class Training:
    """All that was asked for, checked."""

    loss_fn: Callable[..., Any]
    optimizer: Any
    mode: Mode
    settings: ParallelContext
    has_aux: bool
    device: Any
    micro_batches: int
    compute_dtype: Any
    cross_batch: bool
    own: tuple[str, ...]
    frozen: tuple[str, ...]
    donate: bool
    fusion: Fusion | None
    """Which collectives travel together."""
    reuse: int | None
    """The most equal blocks that one scanned body stands for; None folds nothing."""
    recompute: Any
    """How many of them are worked out again in the backward pass, or "auto"."""
    options: Mapping[str, Any]
    """What goes on to `shard`."""

    @property
    def reduction(self) -> gradients.Reduction:
        """How gradients become one: a mean, unless you said otherwise."""
        mean = self.settings.read("gradients_mean") if self.settings.is_set("gradients_mean") else True
        return gradients.Reduction(mean, self.settings.read("gradient_fp32_sync"))

    @property
    def zero(self) -> OptimizerParallel | None:
        """What of the optimizer is cut."""
        return optimizer_parallel_of(self.settings)

    def hardware(self) -> Hardware:
        """The devices of the mode."""
        count = 1 if self.mode.one_device else self.settings.device_num
        return hardware.resolve(self.device, count=count, default=self.settings.device_target)


@dataclasses.dataclass(frozen=True)
class Laid:
    """A step for one kind of call."""

    sharded: ShardedFunction
    state: State
    """Of `NamedSharding`s."""
    buckets: tuple[tuple[Bucket, tuple[str, ...]], ...] = ()
    """The collectives of gradients and parameters, each with the paths of what it takes."""


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """A layout for every array: the grid, the axes that cut the batch, and for each leaf the axes that cut its dims."""

    mesh: Mesh | AbstractMesh
    data: tuple[str, ...]
    params: tuple[Spec, ...]
    opt_state: tuple[Spec, ...]
    batch: tuple[Spec, ...]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.mesh.shape.items())

    def named(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, _partition(spec))


def lay(training: Training, parts: Anatomy, state: State, batch: tuple[Any, ...]) -> Laid:
    """A step for arrays of these shapes.

    Raises:
      StrategyError: a batch that the devices or the micro-batches do not divide; a glob that matches nothing; what
        `shard` raises in the semi-auto and auto modes.
    """
    if training.mode.layouts == "whole":
        drawn: _Drawn | Laid = _whole(training, parts, state, batch)
    else:
        drawn = _planned(training, parts, state, batch)
    if isinstance(drawn, Laid):
        return drawn
    cut = _cut(training, parts, state, drawn)
    function = _update(training, parts, drawn, cut, state, batch)
    shardings = _shardings(state, drawn, cut)
    entries = _tree(batch, [drawn.named(s) for s in drawn.batch])
    donated = (0,) if training.donate else ()
    how = _parts(training, parts, drawn, cut) if _is_per_device(training, drawn) else None
    told = _told(training, how is not None and not how.is_partial)
    sharded = shard(
        function, (shardings, *entries), device=training.device, donate_argnums=donated, compiler_options=told
    )
    return Laid(sharded, shardings, _fused(training, parts, state, drawn, cut, how) if how else ())


def _told(training: Training, is_explicit: bool) -> dict[str, Any]:
    """What XLA is told of the collectives."""
    platform = training.hardware().platform
    missed = [] if is_explicit else unheard(training.fusion, platform)
    if missed:
        warnings.warn(
            f"comm_fusion has no effect on {', '.join(missed)}: in mode {training.mode.name!r} XLA's partitioner makes the "
            f'collectives, and on {platform} it takes no such option; use mode="data_parallel", or cross_batch=True',
            stacklevel=2,
        )
    return compiler_options(training.fusion, platform, is_explicit)


def _fused(
    training: Training, parts: Anatomy, state: State, drawn: _Drawn, cut: _Cut, how: Parts
) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
    if training.fusion is None:
        return ()
    check_ids(training.fusion, how.paths)
    leaves = tree_util.tree_leaves(_cast(parts.split(state.params)[0], training.compute_dtype))
    kept = [i for i, is_trained in enumerate(parts.trained) if is_trained]
    last = _regathered(how, drawn, cut, kept) if training.zero is not None and training.zero.level < 3 else how
    sizes, found = dict(how.mesh.shape), []
    for one, gathers in ((last, True), (how, False)):
        local = [_local_shape(x, at if gathers else None, own, sizes)
                 for x, at, own in zip(leaves, one.gathered, how.own, strict=True)]  # fmt: skip
        tensors = [t for t in one.tensors(local, training.reduction, gathers) if t is not None]
        found += [(b, tuple(tensors[i].path for i in b.members)) for b in buckets(tensors, training.fusion)]
    return tuple(found)


def _local_shape(x: Any, at: At, own: bool, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    if at is not None:
        shape[at[0]] //= math.prod(sizes[a] for a in at[1])
    return jax.ShapeDtypeStruct(shape[1:] if own else shape, x.dtype)


def whole_layout(training: Training, parts: Anatomy, state: State) -> State:
    """The layout of a state in the modes whose layouts do not depend on the batch."""
    drawn = _whole(training, parts, state, ())
    return _shardings(state, drawn, _cut(training, parts, state, drawn))


def _shardings(state: State, drawn: _Drawn, cut: _Cut) -> State:
    return State(
        _tree(state.params, [drawn.named(s) for s in cut.params]),
        _tree(state.opt_state, [drawn.named(s) for s in cut.opt_state]),
        drawn.named(()),
    )


# ---- where everything lies


def _whole(training: Training, parts: Anatomy, state: State, batch: tuple[Any, ...]) -> _Drawn:
    """Parameters whole on every device, dim 0 of the batch cut over all."""
    devices = training.hardware()
    axes = _data_axes(devices.count, training.zero)
    names = tuple(name for name, _ in axes)
    own = owned(parts, training.own)
    params = tuple(
        (names, *((),) * (len(x.shape) - 1)) if mine else ((),) * len(x.shape)
        for x, mine in zip(parts.treedef.flatten_up_to(state.params), own, strict=True)
    )
    like = dict(zip(parts.paths, params, strict=True))
    leaves = tree_util.tree_leaves(state.opt_state)
    seen = [like.get(p or "", ((),) * len(x.shape)) for p, x in zip(_mirrored(parts, state), leaves, strict=True)]
    cuts = tuple((names, *((),) * (len(x.shape) - 1)) if x.shape else () for x in tree_util.tree_leaves(batch))
    raise_problems(list(_batch_problems(training, devices.count, batch)))
    return _Drawn(_mesh(devices, axes), names, params, tuple(seen), cuts)


def _planned(training: Training, parts: Anatomy, state: State, batch: tuple[Any, ...]) -> _Drawn | Laid:
    """As `shard` plans the step on the whole batch; that plan itself where nothing of it is changed."""
    given = training.mode.layouts == "given"
    options = dict(training.options)
    entries = options.pop("in_strategy") or ((None if given else AUTO),) * len(batch)
    raise_problems(list(_entry_problems(entries, batch)))
    wanted = _wanted(parts, state, options.pop("parameter_plan"), given)
    undrawn = _Drawn(_mesh(training.hardware(), ()), (), (), (), ())
    function = _update(dataclasses.replace(training, micro_batches=1), parts, undrawn, None, state, batch)
    draft = shard(
        function,
        (AUTO, *entries), device=training.device, parameter_plan=wanted,
        donate_argnums=(0,) if training.donate else (),
        compiler_options=None if _may_be_per_device(training) else _told(training, False), **options,
    )  # fmt: skip
    made = draft.plan(state, *batch)
    specs = [d.spec for d in made.inputs]
    counts = [len(tree_util.tree_leaves(part)) for part in (state.params, state.opt_state, state.step)]
    params, opt_state, _, rest = (specs[sum(counts[:i]) : (sum(counts[: i + 1]) if i < 3 else None)] for i in range(4))
    data = next((spec[0] for spec in rest if spec and spec[0]), ())
    drawn = _Drawn(made.mesh(), data, tuple(params), tuple(opt_state), tuple(rest))
    if training.zero is None and training.micro_batches == 1 and not _is_per_device(training, drawn):
        shardings = [drawn.named(s) for s in specs]
        return Laid(draft, tree_util.tree_unflatten(tree_util.tree_structure(state), shardings[: sum(counts)]))
    pieces = math.prod(drawn.mesh.shape[a] for a in data) if _is_per_device(training, drawn) else 1
    raise_problems(list(_batch_problems(training, pieces, batch)))
    return drawn


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The layouts with optimizer parallel."""

    params: tuple[Spec, ...]
    states: tuple[Spec, ...]
    """Of what is worked out for each parameter in the optimizer."""
    opt_state: tuple[Spec, ...]


def _cut(training: Training, parts: Anatomy, state: State, drawn: _Drawn) -> _Cut:
    zero = training.zero
    if zero is None:
        return _Cut(drawn.params, drawn.params, drawn.opt_state)
    leaves = parts.treedef.flatten_up_to(state.params)
    states = tuple(
        cut_further(x.shape, x.dtype.itemsize, spec, drawn.axes, zero) if trained else spec
        for x, spec, trained in zip(leaves, drawn.params, parts.trained, strict=True)
    )
    like = dict(zip(parts.paths, states, strict=True))
    opt_state = tuple(
        like[path] if path is not None else cut_further(x.shape, x.dtype.itemsize, spec, drawn.axes, zero)
        for x, path, spec in zip(
            tree_util.tree_leaves(state.opt_state), _mirrored(parts, state), drawn.opt_state, strict=True
        )
    )
    return _Cut(states if zero.level == 3 else drawn.params, states, opt_state)


def owned(parts: Anatomy, globs: Sequence[str]) -> tuple[bool, ...]:
    """Which leaves match a glob.

    Raises:
      StrategyError: a glob matches none.
    """
    problems = [
        Problem(f"layerwise_parallel {glob!r} matches no parameter", f"layerwise_parallel = {tuple(globs)!r}",
                f"the parameters are {', '.join(parts.paths[:8])}", "use a path, or a glob of paths")
        for glob in globs if not fnmatch.filter(parts.paths, glob)
    ]  # fmt: skip
    raise_problems(problems)
    return tuple(any(fnmatch.fnmatchcase(path, glob) for glob in globs) for path in parts.paths)


def _mirrored(parts: Anatomy, state: State) -> list[str | None]:
    shapes = [tuple(x.shape) for x in parts.treedef.flatten_up_to(state.params)]
    return mirrored(state.opt_state, dict(zip(parts.paths, shapes, strict=True)))


def _wanted(parts: Anatomy, state: State, plan: Mapping[str, Any], is_given: bool) -> dict[str, Any]:
    """The user's parameter plan by paths within the step's arguments.

    Where layouts are given, what it does not name is whole, and the optimizer's states lie as their parameters.
    """
    found: dict[str, Any] = {}
    by_path: dict[str | None, Any] = {}
    keyed = tree_util.tree_flatten_with_path(state.params)[0]
    for glob, entry in plan.items():
        hits = [(i, path) for i, path in enumerate(parts.paths) if fnmatch.fnmatchcase(path, glob)]
        if not hits:
            found[f"state/params/{glob}"] = entry  # `shard` says that it matches nothing
        for i, path in hits:
            by_path[path] = found[join("state/params", keyed[i][0])] = entry
    if is_given:
        states = zip(tree_util.tree_flatten_with_path(state.opt_state)[0], _mirrored(parts, state), strict=True)
        rest = {join("state/params", key): (1,) * len(x.shape) for key, x in keyed}
        rest |= {join("state/opt_state", key): by_path.get(path, (1,) * len(x.shape)) for (key, x), path in states}
        found = {**rest, "state/step": (), **found}
    return found


def _data_axes(count: int, zero: OptimizerParallel | None) -> tuple[tuple[str, int], ...]:
    """One axis, or two where states are cut over groups of devices that lie side by side."""
    size = zero.shard_size if zero else -1
    if size in (-1, count) or size == 1:
        return (("data", count),)
    if size > count or count % size:
        where = f"optimizer_weight_shard_size = {size}"
        fix = f"use one of {', '.join(str(n) for n in range(2, count + 1) if count % n == 0)}, or -1 for all"
        raise_problems([Problem(f"states cannot be cut over {size} of {count} devices", where,
                                f"{size} does not divide {count}", fix)])  # fmt: skip
    return (("replica", count // size), ("data", size))


def _mesh(devices: Hardware, axes: Sequence[tuple[str, int]]) -> Mesh | AbstractMesh:
    axes = axes or (("data", devices.count),)
    names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    types = (AxisType.Auto,) * len(axes)
    if devices.devices is None:
        return AbstractMesh(sizes, names, axis_types=types)
    return Mesh(np.array(devices.devices, dtype=object).reshape(sizes), names, axis_types=types)


def _batch_problems(training: Training, count: int, batch: tuple[Any, ...]):
    """What of the batch cannot be cut over the devices and into micro-batches."""
    need = count * training.micro_batches
    for key, x in tree_util.tree_flatten_with_path(batch)[0]:
        name = f"argument {key[0].idx + 1} `{join('batch', key)}`"
        what = (
            f"{training.micro_batches} micro-batches on each of {count} devices"
            if training.micro_batches > 1
            else f"{count} devices"
        )
        if not x.shape:
            yield Problem(f"{name} is a scalar, which has no batch dim", f"{join('batch', key)}: {x.dtype}[]",
                          "dim 0 of every array of the batch is cut", "close over it in the loss function")  # fmt: skip
        elif x.shape[0] % need:
            yield Problem(f"{name} cannot be cut into {need} parts", f"{x.dtype}{list(x.shape)}",
                          f"{x.shape[0]} is not divisible by {need}: {what}",
                          f"use a batch of {max(x.shape[0] // need, 1) * need}, or pad it")  # fmt: skip


def _entry_problems(entries: Any, batch: tuple[Any, ...]):
    if not isinstance(entries, tuple) or len(entries) != len(batch):
        yield Problem(f"`in_strategy` must be a tuple with {len(batch)} entries", f"in_strategy = {entries!r}",
                      "it holds one for each argument of the batch; parameters are cut by parameter_plan",
                      "write an entry for each, None for data parallel")  # fmt: skip


# ---- what is done


def _is_per_device(training: Training, drawn: _Drawn) -> bool:
    """Whether the loss is called on each device's part of the batch."""
    if math.prod(drawn.mesh.shape[a] for a in drawn.data) == 1:
        return False
    return _may_be_per_device(training)


def _may_be_per_device(training: Training) -> bool:
    return training.mode.per_device or training.cross_batch or training.micro_batches > 1


def _update(
    training: Training, parts: Anatomy, drawn: _Drawn, cut: _Cut | None, state: State, batch: tuple[Any, ...]
) -> Callable[..., Any]:
    """The step as a pure function of arrays that lie as `cut` says; None for one that is not laid out yet."""
    loss = _loss(training, parts)
    gradients_of = _gradients(training, parts, drawn, cut, loss, state, batch)
    kept = [i for i, trained in enumerate(parts.trained) if trained]

    def constrained(tree: Any, specs: Sequence[Spec] | None) -> Any:
        if specs is None:
            return tree
        named = _tree(tree, [drawn.named(specs[i]) for i in kept])
        return tree_util.tree_map(lax.with_sharding_constraint, tree, named)

    zero = training.zero
    gather = lambda new: new  # noqa: E731
    if zero is not None and cut is not None and training.fusion is not None and _is_per_device(training, drawn):
        how = _parts(training, parts, drawn, cut)
        if not how.is_partial and zero.level < 3:
            gather = functools.partial(gradients.put_together, how=_regathered(how, drawn, cut, kept))
    states = cut.states if zero is not None and cut is not None else None

    def update(state: State, *batch: Any) -> tuple[State, Any]:
        trained, carried = parts.split(state.params)
        value, aux, grads, carried = gradients_of(_cast(trained, training.compute_dtype), carried, batch)
        grads = tree_util.tree_map(lambda g, p: g.astype(p.dtype), grads, trained)
        grads = constrained(grads, states if zero and zero.level > 1 else None)
        pieces = constrained(trained, states)
        updates, opt_state = training.optimizer.update(grads, state.opt_state, pieces)
        new = constrained(optax.apply_updates(pieces, updates), states)
        made = State(parts.join(gather(new), carried), opt_state, state.step + 1)
        return made, ((value, aux) if training.has_aux else value)

    return update


def _loss(training: Training, parts: Anatomy) -> gradients.Loss:
    def loss(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        model = parts.model(parts.join(trained, carried))
        value = training.loss_fn(model, *batch)
        value, aux = value if training.has_aux else (value, ())
        return value, (aux, parts.split(parts.arrays(model))[1])

    return loss


def _gradients(
    training: Training, parts: Anatomy, drawn: _Drawn, cut: _Cut | None, loss: gradients.Loss, state: State,
    batch: tuple[Any, ...],
) -> Callable[..., Any]:  # fmt: skip
    """(trained, carried, batch) -> (loss, auxiliary output, gradients, carried), by the road that the mode takes."""
    pieces = math.prod(drawn.mesh.shape[a] for a in drawn.data)
    repeats = drawn.mesh.size // pieces
    mean, once = training.reduction.mean, training.settings.read("loss_repeated_mean")
    factor = 1 if once else repeats
    scale = lambda grads: grads if factor == 1 else tree_util.tree_map(lambda g: g * factor, grads)  # noqa: E731
    trained, carried = parts.split(state.params)
    trained = _cast(trained, training.compute_dtype)

    def growing(of: tuple[Any, ...], count: int) -> Any:
        return gradients.growing_dims(loss, trained, carried, of, count)

    if cut is None or not _is_per_device(training, drawn):
        run: Callable[..., Any] = lambda *args: gradients.whole(loss, *args)  # noqa: E731
        if training.micro_batches > 1:
            raise_problems(list(_batch_problems(training, 1, batch)))
            zeros = lambda t: tree_util.tree_map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), t)  # noqa: E731
            run = gradients.micro(
                loss, training.micro_batches, growing(batch, training.micro_batches), lambda g: g, zeros
            )
        times = factor if mean else factor * pieces

        def globally(*args: Any) -> Any:
            value, aux, grads, carried = run(*args)
            return (
                value if mean else value * pieces,
                aux,
                tree_util.tree_map(lambda g: g * times, grads) if times != 1 else grads,
                carried,
            )

        return globally

    part = tree_util.tree_map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // pieces, *x.shape[1:]), x.dtype), batch)
    own, zero = owned(parts, training.own), training.zero
    how = _parts(training, parts, drawn, cut)
    early = bool(zero and zero.accumulation_shard)
    whole_growing = _local(
        training, parts, loss, trained, own, lambda t: gradients.growing_dims(loss, t, carried, batch, pieces)
    )
    part_growing = (
        _local(
            training,
            parts,
            loss,
            trained,
            own,
            lambda t: gradients.growing_dims(loss, t, carried, part, training.micro_batches),
        )
        if training.micro_batches > 1
        else None
    )

    def by_parts(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        value, aux, grads, carried = gradients.parts(
            loss, how, training.reduction, training.micro_batches, early, whole_growing, part_growing,
            trained, carried, batch,
        )  # fmt: skip
        return value, aux, scale(grads), carried

    return by_parts


def _parts(training: Training, parts: Anatomy, drawn: _Drawn, cut: _Cut) -> Parts:
    """How gradients travel where each device works on its part of the batch."""
    kept = [i for i, is_trained in enumerate(parts.trained) if is_trained]
    zero, all_manual = training.zero, set(drawn.data) == set(drawn.mesh.axis_names)
    own = owned(parts, training.own)
    return Parts(
        drawn.mesh,
        drawn.data,
        tuple(_added(drawn.params[i], cut.states[i]) if zero and zero.level > 1 and all_manual else None for i in kept),
        tuple(_added(drawn.params[i], cut.params[i]) if all_manual else None for i in kept),
        tuple(own[i] for i in kept),
        tuple(parts.paths[i] for i in kept),
        training.fusion,
    )


def _regathered(how: Parts, drawn: _Drawn, cut: _Cut, kept: Sequence[int]) -> Parts:
    """The same with the pieces that updated parameters are put together from."""
    return dataclasses.replace(how, gathered=tuple(_added(drawn.params[i], cut.states[i]) for i in kept))


def _local(training, parts, loss, trained, own, of):
    """`of` the trained leaves as one device has them."""
    kept = [mine for mine, is_trained in zip(own, parts.trained, strict=True) if is_trained]
    leaves, treedef = tree_util.tree_flatten(trained)
    shapes = [
        jax.ShapeDtypeStruct(x.shape[1:] if mine else x.shape, x.dtype) for x, mine in zip(leaves, kept, strict=True)
    ]
    return of(tree_util.tree_unflatten(treedef, shapes))


def _added(before: Spec, after: Spec) -> At:
    """The dim that `after` cuts further, and by which axes."""
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if a != b:
            return i, b[len(a) :]
    return None


def _cast(tree: Any, dtype: Any) -> Any:
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return tree_util.tree_map(cast, tree)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _tree(like: Any, leaves: Sequence[Any]) -> Any:
    return tree_util.tree_unflatten(tree_util.tree_structure(like), leaves)


def _partition(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in spec))
