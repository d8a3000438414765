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
START_S = 1800.0
"""Seconds until the first heartbeat: a process imports, joins its group (JAX waits five minutes), restores, compiles, and takes a
step. Larger models compile for longer, so that this is a choice, not a measurement."""


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


def expect(folder: pathlib.Path, rank: int, limit_s: float, start_s: float) -> int:
    """Look at a process from now on: it counts as silent when its first heartbeat has not come after `start_s` seconds.

    Args:
      folder: the directory of the files.
      rank: the process.
      limit_s: what `silent` is asked with.
      start_s: seconds until the first heartbeat.

    Returns:
      The time of the file, in nanoseconds, as long as no heartbeat has come.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = expect(pathlib.Path(folder), 0, 1.0, 60.0), expect(pathlib.Path(folder), 1, 1.0, -1.0)
    ...     silent(pathlib.Path(folder), (0, 1), 1.0)
    1
    """
    path, at = folder / str(rank), time.time_ns() + round((start_s - limit_s) * 1e9)
    path.touch()
    os.utime(path, ns=(at, at))
    return path.stat().st_mtime_ns


def silent(folder: pathlib.Path, running: Iterable[int], limit_s: float) -> int | None:
    """The process that has been silent longest, if that is longer than `limit_s` seconds.

    Before its first heartbeat a process has the time that `expect` gave it. While it rests it has any.
    """
    last = {}
    for rank in running:
        with contextlib.suppress(FileNotFoundError):
            last[rank] = (folder / str(rank)).stat().st_mtime
    rank = min(last, key=lambda r: last[r], default=None)
    return rank if rank is not None and time.time() - last[rank] > limit_s else None
