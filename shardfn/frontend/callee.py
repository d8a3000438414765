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
import types
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util

from shardfn.errors import StrategyError, fail, warn
from shardfn.frontend import nnx_objects
from shardfn.frontend.arguments import Call, Slot, is_hashable
from shardfn.frontend.nnx_objects import HeldObjects, State, held_objects
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import is_cell, shape_of


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one kind of object gives its arrays away and takes them back.

    `fixed` is what of the object is no array, as something hashable; `rebuild(owner, state)` is a copy of the object
    that holds other arrays; `write` puts arrays into the object itself. `attributes` are those that are no arrays, by path.
    """

    matches: Callable[[Any], bool]
    read: Callable[[Any], State]
    fixed: Callable[[Any], Any]
    rebuild: Callable[[Any, State], Any]
    write: Callable[[Any, State], None]
    attributes: Callable[[Any], State]


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

    def of_call(
        self, slots: Sequence[Slot], values: Sequence[Any], donated: frozenset[str] = frozenset()
    ) -> tuple[Callee, Sequence[Any]]:
        """The callee of one call, and the call's values with their arrays in the place of NNX objects.

        Raises:
          StrategyError: an argument and the object that holds the callee's arrays share a variable.
        """
        if getattr(self.function, PURE, False):
            return self, values
        arguments = {s.name: v for s, v in zip(slots, values, strict=True)}
        objects = held_objects(((s.name, arguments[s.name]) for s in slots if not s.is_static), donated)
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
        return (own, self.objects.definition) if self.objects else own

    def frozen(self, call: Call) -> Callee:
        """The same on copies of the objects as they are now, which keep no arrays alive.

        Args:
          call: the call, with shapes in the place of arrays.
        """
        owner = self.owner if self.adapter is None else self.adapter.rebuild(self.owner, call.values[0])
        objects = self.objects.filled(call.arguments())[0] if self.objects else self.objects
        return dataclasses.replace(self, owner=owner, objects=objects)

    def write(self, changed: State) -> None:
        """Put changed arrays back into the objects."""
        of_arguments = {path: a for path, a in changed.items() if self.objects.holds(path)}
        if of_arguments:
            self.objects.write(of_arguments)
        if self.adapter is not None and len(of_arguments) < len(changed):
            self.adapter.write(self.owner, {path: a for path, a in changed.items() if path not in of_arguments})

    def call(self, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, State]:
        """Call as a pure function; returns the result and those arrays of the object that are not the same any more."""
        args, kwargs = (*self.bound[0], *args), {**dict(self.bound[1]), **kwargs}
        if self.adapter is None:
            return self.function(*args, **kwargs), {}
        owner = self.adapter.rebuild(self.owner, state)
        getattr(owner, "__dict__", {}).pop(SHARDED, None)  # this call is the sharded one; Cells inside keep theirs
        attributes = self.adapter.attributes(owner)
        result = self.function(owner, *args, **kwargs)
        return result, self.changed(state, self.adapter.read(owner), attributes, self.adapter.attributes(owner))

    def changed(self, before: State, after: State, attributes: State, attributes_after: State) -> State:
        """Those arrays of an object that a call changed; it warns of new ones, which are lost.

        Args:
          before: the arrays.
          after: the arrays after the call.
          attributes: the attributes that are no arrays (`Adapter.attributes`).
          attributes_after: the same after the call.

        Raises:
          StrategyError: the call changed what is no array.
        """
        if attributes != attributes_after and after.keys() <= before.keys():
            absent = object()
            paths = [path for path in {**attributes, **attributes_after}
                     if attributes.get(path, absent) != attributes_after.get(path, absent)]  # fmt: skip
            fail(StrategyError, f"the call of `{self.name}` changes what is no array, and the change would be lost",
                 where=", ".join(filter(None, paths)),
                 why="a compiled call writes arrays back, and Python runs only when it is traced",
                 fix="set it before the call, or keep it in an array (of a Flax NNX module in an nnx.Variable)")  # fmt: skip
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
    wrapped = inspect.unwrap(fn)
    has_name = wrapped is fn or hasattr(wrapped, "__name__") or isinstance(wrapped, functools.partial)
    name = getattr(fn, "__name__", None) if has_name else type(wrapped).__name__  # jax.vmap(module)
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

SHARDED = "_shardfn_sharded"
"""Attribute of a Cell that holds its sharded call; a rebuilt copy goes without."""


def _is_holder(value: Any) -> bool:
    """Whether a plain object holds arrays: without taking them out, a compiled call would keep the first ones for ever."""
    return hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type) and bool(_cell_read(value))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and shape_of(value) is not None


def _items(value: Any, path: str) -> list[tuple[Any, str, Any]] | None:
    """Key, path and value of each item of the object itself (at the empty path), a Cell, a list, a tuple or a dict; None for
    what is none of these."""
    if is_cell(value) or not path:
        items, entry = vars(value).items(), tree_util.GetAttrKey
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)  # of a named tuple
        items = enumerate(value) if fields is None else zip(fields, value, strict=True)
        entry = tree_util.SequenceKey if fields is None else tree_util.GetAttrKey
    elif isinstance(value, dict):
        items, entry = value.items(), tree_util.DictKey
    else:
        return None
    return [(key, join(path, (entry(key),)), item) for key, item in items]


def _walk(
    value: Any, path: str, found: State, seen: set[int], is_leaf: Callable[[Any], bool] = lambda value: False
) -> None:
    """The arrays of a nest, and what `is_leaf` says; a Cell that stands at several places (tied weights, a parent) is met at
    the first."""
    if is_cell(value) or not path:
        if id(value) in seen:
            return
        seen.add(id(value))
    if (items := _items(value, path)) is not None:
        for _, inside, item in items:
            _walk(item, inside, found, seen, is_leaf)
    elif not (is_leaf(value) or tree_util.all_leaves([value])):
        for key, leaf in tree_util.tree_flatten_with_path(value, is_leaf)[0]:
            _walk(leaf, join(path, key), found, seen, is_leaf)
    elif _is_array(value):
        found[path] = value


def _with_state(value: Any, path: str, state: State, met: dict[int, Any], *, in_place: bool) -> Any:
    """A nest with the arrays of `state`.

    Args:
      value: a nest of Cells and containers.
      path: where it stands.
      state: arrays by path.
      met: for each Cell, by its id, what it became.
      in_place: whether Cells are changed themselves, and containers without new arrays kept; else all is copied.
    """
    items = _items(value, path)
    if is_cell(value) or not path:
        if id(value) not in met:
            new = met[id(value)] = value if in_place else copy.copy(value)
            for key, inside, item in items or ():
                new.__dict__[key] = _with_state(item, inside, state, met, in_place=in_place)
        return met[id(value)]
    if items is not None:
        changed = {key: _with_state(item, inside, state, met, in_place=in_place) for key, inside, item in items}
        if in_place and all(changed[key] is item for key, _, item in items):
            return value
        if isinstance(value, dict):
            new = copy.copy(value)
            new.update(changed)
            return new
        return type(value)(*changed.values()) if hasattr(value, "_fields") else type(value)(changed.values())
    if tree_util.all_leaves([value]):
        return state.get(path, value)
    return tree_util.tree_map_with_path(
        lambda key, leaf: _with_state(leaf, join(path, key), state, met, in_place=in_place), value
    )


def _cell_read(owner: Any) -> State:
    found: State = {}
    _walk(owner, "", found, set())
    return found


def arrays_of_cells(leaves: Sequence[Any], is_leaf: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """The leaves of a pytree, with the arrays by path of each that is a Cell; a Cell that was met before has none.

    Args:
      leaves: the leaves.
      is_leaf: which objects that hold an array stand for it.
    """
    seen: set[int] = set()

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


def _cell_fixed(owner: Any) -> Any:
    """Every attribute that is no array, with its place; what cannot be hashed counts as itself only."""
    leaves: list[Any] = []
    met: dict[int, int] = {}

    def walk(value: Any, path: str) -> None:
        items = _items(value, path)
        if is_cell(value) or not path:
            is_new = id(value) not in met
            leaves.append((path, type(value), met.setdefault(id(value), len(met))))
            items = items if is_new else []
        elif items is not None:
            leaves.append((path, type(value), len(items)))
        elif not tree_util.all_leaves([value]):
            keyed, structure = tree_util.tree_flatten_with_path(value)
            leaves.append((path, structure))
            items = [(key, join(path, key), leaf) for key, leaf in keyed]
        elif not _is_array(value):
            leaves.append((path, _hashed(value)))
        for _, inside, item in items or ():
            walk(item, inside)

    walk(owner, "")
    return tuple(leaves)


def _cell_attributes(owner: Any) -> State:
    return {path: row for path, *row in _cell_fixed(owner)}


def _hashed(value: Any) -> Any:
    return type(value), value if is_hashable(value) else id(value)


def _cell_rebuild(owner: Any, state: State) -> Any:
    return _with_state(owner, "", state, {}, in_place=False)


def _cell_write(owner: Any, state: State) -> None:
    """Arrays that are attributes are set; those in lists, dicts and pytrees are replaced with their container."""
    _with_state(owner, "", state, {}, in_place=True)


def _tree_read(owner: Any) -> State:
    return {join("", k): leaf for k, leaf in tree_util.tree_flatten_with_path(owner)[0] if _is_array(leaf)}


def _tree_fixed(owner: Any) -> Any:
    leaves, structure = tree_util.tree_flatten(owner)
    return structure, tuple(None if _is_array(leaf) else _hashed(leaf) for leaf in leaves)


def _tree_attributes(owner: Any) -> State:
    return {"": _tree_fixed(owner)}


def _tree_rebuild(owner: Any, state: State) -> Any:
    return tree_util.tree_map_with_path(lambda key, leaf: state.get(join("", key), leaf), owner)


def _tree_write(owner: Any, state: State) -> None:
    raise TypeError(f"{type(owner).__name__} is an immutable pytree, but its call changed {', '.join(state)}")


_FOR_CELLS = _cell_read, _cell_fixed, _cell_rebuild, _cell_write, _cell_attributes
_FOR_NNX = nnx_objects.read, nnx_objects.definition, nnx_objects.rebuild, nnx_objects.write, nnx_objects.attributes
_FOR_TREES = _tree_read, _tree_fixed, _tree_rebuild, _tree_write, _tree_attributes
ADAPTERS: tuple[Adapter, ...] = (
    Adapter(nnx_objects.is_module, *_FOR_NNX),
    Adapter(is_cell, *_FOR_CELLS),
    Adapter(lambda o: not tree_util.all_leaves([o]), *_FOR_TREES),
    Adapter(_is_holder, *_FOR_CELLS),
)
