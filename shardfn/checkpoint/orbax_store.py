"""Step folders, retention and background saves with Orbax. The only user of `orbax`.

Orbax writes a step into a temporary folder and renames it when all processes have written their files. The contents are
ours: arrays (`arrays.py`), `checkpoint.json`, `layout.toml`.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from shardfn.checkpoint import arrays
from shardfn.checkpoint.chunks import Box
from shardfn.checkpoint.contents import FILE, Contents, contents_to_json
from shardfn.checkpoint.fingerprints import file_fingerprints
from shardfn.checkpoint.step_folders import ITEM
from shardfn.errors import CheckpointFileError

LocalShards = Mapping[str, Sequence[tuple[Box, np.ndarray]]]


class StateHandler(ocp.AsyncCheckpointHandler):
    """Writes one checkpoint into the folder that Orbax provides."""

    args: StateSave

    async def async_save(self, directory: Any, args: StateSave) -> list[Any]:
        """Write in the background; the shards are in host memory already."""
        self.args = args
        return [_Commit(pathlib.Path(directory), args)]

    def save(self, directory: Any, args: StateSave) -> None:
        """Write, and wait."""
        self.args = args
        _Commit(pathlib.Path(directory), args).result()

    def finalize(self, directory: Any) -> None:
        """Write the description, in the first process, after all processes have written their files."""
        at, contents = pathlib.Path(directory), self.args.contents
        files = file_fingerprints(at, contents.entries, self.args.texts)
        _text(at / FILE, contents_to_json(dataclasses.replace(contents, files=files)))

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Not used: `reader` reads without Orbax."""
        raise NotImplementedError


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass(repr=False)
class StateSave(ocp.args.CheckpointArgs):
    """The data that one process writes: its shards of the arrays; the first process also writes the texts."""

    contents: Contents
    shards: LocalShards
    texts: Mapping[str, str]


class _Commit:
    """A write in a thread of its own, with the interface of Orbax's futures."""

    def __init__(self, directory: pathlib.Path, args: StateSave):
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(directory, args), name="checkpoint")
        self.thread.start()

    def _run(self, directory: pathlib.Path, args: StateSave) -> None:
        try:
            futures = []
            for entry in args.contents.entries:
                if 0 not in entry.shape and (shards := args.shards[entry.path]):
                    futures += arrays.write_shards(directory, entry, shards)
            errors = [error for future in futures if (error := _error(future)) is not None]
            if errors:
                raise errors[0]
            if jax.process_index() == 0:
                for name, text in args.texts.items():
                    _text(directory / name, text)
        except BaseException as error:
            self.error = error

    def result(self, timeout: float | None = None) -> None:
        self.thread.join(timeout)
        if self.error is not None:
            raise self.error


def _text(path: pathlib.Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _error(future: Any) -> BaseException | None:
    try:
        future.result()
    except (ValueError, OSError) as error:
        return error
    return None


class Saving:
    """A save, possibly in the background. `path` is the folder, `step` the number of the step."""

    def __init__(self, path: pathlib.Path, step: int, manager: ocp.CheckpointManager):
        self.path, self.step = path, step
        self._manager: ocp.CheckpointManager | None = manager
        self._failed: CheckpointFileError | None = None

    def wait(self) -> None:
        """Wait until the checkpoint is complete on disk.

        Raises:
          CheckpointFileError: it could not be written, for instance because the disk is full. Earlier steps are complete.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.wait_until_finished()
                manager.close()
            except Exception as error:
                _clear(self.path, self.step)
                try:
                    arrays.raise_write_error(error, self.path)
                    raise
                except CheckpointFileError as ours:
                    self._failed = ours
            finally:
                if UNDER_WAY.get(self.path) is self:
                    del UNDER_WAY[self.path]
        if self._failed is not None:
            raise self._failed

    def __repr__(self) -> str:
        state = "under way" if self._manager else "failed" if self._failed else "done"
        return f"Saving({str(self.path)!r}, step={self.step}, {state})"


UNDER_WAY: dict[pathlib.Path, Saving] = {}
"""The background save of each folder. The next call on the folder waits for it."""


def wait_for_save(path: pathlib.Path) -> None:
    """Wait for a background save of this process into the folder, if there is one."""
    saving = UNDER_WAY.get(path)
    if saving is not None:
        saving.wait()


def _settle_all() -> None:
    for saving in list(UNDER_WAY.values()):
        saving.wait()


# Python refuses new work for threads when it shuts them down, before `atexit`. The handler of concurrent.futures must run after
# this one, so it has to be registered first.
assert ThreadPoolExecutor
getattr(threading, "_register_atexit", atexit.register)(_settle_all)


def begin(
    path: pathlib.Path,
    step: int,
    contents: Contents,
    shards: LocalShards,
    texts: Mapping[str, str],
    keep: int | None,
    keep_every: int | None,
) -> Saving:
    """Begin to save one step, after any save into the folder that is still running.

    Args:
      path: the folder of all steps.
      step: the number of the step.
      contents: the description, without fingerprints.
      shards: the boxes and values that this process writes, by the path of the array.
      texts: other files that the first process writes, by name.
      keep: as in `save`.
      keep_every: as in `save`.

    Raises:
      CheckpointFileError: the folder cannot be written.
    """
    wait_for_save(path)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        keep_period=keep_every,
        create=True,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        save_root_metadata=False,
    )
    try:
        manager = ocp.CheckpointManager(path, options=options, item_handlers={ITEM: StateHandler()})
        saving = Saving(path, step, manager)
        manager.save(step, args=ocp.args.Composite(**{ITEM: StateSave(contents, shards, texts)}), force=True)
    except OSError as error:
        _clear(path, step)
        arrays.raise_write_error(error, path)
        raise
    UNDER_WAY[path] = saving
    return saving


def _clear(path: pathlib.Path, step: int) -> None:
    """Delete the partial files of a failed save, which could fill the disk."""
    if jax.process_index() == 0:
        for left in path.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
