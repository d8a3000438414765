"""The training step as one pure function: gradients, the optimizer's update, the next state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax, tree_util

from shardfn.errors import StrategyError, fail, warn
from shardfn.frontend.callee import as_pure
from shardfn.frontend.outer_call import on_parts
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import shape_of, short
from shardfn.train.batch_reduction import SUM, batch_reduction, twice
from shardfn.train.flat_jaxpr import FlatJaxpr, flatten_jaxpr
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps import gradients
from shardfn.train.steps.communication import update_sync
from shardfn.train.steps.gradients import Gradients, GradientSync, Loss
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import StepShardings, tree_of
from shardfn.train.steps.state import ModelParts, TrainState


def update_function(
    options: StepOptions, parts: ModelParts, shardings: StepShardings | None, sync: GradientSync | None,
    state: TrainState, batch: tuple[Any, ...],
) -> Callable[..., Any]:  # fmt: skip
    """The function `(state, *batch) -> (state, loss)`.

    Args:
      options: those of the step.
      parts: which of the model's leaves are trained.
      shardings: those of the step; None while they are being planned.
      sync: the collectives of gradients, if the loss is called on each device's part of the batch.
      state: shapes.
      batch: shapes.
    """
    cast = functools.partial(_cast, dtype=options.compute_dtype)
    loss = _loss(options, parts)
    of_part = loss if sync is None else on_parts(loss, _note(options))
    trained, carried = parts.split(state.params)
    if shardings is not None:
        _warn_of_sum(options, sync, of_part, (cast(trained), carried), batch)
    gradients_of = _gradients(options, parts, shardings, sync, of_part, (cast(trained), carried, batch))
    zero = options.zero if shardings is not None else None
    updated = None if shardings is None else update_sync(options, parts, shardings, sync)

    def sharded(tree: Any) -> Any:
        return tree if zero is None or shardings is None else _constrain(tree, shardings, shardings.updates, parts)

    def train_step(state: TrainState, *batch: Any) -> tuple[TrainState, Any]:
        trained, before = parts.split(state.params)
        value, aux, grads, carried = gradients_of(cast(trained), before, batch)
        grads = tree_util.tree_map(lambda g, p: g.astype(p.dtype), grads, trained)
        grads = sharded(grads) if zero is not None and zero.level > 1 else grads
        shards = sharded(trained)
        updates, opt_state = options.optimizer.update(
            grads, state.opt_state, shards, value=value.astype(jnp.float32), grad=grads,
            value_fn=lambda p: loss(cast(p), before, batch)[0].astype(jnp.float32),  # for a line search
        )  # fmt: skip
        new = sharded(optax.apply_updates(shards, updates))
        new = new if updated is None else gradients.gather_updated(new, updated)
        following = TrainState(parts.join(new, carried), opt_state, state.step + 1)
        return following, ((value, aux) if options.has_aux else value)

    called: Any = options.loss_fn
    # Attributes of a function are watched.
    train_step.__dict__["reads"] = called.options.stages if isinstance(called, Pipeline) else called
    return as_pure(train_step)


_INLINED = frozenset({"jit", "pjit", "checkpoint", "remat2"})


def _note(options: StepOptions) -> str:
    """Why operators run without their shardings where each device calls the loss on its part of the batch, and what to do."""
    why = "each device calls the loss on its part of the batch"
    if options.mode.per_device:
        return f'{why}; use mode="semi_auto_parallel" or "auto_parallel"'
    names = ["micro_batches"] * (options.micro_batches > 1) + ["cross_batch"] * options.cross_batch
    return (
        f"{why}, and XLA shards it further as the parameters are; shard them by parameter_plan, or leave "
        f"{' and '.join(names)} out"
    )


def _warn_of_sum(
    options: StepOptions, sync: GradientSync | None, loss: Loss, params: tuple[Any, Any], batch: tuple[Any, ...]
) -> None:
    """Warn of a loss that is no mean over its batch, or is not seen to be one, where the step takes the mean of parts' losses."""
    parts = options.micro_batches * (sync.count if sync is not None and sync.mean else 1)
    if parts == 1:
        return

    def flat(batch: Any) -> FlatJaxpr:
        closed = jax.make_jaxpr(lambda trained, carried, batch: loss(trained, carried, batch)[0])(*params, batch)
        return flatten_jaxpr(closed, len(tree_util.tree_leaves(params)), lambda eqn: eqn.primitive.name in _INLINED)

    try:
        found = batch_reduction(flat(batch), flat(tree_util.tree_map(twice, batch)))
    except Exception:  # the loss is written for one size of the batch, or names an axis of the devices
        return
    if found == SUM:
        other = "pass gradients_mean=False, or " if options.micro_batches == 1 else ""
        warn(
            f"the loss is a sum over the batch, and the step takes the mean of the losses of {parts} parts of it: loss and "
            f"gradients are 1/{parts} of those on one device; fix: {other}end the loss with jnp.mean over the batch"
        )
    elif found is None:
        other = "micro_batches=1" if options.micro_batches > 1 else "mode='semi_auto_parallel'"
        warn(
            "nothing shows that the loss is a mean over the batch, and the step takes the mean of the losses of "
            f"{parts} parts of it: another loss, such as a mean with weights or a mask, has another value; fix: end the loss "
            f"with jnp.mean over the batch, or compute it of the whole batch with {other}"
        )


def _constrain(tree: Any, shardings: StepShardings, specs: Any, parts: ModelParts) -> Any:
    """Trained leaves with sharding constraints."""
    named = [shardings.named(s) for s, mine in zip(specs, parts.trained, strict=True) if mine]
    return tree_util.tree_map(lax.with_sharding_constraint, tree, tree_of(tree, named))


def _loss(options: StepOptions, parts: ModelParts) -> Loss:
    def loss(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        params = parts.join(trained, carried)
        model = parts.model(params)
        value, aux, collections = _checked_result(options, options.loss_fn(model, *batch))
        after = parts.arrays(_with_collections(model, collections))
        if parts.cells is not None:
            _check_trained(parts, params, after)
        return value, (aux, parts.split(after)[1])

    return loss


def _check_trained(parts: ModelParts, before: Any, after: Any) -> None:
    """Check that the loss changed no array of a model that is trained: the optimizer computes its next value."""
    pairs = zip(*map(parts.treedef.flatten_up_to, (before, after)), strict=True)
    rows = zip(parts.paths, parts.trained, pairs, strict=True)
    if changed := [path for path, mine, (old, new) in rows if mine and old is not new]:
        names = listed(changed)
        fail(StrategyError, f"the loss changes what is trained: {names}", where=names,
             why="the optimizer computes the next value of a trained array, and the loss's would be lost",
             fix=f"freeze it, and the state keeps its new values: frozen={changed}")  # fmt: skip


def _checked_result(options: StepOptions, result: Any) -> tuple[Any, Any, Any]:
    """The loss, the auxiliary output and the changed collections that a loss function returned."""
    value: Any
    rest: Any
    aux, collections = (), None
    if options.mutable:
        form = "(loss, (auxiliary output, collections))" if options.has_aux else "(loss, collections)"
        value, rest = result if _is_pair(result) else (None, None)
        aux, collections = ((), rest) if not options.has_aux else rest if _is_pair(rest) else ((), None)
        if not isinstance(collections, Mapping) or set(collections) != set(options.mutable):
            is_dict = isinstance(collections, Mapping)
            has = f"a dict of {', '.join(map(repr, collections))}" if is_dict else short(result)
            fail(StrategyError, f"the loss function does not return the collections {', '.join(options.mutable)}",
                 where=f"mutable = {options.mutable!r}; it returns {has}",
                 why=f"with has_aux={options.has_aux} it returns {form}, the collections as apply(..., mutable=[...]) does",
                 fix=f"return {form}")  # fmt: skip
    elif options.has_aux != _is_pair(result):
        fail(StrategyError, f"the loss function returns {'no pair' if options.has_aux else 'a pair'}, "
             f"and has_aux is {options.has_aux}", where=f"has_aux = {options.has_aux}",
             why="with has_aux it returns (loss, auxiliary output), without it the loss alone",
             fix=f"set has_aux={not options.has_aux}, or change what it returns")  # fmt: skip
    else:
        value, aux = result if options.has_aux else (result, ())
    if shape_of(value) is None or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        fail(StrategyError, "the loss is no floating-point scalar", where=f"loss: {_shapes(value)}",
             why="gradients are those of one number", fix="take its mean over the batch")  # fmt: skip
    return value, tree_util.tree_map(jnp.asarray, aux), collections


def _shapes(value: Any) -> str:
    """A result as shapes: what is traced has no values, and a long text."""
    return short(tree_util.tree_map(lambda x: _Shape(x) if shape_of(x) else x, value))


class _Shape:
    def __init__(self, x: Any):
        self.shape, self.dtype = shape_of(x)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2


def _with_collections(model: Any, collections: Mapping[str, Any] | None) -> Any:
    """Linen variables with the collections that the loss returned."""
    if collections is None:
        return model
    new = {}
    for name, given in collections.items():
        leaves, treedef = tree_util.tree_flatten(model[name])
        shapes, found = [list(map(shape_of, tree_util.tree_leaves(tree))) for tree in (leaves, given)]
        if shapes != found:
            fail(StrategyError, f"the collection {name!r} changes its form", where=f"{name} = {short(given)}",
                 why=f"the state has arrays of {shapes}, the loss returns {found}",
                 fix="return the collection as apply(variables, ..., mutable=[...]) does")  # fmt: skip
        new[name] = treedef.unflatten(tree_util.tree_leaves(given))
    return type(model)({**model, **new})


def _gradients(
    options: StepOptions, parts: ModelParts, shardings: StepShardings | None, sync: GradientSync | None, loss: Loss,
    shapes: tuple[Any, Any, tuple[Any, ...]],
) -> Gradients:  # fmt: skip
    if shardings is None:
        return functools.partial(gradients.global_gradients, loss)
    count, zero = options.micro_batches, options.zero
    repeats = 1 if options.settings.loss_repeated_mean else shardings.mesh.size // shardings.count
    if sync is not None:
        early = zero is not None and zero.accumulation_shard
        return _scaled(gradients.per_device_gradients(loss, sync, count, early, shapes), repeats, 1)
    total = 1 if options.settings.gradients_mean else shardings.count
    put = lambda tree: _constrain(tree, shardings, shardings.params, parts)  # noqa: E731
    growing = gradients.growing_dims(loss, *shapes, count) if count > 1 else None
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    sums = lambda tree: tree_util.tree_map(lambda x: jnp.zeros(x.shape, gradients.wide(x.dtype)), tree)  # noqa: E731

    def run(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        called = loss
        if options.parallel_optimizer_comm_recompute:
            called, trained = gradients.regathering_loss(loss, trained, put, zeros)
        elif zero is not None and zero.level > 2:
            trained = put(trained)
        return gradients.micro_batched(called, count, growing, lambda g: g, sums)(trained, carried, batch)

    return _scaled(run, repeats * total, total)


def _scaled(run: Gradients, of_gradients: int, of_loss: int) -> Gradients:
    if of_gradients == of_loss == 1:
        return run

    def scaled(*args: Any) -> Any:
        value, aux, grads, carried = run(*args)
        return value * of_loss, aux, tree_util.tree_map(lambda g: g * of_gradients, grads), carried

    return scaled


def _cast(tree: Any, dtype: Any) -> Any:
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return tree_util.tree_map(cast, tree)
