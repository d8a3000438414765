"""Processes that tests start as a newcomer starts them."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent


def raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    """Check, in a process that pytest did not start, that a call raises an error that says `text`."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


def bare_environment() -> dict[str, str]:
    """The environment without what says how many devices there are: the process finds them itself.

    What makes XLA compile quickly stays, as in the tests' own process.
    """
    flags = (flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    keep = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_PLATFORMS")}
    return keep | {"XLA_FLAGS": " ".join(flags)}


def launched(*arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess:
    """Run `shardfn launch` with these arguments in the environment of a newcomer, on CPUs; after `timeout` seconds it fails.

    The launcher ends its processes when it gets SIGTERM, so that none is left over.
    """
    command = [sys.executable, "-m", "shardfn", "launch", *arguments]
    environment = bare_environment() | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.terminate()
        out, err = launcher.communicate(timeout=30)
        raise AssertionError(f"no end after {timeout} s:\n{out[-4000:]}\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)
