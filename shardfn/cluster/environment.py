"""The variables that a launcher sets for a process: JAX's and Kubeflow's, and MindSpore's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from shardfn.errors import ClusterError, Problem, fail, raise_problems

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""JAX reads the first by itself. Kubeflow sets all three."""
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
LOOPBACK = re.compile(r"(127\.[\d.]+|localhost|\[?::1\]?)(:\d+)?")


@dataclasses.dataclass(frozen=True)
class Membership:
    """Where a process finds its group. What is None, JAX finds by itself.

    Attributes:
      coordinator: `host:port` of process 0.
      count: the number of processes.
      index: which of them this is, from 0.
      devices: the ids of the machine's devices that this process uses.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None


def membership(variables: Mapping[str, str]) -> Membership | None:
    """The group that variables name; None if they name none, as under Slurm, Open MPI and on Cloud TPU, which JAX detects.

    JAX's variables take precedence over MindSpore's.

    Raises:
      ClusterError: a variable is no number, one is missing, or the role is not one of a worker.

    >>> membership({"MS_WORKER_NUM": "2", "MS_NODE_ID": "1", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118"})
    Membership(coordinator='10.0.0.1:8118', count=2, index=1, devices=None)
    >>> membership({}) is None
    True
    """
    if any(name in variables for name in (COORDINATOR, COUNT, INDEX)):
        return _checked(
            Membership(variables.get(COORDINATOR), _number(variables, COUNT), _number(variables, INDEX)),
            {"the address of process 0": COORDINATOR, "the number of processes": COUNT, "the process": INDEX},
            is_detected=COUNT not in variables and INDEX not in variables,
        )
    count, index = group_size(variables), process_index(variables)
    host, port = variables.get("MS_SCHED_HOST"), variables.get("MS_SCHED_PORT")
    if count is None and index is None and host is None:
        return None
    if (role := variables.get("MS_ROLE", "MS_WORKER")) != "MS_WORKER":
        fail(ClusterError, f"this process has the role {role}", where=f"MS_ROLE={role}",
             why="JAX's coordinator runs inside process 0, and schedulers and servers are for parameter servers",
             fix="call shardfn.mindspore.set_ps_context(enable_ps=True) before shardfn.mindspore.init(), or start the "
                 "workers only, with MS_SCHED_HOST the host of worker 0")  # fmt: skip
    device = _number(variables, "DEVICE_ID")
    return _checked(
        Membership(f"{host}:{port}" if host and port else None, count, index, None if device is None else (device,)),
        {"the address of process 0": "MS_SCHED_HOST and MS_SCHED_PORT", "the number of processes": "RANK_SIZE or MS_WORKER_NUM",
         "the process": "RANK_ID or MS_NODE_ID"},
    )  # fmt: skip


def group_size(variables: Mapping[str, str]) -> int | None:
    """The number of processes that variables name.

    >>> group_size({"RANK_SIZE": "8"}), group_size({})
    (8, None)
    """
    return next(
        (n for name in (COUNT, "RANK_SIZE", "MS_WORKER_NUM") if (n := _number(variables, name)) is not None), None
    )


def process_index(variables: Mapping[str, str]) -> int | None:
    """Which process this is, by its variables. `MS_NODE_ID` may be a name that ends in the number, as that of a pod.

    >>> process_index({"RANK_ID": "3"}), process_index({"MS_NODE_ID": "job-worker-2"}), process_index({})
    (3, 2, None)
    """
    for name in (INDEX, "RANK_ID"):
        if (found := _number(variables, name)) is not None:
            return found
    node = re.search(r"(?:^|-)(\d+)$", variables.get("MS_NODE_ID", ""))
    return int(node[1]) if node else None


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        fail(ClusterError, f"`{name}` is not a number", where=f"{name}={text}", why="it counts processes or devices from 0",
             fix="set it to a number, or unset it")  # fmt: skip
    return int(text)


def _checked(found: Membership, names: Mapping[str, str], is_detected: bool = False) -> Membership:
    """The membership, if it is complete or needs no more.

    Raises:
      ClusterError: what is missing, all together.
    """
    if is_detected or found.count == 1:
        return found
    values = (found.coordinator, found.count, found.index)
    here = [variable for value, variable in zip(values, names.values(), strict=True) if value is not None]
    raise_problems(
        [Problem(f"nothing says {what}", where=f"the environment, which has {', '.join(here)}",
                 why="a group of processes needs its address, its size and this process's number",
                 fix=f"set {variable}, or start the processes with `shardfn launch`")
         for value, (what, variable) in zip(values, names.items(), strict=True) if value is None],
        ClusterError,
    )  # fmt: skip
    assert found.count is not None and found.index is not None
    if found.index >= found.count:
        fail(ClusterError, f"process {found.index} is not one of {found.count}",
             where=", ".join(names.values()), why="processes count from 0", fix=f"give 0 to {found.count - 1}")  # fmt: skip
    return found
