"""What `ParameterServer.create` refuses: optimizers that are not elementwise, and numbers that make no sense."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardfn.cluster.parameter_server.ledger import Rules
from shardfn.errors import StrategyError, fail, raise_problems
from shardfn.frontend.value_checks import integer, option_problems


def check_elementwise(optimizer: Any) -> None:
    """Refuse an optimizer whose update of an element depends on other elements.

    Args:
      optimizer: an optax optimizer.

    Raises:
      StrategyError: the update of an array differs from that of its two halves.

    >>> import optax
    >>> check_elementwise(optax.adam(0.1))
    """
    params, gradients = np.array([1.0, -2, 3, 5], "float32"), np.array([3.0, 40, -500, 6], "float32")

    def updates(parts: list[slice]) -> np.ndarray:
        found = []
        for part in parts:
            here = {"w": jnp.asarray(params[part])}
            change, _ = optimizer.update({"w": jnp.asarray(gradients[part])}, optimizer.init(here), here)
            found.append(np.asarray(change["w"]))
        return np.concatenate(found)

    with contextlib.suppress(KeyError):  # an optimizer for arrays of certain names
        if not np.allclose(updates([slice(0, 4)]), updates([slice(0, 2), slice(2, 4)]), rtol=1e-5):
            fail(StrategyError, "the optimizer does not treat each element alone", where="create(optimizer=...)",
                 why="each server holds some rows only, so norms of an array or of all gradients would be those of a part",
                 fix="use SGD, Adam, Adagrad or the like, and clip by value; or train by all-reduce")  # fmt: skip


def count(name: str, value: Any, low: int = 0) -> int:
    """An int from `low` up, of NumPy or not, as an int that JSON can hold.

    Raises:
      StrategyError: it is no such int.

    >>> count("step", np.int64(3))
    3
    """
    raise_problems(option_problems(integer(low), name, value))
    return int(value)


def check_rules(workers: int, rules: Rules, staleness: Any = None) -> None:
    """Refuse a number of workers that does not fit the rules, and rules that contradict each other.

    Args:
      workers: the number of workers.
      rules: the rules.
      staleness: the staleness that was asked for, or None.

    Raises:
      StrategyError: it says which.
    """
    where = f"workers={workers}, backup_workers={rules.backup}, staleness={staleness}"
    if rules.backup >= workers:
        fail(StrategyError, "an update would wait for no worker", where=where,
             why="all workers are backup workers", fix="give workers > backup_workers")  # fmt: skip
    if rules.synchronous and staleness is not None:
        fail(StrategyError, "synchronous training has no staleness", where=where,
             why="all workers compute from the same parameters",
             fix="leave staleness out, or give synchronous=False")  # fmt: skip
    if not rules.synchronous and rules.backup:
        fail(StrategyError, "asynchronous training has no backup workers", where=where,
             why="no worker waits for another", fix="leave backup_workers out, or give synchronous=True")  # fmt: skip
