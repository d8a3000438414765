"""Plain Python objects that hold arrays: the instances of `Cell` and of the user's own classes.

Their arrays are found in attributes, lists, tuples, dicts, pytrees and other Cells, and in the Cells that sharded functions,
bound methods and partials there are made of; of other plain objects inside a Cell, only in their Cells. A call runs on a copy
that holds the traced arrays, so that the user's object keeps its own; what inside refers to the object refers to the copy there.
"""

from __future__ import annotations

import argparse
import collections
import configparser
import copy
import enum
import functools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.frontend.other_words import OF_PARAMETERS, refuse_attribute
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import is_cell, shape_of
from shardfn.frontend.wrapped import PARTS, Layers, unwrapped, wrapped

State = dict[str, Any]
"""Arrays, or objects, by path."""

SHARDED = "_shardfn_sharded"
"""Attribute of a Cell that holds its sharded call; a rebuilt copy goes without."""

LIBRARIES = frozenset({*sys.stdlib_module_names, "jax", "jaxlib", "numpy", "flax", "optax", "shardfn"}) - {"__main__"}
"""Top-level modules whose classes are no user's."""


def is_users_module(name: Any) -> bool:
    """Whether a module, by its name, is none of the standard library, of JAX, or of the libraries that are built in here."""
    return str(name).partition(".")[0] not in LIBRARIES


def is_users_class(kind: type) -> bool:
    """Whether a class is written in Python, in a user's module."""
    is_heap_type = bool(kind.__flags__ & 1 << 9)
    return is_heap_type and (
        is_users_module(kind.__module__) or kind.__module__ == "builtins"
    )  # of code without a `__name__`


_HOLDERS = (
    argparse.Namespace, types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap,
    weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, configparser.RawConfigParser, queue.Queue,
    threading.Event, threading.Semaphore, np.poly1d,
)  # fmt: skip
"""Classes of the standard library and of NumPy whose instances hold what a program puts there, in attributes."""


def is_plain(value: Any) -> bool:
    """Whether an object is an instance of a user's class, or one of `_HOLDERS`; a Flax Linen module has rules of its own, and a
    member of an enum is a value."""
    if isinstance(value, _HOLDERS):
        return True
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(value, linen.Module)
    return is_users_class(type(value)) and not isinstance(value, type | enum.Enum) and not is_linen


def is_holder(value: Any) -> bool:
    """Whether any other object holds arrays in its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type) and bool(read(value))


def is_array(value: Any) -> bool:
    """Whether a value is an array that JAX takes, or a shape in the place of one. Python's numbers are none, nor are arrays with
    a mask and those of other libraries."""
    is_one = isinstance(value, _ARRAYS) or hasattr(type(value), "__jax_array__")
    return is_one and not isinstance(value, np.ma.MaskedArray) and shape_of(value) is not None


_ARRAYS = jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    members = (item for base in kind.__mro__ for item in vars(base).items())
    rows = ((name, member) for name, member in members if isinstance(member, types.MemberDescriptorType))
    return tuple((name, member) for name, member in rows if name != "__dict__")


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots too."""
    found = dict(getattr(value, "__dict__", {}))
    for name, member in _slots(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def _is_inner(value: Any) -> bool:
    """Whether an object inside another one is a plain object and no container: it may hold Cells, or refer to the other one."""
    return is_plain(value) and not isinstance(value, _CONTAINERS) and tree_util.all_leaves([value])


def _attribute_items(value: Any, path: str) -> list[tuple[Any, str, Any]]:
    return [(key, join(path, (tree_util.GetAttrKey(key),)), item) for key, item in attributes_of(value).items()]


def _held_cell(value: Any) -> tuple[Any, Layers] | None:
    """The Cell that a callable is made of, and how; None for any other value, and for a Cell itself."""
    held = _held_object(value)
    return held if held is not None and is_cell(held[0]) else None


def _held_object(value: Any) -> tuple[Any, Layers] | None:
    """What a bound method, a partial or a sharded function is made of, and how."""
    is_made = isinstance(value, types.MethodType | functools.partial) or hasattr(type(value), PARTS)
    return unwrapped(value) if is_made else None


_NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _items(value: Any, path: str) -> list[tuple[Any, str, Any]] | None:
    """Key, path and value of each item of the object itself (at the empty path), a Cell, a list, a tuple, a deque or a dict;
    None for what is none of these."""
    if is_cell(value) or not path:
        return _attribute_items(value, path)
    if isinstance(value, list | tuple | collections.deque):
        fields = getattr(value, "_fields", None)  # of a named tuple
        items = enumerate(value) if fields is None else zip(fields, value, strict=True)
        entry = tree_util.SequenceKey if fields is None else tree_util.GetAttrKey
    elif isinstance(value, dict):
        items, entry = value.items(), tree_util.DictKey
    else:
        return None
    return [(key, join(path, (entry(key),)), item) for key, item in items]


def _walk(
    value: Any,
    path: str,
    found: State,
    seen: dict[int, Any],
    is_leaf: Callable[[Any], bool] = lambda value: False,
    of_cell: bool = False,
    is_inner: bool = False,
) -> None:
    """The arrays of a nest, and what `is_leaf` says; a Cell that stands at several places (tied weights, a parent) is met at
    the first. `of_cell` says that the nest is part of a Cell, and `is_inner` of a plain object there, of which only Cells
    count. `seen` receives the objects, by their ids."""
    if (held := _held_cell(value)) is not None:
        value = held[0]
    if is_cell(value) or not path:
        if id(value) in seen:
            return
        seen[id(value)] = value
        of_cell, is_inner = of_cell or is_cell(value), False
    elif isinstance(value, _CONTAINERS) and _NUMBERS.issuperset(
        map(type, value.values() if isinstance(value, dict) else value)
    ):  # long lists of them are usual
        return
    if (items := _items(value, path)) is not None:
        for _, inside, item in items:
            _walk(item, inside, found, seen, is_leaf, of_cell, is_inner)
    elif not (is_leaf(value) or tree_util.all_leaves([value])):
        for key, leaf in tree_util.tree_flatten_with_path(value, is_leaf)[0]:
            _walk(leaf, join(path, key), found, seen, is_leaf, of_cell, is_inner)
    elif is_array(value):
        if not is_inner:
            found[path] = value
        if of_cell and (said := getattr(value, "__dict__", None)):
            for name in OF_PARAMETERS.keys() & said:
                refuse_attribute(name, said[name], path)
    elif of_cell and _is_inner(value) and id(value) not in seen:
        seen[id(value)] = value
        for _, inside, item in _attribute_items(value, path):
            _walk(item, inside, found, seen, is_leaf, True, True)


def _shallow(value: Any) -> Any:
    """A copy of an object with the same attributes. What its class does when it is copied is for copies that a user makes."""
    try:
        new = object.__new__(type(value))
    except TypeError:  # of a built-in kind
        return alike(value, _content(value)) if isinstance(value, _CONTAINERS) else copy.copy(value)
    return _with_attributes(new, value)


_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, tuple, collections.deque)


def _content(value: Any) -> dict[Any, Any]:
    return dict(value.items() if isinstance(value, dict) else enumerate(value))


def alike(value: Any, items: dict[Any, Any]) -> Any:
    """A container of the same class, with the same attributes, that holds other items; no code of the class runs.

    >>> alike(collections.Counter(a=2), {"a": 3})
    Counter({'a': 3})
    """
    kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    new = tuple.__new__(type(value), items.values()) if kind is tuple else kind.__new__(type(value))
    if kind is list:
        list.extend(new, items.values())
    elif kind is collections.deque:
        collections.deque.__init__(new, items.values(), value.maxlen)
    elif issubclass(kind, dict):
        for key, item in items.items():
            kind.__setitem__(new, key, item)
    return _with_attributes(new, value)


def _with_attributes(new: Any, value: Any) -> Any:
    """An object with the attributes of another one."""
    own = getattr(value, "__dict__", None)
    if own is value:  # class Config(dict): def __init__(self, ...): self.__dict__ = self
        new.__dict__ = new
    elif own is not None:
        new.__dict__.update(own)
    for name, member in _slots(type(value)):
        if (held := attributes_of(value)).get(name, new) is not new:
            member.__set__(new, held[name])
    return new


def _put(owner: Any, name: str, value: Any) -> None:
    if name in getattr(owner, "__dict__", {}):
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)


def _with_state(
    value: Any, path: str, state: State, met: dict[int, Any], *, in_place: bool, of_cell: bool = False
) -> Any:
    """A nest with the arrays of `state`.

    Args:
      value: a nest of Cells and containers.
      path: where it stands.
      state: arrays by path.
      met: for each Cell, by its id, what it became.
      in_place: whether Cells are changed themselves, and containers without new arrays kept; else all is copied.
      of_cell: whether it is part of a Cell.
    """
    of_cell = of_cell or is_cell(value)
    held = _held_object(value)
    if held is not None and (is_cell(held[0]) or id(held[0]) in met):
        owner, layers = held
        new = (
            met[id(owner)]
            if id(owner) in met
            else _with_state(owner, path, state, met, in_place=in_place, of_cell=of_cell)
        )
        return value if new is owner else wrapped(new, layers)
    items = _items(value, path)
    if is_cell(value) or not path:
        if id(value) not in met:
            new = met[id(value)] = value if in_place else _shallow(value)
            for key, inside, item in items or ():
                changed = _with_state(item, inside, state, met, in_place=in_place, of_cell=of_cell)
                if changed is not item:
                    _put(new, key, changed)
        return met[id(value)]
    if items is not None:
        changed = {
            key: _with_state(item, inside, state, met, in_place=in_place, of_cell=of_cell)
            for key, inside, item in items
        }
        if (in_place or isinstance(value, tuple)) and all(changed[key] is item for key, _, item in items):
            return value
        return alike(value, changed)
    if not tree_util.all_leaves([value]):
        return tree_util.tree_map_with_path(
            lambda key, leaf: _with_state(leaf, join(path, key), state, met, in_place=in_place, of_cell=of_cell), value
        )
    if path in state or not _is_inner(value):
        return state.get(path, value)
    if id(value) not in met:
        new = met[id(value)] = _shallow(value) if not in_place and _reaches(value, met, of_cell, set()) else value
        if new is not value or (in_place and of_cell):
            for key, inside, item in _attribute_items(value, path):
                changed = _with_state(item, inside, state, met, in_place=in_place, of_cell=of_cell)
                if changed is not item:
                    _put(new, key, changed)
    return met[id(value)]


def _reaches(value: Any, met: dict[int, Any], of_cell: bool, seen: set[int]) -> bool:
    """Whether a nest holds an object that was copied or, as part of a Cell, a Cell."""
    if (held := _held_object(value)) is not None:
        value = held[0]
    if (of_cell and is_cell(value)) or met.get(id(value), value) is not value:
        return True
    if id(value) in seen or type(value) in _NUMBERS:
        return False
    seen.add(id(value))
    if isinstance(value, _CONTAINERS):
        inside = value.values() if isinstance(value, dict) else value
    elif not tree_util.all_leaves([value]):
        inside = tree_util.tree_leaves(value)
    else:
        inside = attributes_of(value).values() if _is_inner(value) else ()
    return any(_reaches(item, met, of_cell, seen) for item in inside)


def read(owner: Any) -> State:
    """An object's arrays by path."""
    found: State = {}
    _walk(owner, "", found, {})
    return found


def inner_objects(owner: Any) -> list[Any]:
    """The plain objects inside a Cell, of which only the Cells inside count."""
    seen: dict[int, Any] = {}
    _walk(owner, "", {}, seen)
    return [value for value in seen.values() if not is_cell(value)]


def rebuild(owner: Any, state: State) -> Any:
    """A copy of an object that holds other arrays."""
    return _with_state(owner, "", state, {}, in_place=False)


def write(owner: Any, state: State) -> None:
    """Put arrays into an object: those that are attributes are set; those in lists, dicts and pytrees are replaced with their
    container."""
    _with_state(owner, "", state, {}, in_place=True)


def attributes(owner: Any) -> State:
    """Every attribute that is no array, by path, but for cached properties; what cannot be hashed counts as itself only."""
    return {path: row for path, *row in _rows(owner)}


def _rows(owner: Any) -> Iterator[tuple[Any, ...]]:
    met: dict[int, int] = {}

    def walk(value: Any, path: str, of_cell: bool = False, is_inner: bool = False) -> Iterator[tuple[Any, ...]]:
        if (held := _held_cell(value)) is not None:
            value = held[0]
        is_object = is_cell(value) or not path
        of_cell, is_inner = of_cell or is_cell(value), is_inner and not is_object
        is_listed = not is_inner
        items, rows = _items(value, path), list[tuple[Any, ...]]()
        if is_object:
            is_new = id(value) not in met
            rows = [(path, type(value), met.setdefault(id(value), len(met)))]
            items = items if is_new else []
        elif items is not None:
            rows = [(path, type(value), len(items))]
        elif not tree_util.all_leaves([value]):
            keyed, structure = tree_util.tree_flatten_with_path(value)
            rows = [(path, structure)]
            items = [(key, join(path, key), leaf) for key, leaf in keyed]
        elif not is_array(value):
            rows = [(path, hashed(value))]
            if of_cell and _is_inner(value) and id(value) not in met:
                met[id(value)] = len(met)
                items, is_inner = _attribute_items(value, path), True
        yield from rows if is_listed else ()
        for key, inside, item in items or ():
            if not (is_object and isinstance(getattr(type(value), str(key), None), functools.cached_property)):
                yield from walk(item, inside, of_cell, is_inner)

    return walk(owner, "")


def hashed(value: Any) -> Any:
    """A value that is no array as part of a dictionary key."""
    return exactly(value) if is_hashable(value) else (type(value), id(value))


def exactly(value: Any) -> Any:
    """A key that tells a value from others that equal it: by its type, by the sign of a zero; in tuples and frozensets, too.

    >>> exactly((0.0, 1)) == exactly((-0.0, 1)), exactly(1) == exactly(True), exactly(float("nan")) == exactly(float("nan"))
    (False, False, True)
    """
    kind = type(value)
    if kind is float or kind is complex or isinstance(value, np.inexact):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, tuple(map(exactly, value))
    return kind, frozenset(map(exactly, value)) if kind is frozenset else value


def is_hashable(value: Any) -> bool:
    """Whether a value has a hash."""
    try:
        hash(value)
    except (TypeError, ValueError):  # that of a memoryview
        return False
    return True


def arrays_of_cells(leaves: Sequence[Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """The leaves of a pytree, with the arrays by path of each that is a Cell; a Cell that was met before has none.

    Args:
      leaves: the leaves.
      is_leaf: which objects that hold an array stand for it.
    """
    seen: dict[int, Any] = {}

    def arrays(cell: Any) -> State:
        found: State = {}
        _walk(cell, "", found, seen, is_leaf)
        return found

    return [arrays(leaf) if is_cell(leaf) else leaf for leaf in leaves]


def cells_with_arrays(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The inverse of `arrays_of_cells`, with other arrays: copies of the Cells, and what stands for the other leaves."""
    met: dict[int, Any] = {}
    rows = zip(leaves, arrays, strict=True)
    return [_with_state(leaf, "", part, met, in_place=False) if is_cell(leaf) else part for leaf, part in rows]
