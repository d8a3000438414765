"""Arrays that a function closes over: their names, and a call that takes them as arguments.

JAX makes a constant of each: every device holds all of it. `shard(..., closed_over="argument")` traces the call once and passes
the constants of its jaxpr as arguments, with paths such as `closed_over/weights`. Refs (`jax.new_ref`) are always passed so:
their values go in, and results are written back.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer

from shardfn.errors import StrategyError, fail
from shardfn.frontend.paths import join
from shardfn.frontend.refs import HeldRefs, values_of
from shardfn.frontend.watch import NOTHING_READ, Watch
from shardfn.ir.rewrite import constants, evaluate_with_constants

OPTIONS = ("constant", "argument")
"""What becomes of arrays that a function closes over."""

PREFIX = "closed_over"
"""The first part of the path of such an array as an argument."""


def option_for(pattern: str, paths: Sequence[str]) -> str:
    """The fix for a path or glob of an array that a function closes over, in a call without such arguments; "" for any other.

    >>> option_for("closed_over/table", ["x"])
    'pass closed_over="argument", which makes arguments of the arrays that the function closes over'
    >>> option_for("closed_over/table", ["closed_over/w", "x"])
    ''
    """
    first = f"{PREFIX}/"
    if not pattern.replace(".", "/").startswith(first) or any(path.startswith(first) for path in paths):
        return ""
    return f'pass {PREFIX}="argument", which makes arguments of the arrays that the function closes over'


class ClosesOverRef(StrategyError):
    """The function closes over a JAX ref, which has to be an argument."""


@dataclasses.dataclass(frozen=True)
class ClosedOverArray:
    """An array that a function closes over, which each device holds in full: name, shape, dtype and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class ClosedOverArguments:
    """The arrays that a traced call closes over, as arguments of it."""

    jaxpr: Any
    result: Any
    """The structure of the result."""
    arrays: dict[str, Any]
    """The constants by path; a ref is its value at each call."""
    paths: dict[Any, str]
    """The path of each constant, by its identity."""
    is_stateful: bool
    """Whether the call without them has a state."""
    returns_changes: bool = False
    """Whether the call without them returns changed arrays beside its result."""
    only_refs: bool = False
    """Whether other constants than refs stay what they are."""
    watch: Watch = NOTHING_READ
    """What the function read when it was traced."""

    @property
    def refs(self) -> dict[str, Any]:
        """The refs by path."""
        return {path: a for path, a in self.arrays.items() if isinstance(a, jax.Ref)}

    def current(self) -> dict[str, Any]:
        """The arrays of a call by path: the constants, and what is in the refs now."""
        return {path: a[...] if isinstance(a, jax.Ref) else a for path, a in self.arrays.items()}

    def write(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Put changed values into the refs; returns the other ones."""
        refs = self.refs
        HeldRefs(refs).write({path: value for path, value in changed.items() if path in refs})
        return {path: value for path, value in changed.items() if path not in refs}

    def evaluate(self, values: Sequence[Any]) -> Any:
        """The result of the function for the dynamic values of a call, its state with the constants first.

        Where there are refs, it is a pair: the result, and the changed arrays with the values of the refs.
        """
        state, *rest = values
        own = [{path: a for path, a in state.items() if path not in self.arrays}] if self.is_stateful else []
        leaves = tree_util.tree_leaves([*own, *rest])
        made = {path: jax.new_ref(state[path]) for path in self.refs}

        def constant(value: Any) -> Any:
            path = self.paths.get(identity(value))
            return value if path is None else made.get(path, state[path])

        found = tree_util.tree_unflatten(self.result, evaluate_with_constants(self.jaxpr, constant, leaves))
        if not made:
            return found
        result, changed = found if self.returns_changes else (found, {})
        return result, {**changed, **values_of(made)}

    def placed(self, targets: dict[str, Any]) -> ClosedOverArguments:
        """The same with its constants in the shardings of a plan, by path."""
        put = {path: jax.device_put(a, targets[path]) for path, a in self.arrays.items() if path not in self.refs}
        return dataclasses.replace(self, arrays={**self.arrays, **put})


def as_arguments(
    traced: Any, function: Callable[..., Any], is_stateful: bool, returns_changes: bool, only_refs: bool
) -> ClosedOverArguments:
    """The arrays that a traced call closes over, as arguments. Values of a transformation around the call stay what they are.

    Args:
      traced: from `jax.jit(...).trace(...)`.
      function: the user's function, which gives the constants their names.
      is_stateful: whether the first value of the call is a state.
      returns_changes: whether the call returns changed arrays beside its result.
      only_refs: whether other constants than refs stay what they are.
    """
    found = [c for c in _constants(traced.jaxpr) if isinstance(c, jax.Ref) or not only_refs]
    named = {f"{PREFIX}/{name}": c for name, c in zip(_names(function, found), found, strict=True)}
    paths = {identity(c): path for path, c in named.items()}
    result = tree_util.tree_structure(traced.out_info)
    arrays = {path: c if isinstance(c, jax.Array | jax.Ref) else np.asarray(c) for path, c in named.items()}
    return ClosedOverArguments(traced.jaxpr, result, arrays, paths, is_stateful, returns_changes, only_refs)


def closed_over(jaxpr: Any, function: Callable[..., Any] | None) -> tuple[ClosedOverArray, ...]:
    """The arrays that a function closes over, the largest first.

    Args:
      jaxpr: its closed jaxpr.
      function: the user's function, which gives the arrays their names.

    Raises:
      ClosesOverRef: a JAX ref is among them.
    """
    found = _constants(jaxpr)
    if any(isinstance(c, jax.Ref) for c in found):
        fail(ClosesOverRef, "the function closes over a JAX ref where it cannot be an argument",
             why="the call works on a copy of it, sharded as an argument is, and writes the result back",
             fix="pass the ref as an argument; a ref that the function makes inside works too")  # fmt: skip
    rows = (
        ClosedOverArray(name, tuple(c.shape), str(c.dtype), int(getattr(c, "nbytes", 0)))
        for name, c in zip(_names(function, found), found, strict=True)
    )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def identity(value: Any) -> Any:
    """What distinguishes a constant from others: NumPy's are wrapped anew in each trace."""
    if isinstance(value, jax.Array | jax.Ref):
        return id(value)
    array = np.asarray(value)
    return array.__array_interface__["data"][0], array.shape, array.dtype


def _constants(jaxpr: Any) -> list[Any]:
    """The different constants of a closed jaxpr: refs, and arrays that have dimensions."""
    every = (
        c for c in constants(jaxpr) if not isinstance(c, Tracer) and (isinstance(c, jax.Ref) or getattr(c, "shape", ()))
    )
    return list({identity(c): c for c in every}.values())


def _names(function: Callable[..., Any] | None, arrays: Sequence[Any]) -> list[str]:
    """A distinct name of each array, from the variables that the function sees."""
    known: dict[Any, str] = {}
    if arrays and function is not None:
        for name, leaf in _seen_by(function, set()):
            known.setdefault(identity(leaf), name)
    names: dict[str, None] = {}
    for i, array in enumerate(arrays):
        name = known.get(identity(array), f"array_{i}")
        names[name if name not in names else f"{name}_{i}"] = None
    return list(names)


def _seen_by(function: Callable[..., Any], met: set[int]) -> Iterator[tuple[str, Any]]:
    """Name and value of the arrays that a function refers to, and the functions and objects that it refers to."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        function = function.__func__
    if id(function) in met or not isinstance(function, types.FunctionType):
        return
    met.add(id(function))
    seen = inspect.getclosurevars(function)
    for name, value in (*seen.nonlocals.items(), *seen.globals.items()):
        yield from _arrays_of(name, value, met)


def _arrays_of(name: str, value: Any, met: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.ModuleType | type):
        return
    try:
        keyed = tree_util.tree_flatten_with_path(value)[0]
    except (ValueError, TypeError):  # a dict whose keys have no order is no pytree
        return
    for key, leaf in keyed:
        path = join(name, key)
        if isinstance(leaf, jax.Array | np.ndarray | jax.Ref):
            yield path, leaf
        elif callable(leaf) and isinstance(inspect.unwrap(leaf), _FUNCTIONS):
            yield from _seen_by(leaf, met)
        elif hasattr(leaf, "__dict__") and id(leaf) not in met:
            met.add(id(leaf))
            for attribute, inside in vars(leaf).items():
                yield from _arrays_of(f"{path}/{attribute}", inside, met)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
