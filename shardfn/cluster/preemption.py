"""Notices of a preemption: SIGTERM says that a job is to end soon, and all processes agree after which step they save."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

STATUS = 128 + signal.SIGTERM
"""The exit status of a process that ends because it was told to."""


@contextlib.contextmanager
def notices() -> Iterator[Callable[[int], bool]]:
    """Within it, a function of a step's number: whether to save after that step and end. Call it after every step.

    With several processes JAX catches the signal, and its coordinator chooses a step that no process has passed.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield lambda step: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
