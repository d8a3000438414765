"""Flax NNX objects, as the owner of a function or among its arguments: their arrays by path, and back into the objects.

An owner is any pytree that holds NNX modules, optimizers, random streams or variables. A variable that stands at several
places has one path. Nothing here is used unless the user's program has imported Flax NNX.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from jax import tree_util

from shardfn.frontend.paths import join

State = dict[str, Any]
"""Path to array."""


def is_module(owner: Any) -> bool:
    """Whether an object is an NNX module."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(owner, nnx.Module)


def among(arguments: Iterable[tuple[str, Any]]) -> State:
    """The arguments, by name, that hold NNX objects whose changes a call has to keep; an `nnx.State` is plain data."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    kinds = nnx.Pytree, nnx.Variable
    stops = *kinds, nnx.State

    def holds(value: Any) -> bool:
        leaves = tree_util.tree_leaves(value, is_leaf=lambda node: isinstance(node, stops))
        return any(isinstance(leaf, kinds) for leaf in leaves)

    return {name: value for name, value in arguments if holds(value)}


def shared(owner: Any, objects: State) -> list[str]:
    """The paths of variables of an owner that also stand in other objects."""
    nnx = sys.modules["flax.nnx"]
    if not isinstance(owner, nnx.Pytree):
        return []
    mine = {id(variable) for _, variable in nnx.iter_graph(objects) if isinstance(variable, nnx.Variable)}
    return ["/".join(map(str, path)) for path, variable in nnx.iter_graph(owner) if id(variable) in mine]


def nested(owner: Any) -> Any:
    """The arrays of an owner as nested dictionaries; every shared variable once."""
    nnx = sys.modules["flax.nnx"]
    return nnx.to_pure_dict(nnx.split(owner)[1])


def read(owner: Any) -> State:
    """The arrays of an owner."""
    return by_path(nested(owner))


def by_path(arrays: Mapping[str, Any]) -> State:
    """Nested arrays by path."""
    return {join("", key): leaf for key, leaf in tree_util.tree_flatten_with_path(arrays)[0]}


def fixed(owner: Any) -> Any:
    """All of an owner but its arrays."""
    return sys.modules["flax.nnx"].graphdef(owner)


def rebuild(owner: Any, state: State) -> Any:
    """A copy of an owner with other arrays."""
    nnx = sys.modules["flax.nnx"]
    definition, old = nnx.split(owner)
    return nnx.merge(definition, _replaced(old, state))


def write(owner: Any, state: State) -> None:
    """Put changed arrays into the variables of an owner."""
    nnx = sys.modules["flax.nnx"]
    changed = nnx.filter_state(nnx.split(owner)[1], lambda path, _: "/".join(map(str, path)) in state)
    nnx.update(owner, _replaced(changed, state))


def _replaced(old: Any, state: State) -> Any:
    nnx = sys.modules["flax.nnx"]
    pure = tree_util.tree_map_with_path(lambda key, leaf: state.get(join("", key), leaf), nnx.to_pure_dict(old))
    nnx.replace_by_pure_dict(old, pure)
    return old
