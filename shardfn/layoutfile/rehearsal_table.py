"""The table [rehearsal] of a layout file: what one device measured of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from shardfn.cost.rehearsal import Kernel, Rehearsal
from shardfn.ir.source_lines import file_line
from shardfn.layoutfile.toml_text import quoted

_TEXTS = ("target", "device", "jax")
_SIZES = ("count", "predicted_bytes", "compiled_bytes", "peak_bytes")
_SECONDS = ("compute_s", "communication_s", "kernels_s")
_UNKNOWN = ("compiled_bytes", "peak_bytes")
"""Left out where they are not known."""
MOST_ROWS = 100


def rehearsal_lines(found: Rehearsal) -> Iterator[str]:
    """The lines of the table; those of the user's code without directories.

    >>> import tomllib
    >>> made = Rehearsal("h100:8", 8, "NVIDIA H100", "0.12.0", (0.0163,), 0.0117, 0.004, 1024)
    >>> read_rehearsal(tomllib.loads("\\n".join(rehearsal_lines(made))), print) == made
    True
    """
    yield from (f"{key} = {quoted(getattr(found, key))}" for key in _TEXTS)
    yield from (f"{key} = {size}" for key in _SIZES if (size := getattr(found, key)) is not None)
    yield from (f"{key} = {float(getattr(found, key))!r}" for key in _SECONDS)
    if found.layers:
        yield f"layers = {quoted(found.layers)}"
    yield f"rounds_s = {[float(seconds) for seconds in found.rounds_s]}"
    if found.notes:
        yield f"notes = [{', '.join(map(quoted, found.notes))}]"
    if found.kernels:
        yield "kernels = ["
        for k in found.kernels:
            texts = ", ".join(map(quoted, (k.op, k.kernel, file_line(k.where))))
            yield f"  [{texts}, {float(k.runs)!r}, {float(k.seconds)!r}],"
        yield "]"


def read_rehearsal(value: Any, wrong: Callable[[str, str, str], None]) -> Rehearsal | None:
    """A rehearsal from the data of its table.

    Args:
      value: the data.
      wrong: is told what is wrong, where, and the fix.
    """
    fields = dict(value) if isinstance(value, dict) else {}
    kernels = fields.get("kernels", [])
    known = {field.name for field in dataclasses.fields(Rehearsal)}
    is_right = (
        all(isinstance(fields.get(key), str) for key in _TEXTS)
        and isinstance(fields.get("layers", ""), str)
        and all(type(fields.get(key)) is int for key in _SIZES if key in fields or key not in _UNKNOWN)
        and all(_is_time(fields.get(key)) for key in _SECONDS)
        and _are(fields.get("rounds_s"), _is_time)
        and fields["rounds_s"]
        and _are(fields.get("notes", []), lambda note: isinstance(note, str))
        and _are(kernels, _is_kernel)
        and fields.keys() <= known
    )
    if not is_right:
        wrong(
            "the table [rehearsal] is not what a plan writes",
            "rehearsal",
            "remove it, or write it again: plan.rehearse().save(path)",
        )
        return None
    fields |= {key: tuple(fields[key]) for key in ("rounds_s", "notes") if key in fields}
    return Rehearsal(**{**fields, "kernels": tuple(Kernel(*row) for row in kernels)})


def _are(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= MOST_ROWS and all(map(is_one, value))


def _is_time(value: Any) -> bool:
    return type(value) is float and 0 <= value < float("inf")


def _is_kernel(row: Any) -> bool:
    return (
        isinstance(row, list) and len(row) == 5 and all(isinstance(text, str) for text in row[:3]) and all(map(_is_time, row[3:]))
    )  # fmt: skip
