"""The checkpoints in a folder: find, open and describe the step folders."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardfn.checkpoint import contents
from shardfn.checkpoint.catalogue import MAX_BYTES, METADATA, read_contents
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, a, fail
from shardfn.files import read_bytes
from shardfn.frontend.paths import listed
from shardfn.ir.model import mesh_text
from shardfn.layoutfile import LayoutFileError, read_layout
from shardfn.planning.layout_rules import LayoutFile
from shardfn.render.cells import shape_text
from shardfn.render.parts import Table, Text
from shardfn.render.text import to_text

StrPath = str | os.PathLike[str]

ITEM = "state"
"""The item of a step that holds the arrays."""
LAYOUT_ITEM = "layout"
"""The item of a step that holds the layout file."""
LAYOUT = "layout.toml"
STEP_METADATA = "_CHECKPOINT_METADATA"
"""Orbax's file of a whole step."""


def absolute_path(path: Any) -> pathlib.Path:
    """The absolute path of a folder, `~` expanded.

    Raises:
      CheckpointError: `path` is not a path of a file system.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        what = f"must be a string or a path, not {a(path)}" if path != "" else "is empty"
        fail(CheckpointError, f"a checkpoint's path {what}",
             where=f"path = {path!r:.60}", fix='write the folder of the checkpoints, such as "run/checkpoints"')  # fmt: skip
    if "://" in os.fspath(path):
        fail(CheckpointError, f"{path} is no folder of a file system", why="object stores are not supported here",
             fix="mount it, or copy the folder")  # fmt: skip
    return pathlib.Path(os.path.abspath(os.path.expanduser(os.fspath(path))))


def folder_for_writing(path: Any) -> pathlib.Path:
    """The absolute path of a folder that gets a step.

    Raises:
      CheckpointError: as `absolute_path`; Orbax would write a step there that nobody can read.
    """
    folder = absolute_path(path)
    _check_backslash(folder)
    # Orbax finds what the processes wrote by a glob of the path, and completes the step also where it finds nothing.
    if name := next((name for name in folder.parts if not fnmatch.fnmatchcase(name, name)), None):
        fail(CheckpointError, f"no checkpoint can be written to {folder}", where=f"the folder `{name}`",
             why="Orbax takes its brackets for a pattern, and does not find what it wrote",
             fix="rename the folder, or choose one without brackets")  # fmt: skip
    return folder


def _check_backslash(folder: pathlib.Path) -> None:
    if name := next((name for name in folder.parts[1:] if "\\" in name), None):
        fail(CheckpointError, f"no checkpoint can be in {folder}", where=f"the folder `{name}`",
             why="TensorStore takes its backslash for a /", fix="rename the folder")  # fmt: skip


def steps(path: StrPath) -> tuple[int, ...]:
    """The complete steps in a folder. Waits for a background save of this process.

    A step folder gets its name when it is complete, and loses it before its files are deleted. Other programs may have deleted a
    part of an old step, so a folder without a description is listed only if no later step is complete: it is damaged then.

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
    found = {int(name) for name in _numbered(folder)}
    complete = [step for step in found if _arrays_of(folder / str(step))]
    last = max(complete, default=-1)
    return tuple(sorted(complete + [step for step in found if step > last and _was_saved(folder / str(step))]))


def no_steps(folder: pathlib.Path) -> list[str]:
    """The names of folders that are numbers, of which Orbax wrote nothing."""
    return [name for name in _numbered(folder) if (folder / name).is_dir() and not _was_saved(folder / name)]


def check_free(step: pathlib.Path) -> None:
    """Refuse what is in the place of a new step: Orbax would delete it.

    Raises:
      CheckpointError: there is a file, or what is left of a step.
    """
    if step.is_dir():
        fail(CheckpointError, f"there are remains of a step {step.name}", where=str(step),
             why="its removal was interrupted", fix="delete the folder, or write another step")  # fmt: skip
    if os.path.lexists(step):
        fail(CheckpointError, f"{step} is a file", where=f"step {step.name}", why="a step is a folder of this name",
             fix="move the file, or write another step")  # fmt: skip


def whole_number(name: str, value: Any, least: int, where: str) -> int:
    """The value of an argument, as an int.

    Args:
      name: the name of the argument.
      value: its value.
      least: the least value that it may have.
      where: the call before the argument, such as "save('run', …".

    Raises:
      CheckpointError: it is no int, or less.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        fail(CheckpointError, f"`{name}` is {value!r:.40}", where=f"{where}, {name}={value!r:.40})",
             fix=f"write an int of {least} or more")  # fmt: skip
    return int(value)


def _numbered(folder: pathlib.Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if child.name.isdecimal() and child.name.isascii())


def _arrays_of(step: pathlib.Path) -> list[pathlib.Path]:
    """The folders with arrays of a step: the step itself, or its items, that of `save` first."""
    if not step.is_dir():
        return []
    found = [step, *sorted(step.iterdir(), key=lambda folder: (folder.name != ITEM, folder.name))]
    return [folder for folder in found if (folder / METADATA).is_file()]


def _was_saved(folder: pathlib.Path) -> bool:
    """Whether a folder with a number as its name is, or was, a step: Orbax has written it."""
    try:
        left = set(os.listdir(folder))
    except OSError:
        return False
    return bool(left & {ITEM, STEP_METADATA, METADATA, "commit_success.txt"})


def wait_for_save(folder: pathlib.Path) -> None:
    """Wait for a background save of this process into the folder. Without one, Orbax is not imported."""
    store = sys.modules.get("shardfn.checkpoint.orbax_store")
    if store is not None:
        store.wait_for_save(folder)


def open_step(path: StrPath, step: int | None = None) -> tuple[pathlib.Path, int, contents.Contents]:
    """The folder of the arrays of a step, its number and its description; `step` None is the last.

    A folder that holds arrays itself, as Orbax's checkpointers write it, is one step, with the number 0. A damaged description of
    the last step is an error; no older step is taken instead.

    Raises:
      CheckpointError: there is no such step, or it cannot be there; several items hold arrays, and none is that of `save`.
      CheckpointFileError: its description is damaged.
    """
    folder = absolute_path(path)
    _check_backslash(folder)
    known = steps(folder)
    if not known and step is None and (held := _arrays_of(folder)):
        return held[0], 0, _contents(folder, held)
    if step is None and known:
        step = known[-1]
    if step is None or isinstance(step, float | bool) or step not in known:
        shown = ", ".join(map(str, known[-8:]))
        if known:
            fail(CheckpointError, f"there is no step {step!r:.40} in {folder}", why=f"the steps are {shown}",
                 fix="choose one of them, or leave step out for the last")  # fmt: skip
        there = (
            "it has no complete checkpoint"
            if folder.is_dir()
            else "it is a file"
            if folder.exists()
            else "there is no such folder"
        )
        fail(CheckpointError, f"there is no checkpoint in {folder}", why=there, fix=_meant(folder))
    held = _arrays_of(folder / str(step)) or [folder / str(step) / ITEM]
    return held[0], step, _contents(folder / str(step), held)


OTHER_FORMS = (
    ("*.safetensors", "make a checkpoint of them by `checkpoint.import_safetensors`"),
    ("*.ckpt", "load MindSpore's files by `shardfn.mindspore.load_distributed_checkpoint`"),
    ("checkpoint_*", "read Flax's own files by `flax.training.checkpoints.restore_checkpoint`"),
)
"""Names of files of weights that are no checkpoints of Orbax, and what reads them."""


def _meant(path: pathlib.Path) -> str:
    """What to do about a path without steps."""
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    if step := next((child for child in inside if _arrays_of(child)), None):
        return f"pass the folder of one of its steps: {step}"
    known = (fix for name, fix in OTHER_FORMS if any(file.match(name) and file.is_file() for file in inside))
    return next(known, "pass the folder that `checkpoint.save` was called with, or a checkpoint of Orbax")


def _contents(step: pathlib.Path, held: Sequence[pathlib.Path]) -> contents.Contents:
    """The description of the arrays of a step."""
    if len(held) > 1 and held[0].name != ITEM:
        fail(CheckpointError, f"several items of {step} hold arrays", why=listed([folder.name for folder in held]),
             fix=f"pass the folder of one of them, such as {held[0]}")  # fmt: skip
    known: dict[str, Any] = {}
    try:
        told = _step_metadata(step)["custom_metadata"]
        known = {"devices": int(told["devices"]), "processes": int(told["processes"])}
        given, total = bool(told["layout_given"]), told.get("layout_sha256")
        is_there = given or total or (step / LAYOUT_ITEM).is_dir()
        known["layout"] = contents.StoredLayout(step / LAYOUT_ITEM / LAYOUT, given, total) if is_there else None
    except (ValueError, KeyError, TypeError):  # another program saved it
        pass
    return dataclasses.replace(read_contents(held[0], is_ours="layout" in known), **known)


def _step_metadata(step: pathlib.Path) -> Any:
    """Orbax's description of a whole step; empty where it wrote none.

    Raises:
      CheckpointFileError: it is damaged.
    """
    try:
        return json.loads(read_bytes(step / STEP_METADATA, MAX_BYTES))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(Problem(f"{step / STEP_METADATA} is damaged", why=str(error),
                                          fix="restore another step: checkpoint.steps(path) lists them; or delete this file: the "
                                              "arrays are read without it, as those of another program")) from None  # fmt: skip


def read_stored_layout(layout: contents.StoredLayout) -> LayoutFile:
    """The layout file of a step.

    Raises:
      CheckpointFileError: it is missing or damaged.
    """
    try:
        found = hashlib.sha256(read_bytes(layout.file, MAX_BYTES)).hexdigest()
        if layout.sha256 not in (None, found):
            raise ValueError("its SHA-256 is not the one that the step notes")
        return read_layout(layout.file)
    except (OSError, ValueError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError | NotADirectoryError) else "is damaged"
        why = error.problems[0].what if isinstance(error, LayoutFileError) else str(error)
        raise CheckpointFileError(Problem(f"{layout.file} {what}", why=why,
                                          fix="give `restore` a target, such as the plan; or restore another step: "
                                              "checkpoint.steps(path) lists them")) from None  # fmt: skip


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
        kinds = [e.dtype + shape_text(e.shape) if e.kind in contents.ARRAYS else e.kind for e in held.entries]
        rows = [(e.path, k, str(e.strategy), f"{e.nbytes:,}") for e, k in zip(held.entries, kinds, strict=True)]
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
