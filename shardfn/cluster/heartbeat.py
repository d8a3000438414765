"""Heartbeats: each process touches a file of its own, and the launcher ends a job in which one falls silent."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterable

from shardfn.cluster.environment import process_index

FOLDER = "SHARDFN_HEARTBEATS"
"""The directory of the files, which `launch` names to its processes."""


def beat() -> None:
    """Tell the launcher that this process goes on. Call it once for each step of a loop of your own; `cluster.run` does.

    It does nothing in a process that `shardfn launch --heartbeat` did not start.

    >>> beat()
    """
    if folder := os.environ.get(FOLDER):
        path = _file(folder)
        try:
            os.utime(path)
        except FileNotFoundError:
            path.touch()


def rest() -> None:
    """Tell the launcher that no step is taken for a while, such as before an evaluation. The next `beat` ends the rest.

    >>> rest()
    """
    if folder := os.environ.get(FOLDER):
        _file(folder).unlink(missing_ok=True)


def _file(folder: str) -> pathlib.Path:
    return pathlib.Path(folder, str(process_index(os.environ) or 0))


def silent(folder: pathlib.Path, running: Iterable[int], limit_s: float) -> int | None:
    """The process that has been silent longest, if that is longer than `limit_s` seconds.

    A process counts from its first heartbeat: starting and compiling take as long as they take. While it rests it does not.
    """
    last = {}
    for rank in running:
        with contextlib.suppress(FileNotFoundError):
            last[rank] = (folder / str(rank)).stat().st_mtime
    rank = min(last, key=lambda r: last[r], default=None)
    return rank if rank is not None and time.time() - last[rank] > limit_s else None
