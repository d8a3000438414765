"""The roles of MindSpore's parameter server on Ray: the scheduler is the head of a cluster, each server is a node of it.

The address of the scheduler is that of JAX's group of workers. Ray's head listens at the next port.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any

from shardfn.cluster.kubernetes.ray import SERVER
from shardfn.cluster.parameter_server.ray_engine import NAMESPACE, RayError, ray  # pyright: ignore[reportAttributeAccessIssue]
from shardfn.errors import ClusterError, fail, nearest
from shardfn.mindspore.context import get_ps_context
from shardfn.mindspore.context_keys import ROLES

START_S = 300
"""Seconds that a process waits for the scheduler."""

_LIST = "attendance"


class Attendance:
    """An actor that knows how many workers have ended."""

    def __init__(self) -> None:
        self.gone = 0

    def leave(self) -> None:
        """A worker has ended."""
        self.gone += 1

    def ended(self) -> int:
        """How many workers have ended."""
        return self.gone


def take_role() -> None:
    """Join the cluster in the role of the context. Of a scheduler and a server this returns never: they end with the workers.

    Raises:
      ClusterError: the context is incomplete, the scheduler does not answer, or nothing says who may join the cluster.
    """
    found = {key: get_ps_context(key) for key in ("ms_role", "scheduler_ip", "scheduler_port", "worker_num")}
    if missing := [key for key, value in found.items() if value is None]:
        fail(ClusterError, "the job with parameter servers is not known", where="init", why=f"{', '.join(missing)} are not set",
             fix="set MS_ROLE, MS_SCHED_HOST, MS_SCHED_PORT, MS_WORKER_NUM and MS_SERVER_NUM")  # fmt: skip
    if found["ms_role"] not in ROLES:
        fail(ClusterError, f"there is no role {found['ms_role']}", where=f"MS_ROLE={found['ms_role']}",
             why=f"the roles are {', '.join(ROLES)}", fix=nearest(found["ms_role"], ROLES))  # fmt: skip
    if ray.is_initialized():
        return
    if not os.environ.get("RAY_AUTH_MODE"):  # `ray start` would let everybody in that reaches the port
        fail(ClusterError, "this job does not say who may join its cluster", where="init",
             why="whoever reaches a Ray cluster can run code there, and RAY_AUTH_MODE is not set",
             fix="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to one file for all roles (`ray get-auth-token --generate` "
                 "makes a token); or RAY_AUTH_MODE=disabled in a network of its own")  # fmt: skip
    address = f"{found['scheduler_ip']}:{found['scheduler_port'] + 1}"
    nodes = {
        "MS_SCHED": ["--head", f"--node-ip-address={found['scheduler_ip']}", f"--port={found['scheduler_port'] + 1}",
                     "--include-dashboard=false"],
        "MS_PSERVER": [f"--address={address}", f"--resources={json.dumps({SERVER: 1})}"],
    }  # fmt: skip
    if found["ms_role"] not in nodes:
        _joined(lambda: ray.init(address, namespace=NAMESPACE, log_to_driver=False), address)
        attendance = _attendance()
        atexit.register(lambda: ray.get(attendance.leave.remote(), timeout=30))
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=0",
               "--min-worker-port=0", "--max-worker-port=0", *nodes[found["ms_role"]]]  # fmt: skip
    start = functools.partial(_started, command)
    node = start() if found["ms_role"] == "MS_SCHED" else _joined(start, address)
    try:
        _joined(lambda: ray.init(address, namespace=NAMESPACE, log_to_driver=False), address)
        attendance = _attendance()
        with contextlib.suppress(RayError):  # the scheduler has ended
            while ray.get(attendance.ended.remote()) < found["worker_num"]:
                if node.poll() is not None and found["ms_role"] == "MS_PSERVER":  # Ray gives a slow start up
                    node = _joined(start, address)
                time.sleep(0.2)
        ray.shutdown()
    finally:
        node.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(30)
    raise SystemExit(0)


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    """A node, if it still runs after a moment: a server's node ends where the scheduler is not there yet."""
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(5)
        fail(ClusterError, "a node of the cluster does not start", where=" ".join(command[3:]),
             why=f"`ray start` ended with {node.returncode}", fix="read what it printed; another port may be free")  # fmt: skip
    return node


def _joined(attempt: Any, address: str) -> Any:
    """What an attempt gives, once the scheduler is there."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return attempt()
        except (ConnectionError, RuntimeError, ValueError) as error:  # RuntimeError: of Ray, and a node that ended
            if time.monotonic() > deadline:
                fail(ClusterError, f"no scheduler answers at {address}", where="init", why=str(error).split("\n")[0],
                     fix="start a process with MS_ROLE=MS_SCHED there; "
                         "a worker's host needs a node of the cluster, too")  # fmt: skip
        time.sleep(0.5)


def _attendance() -> Any:
    options = {"name": _LIST, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(Attendance).options(**options).remote()
