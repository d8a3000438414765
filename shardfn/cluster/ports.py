"""Ports of this machine at which process 0 of a job listens."""

from __future__ import annotations

import socket

from shardfn.cluster.environment import LOOPBACK
from shardfn.errors import ClusterError, fail


def free_port() -> int:
    """A port of the loopback address that nothing listens at now.

    >>> free_port() > 0
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_free(host: str, port: int) -> None:
    """Refuse a port at which something listens: JAX's coordinators share it, and each job would take the other's processes.

    Raises:
      ClusterError: it is in use.

    >>> check_free("127.0.0.1", free_port())
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        try:
            probe.bind(("127.0.0.1" if LOOPBACK.fullmatch(host) else "", port))
        except (OSError, OverflowError) as error:
            fail(ClusterError, f"port {port} is in use", where=f"{host}:{port}", why=str(error),
                 fix="give another port, the same on all hosts; `shardfn launch` takes a free one on one machine")  # fmt: skip
