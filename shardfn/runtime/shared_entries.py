"""Sharded functions of one function with the same options share what they keep, as those of `jax.jit` do.

What is kept of the calls of a function, a partial or a callable object goes when that goes. It is another function where its
code, its defaults, a variable that it closes over, or a global that it names is another object than before. A bound method is a
new one each time that it is looked up, here as for `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shardfn.frontend.closed_over import ClosedOverArguments
from shardfn.frontend.options import Options
from shardfn.frontend.plain_objects import is_plain
from shardfn.runtime.entries import Entries
from shardfn.runtime.executable import Entry, Results
from shardfn.search import BUILT_IN

_NAME = "__shardfn_kept__"


@dataclasses.dataclass
class Kept:
    """What sharded functions of one function, with the same options, keep of its calls."""

    entries: Entries[Entry] = dataclasses.field(default_factory=Entries)
    closed_over: Entries[ClosedOverArguments] = dataclasses.field(default_factory=Entries)
    results_of: Entries[Results] = dataclasses.field(default_factory=Entries)
    """Of calls that were traced, and not planned."""
    is_shared: bool = False


class _KeptByOptions:
    """What a function holds. Copies and pickles of it are empty."""

    def __init__(self, owner: Callable[..., Any] | None = None):
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)
        self.reads: tuple[Any, ...] = ()
        self.by_options: dict[Any, Kept] = {}
        self.methods: dict[Any, Any] = {}
        """The sharded methods of an object, by those of its class."""
        _HELD.add(self)

    def __reduce__(self) -> Any:
        return _KeptByOptions, ()


_HELD: weakref.WeakSet[_KeptByOptions] = weakref.WeakSet()


def forget_shared() -> None:
    """Let no later sharded function share what those before it keep. They keep it."""
    for held in _HELD:
        held.by_options = {}


def kept_for(function: Callable[..., Any], options: Options) -> Kept:
    """What is kept of the calls of a function with some options; nothing yet if neither can be recognised.

    Args:
      function: what is sharded; an object of a Flax NNX or Equinox module shares with its copies already.
      options: those of `shard`.
    """
    code = _code_of(function)
    if code is None or not _is_settled(options):
        return Kept()
    try:
        key = tuple(_frozen(getattr(options, f.name)) for f in dataclasses.fields(options))
        hash(key)
    except TypeError:
        return Kept()
    held, reads = held_by(function), (type(function), *_reads(code))
    if held is None:
        return Kept()
    if len(held.reads) != len(reads) or any(a is not b for a, b in zip(held.reads, reads, strict=True)):
        held.by_options, held.reads = {}, reads
    return held.by_options.setdefault(key, Kept(is_shared=True))


def _code_of(function: Any) -> types.FunctionType | None:
    """The function that a call of `function` runs, where it stays the same object."""
    if isinstance(function, functools.partial):
        return _code_of(function.func)
    if not isinstance(function, types.FunctionType | types.MethodType) and is_plain(function):
        function = type(function).__call__
    return function if isinstance(function, types.FunctionType) else None


_OF_OBJECTS: dict[int, _KeptByOptions] = {}
"""By the ids of objects that are no functions."""


def held_by(function: Any, makes: bool = True) -> _KeptByOptions | None:
    """What is kept of a function or of an object, outside of the object.

    Args:
      function: the function or the object.
      makes: whether to begin it.

    Returns:
      It; None if there is nothing yet, or it cannot be told when the object goes.
    """
    is_object = not isinstance(function, types.FunctionType)
    place: Any = _OF_OBJECTS if is_object else vars(function)
    name: Any = id(function) if is_object else _NAME
    held = place.get(name)
    if isinstance(held, _KeptByOptions) and held.owner() is function:  # and is not that of a function that it wraps
        return held
    if not makes:
        return None
    try:
        held = place[name] = _KeptByOptions(function)
    except TypeError:
        return None
    if is_object:
        weakref.finalize(function, lambda: _OF_OBJECTS.pop(name, None)).atexit = False
    return held


def _is_settled(options: Options) -> bool:
    """Whether options mean the same the next time: a file may change, and so may what a name of a search stands for."""
    return not isinstance(options.layout, str | os.PathLike) and options.search_mode in (None, *BUILT_IN)


def _frozen(value: Any) -> Any:
    """A value that does not change with the containers that it comes from."""
    if isinstance(value, Mapping):
        return type(value), tuple((_frozen(k), _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_frozen, value))
    return type(value), value


def _reads(function: types.FunctionType) -> tuple[Any, ...]:
    """The objects that a function is made of: its code, its defaults, and the variables and globals that it names."""
    defaults = function.__defaults__, function.__kwdefaults__
    cells = (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return (function.__code__, *defaults, *cells, *named)
