"""The process: who runs Python here (a person at a prompt or in a notebook, or a script), and its garbage collector."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any


def ipython_shell() -> Any:
    """IPython's shell, of a notebook too; None elsewhere. IPython is not imported for it.

    >>> ipython_shell() is None
    True
    """
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def is_interactive() -> bool:
    """Whether Python reads commands from a person: its own prompt, IPython, a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or ipython_shell() is not None


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No search for reference cycles meanwhile: planning makes many objects and hardly a cycle, and the search looks at all of
    them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
