"""A line on progress for work that takes longer than a second: in a terminal, or below the cell of a notebook."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

FIRST_S, EACH_S = 1.0, 1.0
"""Seconds until the line appears, and between its changes."""


@contextlib.contextmanager
def progress(what: str, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """Show `what` and the seconds so far while the block runs, after its first second.

    Yields a function that adds what is being done.

    The line goes to the terminal's standard error, or below the cell of a notebook that a person runs, and away at the end. In
    pipes, files and notebooks that a program runs there is none. Of several processes the first shows it.

    >>> with progress("planning"):
    ...     pass
    """
    kernel = _kernel()
    show = _in_notebook if kernel is not None else _in_terminal
    is_first = not jax.distributed.is_initialized() or jax.process_index() == 0
    now = [""]

    def say(text: str) -> None:
        now[0] = text

    if not (enabled and is_first) or not (kernel is not None or sys.stderr.isatty()):
        yield say
        return
    done, begun = threading.Event(), time.monotonic()

    def text() -> str:
        return f"{what}: {time.monotonic() - begun:.0f} s{now[0] and f', {now[0]}'}"

    def run() -> None:
        if not done.wait(FIRST_S):
            show(text, done)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        done.set()
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
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    kernel = getattr(get_ipython() if get_ipython is not None else None, "kernel", None)
    return kernel if getattr(kernel, "_allow_stdin", False) else None
