"""The arguments of a call: bound to names, static ones apart from dynamic ones, and what kind of call they make."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import tree_util

from shardfn.errors import Problem, a
from shardfn.frontend.ambient_mesh import AmbientMesh, ambient_mesh, explicit_specs, typed_shape
from shardfn.frontend.closed_over import ClosedOverArguments
from shardfn.frontend.memories import memory_kinds, typed
from shardfn.frontend.paths import array_paths
from shardfn.frontend.plain_objects import exactly, is_hashable
from shardfn.frontend.strategy import shape_of, short
from shardfn.frontend.trace import shaped
from shardfn.ir.model import Spec


@dataclasses.dataclass(frozen=True)
class Slot:
    """One argument of a call as it is handed to JAX: its name, the keyword it is passed by, whether it is static."""

    name: str
    keyword: str | None
    declared: int | None
    """Position among the function's positional parameters; None for keyword-only ones."""
    is_static: bool

    def is_among(self, argnums: Sequence[int], argnames: Sequence[str]) -> bool:
        """Whether an option names this argument by number or name."""
        return self.declared in argnums or self.name in argnames


def bind(
    signature: inspect.Signature | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: frozenset[int] = frozenset(),
    static_argnames: frozenset[str] = frozenset(),
) -> tuple[tuple[Slot, ...], list[Any]]:
    """Order the arguments of a call: positional parameters first, as declared, then keyword-only ones by name.

    Raises:
      TypeError: the call does not fit the signature, in Python's own words.
    """
    rows = list(_bound(signature, args, kwargs))
    slots = tuple(
        Slot(name, keyword, declared, name in static_argnames or declared in static_argnums)
        for name, keyword, declared, _ in rows
    )
    return slots, [value for *_, value in rows]


def _bound(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, str | None, int | None, Any]]:
    """Name, keyword, declared position and value of each argument, in the order of `bind`."""
    if signature is None:
        yield from ((f"arg{i}", None, i, value) for i, value in enumerate(args))
        yield from ((name, name, None, value) for name, value in sorted(kwargs.items()))
        return
    given = signature.bind(*args, **kwargs).arguments
    late: list[tuple[str, str, None, Any]] = []
    position, is_skipped = 0, False
    for p in signature.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            late += [(name, name, None, value) for name, value in sorted(given.get(p.name, {}).items())]
        elif p.kind is p.KEYWORD_ONLY:
            late += [(p.name, p.name, None, given[p.name])] if p.name in given else []
        elif p.kind is p.VAR_POSITIONAL:
            for i, value in enumerate(given.get(p.name, ())):
                yield f"{p.name}/{i}", None, position, value
                position += 1
        else:
            if p.name in given:
                yield p.name, p.name if is_skipped else None, position, given[p.name]
            is_skipped |= p.name not in given
            position += 1
    yield from late


def missing_arguments(signature: inspect.Signature | None, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The required arguments that a call lacks, where it lacks several: Python names the first alone.

    >>> missing_arguments(inspect.signature(lambda x, w, k=2, *, s: x), (), {})
    "missing 3 required arguments: 'x', 'w', 's'"
    """
    try:
        given = signature.bind_partial(*args, **kwargs).arguments if signature else {}
    except TypeError:  # something else is wrong, too
        return ""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p for p in (signature.parameters.values() if signature else ()) if p.default is p.empty]
    missing = [p.name for p in required if p.kind not in variable and p.name not in given]
    return f"missing {len(missing)} required arguments: {', '.join(map(repr, missing))}" if len(missing) > 1 else ""


def split(slots: Sequence[Slot], values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments again."""
    args = tuple(v for s, v in zip(slots, values, strict=True) if s.keyword is None)
    return args, {s.keyword: v for s, v in zip(slots, values, strict=True) if s.keyword is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call as its jitted function takes it: `values` are the slots' arguments, after the callee's state if it has one."""

    slots: tuple[Slot, ...]
    values: Sequence[Any]
    stateful: bool
    returns_changes: bool = False
    """Whether the compiled function returns, beside its result, the arrays of the callee's objects that the call changed."""
    closed_over: ClosedOverArguments | None = None
    """The arrays that the function closes over, where they are part of the state."""
    ambient: AmbientMesh | None = None
    """The mesh around the call."""
    types: tuple[Spec | None, ...] = ()
    """For each leaf of `dynamic` the Explicit axes of its type (`explicit_specs`)."""
    memories: tuple[str | None, ...] = ()
    """For each leaf of `dynamic` its memory kind (`memory_kinds`); () where all are those that the devices compute from."""

    def in_place(self) -> Call:
        """The call with the mesh around it, and with the types of its arrays."""
        ambient = ambient_mesh(self.dynamic)
        types = explicit_specs(self.dynamic) if ambient is not None and ambient.explicit else ()
        memories = memory_kinds(self.dynamic)
        return dataclasses.replace(self, ambient=ambient, types=types, memories=memories if any(memories) else ())

    @property
    def dynamic(self) -> tuple[Any, ...]:
        """What `jax.jit` traces: the state and the arguments that are not static."""
        return (*self.values[: self.stateful], *(v for v, s in self._pairs() if not s.is_static))

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, without the state."""
        return {slot.name: value for value, slot in self._pairs()}

    def of_shapes(self) -> Call:
        """The call with shapes in the place of arrays, of types in the call's memories."""
        leaves, treedef = tree_util.tree_flatten(self.dynamic)
        shapes = [shaped(leaf) for leaf in leaves]
        if self.memories:
            shapes = list(map(typed, shapes, self.memories))
        return dataclasses.replace(self, values=self.replaced(treedef, shapes))

    def of_typed_shapes(self) -> Call:
        """`of_shapes`, with the Explicit axes of their types."""
        static, shapes = self.statics, self.of_shapes().values
        values = [
            v if i in static else tree_util.tree_map(typed_shape, self.values[i], v) for i, v in enumerate(shapes)
        ]
        return dataclasses.replace(self, values=values)

    @property
    def statics(self) -> tuple[int, ...]:
        """Positions of static arguments in `values`."""
        return tuple(i + self.stateful for i, s in enumerate(self.slots) if s.is_static)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dynamic arguments, without the state."""
        return tuple(s.name for s in self.slots if not s.is_static)

    def paths(self) -> list[str]:
        """The paths of the leaves of `dynamic`."""
        rows = zip((*("",) * self.stateful, *self.names), self.dynamic, strict=True)
        return [path for name, value in rows for path in array_paths(name, value)]

    def with_closed_over(self, closed_over: ClosedOverArguments) -> Call:
        """The call with the arrays that the function closes over in its state."""
        state = self.values[0] if self.stateful else {}
        values = [{**state, **closed_over.current()}, *self.values[self.stateful :]]
        changes = self.returns_changes or bool(closed_over.refs)
        return dataclasses.replace(
            self, values=values, stateful=True, returns_changes=changes, closed_over=closed_over
        ).in_place()

    def without_closed_over(self) -> Call:
        """The call without the arrays that the function closes over."""
        if self.closed_over is None:
            return self
        state = {path: a for path, a in self.values[0].items() if path not in self.closed_over.arrays}
        values = [*[state] * self.closed_over.is_stateful, *self.values[1:]]
        stateful, changes = self.closed_over.is_stateful, self.closed_over.returns_changes
        return dataclasses.replace(
            self, values=values, stateful=stateful, returns_changes=changes, closed_over=None
        ).in_place()

    def positions(self, argnums: Sequence[int], argnames: Sequence[str]) -> tuple[int, ...]:
        """Positions in `values` of the dynamic arguments that are named by number or name."""
        return tuple(
            i + self.stateful for i, s in enumerate(self.slots) if not s.is_static and s.is_among(argnums, argnames)
        )

    def leaves_of(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Among all leaves of the dynamic values, the numbers of those at `positions` of `values`."""
        found: list[int] = []
        first = 0
        for i, value in enumerate(self.values):
            if i not in self.statics:
                size = len(tree_util.tree_leaves(value))
                found += range(first, first + size) if i in positions else ()
                first += size
        return tuple(found)

    def replaced(self, treedef: Any, leaves: Sequence[Any]) -> list[Any]:
        """`values` with other arrays: `leaves`, of the dynamic values' structure."""
        dynamic = iter(tree_util.tree_unflatten(treedef, leaves))
        static = self.statics
        return [v if i in static else next(dynamic) for i, v in enumerate(self.values)]

    def kind(self) -> tuple[Any, ...]:
        """What a call shares with those that one plan fits: hashable, unless a static value is not."""
        leaves, treedef = tree_util.tree_flatten(self.dynamic)
        shapes = tuple(map(_shape_and_dtype, leaves))
        return (
            self.slots,
            treedef,
            shapes,
            tuple(exactly(self.values[i]) for i in self.statics),
            self.ambient,
            self.memories,
            self.types,
        )

    def unhashable(self) -> list[Problem]:
        """The static values that cannot be hashed."""
        return [
            Problem(f"static argument `{s.name}` is {a(v)}, which cannot be hashed", f"{s.name} = {short(v)}",
                    "a compiled function is found by the values of its static arguments",
                    "pass a tuple, a string or a frozen dataclass there, or make the argument a dynamic one", is_type=True)
            for v, s in self._pairs() if s.is_static and not is_hashable(v)
        ]  # fmt: skip

    def _pairs(self) -> Sequence[tuple[Any, Slot]]:
        return list(zip(self.values[self.stateful :], self.slots, strict=True))


def signature(flat: Sequence[Any], statics: Sequence[int]) -> Any:
    """What the values of a call must share with those that were planned: structure, shapes, dtypes, static values."""
    dynamic = [v for i, v in enumerate(flat) if i not in statics]
    leaves, treedef = tree_util.tree_flatten(dynamic)
    return treedef, [(shape_of(leaf), is_weak(leaf)) for leaf in leaves], [exactly(flat[i]) for i in statics]


def _shape_and_dtype(leaf: Any) -> Any:
    try:
        return (leaf.shape, leaf.dtype, True) if is_weak(leaf) else (leaf.shape, leaf.dtype)
    except AttributeError:
        return type(leaf)


def is_weak(leaf: Any) -> bool:
    """Whether JAX traces a leaf with a weak type: the program has conversions of its own for it."""
    if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic):
        return True
    return bool(getattr(leaf, "weak_type", False))
