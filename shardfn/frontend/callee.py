"""What is being called: a plain function, a bound method, a module object. All become one pure function of arrays.

A function's arrays are its arguments. A method's or a module's arrays are its attributes as well: they are read before
the call, handed to the compiled function like arguments, and what the call changed (batch statistics, counters) is
written back. `ADAPTERS` lists the kinds of object that hold arrays; a library's own kind is used only if the user's
program has imported that library.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from jax import tree_util

from shardfn.errors import StrategyError, fail, warn
from shardfn.frontend import nnx_objects, plain_objects
from shardfn.frontend.arguments import Call, Slot
from shardfn.frontend.nnx_objects import HeldObjects, State, held_objects
from shardfn.frontend.paths import join
from shardfn.frontend.plain_objects import SHARDED, is_array, is_holder, is_plain
from shardfn.frontend.recorder import active, refuse_changes, was_read
from shardfn.frontend.refs import HeldRefs, held_refs
from shardfn.frontend.static_leaves import objects_in
from shardfn.frontend.strategy import is_cell
from shardfn.frontend.value_parts import may_change
from shardfn.frontend.wrapped import PARTS


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
    refs: HeldRefs = dataclasses.field(default_factory=HeldRefs)
    """JAX refs among the arguments of one call."""

    def of_call(
        self, slots: Sequence[Slot], values: Sequence[Any], donated: frozenset[str] = frozenset()
    ) -> tuple[Callee, Sequence[Any]]:
        """The callee of one call, and the call's values with their arrays in the place of NNX objects and refs.

        Raises:
          StrategyError: an argument and the object that holds the callee's arrays share a variable, or one ref stands twice.
        """
        if getattr(self.function, PURE, False):
            return self, values
        arguments = {s.name: v for s, v in zip(slots, values, strict=True)}
        if refs := held_refs(self.name, [(s.name, arguments[s.name]) for s in slots if not s.is_static]):
            of_arrays = [*refs.values(arguments).values()]
            return dataclasses.replace(self, refs=refs).of_call(slots, of_arrays, donated)
        objects = held_objects(((s.name, arguments[s.name]) for s in slots if not s.is_static), donated)
        if not objects:
            return self, values
        if shared := nnx_objects.shared(self.owner, objects.nodes):
            fail(StrategyError, f"an argument of `{self.name}` shares variables with the module that it is a method of",
                 where=", ".join(shared), why="a change of a variable could be written back to only one of them",
                 fix="pass the variables once: leave the argument out and use the module's own")  # fmt: skip
        return dataclasses.replace(self, objects=objects), [*objects.arrays(arguments).values()]

    @functools.cached_property
    def root(self) -> tuple[Any, Any, Any]:
        """What a call belongs to, for `frontend.watch`."""
        return self.owner, self.function, self.bound if any(self.bound) else None

    @property
    def is_plain(self) -> bool:
        """Whether a plain object holds the arrays, if any."""
        return self.adapter is None or self.adapter is ADAPTERS[-1]

    def read(self) -> State:
        """The object's arrays, by path."""
        return {} if self.adapter is None else self.adapter.read(self.owner)

    def fixed(self) -> Any:
        """What of the object is no array and not watched (`frontend.watch`), as a dictionary key: with another, plan anew."""
        own = None if self.adapter is None else self.adapter.fixed(self.owner)
        return (own, self.objects.definition if self.objects else None, self.refs.paths) if self.has_held else own

    @property
    def has_held(self) -> bool:
        """Whether arguments hold objects or refs, whose changes are written back."""
        return bool(self.objects) or bool(self.refs)

    def objects_of(self, call: Call) -> list[Any]:
        """The objects of users' classes that are no arrays and by which a call is found, whose attributes it may read: static
        arguments, static fields of pytrees, attributes of Flax NNX objects among the arguments. Of the first two also lists,
        dicts and the like."""
        found = [call.values[i] for i in call.statics]
        found += objects_in(tree_util.tree_structure(call.dynamic))
        found = [value for value in found if is_plain(value) or may_change(value)]
        return [*found, *filter(is_plain, self.objects.attributes())]

    def frozen(self, call: Call) -> Callee:
        """The same on copies of the objects as they are now, which keep no arrays alive.

        Args:
          call: the call, with shapes in the place of arrays.
        """
        owner = self.owner
        if self.adapter is not None:
            owner = self.adapter.rebuild(owner, call.values[0] if call.stateful else {})
            if (recorder := active()) is not None:
                recorder.stands_for(owner, self.owner)
        objects = self.objects.filled(call.arguments())[0] if self.objects else self.objects
        return dataclasses.replace(self, owner=owner, objects=objects, refs=self.refs.frozen())

    def write(self, changed: State) -> None:
        """Put changed arrays back into the objects and refs."""
        self.refs.write({path: a for path, a in changed.items() if path in self.refs.refs})
        changed = {path: a for path, a in changed.items() if path not in self.refs.refs}
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
        if SHARDED in getattr(owner, "__dict__", {}):
            owner.__dict__[SHARDED] = None  # this call is the sharded one; Cells inside keep theirs
        attributes = self.adapter.attributes(owner)
        if (recorder := active()) is not None:
            recorder.stands_for(owner, self.owner)
        result = self.function(owner, *args, **kwargs)
        return result, self.changed(state, self.adapter.read(owner), attributes, self.adapter.attributes(owner))

    def changed(self, before: State, after: State, attributes: State, attributes_after: State) -> State:
        """Those arrays of an object that a call changed. It warns of new ones, which are lost: they take the place of nothing
        that the call had read.

        Args:
          before: the arrays.
          after: the arrays after the call.
          attributes: the attributes that are no arrays (`Adapter.attributes`).
          attributes_after: the same after the call.

        Raises:
          StrategyError: the call changed what is no array.
        """
        absent, new = object(), sorted(after.keys() - before.keys())
        paths = [path for path in {**attributes, **attributes_after}
                 if attributes.get(path, absent) != attributes_after.get(path, absent)]  # fmt: skip
        lost = [path for path in paths if not any(f"{one}/".startswith(f"{path}/" if path else "") for one in new)]
        lost += [path for path in new if path in attributes and was_read(self.owner, path)]
        if lost:
            refuse_changes(self.name, lost)
        if new:
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


def is_function(value: Any) -> bool:
    """Whether a value can be called; a `Plan` can only to be told what to write."""
    return callable(value) and not getattr(type(value), "refuses_calls", False)


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
        if hasattr(type(function), PARTS):
            function = _method(function)
    return Callee(str(name or type(inner).__name__), function, owner, adapter, signature, bound)


def _method(sharded: Any) -> Callable[..., Any]:
    """A sharded `__call__` of a class as a function that takes the object first."""

    @functools.wraps(sharded)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return sharded.__get__(owner)(*args, **kwargs)

    return call


# ---- kinds of object


def _tree_read(owner: Any) -> State:
    return {join("", k): leaf for k, leaf in tree_util.tree_flatten_with_path(owner)[0] if is_array(leaf)}


def _tree_fixed(owner: Any) -> Any:
    leaves, structure = tree_util.tree_flatten(owner)
    return structure, tuple(None if is_array(leaf) else plain_objects.hashed(leaf) for leaf in leaves)


def _tree_attributes(owner: Any) -> State:
    return {"": _tree_fixed(owner)}


def _tree_rebuild(owner: Any, state: State) -> Any:
    return tree_util.tree_map_with_path(lambda key, leaf: state.get(join("", key), leaf), owner)


def _tree_write(owner: Any, state: State) -> None:
    raise TypeError(f"{type(owner).__name__} is an immutable pytree, but its call changed {', '.join(state)}")


def _no_attributes(owner: Any) -> Any:
    """What calls of a Cell or a plain object share: the rest is watched."""
    return type(owner)


_FOR_OBJECTS = plain_objects.read, _no_attributes, plain_objects.rebuild, plain_objects.write, plain_objects.attributes
_FOR_NNX = nnx_objects.read, nnx_objects.definition, nnx_objects.rebuild, nnx_objects.write, nnx_objects.attributes
_FOR_TREES = _tree_read, _tree_fixed, _tree_rebuild, _tree_write, _tree_attributes
ADAPTERS: tuple[Adapter, ...] = (
    Adapter(nnx_objects.is_module, *_FOR_NNX),
    Adapter(is_cell, *_FOR_OBJECTS),
    Adapter(lambda o: not tree_util.all_leaves([o]), *_FOR_TREES),
    Adapter(lambda o: is_plain(o) or is_holder(o), *_FOR_OBJECTS),
)
