"""The state of a training run: a model's arrays, the optimizer's state, a step counter.

A model is any pytree. Its leaves are trained (floating-point arrays; of a Flax NNX module the `nnx.Param`s), carried (batch
statistics, counters, random keys: the next state holds their new values), or static (no arrays, such as an activation
function in an Equinox module; the step keeps them).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem, raise_problems
from shardfn.frontend.nnx_objects import is_variable
from shardfn.frontend.paths import join, met, tidy, unmet
from shardfn.frontend.strategy import is_cell, shape_of
from shardfn.train.steps import cells


class TrainState(NamedTuple):
    """The state of a training run, an ordinary pytree.

    Attributes:
      params: the model as given to `init`, with None for leaves that are no arrays.
      opt_state: the optimizer's state.
      step: int32[], the number of steps taken.
    """

    params: Any
    opt_state: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """Which leaves of a model are trained, carried and static."""

    treedef: Any
    """Of the model's arrays, with None for static leaves."""
    paths: tuple[str, ...]
    trained: tuple[bool, ...]
    own: tuple[bool, ...]
    """Which leaves each device has of its own (layerwise parallel)."""
    model_treedef: Any
    static: tuple[Any, ...]
    """The model's leaves, with None for each array."""
    tied: tuple[tuple[Any, Any], ...] = ()
    """For each tied Flax NNX variable the key of a place without the array, and the key of the place that holds it."""
    cells: Any = None
    """The model, of shapes, if it holds Cells; the trees above have the arrays of each by path in its place."""

    def split(self, params: Any) -> tuple[Any, Any]:
        """The trained and the carried leaves, each with None for the other."""
        pairs = list(zip(self.treedef.flatten_up_to(params), self.trained, strict=True))
        trained = self.treedef.unflatten(leaf if mine else None for leaf, mine in pairs)
        return trained, self.treedef.unflatten(None if mine else leaf for leaf, mine in pairs)

    def join(self, trained: Any, carried: Any) -> Any:
        """The inverse of `split`."""
        pairs = zip(self.treedef.flatten_up_to(trained), self.treedef.flatten_up_to(carried), strict=True)
        return self.treedef.unflatten(b if a is None else a for a, b in pairs)

    def model(self, params: Any) -> Any:
        """The model as the loss function takes it, with its static leaves."""
        arrays = iter(self.treedef.flatten_up_to(params))
        model = self.model_treedef.unflatten(next(arrays) if leaf is None else leaf for leaf in self.static)
        return retie(model if self.cells is None else cells.with_arrays(self.cells, model), self.tied)

    def arrays(self, model: Any) -> Any:
        """The inverse of `model`, for one whose arrays may have changed."""
        return self._of_leaves(self.model_treedef.flatten_up_to(self._leaves_tree(model)))

    def arrays_made(self, model: Any) -> Any:
        """As `arrays`, for another model of the function that made this one: it has settings of its own, such as new lambdas."""
        return self._of_leaves(tree_util.tree_leaves(self._leaves_tree(model)))

    def _leaves_tree(self, model: Any) -> Any:
        return model if self.cells is None else cells.arrays_of(model)

    def _of_leaves(self, leaves: Sequence[Any]) -> Any:
        return self.treedef.unflatten(x for x, rest in zip(leaves, self.static, strict=True) if rest is None)


def model_parts(
    model: Any, frozen: Sequence[str] = (), mutable: Sequence[str] = (), layerwise_parallel: Sequence[str] = ()
) -> ModelParts:
    """Sort the leaves of a model, which may be shapes.

    Args:
      model: a pytree, or a module that is one (Flax NNX from 0.12, Equinox). A tied NNX variable is one array, at the
        first of its places. A `Cell` in it is the dict of its arrays, by path.
      frozen: globs of paths that are not trained.
      mutable: the collections of Linen variables that the loss returns.
      layerwise_parallel: globs of paths of which each device has an array of its own.

    >>> import numpy as np
    >>> parts = model_parts({"w": np.ones(3, np.float32), "steps": np.int32(0), "act": abs})
    >>> parts.paths, parts.trained
    (('steps', 'w'), (False, True))
    """
    given, tied, has_cells = model, tied_variables(model), cells.holds_cell(model)
    model = cells.arrays_of(given) if has_cells else given
    keyed, treedef = tree_util.tree_flatten_with_path(model)
    tied_places = {place for place, _ in tied}
    is_tied = lambda key: any(key[:n] in tied_places for n in range(1, len(key) + 1))  # noqa: E731
    static = tuple(_TIED if is_tied(key) else None if holds_array(model, leaf) else leaf for key, leaf in keyed)
    inside = [(join("", key), leaf) for (key, leaf), rest in zip(keyed, static, strict=True) if rest is None]
    paths = tuple(tidy(name) for name, _ in inside)
    globs = {"frozen": frozen, "layerwise_parallel": layerwise_parallel}
    raise_problems(
        [
            *cells.hidden_cells(given),
            *_missing(model, mutable),
            *(p for name in globs for p in unmet(name, globs[name], paths)),
        ]
    )
    no_params = _not_params(cells.arrays_of(given, is_variable) if has_cells else given, mutable)
    trained = tuple(
        jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact) and name not in no_params and not is_frozen
        for (name, leaf), is_frozen in zip(inside, matches(paths, frozen), strict=True)
    )
    arrays = treedef.unflatten(x if rest is None else None for (_, x), rest in zip(keyed, static, strict=True))
    own = matches(paths, layerwise_parallel)
    shape = lambda x: shapes_of(x) if holds_array(model, x) else x  # noqa: E731
    template = cells.with_arrays(given, tree_util.tree_map(shape, model)) if has_cells else None
    return ModelParts(tree_util.tree_structure(arrays), paths, trained, own, treedef, static, tied, template)


def shapes_of(tree: Any, *shardings: Any) -> Any:
    """A pytree of arrays or numbers as shapes; a pytree of shardings may be given, too."""

    def shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x), getattr(x, "dtype", None) or jnp.result_type(x), sharding=sharding)

    return tree_util.tree_map(shape, tree, *shardings)


def is_maker(params: Any) -> bool:
    """Whether `params` is a function that makes a model."""
    return callable(params) and not is_cell(params) and tree_util.all_leaves([params])


def model_shapes(make: Callable[[], Any]) -> Any:
    """The model that a function makes, with shapes for arrays."""
    found: list[Any] = []

    def arrays() -> list[Any]:
        model = make()
        held = cells.arrays_of(model)
        found[:] = *tree_util.tree_flatten(held), model
        return [leaf if holds_array(held, leaf) else None for leaf in found[0]]

    shapes = jax.eval_shape(arrays)
    leaves, treedef, model = found
    cells.refuse_lost_arrays(model)
    held = treedef.unflatten(a if b is None else b for a, b in zip(leaves, shapes, strict=True))
    return retie(cells.with_arrays(model, held), tied_variables(model))


def holds_array(model: Any, leaf: Any) -> bool:
    """Whether a leaf of a model is an array of it."""
    return shape_of(leaf) is not None and (hasattr(leaf, "dtype") or not is_equinox(model))


def is_equinox(model: Any) -> bool:
    """Whether `model` is an Equinox module, whose Python numbers are settings and no arrays."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(model, equinox.Module)


def _not_params(model: Any, mutable: Sequence[str]) -> set[str]:
    """The paths of arrays that are no parameters: other NNX variables, other Linen collections."""
    found: set[str] = set()
    if isinstance(model, Mapping) and "params" in model and ("batch_stats" in model or mutable):
        rest = {name: value for name, value in model.items() if name != "params"}
        found |= {join("", key) for key, _ in tree_util.tree_flatten_with_path(rest)[0]}
    for key, node in _variables(model):
        if not isinstance(node, sys.modules["flax.nnx"].Param):
            found |= {join("", (*key, *inner)) for inner, _ in tree_util.tree_flatten_with_path(node)[0]}
    return found


def _variables(model: Any) -> list[tuple[Any, Any]]:
    """A Flax NNX module's variables with their keys."""
    flat = tree_util.tree_flatten_with_path(model, is_leaf=is_variable)[0]
    return [(key, node) for key, node in flat if is_variable(node)]


def tied_variables(model: Any) -> tuple[tuple[Any, Any], ...]:
    """For each place of a Flax NNX module that holds the variable of an earlier place, the keys of both."""
    first: dict[int, Any] = {}
    pairs = [(key, first.setdefault(id(node), key)) for key, node in _variables(model)]
    return tuple((key, before) for key, before in pairs if key != before)


def retie(model: Any, tied: Sequence[tuple[Any, Any]]) -> Any:
    """A rebuilt module with its tied variables tied again."""
    for (*outer, last), first in tied:
        parent, variable = (functools.reduce(_inside, place, model) for place in (outer, first))
        if isinstance(last, tree_util.GetAttrKey):
            setattr(parent, last.name, variable)
        else:
            parent[last.idx if isinstance(last, tree_util.SequenceKey) else last.key] = variable
    return model


def is_incomplete(params: Any) -> bool:
    """Whether the step must keep more than a model's arrays to rebuild it."""
    return is_equinox(params) or any(not tree_util.tree_leaves(node) for _, node in _variables(params))


def _inside(node: Any, key: Any) -> Any:
    """The child of a module, a list or a dict at a key of a pytree's path."""
    if isinstance(key, tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.idx if isinstance(key, tree_util.SequenceKey) else key.key]


_TIED = object()
"""Replaces an array that another place of the model holds."""


def _missing(model: Any, mutable: Sequence[str]) -> Iterator[Problem]:
    """Names in `mutable` that are no collections of the model."""
    names = sorted(model) if isinstance(model, Mapping) else []
    for name in mutable:
        if name not in names or name == "params":
            yield Problem(f"`mutable` {name!r} is no collection that the loss can change", f"mutable = {tuple(mutable)!r}",
                          f"the model's collections are {', '.join(map(repr, names)) or 'none: it is no dict of variables'}",
                          'give the variables that Linen\'s init makes, {"params": ..., "batch_stats": ...}')  # fmt: skip


def matches(paths: Sequence[str], globs: Sequence[str]) -> tuple[bool, ...]:
    """Which paths match a glob."""
    hits = {i for glob in globs for i in met(glob, paths)[0]}
    return tuple(i in hits for i in range(len(paths)))
