"""Lines of the user's source: in a stack of frames, and of a value of the traced program.

Packages decide whose a frame is: `cli` uses this library as a user does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from shardfn.ir.model import Graph
from shardfn.session import ipython_shell

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OURS = re.compile(re.escape(_HERE) + r"(?!cli[/\\])")
_LIBRARY = re.compile(r"(site|dist)-packages[/\\]|^<frozen ")
_CALLEE = os.path.join(_HERE, "frontend", "callee.py")
"""The module that calls the user's function, which may call others of `frontend`."""
_RUNTIME = os.path.join(_HERE, "runtime", "")
"""The package that a call goes through where it reaches no user's function."""


OURS = "_shardfn_"
"""How the names of compiled functions begin that this library writes into a program. JAX keeps a trace for all callers, and in
it the lines of the first."""


def user_line(frames: Sequence[tuple[str, str]]) -> str:
    """`file:line` of the innermost frame in the user's function: of the user's own code, else of another library's.

    The function ends at the innermost frame that calls it, in `frontend.callee`, or else at the outermost frame of `runtime`.
    Code that calls this library, such as a script at its `shardfn.plan`, lies outside.

    Args:
      frames: (file, line), the innermost first.

    Returns:
      The line; empty where the stack has none.

    >>> plan, call = (_HERE + "api.py", "1"), (_CALLEE, "2")
    >>> user_line([("f.py", "3"), call, plan, ("script.py", "4")]), user_line([call, plan, ("script.py", "4")])
    ('f.py:3', '')
    """
    files = [file for file, _ in frames]
    runtime = [i for i, file in enumerate(files) if file.startswith(_RUNTIME)]
    end = next((i for i, file in enumerate(files) if file == _CALLEE), runtime[-1] if runtime else None)
    inside = [f for f in frames[:end] if f[0] and not _OURS.match(f[0])]
    own = [f for f in inside if not _LIBRARY.search(f[0])]
    return ":".join((own or inside)[0]) if inside else ""


def source_line(graph: Graph, value: int) -> str:
    """The source line of the op that makes a value, or else of the nearest op before it: sums of gradients have none."""
    front, seen = [value], {value}
    while front:
        ops = [op for v in front if (op := graph.maker(v)) is not None]
        found = next((op.where for op in ops if op.where), "")
        if found:
            return found
        front = [v for v in dict.fromkeys(v for op in ops for v in op.inputs) if v not in seen]
        seen.update(front)
    return ""


def file_line(where: str) -> str:
    """`file:line` as people name it, also within a text: without directories, and of a notebook its cell, `In[3]:12`.

    >>> file_line("cumsum (/home/me/model.py:20)")
    'cumsum (model.py:20)'
    """
    return re.sub(r"<ipython-input-[^>\s]+>|[^\s(]*[/\\][^\s(/\\:]*", lambda found: file_name(found[0]), where)


def file_name(file: str) -> str:
    """The name of a file without directories; of a notebook's cell the number of its prompt, as IPython knows it.

    >>> file_name("/home/me/model.py")
    'model.py'
    """
    name_of = getattr(getattr(ipython_shell(), "compile", None), "format_code_name", lambda name: None)
    label = name_of(file)
    return label[1] if label else re.sub(r".*[/\\]", "", file)
