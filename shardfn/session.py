"""Who runs Python here: a person at a prompt or in a notebook, or a script."""

from __future__ import annotations

import sys
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
