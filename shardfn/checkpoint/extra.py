"""The packages that checkpoints need and `import shardfn` does not: found when they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from shardfn.errors import ExtraError, fail


def need(module: str) -> ModuleType:
    """Import a module of the extra `checkpoint`.

    Raises:
      ExtraError: it is not installed.

    >>> need("json").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"orbax": "orbax-checkpoint"}.get(module.partition(".")[0], module.partition(".")[0])
        fail(ExtraError, f"checkpoints need {package}, which is not installed", where=str(error),
             why="it is not installed with the library itself", fix='pip install "shardfn[checkpoint]"')  # fmt: skip
