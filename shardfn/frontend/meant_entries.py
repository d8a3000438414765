"""What a wrongly written entry probably means, as the code to write instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import PartitionSpec

WORDS = {"auto": "AUTO", "replicated": "REPLICATED", "replicate": "REPLICATED", "dataparallel": "DATA_PARALLEL"}


def meant(entry: Any, ndim: int | None = None) -> str:
    """The code of the entry that something else stands for; "" where it could be anything.

    Args:
      entry: no valid entry of an array.
      ndim: the dimensions of the array, where it is known.

    >>> meant("4,1"), meant("auto"), meant(("dp", None)), meant(("AUTO", 1)), meant([8, 1]), meant("dp")
    ('(4, 1)', 'AUTO', "P('dp', None)", '(AUTO, 1)', '(8, 1)', "P('dp')")
    >>> meant(np.array([8, 1])), meant(3.5)
    ('(8, 1)', '')
    """
    if isinstance(entry, str):
        return _text(entry, ndim)
    if isinstance(entry, np.ndarray | jax.Array) and entry.ndim == 1:
        entry = [int(n) if n == int(n) else n for n in entry.tolist()]
    if not isinstance(entry, tuple | list) or isinstance(entry, PartitionSpec):
        return ""
    if len(entry) == 1 and isinstance(entry[0], tuple | list) and any(isinstance(e, int | str) for e in entry[0]):
        return meant(tuple(entry[0]), ndim) or _tuple(tuple(map(_dimension, entry[0])))
    dims = tuple(map(_dimension, entry))
    if any(dim == "" for dim in dims) or ndim not in (None, len(dims)):
        return _axes(entry) if ndim is None or len(entry) <= ndim else ""
    return _tuple(dims)


def _dimension(dim: Any) -> str:
    """The code of one dimension of a strategy; "" where it is none."""
    if isinstance(dim, str):
        dim = dim.strip()
        return dim if dim.isascii() and dim.isdecimal() and int(dim) else "AUTO" if _word(dim) == "AUTO" else ""
    if dim is None:
        return "1"
    if isinstance(dim, int | np.integer) and not isinstance(dim, bool) and dim > 0:
        return str(int(dim))
    return "AUTO" if repr(dim) == "AUTO" else ""


def _tuple(dims: Sequence[str]) -> str:
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})" if all(dims) else ""


def _axes(entry: Sequence[Any]) -> str:
    """A `PartitionSpec` for a tuple of axis names, None and tuples of names; "" for any other."""
    leaves = tree_util.tree_leaves(list(entry))
    if not any(isinstance(e, str) for e in leaves):
        return ""
    if not all((isinstance(e, str) and e.isidentifier() and not _word(e)) or e == 1 for e in leaves):
        return ""
    return f"P({', '.join(repr(None if dim == 1 else tuple(dim) if isinstance(dim, list) else dim) for dim in entry)})"


def _text(text: str, ndim: int | None) -> str:
    if word := _word(text):
        return word
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        parts = [None if part.strip() == "None" else part.strip() for part in text.strip(" ()[]").split(",")]
        return meant(tuple(parts), ndim) or _axes(parts)
    value = (value,) if type(value) is int else value
    return meant(tuple(value), ndim) if isinstance(value, tuple | list) else ""


def _word(text: str) -> str:
    """AUTO, REPLICATED or DATA_PARALLEL, however it is spelt; else ""."""
    return WORDS.get(re.sub(r"[-_ .]", "", text.lower()), "")


def is_device(value: Any) -> bool:
    """Whether a value is what `device` takes: devices, a mesh, or the name of hardware."""
    if isinstance(value, str):
        return value.lower().partition(":")[0] in ("cpu", "gpu", "tpu", "cuda", "rocm", "ascend") or bool(
            re.fullmatch(r"[a-z0-9-]+:\d+(x\d+)*", value.lower())
        )
    each = value if isinstance(value, list | tuple) else [value]
    return bool(each) and all(isinstance(one, jax.Device | jax.sharding.Mesh) for one in each)
