"""What a rule is given: an equation with the values of its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from shardfn.ir.rewrite import bind_one
from shardfn.movement.emit import Emitter
from shardfn.movement.values import Value

MOST_ROWS = 8
"""Rows at constant places that are moved one by one."""


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation with the values of its operands."""

    eqn: Any
    operands: tuple[Value, ...]
    emitter: Emitter

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation."""
        return self.eqn.params

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.eqn.outvars[0].aval.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.eqn.outvars[0].aval.dtype

    def bound(self, *arrays: Any) -> Any:
        """The result of the primitive for arrays."""
        return bind_one(self.eqn, arrays)[0]


Rule = Callable[[Call], Value | None]
"""The value of an equation's result; None if the primitive is bound to arrays as it stands."""


def has_infinity(dtype: Any) -> bool:
    """Whether the greatest and the least of numbers of a dtype have an identity: floats of 8 bits may have no infinity."""
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 8
