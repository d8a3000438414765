"""The folder of a job: its first state, written all or none, and temporary folders."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from shardfn.cluster.parameter_server.engine import COORDINATOR, Setup, Target
from shardfn.cluster.parameter_server.ledger_rows import Job, write_coordinator
from shardfn.cluster.parameter_server.partition import Partition
from shardfn.cluster.parameter_server.server import new_servers
from shardfn.cluster.parameter_server.server_rows import write_new_server
from shardfn.durable.store_errors import cannot_write, told
from shardfn.files import make_folder, sync_folder


def job_folder(
    folder: str | pathlib.Path | None,
    optimizer: Any,
    job: Job,
    arrays: Mapping[str, Any],
    servers: int,
    workers: int,
    log_bytes: int | None,
) -> Setup:
    """Write the first state of a job, unless its folder holds one.

    Args:
      folder: the folder; None for a temporary one, which ends with the process.
      optimizer: an optax optimizer, or one of `embedding` for a table.
      job: what does not change.
      arrays: the first rows of each array by name, [rows, ...]; only slices of them are read.
      servers: the number of servers.
      workers: the number of workers.
      log_bytes: as of `Server`.

    Returns:
      What it takes to start the servers.

    Raises:
      CheckpointFileError: the disk is full, or the folder cannot be written.
    """
    place = pathlib.Path(folder) if folder is not None else _temporary_folder()
    setup = Setup(place.resolve() / "job", optimizer, job.rules.synchronous, log_bytes)
    if not setup.folder.is_dir():
        _write_job(setup, job, arrays, servers, workers)
    return setup


def _write_job(setup: Setup, job: Job, arrays: Mapping[str, Any], servers: int, workers: int) -> None:
    """All or none: of several processes that create the same job, the first one counts."""
    part = dataclasses.replace(setup, folder=setup.folder.with_name(f"{setup.folder.name}.{secrets.token_hex(4)}.part"))
    try:
        with writing(part.folder):
            for index, saved in enumerate(new_servers(Partition(job.arrays, servers), arrays, setup.optimizer)):
                write_new_server(part.path(Target(0, index)), saved)
            write_coordinator(part.path(COORDINATOR), job, servers, workers)
            try:
                part.folder.rename(setup.folder)
            except OSError:
                if not setup.folder.is_dir():
                    raise
            sync_folder(setup.folder.parent)
    finally:
        shutil.rmtree(part.folder, ignore_errors=True)


_FOLDERS: collections.deque[tempfile.TemporaryDirectory[str]] = collections.deque()
"""Temporary folders, which end with the process."""


def _temporary_folder() -> pathlib.Path:
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="shardfn-ps-"))
    return pathlib.Path(_FOLDERS[-1].name)


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Make a folder as `make_folder` does, and write in it.

    Raises:
      CheckpointFileError: the disk is full, or the folder cannot be written.
    """
    with told(folder, cannot_write):
        make_folder(folder)
        yield
