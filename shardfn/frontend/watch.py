"""Which Python state a call read when it was traced, and whether that is still the same.

A compiled call keeps what Python read in its trace. While a call is traced, `recording` notes every attribute that it reads
of the object that it belongs to, and of the objects that it reaches from there: instances of users' classes, Flax NNX and
Equinox modules, Cells. Of a list, a dict, a set, a partial, a function or a class that is read, everything inside counts.
The notes are a `Watch`: a small program that looks the same places up in an object and compares. Each place costs less
than a microsecond.

Arrays that are arguments of the compiled call are not watched. Closures and global variables are not either: `jax.jit` keeps
them, and so does `shard`.
"""

from __future__ import annotations

import dataclasses
import decimal
import enum
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np

from shardfn.frontend.plain_objects import exactly


class _Nothing(enum.Enum):
    ABSENT = "no attribute of this name"
    UNSEEN = "an object that was not reached yet"
    CONTENT = "what an object of a user's class holds as the list, the number or the like that it is as well"
    FACTORY = "what makes the missing entries of a defaultdict"
    IDENTITY = "which object it is, where the call looked something up by it"


ABSENT, UNSEEN, CONTENT, FACTORY, IDENTITY = _Nothing


class Kind(NamedTuple):
    """How objects of one kind are compared: by a header, then part by part."""

    header: Callable[[Any], Any]
    part: Callable[[Any, Any], Any]


class Ref(NamedTuple):
    """A part that is an object of its own: the number of its node."""

    node: int


@dataclasses.dataclass(frozen=True)
class Node:
    """One object that a call read, without the object."""

    kind: Kind
    header: Any
    parts: tuple[tuple[Any, Any], ...]
    """Keys, and the values or `Ref`s there."""
    path: str
    """How messages speak of it."""
    held: Callable[[], Any] | None = None
    """The object itself, or None if it is gone, where it is not reached from the root."""

    def is_header_of(self, obj: Any) -> bool:
        """Whether an object is of the same kind and, of a container, has the same keys."""
        try:
            found, wanted = self.kind.header(obj), self.header
        except Exception:  # another kind of object
            return False
        if self.kind is VALUES or self.kind is ENTRIES:
            if len(found) != len(wanted):
                found, wanted = (tuple(key for key in keys if not is_gone(key)) for keys in (found, wanted))
            if len(found) != len(wanted):
                return False
            equals = self.kind is VALUES or found == wanted  # NaN is a key of its own
            return all(map(operator.is_, found, wanted)) or (equals and all(map(is_same, found, wanted)))
        return found is self.header or bool(found == self.header)


def is_gone(key: Any) -> bool:
    """Whether a key is a weak reference to what is no more: a weak dictionary loses it by itself."""
    return isinstance(key, weakref.ref) and key() is None


@dataclasses.dataclass(frozen=True)
class Watch:
    """What a call read: the root is node 0."""

    nodes: tuple[Node, ...] = ()

    def holds(self, root: Any) -> bool:
        """Whether a call that belongs to `root` would read the same."""
        return next(self._differences(root), None) is None

    def differing(self, root: Any) -> str:
        """The first place where a call would read something else; "" if there is none."""
        found = next(self._differences(root), None)
        return "" if found is None else _place(*found)

    def _differences(self, root: Any) -> Iterator[tuple[Node, Any]]:
        """The nodes, and the keys in them, that differ; every call waits for the first one."""
        met: list[Any] = [UNSEEN] * len(self.nodes)
        met[:1] = [root] if met else []
        for i, node in enumerate(self.nodes):
            obj = met[i]
            if obj is UNSEEN:
                obj = met[i] = None if node.held is None else node.held()
                if obj is None:  # gone, or behind a place that differs
                    continue
            if node.kind is ATTRIBUTES and type(obj) is node.header:
                own, part = _own(obj), raw
            elif node.kind is not ATTRIBUTES and node.is_header_of(obj):
                own, part = (), node.kind.part
            else:
                yield node, None
                continue
            for key, wanted in node.parts:
                if is_gone(key):
                    continue
                value = own[key] if key in own else part(obj, key)  # type: ignore[call-overload]
                if value is wanted:
                    continue
                if type(wanted) is Ref:
                    before = met[wanted.node]
                    if before is UNSEEN:
                        met[wanted.node] = value
                    elif before is not value and not isinstance(value, types.MethodType):
                        yield node, key
                elif not is_same(value, wanted):
                    yield node, key

    def followed(self, root: Any) -> Watch:
        """The same without the places that differ: those that the call itself wrote, in its copy of the object."""
        lost = {(id(node), key) for node, key in self._differences(root)}
        if not lost:
            return self
        gone = {i for i, node in enumerate(self.nodes) if (id(node), None) in lost}

        def kept(node: Node) -> tuple[tuple[Any, Any], ...]:
            rows = (row for row in node.parts if (id(node), row[0]) not in lost)
            return tuple((key, value) for key, value in rows if type(value) is not Ref or value.node not in gone)

        return Watch(tuple(dataclasses.replace(node, parts=kept(node)) for node in self.nodes))

    def objects(self, root: Any) -> Iterator[tuple[Any, Node]]:
        """The objects whose attributes are watched, with their nodes."""
        met: list[Any] = [None] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            obj = met[i] = root if i == 0 else met[i] if node.held is None else node.held()
            if obj is None:
                continue
            for key, wanted in node.parts:
                if type(wanted) is Ref and not is_gone(key):
                    met[wanted.node] = node.kind.part(obj, key)
            if node.kind is ATTRIBUTES:
                yield obj, node


NOTHING_READ = Watch()


def _place(node: Node, key: Any) -> str:
    return node.path if key is None else place_in(node, key)


_INSIDE = frozenset({"__dict__", "__self__", "args", "keywords", "fn", "mapping", "__defaults__", "__kwdefaults__"})


def place_in(node: Node, key: Any) -> str:
    """How messages speak of a part of a node."""
    if type(key) is _Nothing or key in _INSIDE:
        return node.path
    return f"{node.path}[{key!r}]" if node.kind in (ITEMS, ENTRIES) else f"{node.path}.{key}"


def is_same(value: Any, wanted: Any) -> bool:
    """Whether two values are the same to a program: of one type and equal, a float to its sign and NaN."""
    if value is wanted:
        return True
    if type(value) is not type(wanted) or isinstance(value, jax.Array | np.ndarray):
        return False
    if isinstance(value, float | complex | np.inexact | decimal.Decimal | range):
        return repr(value) == repr(wanted)
    if isinstance(value, tuple | frozenset):  # a key
        return exactly(value) == exactly(wanted)
    try:
        return bool(value == wanted)
    except Exception:  # a class whose instances cannot be compared
        return False


# ---- kinds of object


def _own(obj: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return {}


def reference_to(obj: Any) -> Any:
    """One weak reference for each object; the object itself if it has none."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return obj


def raw(obj: Any, name: Any) -> Any:
    """An attribute without running a property: the object's own, in a slot, or that of its class."""
    own = _own(obj)
    if name is CONTENT:
        return obj
    if name is IDENTITY:
        return reference_to(obj)
    if name == "__dict__":
        return own
    if name in own:
        return own[name]
    try:
        found = getattr(type(obj), name, ABSENT)
    except Exception:  # of a descriptor, which has no value for the class
        return ABSENT
    if isinstance(found, types.MemberDescriptorType):
        try:
            return found.__get__(obj)
        except AttributeError:
            return ABSENT
    return found


def _content(array: np.ndarray) -> Any:
    return array.shape, array.dtype, array.tobytes()


def _item(value: Any, key: Any) -> Any:
    return value.default_factory if key is FACTORY else value[key]


def _atom(value: Any) -> Any:
    base: Any = next(base for base in (bool, int, float, complex, str, bytes) if isinstance(value, base))
    return type(value), base.__repr__(value)


def _referent(value: Any, key: Any) -> Any:
    if isinstance(value, weakref.ProxyTypes):
        return value.__repr__.__self__
    return value.get(ABSENT) if isinstance(value, ContextVar) else value()


_TEXTS = frozenset({str})


def _whole(header: Callable[[Any], Any]) -> Kind:
    return Kind(header, _item)


ATTRIBUTES = Kind(type, raw)
NAMESPACE = Kind(lambda o: (type(o), tuple(vars(o))), getattr)
VALUES = Kind(lambda o: (type(o), *o), getattr)
"""A list or a tuple of numbers and strings."""
ITEMS = Kind(lambda o: (type(o), len(o)), _item)
ENTRIES = Kind(lambda o: (type(o), *o), _item)
SELF = Kind(lambda o: o, lambda o, name: getattr(o, name, ABSENT))
"""What has parts but is compared by its identity: a class, a function."""
OWN = Kind(lambda o: o, lambda o, name: vars(o).get(name, ABSENT))
"""A class, with what it defines itself."""
MADE = Kind(type, getattr)
"""What is its parts: a bound method, a partial, the items of a dict."""
REFERENCE = Kind(type, _referent)
"""A weak reference or proxy, a context variable."""
ATOM = Kind(_atom, getattr)
"""A number or a string of a user's class."""
SET, BYTES, ARRAY = (
    _whole(lambda o: (type(o), frozenset(o if _TEXTS.issuperset(map(type, o)) else map(exactly, o)))),
    _whole(lambda o: (type(o), getattr(o, "typecode", getattr(o, "format", "")), getattr(o, "shape", ()), bytes(o))),
    _whole(_content),
)

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice, range})
