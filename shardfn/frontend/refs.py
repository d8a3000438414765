"""JAX refs (`jax.new_ref`) among the arguments of a call: their values go in as arrays, and results are written back.

Inside the compiled function each is a ref of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.ref import freeze

from shardfn.errors import StrategyError, fail
from shardfn.frontend.jax_errors import JaxError
from shardfn.frontend.paths import array_paths

State = Mapping[str, Any]
"""Values, or refs, by path."""


@dataclasses.dataclass(frozen=True)
class HeldRefs:
    """The refs among the arguments of a call by path; None in the place of each after `frozen`."""

    refs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.refs)

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the refs stand."""
        return tuple(self.refs)

    def frozen(self) -> HeldRefs:
        """The same without the refs, which hold arrays."""
        return HeldRefs(dict.fromkeys(self.refs))

    def values(self, arguments: State) -> dict[str, Any]:
        """The arguments with an array in the place of each ref: its value now."""
        return self._filled(arguments, lambda ref: ref[...], {})

    def opened(self, arguments: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments with a new ref in the place of each array that stands for one, and these refs by path."""
        made: dict[str, Any] = {}
        filled = self._filled(arguments, jax.new_ref, made)
        return filled, made

    def write(self, values: State) -> None:
        """Put values into the refs, which keep their shardings.

        Raises:
          StrategyError: a ref in a transformation is on other devices than the value.
        """
        for path, value in values.items():
            ref = self.refs[path]
            is_concrete = not isinstance(ref, Tracer) and not isinstance(value, Tracer)
            try:
                ref[...] = jax.device_put(value, ref.sharding) if is_concrete else value
            except ValueError as error:  # an eager transformation carries concrete arrays
                if not JaxError.COMMITTED_ELSEWHERE.match(error):
                    raise
                fail(StrategyError, f"the ref `{path}` in a transformation is on other devices than the call", where=path,
                     why=str(error).split("\n")[0],
                     fix="put jax.jit around the transformation, or make the ref of an array on these devices")  # fmt: skip

    def _filled(self, arguments: State, make: Callable[[Any], Any], made: dict[str, Any]) -> dict[str, Any]:
        """The arguments with something else in the place of each ref, which `made` receives by path."""
        found = dict(arguments)
        for name, value in arguments.items():
            leaves, treedef = tree_util.tree_flatten(value)
            held = {i: path for i, path in enumerate(array_paths(name, value)) if path in self.refs}
            for i, path in held.items():
                leaves[i] = made[path] = make(leaves[i])
            if held:
                found[name] = treedef.unflatten(leaves)
        return found


def values_of(refs: State) -> dict[str, Any]:
    """The final values of refs that a traced function made, by path."""
    return {path: freeze(ref) for path, ref in refs.items()}


def held_refs(name: str, arguments: Sequence[tuple[str, Any]]) -> HeldRefs:
    """The refs among the arguments of a call.

    Raises:
      StrategyError: one ref stands twice.
    """
    refs = dict(_refs(arguments))
    first: dict[int, str] = {}
    for path, ref in refs.items():
        if first.setdefault(id(ref), path) != path:
            fail(StrategyError, f"`{name}` takes one ref twice", where=f"{first[id(ref)]} is {path}",
                 why="what is written through one of them would not be read through the other",
                 fix="pass the ref once, or copies of it: jax.new_ref(ref[...])")  # fmt: skip
    return HeldRefs(refs)


def is_ref(value: Any) -> bool:
    """Whether a value is a ref, of an array or traced."""
    return not isinstance(value, _NO_REFS) and isinstance(value, jax.Ref)


_NO_REFS = (jax.Array, np.ndarray, bool, int, float)  # the test for a ref takes longer


def _refs(arguments: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments:
        leaves = tree_util.tree_leaves(value)
        if any(map(is_ref, leaves)):
            yield from (
                (path, leaf) for path, leaf in zip(array_paths(name, value), leaves, strict=True) if is_ref(leaf)
            )
