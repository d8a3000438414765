"""Which arrays of a function are its weights: a pytree argument, or what a module holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.arguments import bind
from shardfn.frontend.callee import Callee
from shardfn.frontend.paths import join, listed
from shardfn.frontend.strategy import shape_of, short
from shardfn.runtime.sharded_function import ShardedFunction

Named = str | Sequence[str] | None
"""The argument or the arguments that are the weights; the first pytree if None."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a function, by name: the path inside the argument, or with its name where there are several."""

    arguments: tuple[str, ...]
    """Empty for the arrays that a module holds."""
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    paths: Mapping[str, str]
    """The path of each in the plan of the function."""
    treedef: Any
    """Their structure; None for a module, whose arrays go by path."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Those that are arrays already, not shapes."""


def of_tree(tree: Any, arguments: Sequence[str] = (), what: str = "like") -> Weights:
    """The arrays of a pytree; without an argument's name their paths are bare.

    Raises:
      StrategyTypeError: it holds what is no array, or nothing.
    """
    flat, treedef = tree_util.tree_flatten_with_path(tree)
    named = [(join("", key), leaf) for key, leaf in flat]
    found = {path: shape_of(leaf) for path, leaf in named}
    problems = [
        Problem(f"`{path or what}` is {a(leaf)}, which is no array", where=f"{what} at `{path}`",
                why="weights are arrays, or their shapes", fix="take it out of the tree", is_type=True)
        for path, leaf in named if found[path] is None
    ]  # fmt: skip
    if not flat or found.keys() == {""}:
        problems.append(Problem(f"`{what}` is no pytree of arrays", where=f"{what} = {short(tree)}",
                                why="weights go by their paths", fix='put it into a dict: {"w": w}', is_type=True))  # fmt: skip
    raise_problems(problems)
    first = f"{arguments[0]}/" if len(arguments) == 1 else ""
    return Weights(
        tuple(arguments),
        {path: jax.ShapeDtypeStruct(at[0], _dtype(leaf, at[1])) for path, leaf in named if (at := found[path])},
        {path: first + path for path, _ in named},
        treedef,
        {path: leaf for path, leaf in named if not isinstance(leaf, jax.ShapeDtypeStruct)},
    )


def _dtype(leaf: Any, name: str) -> Any:
    dtype = getattr(leaf, "dtype", None)
    return dtype if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(name)


def of_module(callee: Callee) -> Weights | None:
    """The arrays of a module, or of the object of a method; None for a function."""
    state = callee.read()
    if not state:
        return None
    shapes = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in state.items()}
    return Weights((), shapes, {path: path for path in state}, None, state)


def check_named(named: Any) -> None:
    """`weights` as the user wrote it.

    Raises:
      StrategyTypeError: it names nothing.
    """
    names = (named,) if isinstance(named, str) else named
    if names is not None and not (isinstance(names, list | tuple) and names and all(isinstance(n, str) for n in names)):
        fail(StrategyTypeError, "`weights` names no argument", where=f"weights = {short(named)}", why="it says what is loaded",
             fix='name an argument, or several: weights="params"')  # fmt: skip


def of_call(function: ShardedFunction, args: Sequence[Any], kwargs: Mapping[str, Any], named: Named) -> Weights:
    """The weights of a call: the named arguments, or else the module's arrays, or else the first pytree.

    Raises:
      StrategyError: no argument has that name, or none is a pytree.
    """
    check_named(named)
    options = function.options
    slots, values = bind(
        function.callee.signature, args, dict(kwargs),
        frozenset(options.static_argnums), frozenset(options.static_argnames),
    )  # fmt: skip
    given = {slot.name: value for slot, value in zip(slots, values, strict=True) if not slot.is_static}
    if named is None and (held := of_module(function.callee)) is not None:
        return held
    if named is None:
        name = next((n for n, value in given.items() if not tree_util.all_leaves([value])), None)
        if name is None:
            fail(StrategyError, f"no argument of `{function.callee.name}` is a pytree",
                 where=f"its arguments are {listed(list(given))}", why="the first pytree is taken for the weights",
                 fix=f"name them: weights={next(iter(given), 'w')!r}")  # fmt: skip
        return of_tree(given[name], (name,), name)
    names = (named,) if isinstance(named, str) else tuple(named)
    if unknown := [name for name in names if name not in given]:
        fail(StrategyError, f"`{function.callee.name}` has no argument `{unknown[0]}`", where=f"weights = {named!r:.80}",
             why=f"its arguments are {listed(list(given))}", fix="name one of them")  # fmt: skip
    if len(names) == 1 and not tree_util.all_leaves([given[names[0]]]):
        return of_tree(given[names[0]], names, names[0])
    several = of_tree({name: given[name] for name in names}, names, "weights")
    return dataclasses.replace(several, paths={path: path for path in several.shapes})
