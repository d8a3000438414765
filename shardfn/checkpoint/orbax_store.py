"""Step folders, retention and background saves with Orbax.

A step is an Orbax checkpoint with two items: `state`, the arrays, and `layout`, the layout file beside them. Orbax writes it into
a temporary folder and renames it when all processes have written.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from shardfn.checkpoint import arrays
from shardfn.checkpoint.catalogue import MAX_BYTES, write_sums
from shardfn.checkpoint.failure import Failure
from shardfn.checkpoint.orbax_arrays import registry
from shardfn.checkpoint.step_folders import ITEM, LAYOUT, LAYOUT_ITEM
from shardfn.errors import CheckpointError, CheckpointFileError, fail
from shardfn.files import atomic_file, read_bytes
from shardfn.layoutfile.toml import to_toml
from shardfn.planning.layout_rules import LayoutFile

REMOVED = "removed.orbax-checkpoint-tmp"
"""The folder that old steps are moved to, each at once, before their files are deleted. Orbax deletes it when a save begins."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What one step holds.

    Attributes:
      tree: a pytree of `orbax_arrays.ArraySource`.
      layout: the layout file, or None.
      is_layout_given: whether `save` was given it; otherwise it says what the shardings of the arrays are.
      devices: how many devices the arrays are on.
      in_flight: most bytes that are written at once; None for no bound.
    """

    tree: Any
    layout: LayoutFile | None
    devices: int
    is_layout_given: bool = False
    in_flight: int | None = None


class StateHandler(ocp.BasePyTreeCheckpointHandler):
    """Orbax's handler of pytrees, which writes the checksums of the files that describe the arrays when all are there."""

    def finalize(self, directory: Any) -> None:
        """Finish the item, in the first process."""
        super().finalize(directory)
        write_sums(pathlib.Path(directory))


class LayoutHandler(ocp.AsyncCheckpointHandler):
    """Writes the layout file."""

    async def async_save(self, directory: Any, args: LayoutSave) -> list[future.Future]:
        """Write it in the background, in the first process."""

        async def write() -> None:
            self.save(directory, args)

        if jax.process_index():
            return []
        return [future.CommitFutureAwaitingContractedSignals(write(), name="write layout")]

    def save(self, directory: Any, args: LayoutSave) -> None:
        """Write it, and wait."""
        with atomic_file(directory / LAYOUT) as file:
            file.write(args.text.encode())

    def restore(self, directory: Any, args: Any = None) -> str:
        """The text of the layout file."""
        return read_bytes(directory / LAYOUT, MAX_BYTES).decode()


@ocp.args.register_with_handler(LayoutHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class LayoutSave(ocp.args.CheckpointArgs):
    """The text of a layout file."""

    text: str = ""


class Saving:
    """A save, possibly in the background. `path` is the folder, `step` the number of the step."""

    def __init__(
        self,
        path: pathlib.Path,
        step: int,
        manager: ocp.CheckpointManager,
        failure: Failure,
        lock: contextlib.ExitStack,
    ):
        self.path, self.step, self._failure, self._lock = path, step, failure, lock
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
                    try:
                        manager.wait_until_finished()
                        manager.close()
                        if jax.process_index() == 0:
                            shutil.rmtree(self.path / REMOVED, ignore_errors=True)
                    except Exception as error:
                        self._failure.tell(error)
                        self._failure.settle()
                        raise
            except CheckpointFileError as error:
                self._failed = error
            finally:
                self._lock.close()
                if UNDER_WAY.get(self.path.resolve()) is self:
                    del UNDER_WAY[self.path.resolve()]
        if self._failed is not None:
            raise self._failed

    def __repr__(self) -> str:
        state = "under way" if self._manager else "failed" if self._failed else "done"
        return f"Saving({str(self.path)!r}, step={self.step}, {state})"


UNDER_WAY: dict[pathlib.Path, Saving] = {}
"""The background save of each folder. The next call on the folder waits for it."""


def wait_for_save(path: pathlib.Path) -> None:
    """Wait for a background save of this process into the folder, if there is one."""
    saving = UNDER_WAY.get(path.resolve())
    if saving is not None:
        saving.wait()


def _settle_all() -> None:
    for saving in list(UNDER_WAY.values()):
        try:
            saving.wait()
        except CheckpointFileError:
            traceback.print_exc()
            atexit.register(_end_with_an_error)


def _end_with_an_error() -> None:
    """End the process with the exit status 1, which no other function of `atexit` can give it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# Python refuses new work for threads when it shuts them down, before `atexit`. The handler of concurrent.futures must run after
# this one, so it has to be registered first: by the import above.
getattr(threading, "_register_atexit", atexit.register)(_settle_all)


def begin(path: pathlib.Path, step: int, saved: Saved, keep: int | None, keep_every: int | None) -> Saving:
    """Begin to save one step, after any save into the folder that is still running.

    Args:
      path: the folder of all steps.
      step: the number of the step.
      saved: what it holds; this process writes its part.
      keep: as in `save`.
      keep_every: as in `save`.

    Raises:
      CheckpointError: another process saves in the folder, or has saved the step.
      CheckpointFileError: the folder cannot be written.
    """
    wait_for_save(path)
    failure = Failure()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        keep_period=keep_every,
        create=True,
        cleanup_tmp_directories=True,
        todelete_subdir=REMOVED,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=failure.barrier()),
        save_root_metadata=False,
    )
    files = StateHandler(use_zarr3=True, type_handler_registry=registry(failure, saved.in_flight))
    state = ocp.PyTreeCheckpointHandler(handler_impl=files)
    told: dict[str, Any] = {
        "devices": saved.devices, "processes": jax.process_count(), "layout_given": saved.is_layout_given
    }  # fmt: skip
    items: dict[str, Any] = {ITEM: ocp.args.PyTreeSave(saved.tree)}
    if saved.layout is not None:
        items[LAYOUT_ITEM] = LayoutSave(to_toml(saved.layout))
        told["layout_sha256"] = hashlib.sha256(items[LAYOUT_ITEM].text.encode()).hexdigest()
    with contextlib.ExitStack() as lock:
        lock.enter_context(only_writer(path))
        lock.enter_context(failure.logged_once())
        with clearing(path, step, OSError):
            manager = ocp.CheckpointManager(
                path, options=options, item_handlers={ITEM: state, LAYOUT_ITEM: LayoutHandler()}
            )
            try:
                manager.save(step, args=ocp.args.Composite(**items), custom_metadata=told, force=True)
            except StepAlreadyExistsError:
                fail(CheckpointError, f"step {step} exists already", where=str(path), why="another process saved it meanwhile",
                     fix="save in one process at a time, or give each a folder of its own")  # fmt: skip
        saving = Saving(path, step, manager, failure, lock.pop_all())
    UNDER_WAY[path.resolve()] = saving
    return saving


@contextlib.contextmanager
def only_writer(path: pathlib.Path) -> Iterator[None]:
    """Lock a folder of steps: Orbax deletes what another process has under way there.

    A job of several processes, which write together, takes no lock; nor is there one where the file system has none.

    Raises:
      CheckpointError: another process has the lock.
    """
    if fcntl is None or jax.process_count() > 1:
        yield
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(CheckpointError, f"another process saves in {path}", where=f"the lock of {path}",
                     why="one would delete what the other has under way",
                     fix="save in one process at a time, which waits for its background saves (`wait()`), or give each a folder "
                         "of its own")  # fmt: skip
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # also where a forked process has it open
        os.close(opened)


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
