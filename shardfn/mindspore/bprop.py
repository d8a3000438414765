"""`Cell.bprop`: the gradient that a cell gives itself, as a `jax.custom_vjp` around its calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, tree_util

from shardfn.errors import StrategyError, a, fail
from shardfn.frontend.callee import Callee, describe
from shardfn.frontend.recorder import active
from shardfn.frontend.strategy import shape_of, short


def with_bprop(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same `__call__`, whose gradient is the instance's `bprop(*inputs, out, dout)` where its class has one.

    The arrays of the instance get zero gradients, as in MindSpore.
    """

    @functools.wraps(plain)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), "bprop"):
            return plain(self, *args, **kwargs)
        return _call(plain, self, _inputs(plain, self, args, kwargs))

    return __call__


def _inputs(plain: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The inputs in the order of the signature, with defaults: `bprop` takes them by position."""
    bound = inspect.signature(types.MethodType(plain, owner)).bind(*args, **kwargs)
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values())


def _call(plain: Callable[..., Any], owner: Any, inputs: tuple[Any, ...]) -> Any:
    outer = describe(types.MethodType(plain, owner))
    assert outer.adapter is not None
    signature = inspect.signature(types.MethodType(plain, owner))
    keywords = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
    leaves, structure = tree_util.tree_flatten((outer.read(), inputs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    arrays = [leaves[i] for i in places]
    # What the gradient closes over holds no arrays: those of this trace are gone when it runs.
    shapes = tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), outer.read())
    callee = dataclasses.replace(outer, owner=outer.adapter.rebuild(owner, shapes))
    if (recorder := active()) is not None:
        recorder.stands_for(callee.owner, owner)
    own = repr(outer.adapter.attributes(owner))

    def filled(arrays: Any) -> Any:
        values = list(others)
        for i, x in zip(places, arrays, strict=True):
            values[i] = x
        return tree_util.tree_unflatten(structure, values)

    @jax.custom_vjp
    def run(*arrays: Any) -> Any:
        state, inputs = filled(arrays)
        cut = len(inputs) - len(keywords)
        return callee.call(state, inputs[:cut], dict(zip(keywords, inputs[cut:], strict=True)))

    def forward(*arrays: Any) -> Any:
        result = run(*arrays)
        return result, (arrays, result[0])

    def backward(kept: Any, cotangents: Any) -> Any:
        return _gradients(callee, own, filled(kept[0]), kept, cotangents[0], places)

    run.defvjp(forward, backward)
    result, changed = run(*arrays)
    outer.write(changed)
    return result


def _gradients(
    callee: Callee, own: str, filled: tuple[Any, Any], kept: Any, cotangents: Any, places: Sequence[int]
) -> tuple[Any, ...]:
    """The gradients of a call's arrays. `own` says what of the instance is no array: with another, it is another gradient."""
    (state, inputs), (arrays, out) = filled, kept
    assert callee.adapter is not None
    cell = callee.adapter.rebuild(callee.owner, state)
    name = type(cell).__name__
    gradients = _checked(name, type(cell).bprop(cell, *inputs, out, _zeros_of_integers(cotangents)), inputs)
    flat = [None] * tree_util.tree_structure(state).num_leaves
    for gradient, value in zip(gradients, inputs, strict=True):
        flat += _leaves(name, gradient, value)
    return tuple(_of_dtype(flat[i], x) for i, x in zip(places, arrays, strict=True))


def _is_array(leaf: Any) -> bool:
    return shape_of(leaf) is not None and not isinstance(leaf, bool | int | float | complex)


def _checked(name: str, given: Any, inputs: tuple[Any, ...]) -> Any:
    if not isinstance(given, tuple) or len(given) != len(inputs):
        returned = f"a tuple of {len(given)}" if isinstance(given, tuple) else a(given)
        fail(StrategyError, f"`bprop` of `{name}` returns {returned}, not a tuple of {len(inputs)}",
             where=f"{name}.bprop(...) = {short(given)}", why="it gives one gradient for each input of the call",
             fix="return (gradient,), or jnp.zeros_like(x) too for an input x without one")  # fmt: skip
    return given


def _leaves(name: str, gradient: Any, value: Any) -> list[Any]:
    """The gradient of each leaf of an input; None, for a leaf or all of them, is zero."""
    leaves, structure = tree_util.tree_flatten(value)
    if gradient is None or not any(map(_is_array, leaves)):
        return [None] * len(leaves)
    try:
        given = structure.flatten_up_to(gradient)
    except ValueError as error:
        fail(StrategyError, f"`bprop` of `{name}` returns a gradient of another structure than its input",
             where=f"{name}.bprop(...)", why=str(error), fix="return a gradient with the structure of the input")  # fmt: skip
    for one, leaf in zip(given, leaves, strict=True):
        if one is not None and _is_array(leaf) and np.shape(one) != np.shape(leaf):
            fail(StrategyError, f"`bprop` of `{name}` returns a gradient of another shape than its input",
                 where=f"{name}.bprop(...): {short(one)}, input: {short(leaf)}",
                 why="a gradient has the shape of its input", fix="return an array of the input's shape")  # fmt: skip
    return given


def _of_dtype(gradient: Any, x: Any) -> Any:
    """A gradient in the dtype of its array; None, which is zero, for one that has none, such as of integers."""
    is_differentiable = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jnp.asarray(gradient, jnp.result_type(x)) if is_differentiable and gradient is not None else None


def _zeros_of_integers(cotangents: Any) -> Any:
    is_none = lambda ct: getattr(ct, "dtype", None) == dtypes.float0  # noqa: E731
    return tree_util.tree_map(lambda ct: np.zeros(np.shape(ct), np.int32) if is_none(ct) else ct, cotangents)
