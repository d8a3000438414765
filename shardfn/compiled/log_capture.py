"""XLA's warnings of full rematerialisation, taken out of standard error while this process compiles."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import jax

from shardfn.compiled import forward_log
from shardfn.compiled.xla_log import rematerialisations

_ONE_AT_A_TIME = threading.Lock()


def compile_logged(lowered: jax.stages.Lowered, wanted: bool = True) -> tuple[jax.stages.Compiled, list[str]]:
    """Compile in this process.

    Args:
      lowered: what to compile.
      wanted: whether to take XLA's warnings of full rematerialisation out of standard error.

    Returns:
      The executable, and a diagnostic for each array that a warning was about.
    """
    with captured_rematerialisations(wanted) as log:
        compiled = lowered.compile()
    return compiled, rematerialisations("\n".join(log), compiled.as_text() or "") if log else []


@contextlib.contextmanager
def captured_rematerialisations(wanted: bool = True) -> Iterator[list[str]]:
    """Take XLA's warnings of full rematerialisation out of standard error, if `wanted`.

    XLA writes from C++ to file descriptor 2, so Python's `sys.stderr` does not see it. Within the block, the descriptor is a
    pipe to another process, which passes everything but these warnings on at once and unchanged. It outlives this process if
    XLA ends it. Nothing is taken where that is impossible: no POSIX, no Python to start, a closed standard error, or a block
    of another thread at the same time. Warnings that name another Python thread are passed on.

    Yields:
      A list. After the block it has the lines that were taken.
    """
    taken: list[str] = []
    if not wanted or os.name != "posix" or getattr(sys, "frozen", False) or not _ONE_AT_A_TIME.acquire(blocking=False):
        yield taken
        return
    try:
        end = f"end of {uuid.uuid4()}"
        process = _started(end)
        if process is None:
            yield taken
            return
        assert process.stdin is not None and process.stdout is not None
        own, pipe = os.dup(2), os.fstat(process.stdin.fileno())
        os.dup2(process.stdin.fileno(), 2)
        try:
            yield taken
        finally:
            if os.path.samestat(os.fstat(2), pipe):  # else someone else has replaced it meanwhile
                os.dup2(own, 2)
            os.close(own)
            with contextlib.suppress(OSError):
                process.stdin.write(f"{end}\n".encode())
            process.stdin.close()
            taken += process.stdout.read().decode(errors="replace").splitlines()
            process.stdout.close()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # a process started meanwhile may write to the pipe still
                process.wait(1)
    finally:
        _ONE_AT_A_TIME.release()


def _started(end: str) -> subprocess.Popen[bytes] | None:
    """The process that passes standard error on, when it is ready to; None if there is none."""
    others = "".join(f"(?!{t.native_id} )" for t in threading.enumerate() if t is not threading.current_thread())
    line = (  # JAX 0.10 compiles in a thread of XLA's, JAX 0.12 in the caller's
        rf"W\d+ [\d:.]+ +{others}\d+ [^\n]*Involuntary full rematerialization\. [^\n]* efficiently for HLO [^\n]*\n"
    )
    try:
        os.fstat(2)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(pathlib.Path(forward_log.__file__)), line, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # no Ctrl-C of the terminal reaches it
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    if process.stdout.read(1) == b"\n":
        return process
    process.communicate()
    return None
