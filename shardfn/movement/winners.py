"""Which operand of a minimum or maximum won, asked of the operands.

JAX's derivatives of `x.at[places].max(u)`, and before JAX 0.12 of `max`, compare the result with each operand. XLA may compute an
op on elements again in each kernel that reads it, and round differently there. Then no operand equals the maximum, and the
derivative is 0. An update that was a scatter is such an op once it is a select.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

_WINS = {
    "max": primitives.ge_p, "scatter-max": primitives.ge_p, "min": primitives.le_p, "scatter-min": primitives.le_p,
}  # fmt: skip
"""What holds between the operand that won and the other one."""


@dataclasses.dataclass
class Winners:
    """The minima and maxima of a jaxpr, as far as its equations were seen.

    Attributes:
      places_of: the places that a variable holds, an array of integers, or None where they are not known.
    """

    places_of: Callable[[Any], np.ndarray | None]
    _operands: dict[Any, tuple[Any, Any, Any]] = dataclasses.field(default_factory=dict)
    """By the variable of an extremum: what holds between the winner and the other one, and both operands."""
    _updated: dict[Hashable, tuple[Any, Any, Any]] = dataclasses.field(default_factory=dict)
    """By an array that was updated, and the window: what holds, the array before, the updates."""
    _windows: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    """By an array and the window that was read of it: the variable of the rows."""

    def asked_of_operands(self, eqn: Any) -> Any:
        """An equation as it is; a comparison of an extremum with one of its operands as one of both operands."""
        name = eqn.primitive.name
        if name == "eq":
            return self._compared(eqn)
        if name in _WINS and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            if name in ("max", "min"):
                self._operands[eqn.outvars[0]] = (_WINS[name], *eqn.invars)
            elif (window := self._window_of_update(eqn)) is not None:
                self._updated[eqn.outvars[0], window] = _WINS[name], eqn.invars[0], eqn.invars[2]
        elif name == "gather" and not isinstance(eqn.invars[0], core.Literal):
            array, window = eqn.invars[0], _window_of_gather(eqn)
            self._windows[array, window] = eqn.outvars[0]
            wins, before, updates = self._updated.get((array, window), (None, None, None))
            if (before, window) in self._windows:
                self._operands[eqn.outvars[0]] = wins, self._windows[before, window], updates
        return eqn

    def _compared(self, eqn: Any) -> Any:
        one, other = eqn.invars
        for operand, extremum in ((one, other), (other, one)):
            if isinstance(extremum, core.Literal) or extremum not in self._operands:
                continue
            wins, *both = self._operands[extremum]
            if operand in both:
                rest = both[0] if operand is both[1] else both[1]
                return eqn.replace(primitive=wins, invars=[operand, rest])
        return eqn

    def _window_of_update(self, eqn: Any) -> Hashable | None:
        """The window of a gather that reads what an update wrote; None where the update drops rows or writes one twice."""
        (array, places, updates), numbers = eqn.invars, eqn.params["dimension_numbers"]
        found = self.places_of(places)
        if found is None or numbers.operand_batching_dims or isinstance(array, core.Literal):
            return None
        along, inserted = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        rows = iter(updates.aval.shape[d] for d in numbers.update_window_dims)
        sizes = tuple(1 if d in inserted else next(rows) for d in range(array.aval.ndim))
        starts = found.reshape(math.prod(found.shape[:-1]), found.shape[-1])
        last = np.array([array.aval.shape[d] - sizes[d] for d in along])
        is_apart = len(starts) == 1 or (
            set(along) <= set(inserted) and len({*map(tuple, starts.tolist())}) == len(starts)
        )
        if not is_apart or (starts < 0).any() or (starts > last).any():
            return None
        return places, numbers.update_window_dims, inserted, along, sizes


def _window_of_gather(eqn: Any) -> Hashable:
    numbers = eqn.params["dimension_numbers"]
    return (eqn.invars[1], numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map,
            eqn.params["slice_sizes"])  # fmt: skip
