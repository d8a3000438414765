"""The sharded function that is being traced, for the sharded functions that it calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

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


_OUTER: ContextVar[OuterCall | None] = ContextVar("_OUTER", default=None)


def inside(function: Callable[..., Any], call: OuterCall) -> Callable[..., Any]:
    """`function`, for whose sharded functions `call` is the outer call."""

    @functools.wraps(function)
    def run(*values: Any) -> Any:
        token = _OUTER.set(call)
        try:
            return function(*values)
        finally:
            _OUTER.reset(token)

    return run


def outer_mesh() -> AbstractMesh | None:
    """The mesh that the user gave the outer call; None without one."""
    outer = _OUTER.get()
    return None if outer is None else outer.mesh


def outer_hardware() -> Hardware | None:
    """The hardware of the outer call that takes the entries of a call; None if the call is planned by itself."""
    outer = _OUTER.get()
    return outer.hardware if outer is not None and outer.takes_entries else None
