"""What a value is made of, for the comparison of what a call read (`frontend.recorder`)."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import os
import random
import types
from collections.abc import ItemsView, KeysView, Sequence, ValuesView
from typing import Any

import numpy as np

from shardfn.frontend.watch import ATOM, ATOMS, BYTES, ENTRIES, FACTORY, ITEMS, SET, VALUES, Kind
from shardfn.frontend.wrapped import PARTS


def parts_of(value: Any) -> tuple[str, ...] | None:
    """The attributes that make up a value, for `SELF` and `MADE`."""
    if isinstance(value, types.MethodType):
        return "__func__", "__self__"
    if isinstance(value, functools.partial):
        return "func", "args", "keywords"
    if isinstance(value, types.CellType):
        return ("cell_contents",)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return ("mapping",) if hasattr(value, "mapping") else ("_mapping",)
    return getattr(type(value), PARTS, None)


def _parts_of_function(value: types.FunctionType) -> tuple[str, ...]:
    """Its attributes, and its defaults if a program can change them; of a `functools.singledispatch` what it chooses from."""
    if hasattr(value, "registry") and hasattr(value, "_clear_cache"):
        return ("registry",)
    defaults = (value.__defaults__ or (), (value.__kwdefaults__ or {}).values())
    changing = (not ATOMS.issuperset(map(type, values)) for values in defaults)
    parts = zip(("__dict__", "__defaults__", "__kwdefaults__"), (bool(value.__dict__), *changing), strict=True)
    return tuple(name for name, is_one in parts if is_one)


def content_of(value: Any) -> tuple[Kind, Sequence[Any]] | None:
    """How a container, or a number or a string of a class of its own, is compared, and by which parts."""
    if isinstance(value, set | frozenset):
        return SET, ()
    if isinstance(value, bytearray | memoryview | array.array | ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return BYTES, ()
    if isinstance(value, dict | types.MappingProxyType | type(os.environ)):
        return ENTRIES, (*value, FACTORY) if isinstance(value, collections.defaultdict) else (*value,)
    if isinstance(value, list | tuple | collections.deque):
        return (VALUES, ()) if ATOMS.issuperset(map(type, value)) else (ITEMS, range(len(value)))
    return (ATOM, ()) if isinstance(value, int | float | complex | str | bytes) else None


def may_change(value: Any) -> bool:
    """Whether a value is a container whose content may be another one later."""
    content = content_of(value)
    if content is None or content[0] is ATOM:
        return False
    return content[0] is ITEMS or not isinstance(value, tuple | frozenset)


def is_consumed(value: Any) -> bool:
    """Whether reading a value changes it, out of sight: generators, files, random number generators."""
    if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | np.random.BitGenerator):
        return True
    return hasattr(type(value), "__next__")
