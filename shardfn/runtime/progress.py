"""A progress line on the terminal for work that takes longer than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str, enabled: bool = True) -> Iterator[None]:
    """Show `what` on the terminal's standard error while the block runs, after its first second.

    >>> with progress("planning"):
    ...     pass
    """
    if not enabled or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(1.0):
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            done.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
