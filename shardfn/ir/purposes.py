"""What a collective is for that this library writes in a `shard_map`: a name in the program's locations."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

import jax

from shardfn.ir.source_lines import OURS

_SCOPE = re.compile(rf"{OURS}\{{([^{{}}]*)\}}")
_LEGIBLE = " /_.-,()*"
"""The characters beside letters and digits that a location writes as they are."""


def purpose(text: str) -> Any:
    """A context in which collectives are bound, with what they are for."""
    return jax.named_scope(f"{OURS}{{{urllib.parse.quote(text, safe=_LEGIBLE)}}}")


def purpose_in(location: str) -> str:
    """The text of the innermost `purpose` in a location; empty where there is none.

    >>> purpose_in('loc("_shardfn_{gradient of w%7B}/psum"("collectives.py":3:1))'), purpose_in('loc("psum")')
    ('gradient of w{', '')
    """
    found = _SCOPE.findall(location)
    return urllib.parse.unquote(found[-1]) if found else ""
