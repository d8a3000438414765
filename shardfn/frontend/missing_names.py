"""The answer to a name that a module lacks reaches `from shardfn.mindspore import nn` and `import shardfn.mindspore.nn` too.

Python drops what a module's `__getattr__` says when a name is imported: it looks for a module of that name, and says that
there is none. This finder is asked last for that module, and says it.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

ROOT = __name__.partition(".")[0]


class Answers(MetaPathFinder):
    """A finder that finds nothing, and raises what the `__getattr__` of a package of this library says."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise for a name that its package has an answer to.

        Raises:
          ModuleNotFoundError: the answer.
        """
        package, _, name = fullname.rpartition(".")
        module = sys.modules.get(package)
        if package.partition(".")[0] != ROOT or name.startswith("_") or not hasattr(module, "__getattr__"):
            return
        try:
            getattr(module, name)
        except AttributeError as error:
            raise ModuleNotFoundError(str(error)) from None


def install() -> None:
    """Ask after all other finders, once."""
    if not any(isinstance(finder, Answers) for finder in sys.meta_path):
        sys.meta_path.append(Answers())
