"""Which arrays of a function are its weights (a pytree argument, or what a module holds), and where a checkpoint has them.

A checkpoint names them alike, or with a prefix; the optimizer's copies of them are left aside.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.checkpoint.contents import KEY, StoredArray
from shardfn.checkpoint.reader import family
from shardfn.errors import CheckpointError, Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.arguments import bind
from shardfn.frontend.callee import Callee
from shardfn.frontend.paths import join, listed, tidy
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


# ---- their places in a checkpoint

USUAL = ("params", "model")
"""Where training states keep the weights, if the function calls them something else."""


def matched(
    stored: Mapping[str, StoredArray], weights: Weights, strict: bool, text: str, valued: Sequence[str] = ()
) -> dict[str, str]:
    """The stored path of each weight.

    Args:
      stored: what the checkpoint holds.
      weights: what is wanted.
      strict: names and dtypes must be equal, and nothing may be missing.
      text: what the checkpoint is.
      valued: weights that may be missing, for they have a value.

    Raises:
      CheckpointError: weights that are missing, of another shape or dtype, all of them; several places that fit as well.
    """
    spelt = {tidy(path): path for path in stored}
    wanted = {tidy(name): name for name in weights.shapes}
    root = _root(spelt, wanted, stored, weights, strict, text)
    found, problems = {}, []
    for short_name, name in wanted.items():
        path = spelt.get(f"{root}/{short_name}" if root else short_name)
        if path is None:
            if strict or name not in valued:
                problems.append(Problem(f"{text} has no `{name}`", where=f"{name}: {_said(weights, name)}",
                                        why=f"it holds {listed(list(stored))}",
                                        fix='name_map={"stored/name": "name"} says what it is called there'))  # fmt: skip
        elif problem := _misfit(stored[path], weights, name, strict):
            problems.append(problem)
        else:
            found[name] = path
    raise_problems(problems, CheckpointError)
    if not found:
        fail(CheckpointError, f"{text} has none of the weights", where=listed(list(weights.shapes)),
             why=f"it holds {listed(list(stored))}",
             fix='name_map={"stored/name": "name"} says what they are called there')  # fmt: skip
    return found


def _root(
    spelt: Mapping[str, str], wanted: Mapping[str, str], stored: Mapping[str, StoredArray], weights: Weights,
    strict: bool, text: str,
) -> str:  # fmt: skip
    """What stands before the names: the one under which most weights are found."""
    hits: collections.Counter[str] = collections.Counter()
    for path in spelt:
        parts = path.split("/")
        for n in range(len(parts)):
            name = wanted.get("/".join(parts[n:]))
            if name is not None:
                hits["/".join(parts[:n])] += 2 + (stored[spelt[path]].shape == weights.shapes[name].shape)
    own = weights.arguments if len(weights.arguments) == 1 else ()
    first = ("", *own, *(() if strict else USUAL))
    if strict:
        hits = collections.Counter({root: n for root, n in hits.items() if root in first})
    best = [root for root, n in hits.items() if n == max(hits.values())]
    if (usual := next((root for root in first if root in best or not best), None)) is not None:
        return usual
    depth = min(root.count("/") for root in best)
    nearest = [root for root in best if root.count("/") == depth]
    if len(nearest) > 1:
        fail(CheckpointError, f"{text} holds the weights several times", where=f"under {', '.join(f'`{r}`' for r in nearest)}",
             why="all of them fit", fix=f'say which: name_map={{{nearest[0]!r}: "params"}}')  # fmt: skip
    return nearest[0]


def _said(weights: Weights, name: str) -> str:
    shape = weights.shapes[name]
    return f"{shape.dtype}{list(shape.shape)}"


def _misfit(entry: StoredArray, weights: Weights, name: str, strict: bool) -> Problem | None:
    shape, kind = weights.shapes[name].shape, weights.shapes[name].dtype
    is_key = entry.kind.startswith(KEY)
    of_type = f"`{name}` is {entry.dtype} in the checkpoint, and {kind} is wanted"
    if is_key != jnp.issubdtype(kind, jax.dtypes.prng_key):
        return Problem(f"`{name}` is {'a PRNG key' if is_key else entry.dtype} in the checkpoint", where=entry.text,
                       why=f"the function takes {kind}", fix="correct the name with name_map")  # fmt: skip
    if is_key:
        return None
    if entry.shape != shape:
        return Problem(f"`{name}` has the shape {entry.shape} in the checkpoint, and {shape} is wanted", where=entry.text,
                       why="a shape is never changed while it is read", fix="use the sizes of the training run")  # fmt: skip
    if strict and entry.numpy_dtype != kind:
        return Problem(of_type, where=entry.text, why="strict_load casts nothing", fix="leave strict_load out")
    if family(entry.numpy_dtype) != family(kind):
        return Problem(of_type, where=entry.text, why="only floats are cast to floats, ints to ints",
                       fix="convert it before it is saved")  # fmt: skip
    return None
