"""Which line of a stack of frames is the user's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_LIBRARY = re.compile(r"(site|dist)-packages[/\\]|^<frozen ")
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = os.path.join(_HERE, "cli", "demo.py")  # a user's program that happens to live here
_TRACES = frozenset(
    os.path.join(_HERE, *name.split("/"))
    for name in ("frontend/callee.py", "runtime/program.py", "frontend/trace.py", "runtime/verify.py")
)
"""Who calls the function that is sharded, or has it traced: what called them is not in it."""
_CALL = os.path.join(_HERE, "runtime", "sharded_function.py")
"""Whose caller is not in the function either, unless that stands in another one that is sharded."""


def user_line(frames: Sequence[tuple[str, str]]) -> str:
    """`file:line` of the innermost frame in the function that is the user's own, then of any library's, never of this one's.

    What called this library, such as a script at its `shardfn.plan`, is not in the function.

    Args:
      frames: (file, line), the innermost first.

    >>> plan, call = (_HERE + "api.py", "1"), (os.path.join(_HERE, "frontend", "callee.py"), "2")
    >>> user_line([("f.py", "3"), call, plan, ("script.py", "4")]), user_line([call, plan, ("script.py", "4")])
    ('f.py:3', '')
    """
    files = [file for file, _ in frames]
    calls = [i for i, file in enumerate(files) if file == _CALL]
    end = next((i for i, file in enumerate(files) if file in _TRACES), calls[-1] if calls else None)
    inside = [f for f in frames[:end] if f[0] and (f[0] == _DEMO or not f[0].startswith(_HERE))]
    own = [f for f in inside if not _LIBRARY.search(f[0])]
    return ":".join((own or inside)[0]) if inside else ""
