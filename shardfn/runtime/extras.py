"""Optional packages, imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from shardfn.errors import ExtraError, fail, with_extra

EXTRAS = {"checkpoint": "checkpoints", "data": "batches", "train": "training steps", "k8s": "Kubernetes manifests"}
"""Each extra, and what is made with its packages."""

_PACKAGES = {"orbax": "orbax-checkpoint", "yaml": "PyYAML"}


def need(module: str, extra: str) -> ModuleType:
    """Import a module of an extra.

    Raises:
      ExtraError: it is not installed.

    >>> need("json", "checkpoint").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        fail(ExtraError, f"{EXTRAS[extra]} need {_PACKAGES.get(name, name)}, which is not installed", where=str(error),
             why="it is not installed with the library itself", fix=with_extra(extra))  # fmt: skip
