"""Start the processes of a job on this machine, show what they print, and end them all with the first that fails."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from shardfn.cluster.heartbeat import FOLDER, START_S, expect, silent
from shardfn.cluster.jobs import LOCAL, Process, variables, without
from shardfn.cluster.ports import check_free, free_port
from shardfn.errors import ClusterError, Problem, fail, raise_problems

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. JAX's preemption notifier catches SIGTERM, so that many processes need the second."""
MAX_S = threading.TIMEOUT_MAX
"""The longest time to wait for something."""
SILENT = 124
"""The exit status of a job in which a process sent no heartbeat, that of `timeout`."""
LAST_LINES = 20
"""Lines of the first process that fails, shown at the end."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
      status: the exit status: 0, or that of the first process that failed; 128 and its number for a signal, also one to the
        launcher; 124 for a process that sent no heartbeat.
      rank: which process failed first; None if none did.
      last_lines: what that process printed last.
      attempts: how many times the job was started.
      logs: the directory with a file for each process of each attempt.
      is_silent: whether the process sent no heartbeat.
      has_begun: whether it had sent one before.
    """

    status: int
    rank: int | None = None
    last_lines: tuple[str, ...] = ()
    attempts: int = 1
    logs: pathlib.Path | None = None
    is_silent: bool = False
    has_begun: bool = True

    def __str__(self) -> str:
        if self.rank is None:
            return "interrupted" if self.status else "every process ended well"
        ended = f"by signal {self.status - 128}" if self.status > 128 else f"with exit status {self.status}"
        begun = "" if self.has_begun else " before its first step"
        what = f"was silent{begun}, and the job was ended" if self.is_silent else f"ended first, {ended}"
        last = [f"  {line}" for line in self.last_lines]
        return "\n".join([f"process {self.rank} {what}; its last lines:", *(last or ["  (none)"])])


def launch(
    command: Sequence[str],
    job: Sequence[Process],
    logs: str | os.PathLike[str],
    *,
    host: str = LOCAL,
    port: int | None = None,
    retries: int = 0,
    min_processes: int | None = None,
    heartbeat_s: float | None = None,
    first_heartbeat_s: float = START_S,
    grace_s: float = GRACE_S,
    out: IO[str] | None = None,
) -> Outcome:
    """Run a command once for each process of a job that is on this machine, and wait for all.

    The first process that fails ends the attempt: the others get SIGTERM, and SIGKILL after `grace_s` seconds. Their own
    children, which are in the process's group, end as well.

    Args:
      command: the command and its arguments.
      job: the processes of the job.
      logs: the directory for `attempt-1/process-0.log` and so on; it is made.
      host: which host of the job this machine is; its processes are started.
      port: where process 0 listens; a free one by default, which needs all processes on this machine.
      retries: how many times a failed job starts again.
      min_processes: a job starts again without the process that failed, as long as it has so many; by default with all.
      heartbeat_s: seconds without a heartbeat after which a process counts as failed. `cluster.run` sends one for each step,
        and `cluster.beat` is for loops of your own. None does not look.
      first_heartbeat_s: the same for the first heartbeat, from the start of the process on.
      grace_s: seconds between SIGTERM and SIGKILL.
      out: where the merged lines go, each with its process; standard output by default.

    Returns:
      How the last attempt ended.

    Raises:
      ClusterError: a number that makes no sense, no process of the job is on this host, something listens at the port, or
        the log files cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as logs:
    ...     print(launch([sys.executable, "-c", "print('here')"], (Process(0),), logs))
    [0] here
    every process ended well
    """
    stream: IO[str] = sys.stdout if out is None else out
    outcome, job = Outcome(0), tuple(job)
    _check(job, host, port, retries, heartbeat_s, first_heartbeat_s, grace_s)
    watch = None if heartbeat_s is None else (heartbeat_s, first_heartbeat_s)
    with _signals() as events:
        for attempt in range(1, retries + 2):
            folder = pathlib.Path(logs) / f"attempt-{attempt}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                fail(ClusterError, f"{folder} cannot be made", where=f"launch: logs {os.fspath(logs)}", why=str(error),
                     fix="give a directory that this user may write to")  # fmt: skip
            if attempt == 1 and port is not None and job[0].host == host:
                check_free(host, port)
            running = _Attempt(command, job, host, port or free_port(), folder, stream, events, watch)
            try:
                found = running.outcome(grace_s)
            except BaseException:
                running.end()
                raise
            outcome = dataclasses.replace(found, attempts=attempt, logs=pathlib.Path(logs))
            if found.status == 0 or found.rank is None:
                break
            if attempt <= retries:
                job = without(job, found.rank) if min_processes is not None and len(job) > min_processes else job
                number = "" if min_processes is None else f", processes: {len(job)}"
                _say(stream, f"{outcome}\nstarting again: attempt {attempt + 1} of {retries + 1}{number}")
    return outcome


def _check(
    job: Sequence[Process],
    host: str,
    port: int | None,
    retries: int,
    heartbeat_s: float | None,
    first_s: float,
    grace_s: float,
) -> None:
    """Refuse numbers that make no sense, and a job of which no process is on this host.

    Raises:
      ClusterError: what is wrong, all together.
    """
    wanted = [
        ("port", port, port is None or 1 <= port <= 65535, "1 to 65535"),
        ("retries", retries, retries >= 0, "0 or more"),
        ("heartbeat", heartbeat_s, heartbeat_s is None or 0 < heartbeat_s < MAX_S, "seconds, more than 0"),
        ("first heartbeat", first_s, 0 < first_s < MAX_S, "seconds, more than 0"),
        ("grace", grace_s, 0 <= grace_s < MAX_S, "seconds, 0 or more"),
    ]
    problems = [Problem(f"`{name}` cannot be {value}", where=f"launch: {name}", why="the job could not be watched over",
                        fix=f"give {words}") for name, value, fits, words in wanted if not fits]  # fmt: skip
    hosts = list(dict.fromkeys(process.host for process in job))
    if host not in hosts:
        problems.append(Problem(f"no process of the job is on {host}", where="launch: host",
                                why=f"the processes are on {', '.join(hosts) or 'no host'}",
                                fix="give one of their hosts"))  # fmt: skip
    raise_problems(problems, ClusterError)


class _Attempt:
    """The running processes of one attempt."""

    def __init__(self, command: Sequence[str], job: Sequence[Process], host: str, port: int, folder: pathlib.Path,
                 out: IO[str], events: queue.SimpleQueue[Any], watch: tuple[float, float] | None):  # fmt: skip
        self.events, self.out, self.lock, self.heartbeats = events, out, threading.Lock(), folder / "heartbeats"
        self.watch, self.unbegun = watch, dict[int, int]()
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.last: dict[int, collections.deque[str]] = {}
        self.readers: list[threading.Thread] = []
        width = len(str(len(job) - 1))
        shutil.rmtree(self.heartbeats, ignore_errors=True)  # of an earlier job with the same logs
        self.heartbeats.mkdir()
        outer = os.environ | {FOLDER: str(self.heartbeats.absolute())}
        try:
            for process in job:
                if process.host != host:
                    continue
                if watch is not None:
                    self.unbegun[process.rank] = expect(self.heartbeats, process.rank, *watch)
                child = subprocess.Popen(command, env=variables(job, process, port, outer), stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         start_new_session=True)  # fmt: skip
                self.children[process.rank] = child
                self.last[process.rank] = collections.deque(maxlen=LAST_LINES)
                log = folder / f"process-{process.rank}.log"
                self._thread(self._read, process.rank, f"[{process.rank:>{width}}] ", log)
                self._thread(self._wait, process.rank)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End all at once."""
        for child in self.children.values():
            _signal_group(child, signal.SIGKILL)
        for child in self.children.values():
            child.wait()

    def outcome(self, grace_s: float) -> Outcome:
        """Wait until all have ended well, or end them."""
        left, status, first, is_silent = set(self.children), 0, None, False
        period = None if self.watch is None else min(self.watch) / 4
        while left and not status:
            try:
                rank, code = self.events.get(timeout=period)
            except queue.Empty:
                first = silent(self.heartbeats, left, self.watch[0]) if self.watch else None
                is_silent, status = first is not None, 0 if first is None else SILENT
                continue
            if rank is None:  # a signal to the launcher
                status = 128 + code
                break
            left.discard(rank)
            if code:
                status, first = (code if code > 0 else 128 - code), rank
        if status and (told := self._end(left, grace_s)):
            status, first, is_silent = 128 + told, None, False
        for reader in self.readers:  # a grandchild may keep the stream open
            reader.join(timeout=2)
        if first is None:
            return Outcome(status)
        has_begun = not is_silent or self._has_begun(first)
        return Outcome(status, first, tuple(self.last[first]), is_silent=is_silent, has_begun=has_begun)

    def _has_begun(self, rank: int) -> bool:
        """Whether a heartbeat of a process has come. One that rests has sent some."""
        with contextlib.suppress(FileNotFoundError):
            return (self.heartbeats / str(rank)).stat().st_mtime_ns != self.unbegun[rank]
        return True

    def _thread(self, run: Any, *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        thread.start()
        if run == self._read:
            self.readers.append(thread)

    def _wait(self, rank: int) -> None:
        self.events.put((rank, self.children[rank].wait()))

    def _read(self, rank: int, prefix: str, path: pathlib.Path) -> None:
        stream = self.children[rank].stdout
        assert stream is not None
        with stream, open(path, "wb") as log:
            for line in stream:
                log.write(line)
                log.flush()
                text = line.decode(errors="replace").rstrip("\r\n")
                self.last[rank].append(text)
                with self.lock:
                    _say(self.out, prefix + text)

    def _end(self, left: set[int], grace_s: float) -> int:
        """End the processes that are left, and what all have started; the signal to the launcher that came meanwhile, or 0."""
        told = 0
        for rank in left:
            _signal_group(self.children[rank], signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while left and (rest := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                told = self._seen(left, self.events.get(timeout=rest)) or told
        self.end()
        while left:  # the next attempt starts with an empty queue
            told = self._seen(left, self.events.get()) or told
        return told

    @staticmethod
    def _seen(left: set[int], event: tuple[int | None, int]) -> int:
        """Take a process that has ended out of those that are left; of a signal to the launcher its number."""
        rank, code = event
        left.discard(-1 if rank is None else rank)
        return code if rank is None else 0


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _say(out: IO[str], text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(text, file=out, flush=True)


@contextlib.contextmanager
def _signals() -> Iterator[queue.SimpleQueue[Any]]:
    """A queue of what happens, in which a SIGINT, SIGTERM or SIGHUP to this process is `(None, number)`."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda number, _: events.put((None, number)))
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
