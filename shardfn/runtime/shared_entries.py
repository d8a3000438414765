"""Sharded functions of one function with the same options share what they keep, as those of `jax.jit` do.

A function holds what is kept of its calls, and frees it when it goes. It is another function where its code, its defaults, a
variable that it closes over, or a global that it names is another object than before.
"""

from __future__ import annotations

import dataclasses
import os
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shardfn.frontend.closed_over import ClosedOverArguments
from shardfn.frontend.options import Options
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
      function: what is sharded.
      options: those of `shard`.
    """
    if not isinstance(function, types.FunctionType) or not _is_settled(options):
        return Kept()
    try:
        key = tuple(_frozen(getattr(options, f.name)) for f in dataclasses.fields(options))
        hash(key)
    except TypeError:
        return Kept()
    held, reads = vars(function).get(_NAME), _reads(function)
    if not isinstance(held, _KeptByOptions) or held.owner() is not function:  # that of a function that it wraps
        held = vars(function)[_NAME] = _KeptByOptions(function)
    if len(held.reads) != len(reads) or any(a is not b for a, b in zip(held.reads, reads, strict=True)):
        held.by_options, held.reads = {}, reads
    return held.by_options.setdefault(key, Kept(is_shared=True))


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
