"""What `ParameterServer.create` refuses: optimizers that are not elementwise, and numbers that make no sense."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardfn.errors import StrategyError, fail


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


def check_numbers(servers: int, workers: int, backup: int, synchronous: bool, staleness: int | None) -> None:
    """Refuse numbers of servers and workers, or a staleness, that make no sense.

    Raises:
      StrategyError: it says which.
    """
    where = f"servers={servers}, workers={workers}, backup_workers={backup}, staleness={staleness}"
    if servers < 1 or workers < 1 or backup < 0 or backup >= workers:
        fail(StrategyError, "the numbers of servers and workers make no sense", where=where,
             why="there is at least one of each, and an update needs a worker that is no backup",
             fix="give servers >= 1 and workers > backup_workers")  # fmt: skip
    if synchronous and staleness is not None:
        fail(StrategyError, "synchronous training has no staleness", where=where,
             why="all workers compute from the same parameters",
             fix="leave staleness out, or give synchronous=False")  # fmt: skip
    if not synchronous and (backup or (staleness is not None and staleness < 0)):
        fail(StrategyError, "the numbers of asynchronous training make no sense", where=where,
             why="no worker waits for another, and a gradient is not newer than its parameters",
             fix="leave backup_workers out, and give staleness >= 0")  # fmt: skip
