"""The checkpoints that are in a folder: which steps are whole, and where the files of one lie."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import Any

from shardfn.checkpoint import contents
from shardfn.errors import CheckpointError, a, fail

ITEM = "state"
MARKS = {ITEM, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""What is in the folder of a step, the notes of Orbax among it. A folder with other things only is somebody else's."""


def absolute_path(path: Any) -> pathlib.Path:
    """The absolute path of a folder.

    Raises:
      CheckpointError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        fail(CheckpointError, f"a checkpoint's path must be a string or a path, not {a(path)}",
             where=f"path = {path!r:.60}", fix='write the folder of the checkpoints, such as "run/checkpoints"')  # fmt: skip
    return pathlib.Path(os.path.abspath(os.path.expanduser(os.fspath(path))))


def steps(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The steps that were saved in a folder, oldest first. A save of this process that is under way is waited for.

    A step gets its name when it is whole, and old ones are removed. One without a description is left out if a later step
    has one, since it may be removed in part; after the last of these it is damaged, and listed.

    >>> steps("nowhere")
    ()
    """
    folder = absolute_path(path)
    wait_for_save(folder)
    if not folder.is_dir():
        return ()
    found = {int(child.name) for child in folder.iterdir() if child.name.isdecimal() and child.name.isascii()}
    whole = [step for step in found if (folder / str(step) / ITEM / contents.FILE).is_file()]
    last = max(whole, default=-1)
    return tuple(sorted(whole + [step for step in found if step > last and _was_saved(folder / str(step))]))


def _was_saved(folder: pathlib.Path) -> bool:
    """Whether a step lay in a folder that has its name, by what is left of it."""
    try:
        left = set(os.listdir(folder))
    except OSError:
        return False
    return not left or bool(left & MARKS)


def wait_for_save(folder: pathlib.Path) -> None:
    """Wait for a save of this process into the folder; without one, nothing is imported."""
    store = sys.modules.get("shardfn.checkpoint.orbax_store")
    if store is not None:
        store.wait_for_save(folder)


def step_folder(path: str | os.PathLike[str], step: int | None = None) -> tuple[pathlib.Path, int]:
    """The folder with the arrays of one step, the last if None, and its number.

    Raises:
      CheckpointError: there is none.
    """
    folder = absolute_path(path)
    known = steps(folder)
    if step is None and known:
        step = known[-1]
    if step is None or step not in known:
        shown = ", ".join(map(str, known[-8:]))
        if known:
            fail(CheckpointError, f"there is no step {step!r:.40} in {folder}", why=f"the steps are {shown}",
                 fix="choose one of them, or leave step out for the last")  # fmt: skip
        there = "it has no whole checkpoint" if folder.is_dir() else "there is no such folder"
        fail(CheckpointError, f"there is no checkpoint in {folder}", why=there,
             fix="pass the folder that `checkpoint.save` was called with")  # fmt: skip
    return folder / str(step) / ITEM, step


def open_step(path: str | os.PathLike[str], step: int | None = None) -> tuple[pathlib.Path, int, contents.Contents]:
    """The folder with the arrays of one step, its number and its description.

    Where no step is named, a last one whose description is damaged is an error, not a reason to take an older one.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: its description is damaged.
    """
    folder, step = step_folder(path, step)
    return folder, step, contents.read_contents(folder)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What one step of a folder holds; print it. `disk_bytes` is what its files take, packed."""

    path: pathlib.Path
    step: int
    steps: tuple[int, ...]
    contents: contents.Contents
    disk_bytes: int

    def __str__(self) -> str:
        held = self.contents
        grids = [" x ".join(f"{n}={s}" for n, s in g.axes) for g in held.grids if g.devices > 1]
        others = [step for step in self.steps if step != self.step]
        lines = [
            f"{self.path}: step {self.step}" + (f"; also {', '.join(map(str, others[-8:]))}" if others else ""),
            f"saved on {held.devices} device{'s'[: held.devices != 1]} in {held.processes} "
            f"process{'es' if held.processes != 1 else ''}, grid {'; '.join(grids) or 'of one'}",
            f"{len(held.entries)} arrays, {held.nbytes:,} B, {self.disk_bytes:,} B on disk",
        ]
        rows = [("array", "shape", "cuts", "B"), *((
            e.path, e.kind if e.kind != "array" else f"{e.dtype}[{','.join(map(str, e.shape))}]",
            str(e.cuts), f"{e.nbytes:,}") for e in held.entries)]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
        table = [
            "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=False)), row[3].rjust(widths[3])])
            for row in rows
        ]
        return "\n".join([*lines, "", *table])


def inspect(path: str | os.PathLike[str], step: int | None = None) -> Inspection:
    """What a checkpoint holds, from its description alone.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: its description is damaged.
    """
    folder, step, held = open_step(path, step)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Inspection(absolute_path(path), step, steps(path), held, size)
