"""A sign of life of work that takes long: a line in a terminal or below the cell of a notebook, and records for `logging`."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardfn.session import ipython_shell

FIRST_S, EACH_S = 1.0, 1.0
"""Seconds until the line appears, and between its changes."""
LOGGED_S = 2.0
"""Seconds until the first record goes to the logger. Each further one comes after twice the time of the one before."""

_LOGGER = logging.getLogger("shardfn")


@contextlib.contextmanager
def progress(what: str, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """Say `what` and the seconds so far while the block runs: shown after its first second, logged after two.

    Yields a function that adds what is being done.

    A line goes to the terminal's standard error, or below the cell of a notebook that a person runs, and away at the end. In
    pipes, files and notebooks that a program runs there is none. The records are of level INFO, from the logger "shardfn", after
    2, 4, 8, ... seconds and at the end of work that had one. Of several processes the first speaks.

    >>> with progress("planning"):
    ...     pass
    """
    kernel = _kernel()
    is_first = not jax.distributed.is_initialized() or jax.process_index() == 0
    is_shown, is_logged = kernel is not None or sys.stderr.isatty(), _LOGGER.isEnabledFor(logging.INFO)
    now = [""]

    def say(text: str) -> None:
        now[0] = text

    if not (enabled and is_first and (is_shown or is_logged)):
        yield say
        return
    done, begun = threading.Event(), time.monotonic()

    def text() -> str:
        return f"{what}: {time.monotonic() - begun:.0f} s{now[0] and f', {now[0]}'}"

    def show() -> None:
        if not done.wait(FIRST_S):
            (_in_notebook if kernel is not None else _in_terminal)(text, done)

    def log() -> None:
        wait = LOGGED_S
        while not done.wait(wait - (time.monotonic() - begun)):
            _LOGGER.info("%s", text())
            wait *= 2
        if wait > LOGGED_S:
            _LOGGER.info("%s: done after %.0f s", what, time.monotonic() - begun)

    threads = [threading.Thread(target=run, daemon=True) for run in [show] * is_shown + [log] * is_logged]
    for thread in threads:
        thread.start()
    try:
        yield say
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _in_terminal(text: Callable[[], str], done: threading.Event) -> None:
    from rich.console import Console

    with Console(stderr=True).status(text()) as status:
        while not done.wait(EACH_S):
            status.update(text())


def _in_notebook(text: Callable[[], str], done: threading.Event) -> None:
    from IPython.display import display

    shown: Any = display({"text/plain": text()}, raw=True, display_id=True)
    while not done.wait(EACH_S):
        shown.update({"text/plain": text()}, raw=True)
    shown.update({"text/plain": ""}, raw=True)


def _kernel() -> Any:
    """The kernel of the notebook that a person runs here; None elsewhere, and where a program runs it, as `nbconvert` does."""
    kernel = getattr(ipython_shell(), "kernel", None)
    return kernel if getattr(kernel, "_allow_stdin", False) else None
