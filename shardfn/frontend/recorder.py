"""Recording what a call reads while it is traced: the reads become a `Watch`.

The classes of the objects that are reached get a `__getattribute__` that tells the recorder, for as long as the trace takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from shardfn.errors import StrategyError, fail
from shardfn.frontend.class_data import data_of_class, looked_up, named_in
from shardfn.frontend.left_objects import LeftObject, refuse_written, restored
from shardfn.frontend.nnx_objects import is_variable
from shardfn.frontend.numpy_arrays import MAX_BYTES, is_outdated_in_jax, is_writeable
from shardfn.frontend.plain_objects import SHARDED, attributes_of, is_plain, is_users_class
from shardfn.frontend.strategy import is_cell
from shardfn.frontend.value_parts import content_of, is_consumed, parts_of
from shardfn.frontend.watch import (
    ABSENT,
    ARRAY,
    ATOMS,
    ATTRIBUTES,
    CONTENT,
    IDENTITY,
    MADE,
    NAMESPACE,
    NOTHING_READ,
    OWN,
    REFERENCE,
    SELF,
    UNSEEN,
    Kind,
    Node,
    Ref,
    Watch,
    is_gone,
    is_same,
    place_in,
    raw,
)

# ---- kinds of value


def _is_module(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


# ---- recording

ROOT = "self", "function", "partial"
"""How messages speak of the parts of a root (`Callee.root`)."""


class Recorder:
    """The reads of a trace."""

    def __init__(self, root: Any):
        self._indices: dict[int, int] = {}
        self._alive: list[Any] = []
        self._parts: list[dict[Any, Any]] = []
        self._nodes: list[Node] = []
        self._objects: list[Any] = []
        self._left: list[LeftObject] = []
        self._patched: list[type] = []
        self._classes: set[type] = set()
        self._originals: dict[int, Any] = {}
        """What copies stand for, by the copies' ids."""
        self._is_strict = True
        self._reads_around = False
        """Whether methods of an object that was met read attributes around their objects."""
        self._see(root, "")

    def watch(self) -> Watch:
        """What was read so far."""
        rows = [
            dataclasses.replace(node, parts=tuple((k, v) for k, v in parts.items() if v is not UNSEEN))
            for node, parts in zip(self._nodes, self._parts, strict=True)
        ]
        refs = tuple(row for row in rows[0].parts if type(row[1]) is Ref)  # the function itself stays what it is
        return Watch((dataclasses.replace(rows[0], parts=refs), *rows[1:])) if refs or len(rows) > 1 else NOTHING_READ

    def read(self, obj: Any, name: Any) -> None:
        """Note that an attribute of an object is read."""
        index = self._indices.get(id(obj))
        if index is None or self._nodes[index].kind is not ATTRIBUTES:
            return
        parts = self._parts[index]
        if name in parts:
            if type(parts[name]) is Ref:
                self._follow(raw(obj, name), parts[name].node)
            return
        if name is IDENTITY:
            parts[name] = raw(obj, name)
            return
        if name.startswith("__") and name.endswith("__") and name != "__dict__":
            return
        if name.startswith("_pytree__") or (name == SHARDED and raw(obj, name) is None):
            return
        value = raw(obj, name)
        parts[name] = (
            UNSEEN if isinstance(value, functools.cached_property) else self._seen(value, self._nodes[index], name)
        )

    def has_read(self, obj: Any, name: str) -> bool:
        """Whether an attribute of an object was read."""
        index = self._indices.get(id(obj))
        return index is not None and self._parts[index].get(name, UNSEEN) is not UNSEEN

    def stands_for(self, copy: Any, original: Any) -> None:
        """Note that a copy of an object takes its place in a call."""
        if copy is not original and original is not None:
            if not _is_module(original):
                self._originals[id(copy)] = self._originals.get(id(original), original)
            self.include(original)
            if (index := self._indices.get(id(original))) is not None:
                self._follow(copy, index)

    def original(self, obj: Any) -> Any:
        """What a copy stands for, whose identity the call then has read; any other object itself."""
        original = self._originals.get(id(obj), obj)
        if original is not obj:
            self.read(original, IDENTITY)
        return original

    def include(self, obj: Any) -> None:
        """Note an object that a call belongs to, which may be out of the root's reach."""
        if id(obj) not in self._indices and type(self._see(obj, type(obj).__name__)) is Ref:
            index = self._indices.get(id(obj))
            if index is not None:
                self._nodes[index] = dataclasses.replace(self._nodes[index], held=_holding(obj))

    def refuse_written(self, name: str) -> None:
        """Refuse a call whose trace left arrays in objects that it has no copy of."""
        refuse_written(name, self._left)

    def changes(self) -> list[str]:
        """The places that the trace itself changed after it had read them."""
        found: list[str] = []
        for node, parts, obj in zip(self._nodes, self._parts, self._objects, strict=True):
            if obj is None or node.kind in (MADE, SELF):
                continue
            if node.kind is not ATTRIBUTES and not node.is_header_of(obj):
                found.append(node.path)
                continue
            for key, wanted in parts.items():
                if is_gone(key):
                    continue
                value = node.kind.part(obj, key)
                if wanted is UNSEEN or isinstance(value, Tracer) or value is wanted:
                    continue
                if type(wanted) is Ref:
                    if value is not obj and self._indices.get(id(value), wanted.node) != wanted.node:
                        found.append(place_in(node, key))
                elif not is_same(value, wanted):
                    found.append(place_in(node, key))
        return list(dict.fromkeys([*found, *restored(self._left, LeftObject.replaced)]))

    def close(self) -> None:
        """End the recording."""
        for kind in self._patched:
            _unpatch(kind)

    def _seen(self, value: Any, node: Node, key: Any) -> Any:
        return self._see(value, place_in(node, key) if node.path else ROOT[key])

    def _see(self, value: Any, path: str) -> Any:
        """What is noted of a value: itself, a `Ref` to its node, or UNSEEN for what is not watched."""
        self._alive.append(value)
        kind = type(value)
        if kind in ATOMS or isinstance(value, enum.Enum) or value is ABSENT:
            return value
        if isinstance(value, Tracer | jax.ShapeDtypeStruct) or is_variable(value):
            return UNSEEN
        if (index := self._indices.get(id(value))) is not None:
            return Ref(index)
        if isinstance(value, (weakref.ref, ContextVar, *weakref.ProxyTypes)):
            return self._node(REFERENCE, value, path, [CONTENT])
        if isinstance(value, jax.Array):
            return value
        if isinstance(value, np.generic):
            return value
        if isinstance(value, np.ndarray):
            return self._see_numpy(value, path)
        if (content := content_of(value)) is not None:
            if not is_users_class(kind):
                return self._node(content[0], value, path, content[1])
            ref = self._see_object(value, path)
            self._parts[ref.node][CONTENT] = self._node(content[0], value, path, content[1])
            return ref
        if isinstance(value, type):
            return self._node(SELF, value, path, data_of_class(value)) if is_users_class(value) else value
        if isinstance(value, types.SimpleNamespace | threading.local):
            return self._node(NAMESPACE, value, path, list(vars(value)))
        if (names := parts_of(value)) is not None:
            of = SELF if isinstance(value, types.FunctionType) else MADE
            self._left += [LeftObject.of(value, path)] if of is SELF else []
            return self._node(of, value, path, list(names)) if names else value
        if is_cell(value) or _is_module(value) or is_plain(value):
            return self._see_object(value, path)
        if self._is_strict and is_consumed(value):
            fail(StrategyError, f"the call reads {path or 'a value'}, a {kind.__name__}, which changes when it is used",
                 where=path, why="a compiled call keeps what it read when it was traced, and such a change cannot be seen",
                 fix="draw the values before the call and pass them as arrays; random numbers from a jax.random key that is "
                 "an argument")  # fmt: skip
        has_inside = callable(value) and getattr(value, "__wrapped__", None) is not None
        return self._node(SELF, value, path, ["__wrapped__"]) if has_inside else value

    def _see_numpy(self, value: np.ndarray, path: str) -> Any:
        if not is_writeable(value):
            return value
        is_large = value.nbytes > MAX_BYTES or value.dtype.hasobject
        is_outdated = not is_large and is_outdated_in_jax(value)
        if not (is_large or is_outdated):
            return self._node(ARRAY, value, path)
        if self._is_strict and is_large:
            fail(StrategyError, f"the call reads {path or 'a value'}, a writeable NumPy array of "
                 f"{'dtype object' if value.dtype.hasobject else f'{value.nbytes:,} bytes'}",
                 where=path, why="a compiled call keeps it, and its content cannot be compared at each call",
                 fix="make it a JAX array, jnp.asarray(...), or an attribute of the object itself, which is an argument of "
                 "the call; or set flags.writeable = False, also in what it is a view of")  # fmt: skip
        if self._is_strict:
            fail(StrategyError, f"the call reads {path or 'a value'}, a {value.dtype} array that was changed in place",
                 where=path, why="JAX keeps the copy in its own precision that it made for an earlier trace",
                 fix=f"put a new array in its place instead, or make it a JAX array or one of dtype "
                 f"{jax.dtypes.canonicalize_dtype(value.dtype)}")  # fmt: skip
        return value

    def _see_object(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind not in self._patched:
            if not _patch(kind):
                return self._node(NAMESPACE, value, path, list(vars(value))) if hasattr(value, "__dict__") else value
            self._patched.append(kind)
        if not (is_cell(value) or _is_module(value)):
            self._left.append(LeftObject.of(value, path))
        ref = self._node(ATTRIBUTES, value, path)
        self._reads_around |= not named_in(kind).isdisjoint(_AROUND)
        if self._reads_around or _has_own_reads(kind):  # which may look an attribute up under another name
            for name in attributes_of(value):
                self.read(value, name)
        if is_users_class(kind) and kind not in self._classes:
            self._classes.add(kind)
            before, self._is_strict = self._is_strict, False  # what a method names it need not read
            if id(kind) not in self._indices and (names := data_of_class(kind)):
                self._see_class(SELF, kind, names)
            for base, names in looked_up(kind):
                index = self._indices.get(id(base))
                self._see_class(OWN, base, names)
                if index is None:
                    del self._indices[id(base)]
            self._is_strict = before
        return ref

    def _see_class(self, how: Kind, kind: type, names: Sequence[str]) -> None:
        index = self._node(how, kind, kind.__name__, names).node
        self._nodes[index] = dataclasses.replace(self._nodes[index], held=_holding(kind))

    def _node(self, kind: Kind, value: Any, path: str, keys: Sequence[Any] = ()) -> Ref:
        index = len(self._nodes)
        self._indices.setdefault(id(value), index)
        node = Node(kind, kind.header(value), (), path)
        self._nodes.append(node)
        self._objects.append(value)
        parts: dict[Any, Any] = {}
        self._parts.append(parts)
        for key in keys:
            parts[key] = self._seen(kind.part(value, key), node, key)
        return Ref(index)

    def _follow(self, value: Any, index: int) -> None:
        """Take a value as another one of an object that was met, and what it holds likewise."""
        if id(value) in self._indices or isinstance(value, Tracer):
            return
        self._indices[id(value)] = index
        self._alive.append(value)
        self._follow_parts(value, index)

    def _follow_parts(self, value: Any, index: int) -> None:
        for key, wanted in list(self._parts[index].items()):
            if type(wanted) is Ref:
                try:
                    inside = self._nodes[index].kind.part(value, key)
                except (LookupError, TypeError, AttributeError):
                    continue
                (self._follow_parts if inside is value else self._follow)(inside, wanted.node)


def _holding(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


_OWN_READS = frozenset({"functools", "shardfn", "flax", "equinox", "dataclasses"})
"""Modules that look into an object's `__dict__` for what they read as attributes, or keep there for themselves."""


_WHOLE = "__dict__", "__getstate__"
"""What gives all attributes of an object; the second is what `copy` asks for."""


def _caller(depth: int) -> str:
    """The top-level module of the code that reads an attribute; of a copy, the one that makes it."""
    frame = sys._getframe(depth)
    while (name := str(frame.f_globals.get("__name__", "")).partition(".")[0]) in ("copy", "copyreg") and frame.f_back:
        frame = frame.f_back
    return name


_RECORDER: ContextVar[Recorder | None] = ContextVar("_RECORDER", default=None)


def active() -> Recorder | None:
    """The recorder of the trace of now."""
    return _RECORDER.get()


def was_read(obj: Any, name: str) -> bool:
    """Whether the trace of now has read an attribute of an object, for what it was before."""
    recorder = active()
    return recorder is not None and recorder.has_read(obj, name)


@contextlib.contextmanager
def recording(root: Any, name: str, others: Iterable[Any] = ()) -> Iterator[Callable[[], Watch]]:
    """Record what is read from `root` and other objects inside; the value gives it, once all is done.

    Raises:
      StrategyError: what was read was changed by the trace, or cannot be watched, or arrays were left where they are lost.
    """
    recorder = Recorder(root)
    for value in others:
        recorder.include(value)
    token = _RECORDER.set(recorder)
    found: list[Watch] = []
    try:
        try:
            yield lambda: found[0]
        finally:
            recorder.refuse_written(name)
        if changed := recorder.changes():
            refuse_changes(name, changed)
        found.append(recorder.watch().followed(root))
    finally:
        _RECORDER.reset(token)
        recorder.close()


def include(watch: Watch, root: Any) -> None:
    """Let the trace of now watch what a sharded function that it calls watches."""
    recorder = active()
    if recorder is not None:
        for value in root:
            if value is not None:
                recorder.include(value)
        for obj, node in watch.objects(root):
            recorder.include(obj)
            for key, _ in node.parts:
                recorder.read(obj, key)


def refuse_changes(name: str, places: list[str]) -> None:
    """Refuse a call that changes what is no array."""
    fail(StrategyError, f"the call of `{name}` changes what is no array, and the change would be lost",
         where=", ".join(filter(None, places)),
         why="a compiled call writes arrays back, and Python runs only when it is traced",
         fix="set it before the call, or keep it in an array (of a Flax NNX module in an nnx.Variable)")  # fmt: skip


# ---- seeing reads

_LOCK = threading.RLock()
_PATCHED: dict[type, int] = {}


def _patch(kind: type) -> bool:
    """Let the instances of a class tell the recorder what is read; False if the class cannot be changed."""
    with _LOCK:
        if kind in _PATCHED:
            _PATCHED[kind] += 1
            return True
        inherited = kind.__getattribute__

        def __getattribute__(self: Any, name: str) -> Any:
            recorder = _RECORDER.get()
            if recorder is not None and (name not in _WHOLE or _caller(2) not in _OWN_READS):
                recorder.read(self, "__dict__" if name in _WHOLE else name)
            return inherited(self, name)  # pyright: ignore[reportCallIssue]

        new: dict[str, Any] = {"__getattribute__": __getattribute__}
        if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
            new |= {"__eq__": _is_equal, "__hash__": _hash}
        own = {name: kind.__dict__.get(name) for name in new}
        try:
            for name, method in new.items():
                type.__setattr__(kind, name, method)
        except TypeError:
            return False
        _PATCHED[kind], _OWN[kind] = 1, own
        return True


def _original(obj: Any) -> Any:
    recorder = _RECORDER.get()
    return obj if recorder is None else recorder.original(obj)


def _is_equal(self: Any, other: Any) -> Any:
    """That of `object`, for which a copy that a call runs on is the object itself: programs keep values by their objects."""
    return True if _original(self) is _original(other) else NotImplemented


def _hash(self: Any) -> int:
    return object.__hash__(_original(self))


_OWN: dict[type, dict[str, Any]] = {}


def _has_own_reads(kind: type) -> bool:
    """Whether a user's class says itself what reading an attribute does."""
    for base in kind.__mro__:
        if is_users_class(base) and base.__module__.partition(".")[0] not in _OWN_READS:
            own = (_OWN[base] if base in _PATCHED else vars(base)).get("__getattribute__")
            if own is not None or "__getattr__" in vars(base):
                return True
    return False


_AROUND = frozenset({"__getattribute__", "__getstate__", "__reduce_ex__", "getattr_static"})
"""Names by which methods read attributes of their object around it."""


def _unpatch(kind: type) -> None:
    with _LOCK:
        _PATCHED[kind] -= 1
        if _PATCHED[kind]:
            return
        del _PATCHED[kind]
        for name, method in _OWN.pop(kind).items():
            if method is None:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, method)
