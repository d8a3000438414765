"""The training step as one pure function: gradients by the road of the mode, the optimizer's update, the new state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax, tree_util

from shardfn.errors import StrategyError, fail
from shardfn.frontend.strategy import shape_of, short
from shardfn.train.steps import gradients
from shardfn.train.steps.communication import parts_of, regathered
from shardfn.train.steps.gradients import Loss
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import Cut, StepShardings, is_per_device, tree_of
from shardfn.train.steps.state import ModelParts, TrainState

Gradients = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any, Any, Any]]
"""(trained, carried, batch) -> (loss, auxiliary output, gradients, carried)."""


def update_of(
    training: StepOptions, parts: ModelParts, drawn: StepShardings | None, cut: Cut | None, own: tuple[bool, ...],
    state: TrainState, batch: tuple[Any, ...],
) -> Callable[..., Any]:  # fmt: skip
    """`(state, *batch) -> (state, loss)`.

    Args:
      drawn, cut: where things lie; None for a step that is not laid out yet.
      own: which parameters are a device's own.
      state, batch: shapes.
    """
    trained, carried = parts.split(state.params)
    shapes = _cast(trained, training.compute_dtype), carried, batch
    gradients_of = _gradients(training, parts, drawn, cut, own, shapes)
    zero = training.zero
    states = [s for s, mine in zip(cut.states, parts.trained, strict=True) if mine] if zero and cut else None

    gathers = None
    if drawn is not None and cut is not None and is_per_device(training, drawn):
        gathers = regathered(training, parts, drawn, cut, parts_of(training, parts, drawn, cut, own))

    def in_pieces(tree: Any) -> Any:
        if states is None or drawn is None:
            return tree
        return tree_util.tree_map(lax.with_sharding_constraint, tree, tree_of(tree, [drawn.named(s) for s in states]))

    loss = _loss(training, parts)

    def at(trained: Any, carried: Any, batch: tuple[Any, ...]) -> jax.Array:
        """The loss with other parameters, for an optimizer that searches along a line."""
        return loss(_cast(trained, training.compute_dtype), carried, batch)[0].astype(jnp.float32)

    def update(state: TrainState, *batch: Any) -> tuple[TrainState, Any]:
        trained, carried = parts.split(state.params)
        before = carried
        value, aux, grads, carried = gradients_of(_cast(trained, training.compute_dtype), carried, batch)
        grads = tree_util.tree_map(lambda g, p: g.astype(p.dtype), grads, trained)
        if zero and zero.level > 1:
            grads = in_pieces(grads)
        pieces = in_pieces(trained)
        told = {"value": value.astype(jnp.float32), "grad": grads, "value_fn": lambda p: at(p, before, batch)}
        updates, opt_state = training.optimizer.update(grads, state.opt_state, pieces, **told)
        new = in_pieces(optax.apply_updates(pieces, updates))
        new = new if gathers is None else gradients.put_together(new, gathers)
        made = TrainState(parts.join(new, carried), opt_state, state.step + 1)
        return made, ((value, aux) if training.has_aux else value)

    return update


def _loss(training: StepOptions, parts: ModelParts) -> Loss:
    def loss(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        model = parts.model(parts.join(trained, carried))
        value, aux, changed = _told(training, training.loss_fn(model, *batch))
        return value, (aux, parts.split(parts.arrays(_changed(model, changed)))[1])

    return loss


def _told(training: StepOptions, result: Any) -> tuple[Any, Any, Any]:
    """The loss, the auxiliary output and the changed collections of what the loss function gave."""
    aux, changed = (), None
    if training.mutable:
        form = "(loss, (auxiliary output, collections))" if training.has_aux else "(loss, collections)"
        found: Any = result if _is_pair(result) else (None, None)
        inner: Any = found[1] if training.has_aux else (aux, found[1])
        aux, changed = inner if _is_pair(inner) else (aux, None)
        if not isinstance(changed, Mapping) or set(changed) != set(training.mutable):
            has = f"a dict of {', '.join(map(repr, changed))}" if isinstance(changed, Mapping) else short(result)
            fail(StrategyError, f"the loss function does not give the collections {', '.join(training.mutable)}",
                 where=f"mutable = {training.mutable!r}; it gives {has}",
                 why=f"with has_aux={training.has_aux} it gives {form}, the collections as apply(..., mutable=[...]) does",
                 fix=f"return {form}")  # fmt: skip
        result = found[0]
    elif training.has_aux != _is_pair(result):
        what = "no pair" if training.has_aux else "a pair"
        fail(StrategyError, f"the loss function gives {what}, and has_aux is {training.has_aux}",
             where=f"has_aux = {training.has_aux}",
             why="with has_aux it gives (loss, auxiliary output), without it the loss alone",
             fix=f"set has_aux={not training.has_aux}, or change what it gives")  # fmt: skip
    elif training.has_aux:
        result, aux = result
    value: Any = result
    if shape_of(value) is None or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        fail(StrategyError, "the loss is no floating-point scalar", where=f"loss = {short(value)}",
             why="gradients are those of one number", fix="take its mean over the batch")  # fmt: skip
    return value, tree_util.tree_map(jnp.asarray, aux), changed


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2


def _changed(model: Any, collections: Mapping[str, Any] | None) -> Any:
    """Linen's variables with collections that the loss gave."""
    if collections is None:
        return model
    new = {}
    for name, given in collections.items():
        leaves, treedef = tree_util.tree_flatten(model[name])
        shapes, found = [list(map(shape_of, tree_util.tree_leaves(tree))) for tree in (leaves, given)]
        if shapes != found:
            fail(StrategyError, f"the collection {name!r} changes its form", where=f"{name} = {short(given)}",
                 why=f"the state has arrays of {shapes}, the loss gives {found}",
                 fix="give the collection as apply(variables, ..., mutable=[...]) returns it")  # fmt: skip
        new[name] = tree_util.tree_unflatten(treedef, tree_util.tree_leaves(given))
    return type(model)({**model, **new})


def _gradients(
    training: StepOptions, parts: ModelParts, drawn: StepShardings | None, cut: Cut | None, own: tuple[bool, ...],
    shapes: tuple[Any, Any, tuple[Any, ...]],
) -> Gradients:  # fmt: skip
    loss = _loss(training, parts)
    if drawn is None or cut is None:
        return lambda *args: gradients.whole(loss, *args)
    times = 1 if training.settings.loss_repeated_mean else drawn.mesh.size // drawn.count
    if is_per_device(training, drawn):
        return _scaled(_by_parts(training, parts, drawn, cut, own, loss, shapes), times, 1)
    total = 1 if training.reduction.mean else drawn.count
    lies = [drawn.named(s) for s, mine in zip(drawn.params, parts.trained, strict=True) if mine]
    put = lambda tree: tree_util.tree_map(lax.with_sharding_constraint, tree, tree_of(tree, lies))  # noqa: E731

    def run(trained: Any, carried: Any, batch: tuple[Any, ...]) -> Any:
        if training.gathers_again:
            called, trained = gradients.again(loss, trained, put, lambda x: jnp.zeros(x.shape, x.dtype))
            return _at_once(training, called, shapes)(trained, carried, batch)
        is_kept = training.zero is not None and training.zero.level > 2
        return _at_once(training, loss, shapes)(put(trained) if is_kept else trained, carried, batch)

    return _scaled(run, times * total, total)


def _at_once(training: StepOptions, loss: Loss, shapes: tuple[Any, Any, tuple[Any, ...]]) -> Gradients:
    """On the whole batch, XLA making the reductions."""
    count = training.micro_batches
    if count == 1:
        return lambda *args: gradients.whole(loss, *args)
    zeros = lambda tree: tree_util.tree_map(lambda x: jnp.zeros(x.shape, gradients.wide(x.dtype)), tree)  # noqa: E731
    return gradients.micro(loss, count, gradients.growing_dims(loss, *shapes, count), lambda g: g, zeros)


def _by_parts(
    training: StepOptions, parts: ModelParts, drawn: StepShardings, cut: Cut, own: tuple[bool, ...], loss: Loss,
    shapes: tuple[Any, Any, tuple[Any, ...]],
) -> Gradients:  # fmt: skip
    """On each device's part of the batch."""
    zero, count = training.zero, training.micro_batches
    how = parts_of(training, parts, drawn, cut, own)
    trained, carried, batch = shapes
    leaves = [
        jax.ShapeDtypeStruct(x.shape[1:] if mine else x.shape, x.dtype)
        for x, mine in zip(tree_util.tree_leaves(trained), how.own, strict=True)
    ]
    local = tree_of(trained, leaves)
    return gradients.by_parts(
        loss, how, training.reduction, count, zero is not None and zero.accumulation_shard,
        gradients.growing_dims(loss, local, carried, batch, drawn.count),
        gradients.growing_dims(loss, local, carried, gradients.part_of(batch, drawn.count), count),
        gradients.moving(loss, local, carried, gradients.part_of(batch, drawn.count)),
    )  # fmt: skip


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
