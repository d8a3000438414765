"""Optimizers that want more than gradients, a state and parameters: the loss's value, or slow parameters beside the fast."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax
from jax import tree_util

from shardfn.errors import StrategyError, StrategyTypeError, fail


class Synced(NamedTuple):
    """The state of an optimizer with `optax.lookahead` in it."""

    inner: Any
    """The optimizer's own."""
    slow: Any
    """The slow parameters, those to evaluate and keep; the fast ones are the model's."""


def adapted(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes plain parameters, and `value`, `grad` and `value_fn` whether it needs them or not.

    Of `optax.lookahead` the slow parameters become part of the state.

    >>> import jax.numpy as jnp
    >>> ahead = adapted(optax.lookahead(optax.sgd(0.5), sync_period=1, slow_step_size=0.5))
    >>> w = jnp.ones(())
    >>> updates, state = ahead.update(jnp.ones(()), ahead.init(w), w, value=0.0)
    >>> float(w + updates), float(state.slow)
    (0.75, 0.75)
    """
    inner = optimizer if isinstance(optimizer, optax.MultiSteps) else optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        _refuse_wrapped(params)
        if _is_ahead(inner, params):
            return Synced(inner.init(optax.LookaheadParams(params, params)), params)
        return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        if not isinstance(state, Synced):
            return _updated(inner, updates, state, params, more)
        both, kept = _updated(inner, updates, state.inner, optax.LookaheadParams(params, state.slow), more)
        return both.fast, Synced(kept, optax.apply_updates(state.slow, both.slow))

    return optax.GradientTransformationExtraArgs(init, update)


def _updated(optimizer: Any, updates: Any, state: Any, params: Any, more: dict[str, Any]) -> tuple[Any, Any]:
    try:
        return optimizer.update(updates, state, params, **more)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        fail(StrategyError, "the optimizer needs an argument that a training step does not know",
             where=str(error), why=f"it passes {', '.join(more) or 'none'}",
             fix="bind it in a transformation of yours around it: update(updates, state, params, **extra)")  # fmt: skip


def _is_ahead(optimizer: Any, params: Any) -> bool:
    """Whether it tells fast parameters from slow ones, tried on shapes."""

    def tried(params: Any) -> Any:
        both = optax.LookaheadParams(params, params)
        fields = {"value": 0.0, "grad": params, "value_fn": lambda _: 0.0}
        return optimizer.update(params, optimizer.init(both), both, **fields)[0]

    try:
        return isinstance(jax.eval_shape(tried, params), optax.LookaheadParams)
    except Exception:  # an optimizer of plain parameters may say anything to such a pair
        return False


def _refuse_wrapped(params: Any) -> None:
    is_pair = lambda node: isinstance(node, optax.LookaheadParams)  # noqa: E731
    if any(map(is_pair, tree_util.tree_leaves(params, is_leaf=is_pair))):
        fail(StrategyTypeError, "the parameters are wrapped in LookaheadParams", where="init(params)",
             why="the step keeps the slow ones in the optimizer's state, and the loss gets the fast ones",
             fix="pass the parameters as they are; the slow ones are state.opt_state.slow")  # fmt: skip
