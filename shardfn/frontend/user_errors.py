"""Errors of the user's own function, with a traceback that begins in that function."""

from __future__ import annotations

import os
import types

import jax

from shardfn.errors import ShardError

_CALLEE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "callee.py")
"""The module that calls the user's function."""


def begin_in_function(error: Exception) -> None:
    """Drop from an error's traceback the frames of this library and of JAX that led to the user's function.

    Args:
      error: the error, to be raised again. One of this library stays as it is. So do all with `JAX_TRACEBACK_FILTERING=off`,
        which shows JAX's own frames.
    """
    if isinstance(error, ShardError) or jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return
    entries, entry = list[types.TracebackType](), error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    inside = [i for i, one in enumerate(entries) if one.tb_frame.f_code.co_filename == _CALLEE]
    if not inside or inside[-1] + 1 == len(entries):
        return
    kept = None
    for one in reversed(entries[inside[-1] + 1 :]):
        kept = types.TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = kept
