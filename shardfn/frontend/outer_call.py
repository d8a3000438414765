"""The sharded function that is being traced, for the sharded functions that it calls.

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
_PER_DEVICE = jax.make_user_context(False)


def inside(function: Callable[..., Any], call: OuterCall) -> Callable[..., Any]:
    """`function`, for whose sharded functions `call` is the outer call."""

    return _with(_OUTER, call, function)


def per_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which each device calls on its own arrays: the entries of sharded functions inside have no effect, as those
    of MindSpore's operators in the data-parallel modes."""
    return _with(_PER_DEVICE, True, function)


def _with(context: Any, value: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*values: Any) -> Any:
        with context(value):
            return function(*values)

    return run


def is_per_device() -> bool:
    """Whether each device calls the functions of now on its own arrays, so that their entries have no effect."""
    return _PER_DEVICE.value


def outer_mesh() -> AbstractMesh | None:
    """The mesh that the user gave the outer call; None without one."""
    outer = _OUTER.value
    return None if outer is None else outer.mesh


def outer_hardware() -> Hardware | None:
    """The hardware of the outer call that takes the entries of a call; None if the call is planned by itself."""
    outer = _OUTER.value
    return outer.hardware if outer is not None and outer.takes_entries else None
