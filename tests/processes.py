"""Processes that tests start as a newcomer starts them."""

import os


def bare_environment() -> dict[str, str]:
    """The environment without what says how many devices there are: the process finds them itself.

    What makes XLA compile quickly stays, as in the tests' own process.
    """
    flags = (flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    keep = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_PLATFORMS")}
    return keep | {"XLA_FLAGS": " ".join(flags)}
