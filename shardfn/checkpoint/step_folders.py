"""The checkpoints in a folder: find, open and describe the step folders."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import Any

from shardfn.checkpoint import contents
from shardfn.errors import CheckpointError, a, fail
from shardfn.ir.model import mesh_text
from shardfn.render.cells import shape_text
from shardfn.render.parts import Table, Text
from shardfn.render.text import to_text

StrPath = str | os.PathLike[str]

ITEM = "state"
MARKS = {ITEM, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""The entries of a step folder, with those that Orbax adds. A folder without any of them is not a checkpoint."""


def absolute_path(path: Any) -> pathlib.Path:
    """The absolute path of a folder, `~` expanded.

    Raises:
      CheckpointError: `path` is not a path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        fail(CheckpointError, f"a checkpoint's path must be a string or a path, not {a(path)}",
             where=f"path = {path!r:.60}", fix='write the folder of the checkpoints, such as "run/checkpoints"')  # fmt: skip
    return pathlib.Path(os.path.abspath(os.path.expanduser(os.fspath(path))))


def steps(path: StrPath) -> tuple[int, ...]:
    """The complete steps in a folder. Waits for a background save of this process.

    A step folder gets its name when it is complete. Retention deletes old ones, so a folder without a description counts as
    partly deleted if a later step is complete; otherwise it is damaged, and listed.

    Args:
      path: the folder that `save` was called with.

    Returns:
      The step numbers, ascending.

    Raises:
      CheckpointError: `path` is not a path.

    >>> steps("nowhere")
    ()
    """
    folder = absolute_path(path)
    wait_for_save(folder)
    if not folder.is_dir():
        return ()
    found = {int(child.name) for child in folder.iterdir() if child.name.isdecimal() and child.name.isascii()}
    complete = [step for step in found if (folder / str(step) / ITEM / contents.FILE).is_file()]
    last = max(complete, default=-1)
    return tuple(sorted(complete + [step for step in found if step > last and _was_saved(folder / str(step))]))


def _was_saved(folder: pathlib.Path) -> bool:
    """Whether a folder with a number as its name is, or was, a step."""
    try:
        left = set(os.listdir(folder))
    except OSError:
        return False
    return not left or bool(left & MARKS)


def wait_for_save(folder: pathlib.Path) -> None:
    """Wait for a background save of this process into the folder. Without one, Orbax is not imported."""
    store = sys.modules.get("shardfn.checkpoint.orbax_store")
    if store is not None:
        store.wait_for_save(folder)


def open_step(path: StrPath, step: int | None = None) -> tuple[pathlib.Path, int, contents.Contents]:
    """The array folder of a step, its number and its description; `step` None is the last.

    A damaged description of the last step is an error; no older step is taken instead.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: its description is damaged.
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
        there = "it has no complete checkpoint" if folder.is_dir() else "there is no such folder"
        fail(CheckpointError, f"there is no checkpoint in {folder}", why=there,
             fix="pass the folder that `checkpoint.save` was called with")  # fmt: skip
    folder = folder / str(step) / ITEM
    return folder, step, contents.read_contents(folder)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file that is on disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The contents of one checkpoint; print it for a table.

    Attributes:
      path: the folder of all steps.
      step: this step.
      steps: all complete steps.
      contents: the description of the step.
      disk_bytes: bytes of its files, compressed.
    """

    path: pathlib.Path
    step: int
    steps: tuple[int, ...]
    contents: contents.Contents
    disk_bytes: int

    def __str__(self) -> str:
        held = self.contents
        meshes = [mesh_text(mesh.axes) for mesh in held.meshes if mesh.devices > 1]
        others = [step for step in self.steps if step != self.step]
        lines = [
            f"{self.path}: step {self.step}" + (f"; also {', '.join(map(str, others[-8:]))}" if others else ""),
            f"saved on {held.devices} device{'s'[: held.devices != 1]} in {held.processes} "
            f"process{'es' if held.processes != 1 else ''}, mesh {'; '.join(meshes) or 'of one device'}",
            f"{len(held.entries)} arrays, {held.nbytes:,} B, {self.disk_bytes:,} B on disk",
        ]
        rows = [
            (e.path, e.kind if e.kind != "array" else e.dtype + shape_text(e.shape), str(e.strategy), f"{e.nbytes:,}")
            for e in held.entries
        ]
        return to_text([Text("", tuple(lines)), Table("", ("array", "shape", "strategy", "B"), tuple(rows))])


def inspect(path: StrPath, step: int | None = None) -> Inspection:
    """Describe a checkpoint without reading its arrays.

    Args:
      path: the folder that `save` was called with.
      step: which step; the last if None.

    Returns:
      Its arrays, shardings and sizes, as an object that prints as a table.

    Raises:
      CheckpointError: there is no such step.
      CheckpointFileError: its description is damaged.

    >>> import tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(folder, {"w": jnp.ones((8, 4))}, step=7)
    ...     checkpoint.inspect(folder).step
    7
    """
    folder, step, held = open_step(path, step)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Inspection(absolute_path(path), step, steps(path), held, size)
