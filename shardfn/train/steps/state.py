"""What a training step carries: a model's arrays, the optimizer's, a counter. A model is any pytree.

Of its leaves some are trained (floating-point arrays; of a Flax NNX module the `nnx.Param`s), some are carried along
(batch statistics, counters, keys of random numbers: what the loss function changes in a module is kept), and some are
no arrays (an activation function in an Equinox module), which stay with the step.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem, raise_problems
from shardfn.frontend.paths import join, met, tidy, unmet
from shardfn.frontend.strategy import shape_of


class TrainState(NamedTuple):
    """The state of a training run, an ordinary pytree: save it, map over it, donate it."""

    params: Any
    """The model as you gave it; None in the place of what is no array."""
    opt_state: Any
    step: Any
    """int32[]: how many steps were taken."""


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """Which leaves of a model are trained, which carried along, and what is no array."""

    treedef: Any
    """Of the model's arrays, None for the rest."""
    paths: tuple[str, ...]
    trained: tuple[bool, ...]
    whole: Any
    """The model's treedef with everything in it."""
    rest: tuple[Any, ...]
    """Its leaves, None for each array."""
    tied: tuple[tuple[Any, Any], ...] = ()
    """Keys of Flax NNX variables that are the variable of another place, and the keys of that place, where the array is."""

    def split(self, params: Any) -> tuple[Any, Any]:
        """What is trained and what is carried along, each with None for the other."""
        leaves = self.treedef.flatten_up_to(params)
        first = [leaf if mine else None for leaf, mine in zip(leaves, self.trained, strict=True)]
        second = [None if mine else leaf for leaf, mine in zip(leaves, self.trained, strict=True)]
        return tree_util.tree_unflatten(self.treedef, first), tree_util.tree_unflatten(self.treedef, second)

    def join(self, trained: Any, carried: Any) -> Any:
        """The model's arrays again."""
        pairs = zip(self.treedef.flatten_up_to(trained), self.treedef.flatten_up_to(carried), strict=True)
        return tree_util.tree_unflatten(self.treedef, [b if a is None else a for a, b in pairs])

    def model(self, params: Any) -> Any:
        """The model as the loss function takes it, with what is no array."""
        arrays = iter(self.treedef.flatten_up_to(params))
        made = tree_util.tree_unflatten(self.whole, [next(arrays) if leaf is None else leaf for leaf in self.rest])
        return retied(made, self.tied)

    def arrays(self, model: Any) -> Any:
        """The inverse of `model`, for one whose arrays may have changed."""
        leaves = self.whole.flatten_up_to(model)
        return tree_util.tree_unflatten(self.treedef, [x for x, r in zip(leaves, self.rest, strict=True) if r is None])


def model_parts(model: Any, frozen: Sequence[str] = (), mutable: Sequence[str] = ()) -> ModelParts:
    """Look at a model: its arrays may be shapes.

    Args:
      model: a pytree, or a module that is one (Flax NNX from 0.12, Equinox). A variable that an NNX module has at several
        places is one array, at the first of them.
      frozen: globs of paths that are not trained.
      mutable: the collections of Linen variables that the loss gives anew.

    >>> import numpy as np
    >>> parts = model_parts({"w": np.ones(3, np.float32), "steps": np.int32(0), "act": abs})
    >>> parts.paths, parts.trained
    (('steps', 'w'), (False, True))
    """
    keyed, whole = tree_util.tree_flatten_with_path(model)
    tied = ties(model)
    twice = {place for place, _ in tied}
    again = {i for i, (key, _) in enumerate(keyed) if any(key[:n] in twice for n in range(1, len(key) + 1))}
    is_array = [i not in again and holds_array(model, leaf) for i, (_, leaf) in enumerate(keyed)]
    inside = [(key, leaf) for (key, leaf), mine in zip(keyed, is_array, strict=True) if mine]
    names = tuple(join("", key) for key, _ in inside)
    paths = tuple(map(tidy, names))
    raise_problems([*_missing(model, mutable), *unmet("frozen", frozen, paths)])
    fixed = _not_params(model, mutable)
    still = {i for glob in frozen for i in met(glob, paths)[0]}
    trained = tuple(
        jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact) and name not in fixed and i not in still
        for i, (name, (_, leaf)) in enumerate(zip(names, inside, strict=True))
    )
    rest = tuple(
        None if mine else _TIED if i in again else leaf
        for i, ((_, leaf), mine) in enumerate(zip(keyed, is_array, strict=True))
    )
    arrays = tree_util.tree_unflatten(
        whole, [x if mine else None for (_, x), mine in zip(keyed, is_array, strict=True)]
    )
    return ModelParts(tree_util.tree_structure(arrays), paths, trained, whole, rest, tied)


def holds_array(model: Any, leaf: Any) -> bool:
    """Whether a leaf of a model is an array of it."""
    return shape_of(leaf) is not None and (hasattr(leaf, "dtype") or not is_equinox(model))


def is_equinox(model: Any) -> bool:
    """Whether it is an Equinox module: its Python numbers are settings, and no arrays."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(model, equinox.Module)


def _not_params(model: Any, mutable: Sequence[str]) -> set[str]:
    """The paths of what is no parameter: of a Flax NNX module's other variables, of Linen's other collections."""
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
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    flat = tree_util.tree_flatten_with_path(model, is_leaf=lambda node: isinstance(node, nnx.Variable))[0]
    return [(key, node) for key, node in flat if isinstance(node, nnx.Variable)]


def ties(model: Any) -> tuple[tuple[Any, Any], ...]:
    """Of a Flax NNX module, the keys of each place that holds the variable of an earlier one, and the keys of that."""
    first: dict[int, Any] = {}
    pairs = [(key, first.setdefault(id(node), key)) for key, node in _variables(model)]
    return tuple((key, before) for key, before in pairs if key != before)


def retied(model: Any, tied: Sequence[tuple[Any, Any]]) -> Any:
    """A module made anew, with the variables that `ties` found at several places there again."""
    for place, first in tied:
        _put(model, place, functools.reduce(_inside, first, model))
    return model


def is_incomplete(params: Any) -> bool:
    """Whether the arrays of a model, without what the step keeps, do not make it whole again."""
    return is_equinox(params) or any(not tree_util.tree_leaves(node) for _, node in _variables(params))


def _inside(node: Any, key: Any) -> Any:
    """The child of a module, a list or a dict at a key of a pytree's path."""
    if isinstance(key, tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.idx if isinstance(key, tree_util.SequenceKey) else key.key]


def _put(model: Any, place: Any, variable: Any) -> None:
    """Make a place of a module hold a variable."""
    *outer, last = place
    parent = functools.reduce(_inside, outer, model)
    if isinstance(last, tree_util.GetAttrKey):
        setattr(parent, last.name, variable)
    else:
        parent[last.idx if isinstance(last, tree_util.SequenceKey) else last.key] = variable


_TIED = object()
"""In the place of an array that stands elsewhere in the model."""


def _missing(model: Any, mutable: Sequence[str]) -> Iterator[Problem]:
    """Collections that are said to change and that the model does not have."""
    names = sorted(model) if isinstance(model, Mapping) else []
    for name in mutable:
        if name not in names or name == "params":
            yield Problem(f"`mutable` {name!r} is no collection that the loss can change", f"mutable = {tuple(mutable)!r}",
                          f"the model's collections are {', '.join(map(repr, names)) or 'none: it is no dict of variables'}",
                          'give the variables that Linen\'s init makes, {"params": ..., "batch_stats": ...}')  # fmt: skip


def owned(parts: ModelParts, globs: Sequence[str]) -> tuple[bool, ...]:
    """Which leaves match a glob.

    Raises:
      StrategyError: a glob matches none.
    """
    raise_problems(list(unmet("layerwise_parallel", globs, parts.paths)))
    hits = {i for glob in globs for i in met(glob, parts.paths)[0]}
    return tuple(i in hits for i in range(len(parts.paths)))
