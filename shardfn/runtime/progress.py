"""Work that takes longer than a second shows on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str, enabled: bool = True) -> Iterator[None]:
    """While the block runs, and from its second second on, a line on the terminal's standard error says `what`.

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
