"""What is being called: a plain function, a bound method, a module object. All become one pure function of arrays.

A function's arrays are its arguments. A method's or a module's arrays are its attributes as well: they are read before
the call, handed to the compiled function like arguments, and what the call changed (batch statistics, counters) is
written back. `ADAPTERS` lists the kinds of object that hold arrays; a library's own kind is used only if the user's
program has imported that library.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import tree_util

from shardfn.errors import StrategyError, fail, warn
from shardfn.frontend import nnx_objects
from shardfn.frontend.arguments import Slot
from shardfn.frontend.nnx_objects import HeldObjects, State, held_objects
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import shape_of


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one kind of object gives its arrays away and takes them back.

    `fixed` is what of the object is no array, as something hashable; `rebuild(owner, state)` is a copy of the object
    that holds other arrays; `write` puts arrays into the object itself.
    """

    matches: Callable[[Any], bool]
    read: Callable[[Any], State]
    fixed: Callable[[Any], Any]
    rebuild: Callable[[Any, State], Any]
    write: Callable[[Any, State], None]


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function and, for a method or a module, the object that holds its arrays."""

    name: str
    function: Callable[..., Any]
    """Takes the (rebuilt) owner first where there is one."""
    owner: Any
    adapter: Adapter | None
    signature: inspect.Signature | None
    bound: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] = ((), ())
    """Arguments that a `functools.partial` holds."""
    objects: HeldObjects = dataclasses.field(default_factory=HeldObjects)
    """Flax NNX objects among the arguments of one call (`of_call`)."""

    def of_call(self, slots: Sequence[Slot], values: Sequence[Any]) -> tuple[Callee, Sequence[Any]]:
        """The callee of one call, and the call's values with their arrays in the place of NNX objects.

        Raises:
          StrategyError: an argument and the object that holds the callee's arrays share a variable.
        """
        if getattr(self.function, PURE, False):
            return self, values
        arguments = {s.name: v for s, v in zip(slots, values, strict=True)}
        objects = held_objects((s.name, arguments[s.name]) for s in slots if not s.is_static)
        if not objects:
            return self, values
        if shared := nnx_objects.shared(self.owner, objects.nodes):
            fail(StrategyError, f"an argument of `{self.name}` shares variables with the module that it is a method of",
                 where=", ".join(shared), why="a change of a variable could be written back to only one of them",
                 fix="pass the variables once: leave the argument out and use the module's own")  # fmt: skip
        return dataclasses.replace(self, objects=objects), [*objects.arrays(arguments).values()]

    def read(self) -> State:
        """The object's arrays, by path."""
        return {} if self.adapter is None else self.adapter.read(self.owner)

    def fixed(self) -> Any:
        """What of the object is no array (sizes, a switch between training and evaluation): with another, plan anew."""
        own = None if self.adapter is None else self.adapter.fixed(self.owner)
        return (own, nnx_objects.fixed(self.objects.nodes)) if self.objects else own

    def frozen(self, shapes: State, arguments: State) -> Callee:
        """The same on copies of the objects as they are now, which keep no arrays alive.

        Args:
          shapes: of the owner's arrays, by path.
          arguments: the call's arguments by name, with shapes in the place of arrays.
        """
        owner = self.owner if self.adapter is None else self.adapter.rebuild(self.owner, shapes)
        objects = self.objects.filled(arguments)[0] if self.objects else self.objects
        return dataclasses.replace(self, owner=owner, objects=objects)

    def write(self, changed: State) -> None:
        """Put changed arrays back into the objects."""
        heads = tuple(f"{path}/" for path in self.objects.nodes)
        of_arguments = {path: a for path, a in changed.items() if f"{path}/".startswith(heads)}
        if of_arguments:
            nnx_objects.write(self.objects.nodes, of_arguments)
        if self.adapter is not None and len(of_arguments) < len(changed):
            self.adapter.write(self.owner, {path: a for path, a in changed.items() if path not in of_arguments})

    def call(self, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, State]:
        """Call as a pure function; returns the result and those arrays of the object that are not the same any more."""
        args, kwargs = (*self.bound[0], *args), {**dict(self.bound[1]), **kwargs}
        if self.adapter is None:
            return self.function(*args, **kwargs), {}
        owner = self.adapter.rebuild(self.owner, state)
        getattr(owner, "__dict__", {}).pop(SHARDED, None)  # this call is the sharded one; Cells inside keep theirs
        result = self.function(owner, *args, **kwargs)
        return result, self.changed(state, self.adapter.read(owner))

    def changed(self, before: State, after: State) -> State:
        """Those arrays that a call changed; it warns of new ones, which are lost."""
        if new := sorted(after.keys() - before.keys()):
            warn(
                f"`{self.name}` makes arrays in its call that are not kept: {', '.join(new)}; "
                "to keep them, create them before the call, in `__init__`",
            )
        return {path: after[path] for path in before if path in after and after[path] is not before[path]}


PURE = "__shardfn_pure__"
"""Attribute of a function that changes no NNX object among its arguments, and takes them as plain pytrees."""


def as_pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as one that changes no NNX object among its arguments."""
    setattr(fn, PURE, True)
    return fn


def describe(fn: Callable[..., Any]) -> Callee:
    """Look at a callable once."""
    bound: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]] = ((), ())
    name = getattr(fn, "__name__", None)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        signature = None
    inner = fn
    while isinstance(inner, functools.partial):
        bound = ((*inner.args, *bound[0]), (*inner.keywords.items(), *bound[1]))
        inner = inner.func
        name = name or getattr(inner, "__name__", None)
    owner = inner.__self__ if isinstance(inner, types.MethodType) else None
    if owner is not None and name in ("__call__", "construct"):
        name = type(owner).__name__
    function = inner.__func__ if isinstance(inner, types.MethodType) else inner
    if owner is None and not isinstance(inner, type | types.FunctionType | types.BuiltinFunctionType):
        owner, function = inner, type(inner).__call__
    adapter = next((a for a in ADAPTERS if owner is not None and a.matches(owner)), None)
    if adapter is None:
        function, owner = inner, None
    else:
        function = getattr(function, "__unsharded__", function)
    return Callee(str(name or type(inner).__name__), function, owner, adapter, signature, bound)


# ---- kinds of object

CELL = "__shardfn_cell__"
"""Class attribute that marks a `Cell`, a plain object whose attributes hold arrays."""

SHARDED = "_shardfn_sharded"
"""Attribute of a Cell that holds its sharded call; a rebuilt copy goes without."""


def _is_cell(value: Any) -> bool:
    return getattr(type(value), CELL, False)


def _is_holder(value: Any) -> bool:
    """Whether a plain object holds arrays: without taking them out, a compiled call would keep the first ones for ever."""
    return hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type) and bool(_cell_read(value))


def _is_container(value: Any) -> bool:
    return _is_cell(value) or isinstance(value, list | tuple | dict) or not tree_util.all_leaves([value])


def _numbered(value: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The items of a list or tuple with their keys: numbers, or the names of a named tuple."""
    for i, child in enumerate(value):
        yield tree_util.GetAttrKey(value._fields[i]) if hasattr(value, "_fields") else tree_util.SequenceKey(i), child  # type: ignore[attr-defined]


def _walk(value: Any, path: str, found: State, seen: set[int]) -> None:
    """The arrays of a nest; a Cell that stands at several places (tied weights, a parent) is met at the first."""
    if _is_cell(value) or not path:
        if id(value) in seen:
            return
        seen.add(id(value))
        for key, child in vars(value).items():
            _walk(child, join(path, (tree_util.GetAttrKey(key),)), found, seen)
    elif isinstance(value, list | tuple):
        for key, child in _numbered(value):
            _walk(child, join(path, (key,)), found, seen)
    elif isinstance(value, dict):
        for key, child in value.items():
            _walk(child, join(path, (tree_util.DictKey(key),)), found, seen)
    elif _is_array(value):
        found[path] = value
    elif not tree_util.all_leaves([value]):
        for key, leaf in tree_util.tree_flatten_with_path(value)[0]:
            if _is_array(leaf):
                found[join(path, key)] = leaf


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and shape_of(value) is not None


def _replace(value: Any, path: str, state: State, made: dict[int, Any] | None = None) -> Any:
    """A copy of a nest of Cells and containers with other arrays; `made` holds the copy of each Cell."""
    made = {} if made is None else made
    if _is_cell(value) or not path:
        if id(value) in made:
            return made[id(value)]
        new = made[id(value)] = copy.copy(value)
        for key, child in vars(value).items():
            if _is_container(child) or _is_array(child):
                new.__dict__[key] = _replace(child, join(path, (tree_util.GetAttrKey(key),)), state, made)
        return new
    if isinstance(value, list | tuple):
        items = [_replace(c, join(path, (key,)), state, made) for key, c in _numbered(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update((k, _replace(c, join(path, (tree_util.DictKey(k),)), state, made)) for k, c in value.items())
        return new
    if _is_array(value):
        return state.get(path, value)
    return tree_util.tree_map_with_path(lambda key, leaf: state.get(join(path, key), leaf), value)


def _cell_read(owner: Any) -> State:
    found: State = {}
    _walk(owner, "", found, set())
    return found


def _cell_fixed(owner: Any) -> Any:
    """Every attribute that is no array, with its place; what cannot be hashed counts as itself only."""
    leaves: list[Any] = []
    met: dict[int, int] = {}

    def walk(value: Any, path: str) -> None:
        if _is_cell(value) or not path:
            is_new = id(value) not in met
            leaves.append((path, type(value), met.setdefault(id(value), len(met))))
            if not is_new:
                return
            for key, child in vars(value).items():
                walk(child, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            leaves.append((path, type(value), len(value)))
            for i, child in enumerate(value):
                walk(child, f"{path}/{i}")
        elif isinstance(value, dict):
            leaves.append((path, type(value), len(value)))
            for key, child in value.items():
                walk(child, f"{path}/{key}")
        elif not _is_array(value):
            inside, structure = tree_util.tree_flatten(value)
            leaves.append((path, structure, *(type(leaf) if _is_array(leaf) else _hashed(leaf) for leaf in inside)))

    walk(owner, "")
    return tuple(leaves)


def _hashed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def _cell_write(owner: Any, state: State) -> None:
    """Arrays that are attributes are set; those in lists, dicts and pytrees are replaced with their container."""
    seen: set[int] = set()

    def put(value: Any, path: str) -> Any:
        """`value` itself where nothing in it has changed."""
        if _is_cell(value) or not path:
            if id(value) not in seen:
                seen.add(id(value))
                for key, child in list(vars(value).items()):
                    value.__dict__[key] = put(child, join(path, (tree_util.GetAttrKey(key),)))
            return value
        if isinstance(value, list | tuple):
            items = [put(c, join(path, (key,))) for key, c in _numbered(value)]
            if all(map(operator.is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            changed = {k: put(c, join(path, (tree_util.DictKey(k),))) for k, c in value.items()}
            if all(changed[k] is c for k, c in value.items()):
                return value
            new = copy.copy(value)
            new.update(changed)
            return new
        if _is_array(value) or tree_util.all_leaves([value]):
            return state.get(path, value)
        return tree_util.tree_map_with_path(lambda key, leaf: state.get(join(path, key), leaf), value)

    put(owner, "")


def _tree_read(owner: Any) -> State:
    return {join("", k): leaf for k, leaf in tree_util.tree_flatten_with_path(owner)[0] if _is_array(leaf)}


def _tree_fixed(owner: Any) -> Any:
    leaves, structure = tree_util.tree_flatten(owner)
    return structure, tuple(None if _is_array(leaf) else _hashed(leaf) for leaf in leaves)


def _tree_rebuild(owner: Any, state: State) -> Any:
    return tree_util.tree_map_with_path(lambda key, leaf: state.get(join("", key), leaf), owner)


def _tree_write(owner: Any, state: State) -> None:
    raise TypeError(f"{type(owner).__name__} is an immutable pytree, but its call changed {', '.join(state)}")


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(nnx_objects.is_module, nnx_objects.read, nnx_objects.fixed, nnx_objects.rebuild, nnx_objects.write),
    Adapter(_is_cell, _cell_read, _cell_fixed, lambda o, s: _replace(o, "", s), _cell_write),
    Adapter(lambda o: not tree_util.all_leaves([o]), _tree_read, _tree_fixed, _tree_rebuild, _tree_write),
    Adapter(_is_holder, _cell_read, _cell_fixed, lambda o, s: _replace(o, "", s), _cell_write),
)
