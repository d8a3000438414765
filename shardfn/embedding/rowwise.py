"""Lazy row-wise optimizers: only the rows that a batch touched are updated, and their moments with them.

An optimizer is two pure functions of rows. They take NumPy or JAX arrays, so that rows are updated where they are: on
the host or on a device. The formulas are optax's. Of `sgd` and `adagrad` the result equals that of the dense optimizer: a
row without gradient does not change. Dense `adam` and `lamb` also decay the moments of rows without gradient, and move
these rows; here they stay until they are touched again. The trust ratio of `lamb` is that of each row, not of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.value_checks import is_number

Schedule = float | Callable[[int], float]
"""A learning rate, or a function of the number of updates so far."""

Moments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RowOptimizer:
    """An optimizer of rows.

    Attributes:
      name: its name, stored with saved tables.
      moments: the first value of each moment; moments have the shape of the rows.
      update: `(rows, moments, gradients, count, learning_rate) -> (rows, moments)`; `count` is the number of updates of
        the table before this one.
      learning_rate: the learning rate or its schedule.
    """

    name: str
    moments: tuple[tuple[str, float], ...]
    update: Callable[[Any, Moments, Any, Any, Any], tuple[Any, Moments]]
    learning_rate: Schedule

    def rate(self, count: int) -> float:
        """The learning rate of an update.

        Args:
          count: the number of updates before it.

        Raises:
          StrategyTypeError: it is no number.
        """
        return _rate(self.name, self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate)


def _rate(name: str, rate: Any) -> float:
    try:
        found = float(rate)
    except (TypeError, ValueError):
        found = math.nan
    if isinstance(rate, str) or not math.isfinite(found):
        fail(StrategyTypeError, f"the learning rate of a table is {rate if isinstance(rate, float) else a(rate)}",
             where=f"{name}({rate!r:.40})", why="it is a number, or a function of the number of updates that returns one",
             fix=f"{name}(0.01), or {name}(lambda updates: 0.01 / (updates + 1))")  # fmt: skip
    return found


def _check(name: str, learning_rate: Any, decays: Moments, from_zero: Moments) -> None:
    """Refuse a rate that is no number, decays outside 0 to 1, and other numbers below 0."""
    if not callable(learning_rate):
        _rate(name, learning_rate)
    for option, value in (decays | from_zero).items():
        if not is_number(value) or not 0 <= value < (1 if option in decays else math.inf):
            fail(StrategyError, f"`{option}` of {name} cannot be {value!r:.40}", where=f"{name}(..., {option}={value!r:.40})",
                 why="it is a number from 0" + " to below 1" * (option in decays), fix="leave it out")  # fmt: skip


def sgd(learning_rate: Schedule) -> RowOptimizer:
    """Stochastic gradient descent.

    Args:
      learning_rate: a number, or a function of the number of updates.

    Raises:
      StrategyError, StrategyTypeError: a rate that is no number; other numbers out of their range.

    >>> rows, _ = sgd(0.5).update(np.ones((1, 2), "float32"), {}, np.ones((1, 2), "float32"), 0, 0.5)
    >>> rows.tolist()
    [[0.5, 0.5]]
    """

    _check("sgd", learning_rate, {}, {})

    def update(rows: Any, moments: Moments, gradients: Any, count: Any, rate: Any) -> tuple[Any, Moments]:
        return rows - _like(rate, rows) * gradients, {}

    return RowOptimizer("sgd", (), update, learning_rate)


def adagrad(learning_rate: Schedule, initial_accumulator: float = 0.1, eps: float = 1e-7) -> RowOptimizer:
    """Adagrad, with one accumulator for each element.

    Args:
      learning_rate: as of `sgd`.
      initial_accumulator: the first sum of squares.
      eps: added to the sum below the root.

    Raises:
      StrategyError, StrategyTypeError: a rate that is no number; other numbers out of their range.

    >>> adagrad(0.1).moments
    (('sum_of_squares', 0.1),)
    """

    _check("adagrad", learning_rate, {}, {"initial_accumulator": initial_accumulator, "eps": eps})

    def update(rows: Any, moments: Moments, gradients: Any, count: Any, rate: Any) -> tuple[Any, Moments]:
        total = moments["sum_of_squares"] + gradients * gradients
        xp, is_used = _numpy(rows), total > 0
        step = xp.where(is_used, gradients / xp.sqrt(xp.where(is_used, total + _like(eps, rows), _like(1, rows))), 0)
        return rows - _like(rate, rows) * step, {"sum_of_squares": total}

    return RowOptimizer("adagrad", (("sum_of_squares", initial_accumulator),), update, learning_rate)


def adam(learning_rate: Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> RowOptimizer:
    """Lazy Adam: moments of a row decay when the row is touched; the bias correction counts the table's updates.

    Args:
      learning_rate: as of `sgd`.
      b1: the decay of the first moment.
      b2: the decay of the second moment.
      eps: added to the root.

    Raises:
      StrategyError, StrategyTypeError: a rate that is no number; other numbers out of their range.

    >>> adam(0.1).moments
    (('mean', 0.0), ('mean_of_squares', 0.0))
    """

    _check("adam", learning_rate, {"b1": b1, "b2": b2}, {"eps": eps})

    def update(rows: Any, moments: Moments, gradients: Any, count: Any, rate: Any) -> tuple[Any, Moments]:
        direction, moments = _adam_direction(rows, moments, gradients, count, b1, b2, eps)
        return rows - _like(rate, rows) * direction, moments

    return RowOptimizer("adam", (("mean", 0.0), ("mean_of_squares", 0.0)), update, learning_rate)


def lamb(
    learning_rate: Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.0
) -> RowOptimizer:
    """Lazy LAMB with a trust ratio for each row: the norm of the row over that of its step.

    Args:
      learning_rate: as of `sgd`.
      b1: the decay of the first moment.
      b2: the decay of the second moment.
      eps: added to the root.
      weight_decay: the share of a row that is added to its step.

    Raises:
      StrategyError, StrategyTypeError: a rate that is no number; other numbers out of their range.

    >>> lamb(0.1).name
    'lamb'
    """

    _check("lamb", learning_rate, {"b1": b1, "b2": b2}, {"eps": eps, "weight_decay": weight_decay})

    def update(rows: Any, moments: Moments, gradients: Any, count: Any, rate: Any) -> tuple[Any, Moments]:
        xp = _numpy(rows)
        direction, moments = _adam_direction(rows, moments, gradients, count, b1, b2, eps)
        direction = direction + _like(weight_decay, rows) * rows
        norms = [xp.sqrt((x * x).sum(-1, keepdims=True)) for x in (rows, direction)]
        is_zero = (norms[0] == 0) | (norms[1] == 0)
        ratio = xp.where(is_zero, _like(1.0, rows), norms[0] / xp.where(is_zero, _like(1.0, rows), norms[1]))
        return rows - _like(rate, rows) * ratio * direction, moments

    return RowOptimizer("lamb", (("mean", 0.0), ("mean_of_squares", 0.0)), update, learning_rate)


def _adam_direction(
    rows: Any, moments: Moments, gradients: Any, count: Any, b1: float, b2: float, eps: float
) -> tuple[Any, Moments]:
    xp = _numpy(rows)
    mean = _like(b1, rows) * moments["mean"] + _like(1 - b1, rows) * gradients
    squares = _like(b2, rows) * moments["mean_of_squares"] + _like(1 - b2, rows) * gradients * gradients
    # 1 - b ** n, which float32 would round to a thousand times its precision.
    first, second = (-xp.expm1(_like(count + 1, rows) * _like(math.log(b) if b else -math.inf, rows)) for b in (b1, b2))
    return mean / first / (xp.sqrt(squares / second) + _like(eps, rows)), {"mean": mean, "mean_of_squares": squares}


def _numpy(rows: Any) -> Any:
    return jnp if isinstance(rows, jax.Array) else np


def _like(number: Any, rows: Any) -> Any:
    """The number in the dtype of the rows, so that NumPy and JAX compute in one precision."""
    return _numpy(rows).asarray(number, rows.dtype)
