"""What a trace leaves in the objects that it reached, but of which it runs on no copy: nothing, or the call is refused.

A call gets a copy of the object that it belongs to, and of the Cells and containers inside; arrays that it writes there are
written back. Other objects in it are the program's own: an array of a trace that is written there would outlive the trace.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

from jax import tree_util
from jax.core import Tracer

from shardfn.errors import StrategyError, fail
from shardfn.frontend.plain_objects import attributes_of
from shardfn.frontend.watch import ABSENT, is_same


@dataclasses.dataclass(frozen=True)
class LeftObject:
    """An object as it was when a trace first reached it."""

    obj: Any
    path: str
    attributes: dict[str, Any]
    tracers: frozenset[int]
    """Of an outer trace, by their ids."""

    @classmethod
    def of(cls, obj: Any, path: str) -> LeftObject:
        """An object as it is now."""
        attributes = _attributes(obj)
        return cls(obj, path, attributes, frozenset(map(id, tracers_in(attributes.values()))))

    def written(self) -> list[str]:
        """The attributes that hold arrays of the trace."""
        return [
            name
            for name, value in _attributes(self.obj).items()
            if any(id(tracer) not in self.tracers for tracer in tracers_in([value]))
        ]

    def replaced(self) -> list[str]:
        """The attributes that now hold another value. One that was not there before is taken for a cache."""
        now = _attributes(self.obj)
        rows = ((name, value, now.get(name, ABSENT)) for name, value in self.attributes.items())
        return [name for name, value, found in rows if found is not value and not is_same(found, value)]

    def restore(self, names: Iterable[str]) -> None:
        """Set attributes to what they were."""
        for name in names:
            if name in self.attributes:
                object.__setattr__(self.obj, name, self.attributes[name])
            else:
                object.__delattr__(self.obj, name)


def _attributes(obj: Any) -> dict[str, Any]:
    """What a program keeps in an object; of a function not its globals."""
    return dict(vars(obj)) if isinstance(obj, types.FunctionType) else attributes_of(obj)


def restored(objects: Iterable[LeftObject], names: Callable[[LeftObject], list[str]]) -> list[str]:
    """The places of attributes of objects, which become what they were."""
    places = []
    for one in objects:
        changed = names(one)
        places += [f"{one.path}.{name}" for name in changed]
        one.restore(changed)
    return places


def refuse_written(name: str, objects: Iterable[LeftObject]) -> None:
    """Refuse a call that wrote arrays of its trace where they are not written back; the attributes become what they were.

    Raises:
      StrategyError: the call did so.
    """
    if places := restored(objects, LeftObject.written):
        fail(StrategyError, f"the call of `{name}` writes arrays to an object whose arrays are not written back",
             where=", ".join(places),
             why="arrays are written back to the object that the call belongs to, and to the Cells, lists and dicts in it",
             fix="return the array; or keep it in an attribute of the object itself that `__init__` sets to an array, or make "
             "the inner object a `shardfn.mindspore.Cell` (in a Flax NNX module an `nnx.Module`)")  # fmt: skip


def tracers_in(values: Iterable[Any]) -> list[Tracer]:
    """The tracers in values and in the containers and pytrees there."""
    found, todo, seen = [], list(values), set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, Tracer):
            found.append(value)
        elif isinstance(value, dict | list | tuple | collections.deque):  # whose keys JAX need not be able to sort
            if id(value) not in seen:
                seen.add(id(value))
                todo += value.values() if isinstance(value, dict) else value
        elif not tree_util.all_leaves([value]):
            todo += tree_util.tree_leaves(value)
    return found
