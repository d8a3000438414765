"""Step folders, retention and background saves with Orbax. The only user of `orbax`.

Orbax writes a step into a temporary folder and renames it when all processes have written their files. The contents are
ours: arrays (`arrays.py`), `checkpoint.json`, `layout.toml`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import pathlib
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from shardfn.checkpoint import arrays
from shardfn.checkpoint.chunks import Box
from shardfn.checkpoint.contents import FILE, Contents, contents_to_json
from shardfn.checkpoint.fingerprints import file_fingerprints
from shardfn.checkpoint.step_folders import ITEM, write_text
from shardfn.errors import CheckpointFileError


class StateHandler(ocp.AsyncCheckpointHandler):
    """Writes one checkpoint into the folder that Orbax provides."""

    args: StateSave

    async def async_save(self, directory: Any, args: StateSave) -> list[Any]:
        """Write in the background; the shards are in host memory already."""
        self.args = args
        executor = ThreadPoolExecutor(1, "checkpoint")
        try:
            return [executor.submit(_write, pathlib.Path(directory), args)]
        finally:
            executor.shutdown(wait=False)

    def save(self, directory: Any, args: StateSave) -> None:
        """Write, and wait."""
        self.args = args
        _write(pathlib.Path(directory), args)

    def finalize(self, directory: Any) -> None:
        """Write the description, in the first process, after all processes have written their files."""
        at, contents = pathlib.Path(directory), self.args.contents
        files = file_fingerprints(at, contents.entries, self.args.texts)
        write_text(at / FILE, contents_to_json(dataclasses.replace(contents, files=files)))

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Not used: `reader` reads without Orbax."""
        raise NotImplementedError


@ocp.args.register_with_handler(StateHandler, for_save=True, for_restore=True)
@dataclasses.dataclass(repr=False)
class StateSave(ocp.args.CheckpointArgs):
    """The data that one process writes.

    Attributes:
      contents: the description, without fingerprints.
      shards: the boxes and values of its shards, by the path of the array.
      texts: other files by name, which the first process writes.
    """

    contents: Contents
    shards: Mapping[str, Sequence[tuple[Box, np.ndarray]]]
    texts: Mapping[str, str]


def _write(directory: pathlib.Path, args: StateSave) -> None:
    pairs = [(entry, args.shards[entry.path]) for entry in args.contents.entries if 0 not in entry.shape]
    arrays.write_arrays(directory, [(entry, shards) for entry, shards in pairs if shards])
    if jax.process_index() == 0:
        for name, text in args.texts.items():
            write_text(directory / name, text)


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
                with clearing(self.path, self.step, Exception):
                    manager.wait_until_finished()
                    manager.close()
            except CheckpointFileError as error:
                self._failed = error
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
# this one, so it has to be registered first: by the import above.
getattr(threading, "_register_atexit", atexit.register)(_settle_all)


def begin(path: pathlib.Path, step: int, state: StateSave, keep: int | None, keep_every: int | None) -> Saving:
    """Begin to save one step, after any save into the folder that is still running.

    Args:
      path: the folder of all steps.
      step: the number of the step.
      state: what this process writes.
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
    with clearing(path, step, OSError):
        manager = ocp.CheckpointManager(path, options=options, item_handlers={ITEM: StateHandler()})
        saving = Saving(path, step, manager)
        manager.save(step, args=ocp.args.Composite(**{ITEM: state}), force=True)
    UNDER_WAY[path] = saving
    return saving


@contextlib.contextmanager
def clearing(path: pathlib.Path, step: int, kind: type[Exception]) -> Iterator[None]:
    """If a save fails with this kind of error, delete its partial files, which could fill the disk, and raise a fix."""
    try:
        with arrays.write_errors(path, kind):
            yield
    except kind:
        if jax.process_index() == 0:
            for left in path.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)
        raise
