"""What is being traced, for the operators with shardings inside: an outer sharded function, or a loss on a part of the batch.

JAX keeps what it traced, such as the body of a loop. A function inside is traced otherwise in another outer call or in none, so
the outer call is part of the keys of JAX's caches (`jax.make_user_context`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import warn
from shardfn.frontend.meshes import abstract_mesh


@dataclasses.dataclass(frozen=True)
class OuterCall:
    """A call that is being traced."""

    hardware: Hardware
    takes_entries: bool = True
    """Whether sharded functions inside mark their entries for it, in the place of planning."""

    @property
    def mesh(self) -> AbstractMesh | None:
        """The user's mesh, with Auto axes; None if the plan chooses its mesh."""
        mesh = self.hardware.mesh
        return None if mesh is None else abstract_mesh(tuple(mesh.shape.items()))


_OUTER = jax.make_user_context(None)
_PARTS = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A function that is called on parts of arrays."""

    note: str
    said: set[str] = dataclasses.field(default_factory=set, compare=False)


def inside(function: Callable[..., Any], call: OuterCall) -> Callable[..., Any]:
    """`function`, for whose sharded functions `call` is the outer call."""

    return _with(_OUTER, call, function)


def on_parts(function: Callable[..., Any], note: str) -> Callable[..., Any]:
    """`function`, which is called on parts of the batch: operators inside run without their shardings, which are of the whole, as
    those of MindSpore in the data-parallel modes.

    Args:
      function: of positional arguments.
      note: why so, and what to do, for a warning about each operator with a sharding; "" for none.
    """
    return _with(_PARTS, _Parts(note), function)


def _with(context: Any, value: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*values: Any) -> Any:
        with context(value):
            return function(*values)

    return run


def is_on_parts(operator: str) -> bool:
    """Whether the functions of now are called on parts of the batch, so that `operator` runs without its sharding; with a warning
    about each operator once."""
    parts = _PARTS.value
    if parts is not None and parts.note and operator not in parts.said:
        parts.said.add(operator)
        warn(f"`{operator}` runs without its sharding: {parts.note}")
    return parts is not None


def outer_mesh() -> AbstractMesh | None:
    """The mesh that the user gave the outer call; None without one."""
    outer = _OUTER.value
    return None if outer is None else outer.mesh


def outer_hardware() -> Hardware | None:
    """The hardware of the outer call that takes the entries of a call; None if the call is planned by itself."""
    outer = _OUTER.value
    return outer.hardware if outer is not None and outer.takes_entries else None
