"""Flax NNX objects, as the owner of a function or among its arguments: their arrays by path, and back into the objects.

An owner is any pytree that holds NNX modules, optimizers, random streams or variables. A variable that stands at several
places has one path. Nothing here is used unless the user's program has imported Flax NNX.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.frontend.paths import join
from shardfn.frontend.plain_objects import is_hashable

State = dict[str, Any]
"""Arrays, or objects, by path."""


def is_module(owner: Any) -> bool:
    """Whether an object is an NNX module."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(owner, nnx.Module)


def is_variable(value: Any) -> bool:
    """Whether a value is an NNX variable."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """What cannot be hashed. What cannot be compared either, such as an object with a NumPy array inside, equals itself only."""

    attribute: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or type(self.attribute) is not type(other.attribute):
            return False
        mine, others = (getattr(held.attribute, "value", held.attribute) for held in (self, other))
        try:
            return mine is others or bool(mine == others)
        except ValueError:
            return False

    def __hash__(self) -> int:
        return 0


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Definition:
    """An `nnx.GraphDef`, all of NNX objects but their arrays, as a dictionary key. It may hold what cannot be hashed."""

    graphdef: Any
    code: int = dataclasses.field(compare=False)
    """The hash: each call needs it, and it walks through all objects."""

    @classmethod
    def of(cls, graphdef: Any, *, is_watched: bool = False) -> Definition:
        """The definition of a `GraphDef`.

        Args:
          graphdef: the definition.
          is_watched: whether calls notice changes of what is in it (`frontend.watch`); else a copy is kept.
        """
        try:
            return cls(graphdef, hash(graphdef))
        except TypeError:
            keep = _same if is_watched else copy.deepcopy
            rows = [(key, a if is_hashable(a) else _Held(keep(a))) for key, a in graphdef.attributes]
            return cls((tuple(graphdef.nodes), tuple(rows)), graphdef.num_leaves)

    def __hash__(self) -> int:
        return self.code


@dataclasses.dataclass(frozen=True)
class HeldObjects:
    """The NNX objects among the arguments of a call. What the call changes in them is written back."""

    nodes: State = dataclasses.field(default_factory=dict)
    """The objects by path."""
    places: Mapping[str, tuple[Any, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    """By argument: its tree structure with the objects as leaves, and the path of each leaf, "" if the leaf is no object."""
    donated: frozenset[str] = frozenset()
    """The arguments that the call donates."""

    def __bool__(self) -> bool:
        return bool(self.nodes)

    @functools.cached_property
    def _parts(self) -> tuple[Any, Any]:
        return _split(self.nodes)

    @functools.cached_property
    def definition(self) -> Definition:
        """What of the objects is no array."""
        return Definition.of(self._parts[0])

    def arrays(self, arguments: State) -> State:
        """The arguments with nested arrays in the place of the objects."""
        found = _nested(self._parts[1])
        return self._filled(arguments, lambda path, _: found.get(path, {}))

    def filled(self, arguments: State) -> tuple[HeldObjects, State, State]:
        """Copies of the objects that hold the arrays of `arguments`, as `arrays` gives them.

        Returns:
          The copies, the arguments with them in their places, and the arrays by path.
        """
        given: State = {}
        self._filled(arguments, lambda path, leaf: given.setdefault(path, leaf))
        before = by_path(given)
        nodes = _merged(self._parts, before)
        return dataclasses.replace(self, nodes=nodes), self._filled(arguments, lambda path, _: nodes[path]), before

    def write(self, changed: State) -> None:
        """Put changed arrays into the objects, which are as they were when their arrays were taken."""
        _update(self.nodes, self._parts[1], changed)

    def attributes(self) -> list[Any]:
        """What the objects hold that is none of NNX."""
        return list(attributes(self.nodes).values()) if self.nodes else []

    def is_donated(self, path: str) -> bool:
        """Whether an array belongs to a donated argument: the call takes its memory, and has to return it though unchanged."""
        return _is_below(path, self.donated)

    def holds(self, path: str) -> bool:
        """Whether an array is one of the objects' arrays."""
        return _is_below(path, self.nodes)

    def _filled(self, arguments: State, made: Callable[[str, Any], Any]) -> State:
        filled = dict(arguments)
        for name, (treedef, paths) in self.places.items():
            rows = zip(paths, treedef.flatten_up_to(arguments[name]), strict=True)
            filled[name] = treedef.unflatten([made(path, leaf) if path else leaf for path, leaf in rows])
        return filled


def _is_below(path: str, heads: Iterable[str]) -> bool:
    """Whether a path is one of `heads`, or a path inside one."""
    return f"{path}/".startswith(tuple(f"{head}/" for head in heads))


def held_objects(arguments: Iterable[tuple[str, Any]], donated: frozenset[str] = frozenset()) -> HeldObjects:
    """The NNX objects among arguments, given by name; an `nnx.State` is plain data.

    Args:
      arguments: the names and values.
      donated: the names of those that the call donates.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return HeldObjects()
    nodes: State = {}
    places: dict[str, tuple[Any, tuple[str, ...]]] = {}

    def is_object(node: Any) -> bool:
        return isinstance(node, nnx.Pytree | nnx.Variable)

    def is_leaf(node: Any) -> bool:
        return is_object(node) or isinstance(node, nnx.State)

    for name, value in arguments:
        leaves, treedef = tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
        paths = tuple(join(name, key) if is_object(leaf) else "" for key, leaf in leaves)
        if any(paths):
            places[name] = treedef, paths
            nodes |= {path: leaf for path, (_, leaf) in zip(paths, leaves, strict=True) if path}
    return HeldObjects(nodes, places, donated & places.keys())


def shared(owner: Any, objects: State) -> list[str]:
    """The paths of variables of an owner that also stand in other objects."""
    nnx = sys.modules["flax.nnx"]
    if not isinstance(owner, nnx.Pytree):
        return []
    mine = {id(variable) for _, variable in nnx.iter_graph(objects) if isinstance(variable, nnx.Variable)}
    return ["/".join(map(str, path)) for path, variable in nnx.iter_graph(owner) if id(variable) in mine]


def read(owner: Any) -> State:
    """The arrays of an owner by path; every shared variable once."""
    return by_path(_nested(_split(owner)[1]))


def partition_specs(owner: Any) -> State:
    """The `PartitionSpec` of each array of an owner, by path; it names no axis where the variable has no annotation."""
    return by_path(_nested(sys.modules["flax.nnx"].get_partition_spec(_split(owner)[1])))


def by_path(arrays: Mapping[str, Any]) -> State:
    """Nested arrays by path."""
    return {join("", key): leaf for key, leaf in tree_util.tree_flatten_with_path(arrays)[0]}


def definition(owner: Any) -> Definition:
    """What of an owner is no array."""
    return Definition.of(sys.modules["flax.nnx"].graphdef(owner), is_watched=True)


def attributes(owner: Any) -> State:
    """Every attribute of an owner that is no array, by path: its value, or the type of an object or a variable. What is shared
    has one path."""
    nnx = sys.modules["flax.nnx"]
    return {
        "/".join(map(str, path)): type(value) if isinstance(value, nnx.Pytree | nnx.Variable) else value
        for path, value in nnx.iter_graph(owner)
        if not (isinstance(value, jax.Array | np.ndarray) or (path and str(path[-1]).startswith("_pytree__")))
    }


def rebuild(owner: Any, state: State) -> Any:
    """A copy of an owner with other arrays."""
    return _merged(_split(owner), state)


def write(owner: Any, changed: State) -> None:
    """Put changed arrays into the variables of an owner."""
    _update(owner, _split(owner)[1], changed)


def with_values(owner: Any, values: State) -> dict[Any, Any] | None:
    """Values in the place of the arrays of an owner, nested by its paths, as `nnx.State` takes them.

    Returns:
      The nested dictionary; None if the values are of other paths, as where variables are shared with another owner, or if a
      variable holds several arrays.
    """
    variables = _split(owner)[1]
    nested = _nested(variables)
    flat = sys.modules["flax.nnx"].to_flat_state(variables)
    if by_path(nested).keys() != values.keys() or len(list(flat)) != len(values):
        return None
    return tree_util.tree_map_with_path(lambda key, _: values[join("", key)], nested)


# ---- an owner as its `nnx.GraphDef` and its `nnx.State`


def _split(owner: Any) -> tuple[Any, Any]:
    return sys.modules["flax.nnx"].split(owner)


def _nested(variables: Any) -> Any:
    """The arrays of an `nnx.State` as nested dictionaries."""
    return sys.modules["flax.nnx"].to_pure_dict(variables)


def _merged(parts: tuple[Any, Any], state: State) -> Any:
    """A copy of a split owner with other arrays."""
    definition, variables = parts
    return sys.modules["flax.nnx"].merge(definition, _replaced(variables, state))


def _update(owner: Any, variables: Any, changed: State) -> None:
    """Put changed arrays into an owner; `variables` are its own. Others are left alone: they may be of an outer trace."""
    nnx = sys.modules["flax.nnx"]
    held = {path[:end] for path in changed for end in (*(i for i, sign in enumerate(path) if sign == "/"), len(path))}
    of_changed = nnx.filter_state(variables, lambda path, _: "/".join(map(str, path)) in held)
    nnx.update(owner, _replaced(of_changed, changed))


def _replaced(variables: Any, state: State) -> Any:
    """An `nnx.State` with other arrays. A variable may hold several."""
    leaves, treedef = tree_util.tree_flatten(variables)
    rows = zip(by_path(_nested(variables)), leaves, strict=True)
    return treedef.unflatten([state.get(path, leaf) for path, leaf in rows])
