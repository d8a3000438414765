"""Work in a process of its own: XLA's partitioner ends the process where a check of its own fails."""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

CALLS = 200
"""After so many the process is a new one: what JAX compiles stays in memory."""

_pools: list[ProcessPoolExecutor] = []


class Ended(Exception):
    """The process that did the work is gone."""


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in another process, which is kept for the next call.

    Raises:
      Ended: it did not come back. Else what the function raises.
    """
    if not _pools:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with JAX's threads may hang
        _pools.append(ProcessPoolExecutor(1, spawn, max_tasks_per_child=CALLS))
    try:
        return _pools[0].submit(function, *args).result()
    except BrokenProcessPool as error:
        _close()
        raise Ended from error


def _close() -> None:
    while _pools:
        _pools.pop().shutdown(wait=False, cancel_futures=True)


atexit.register(_close)
