"""MindSpore's `communication`: `init`, `get_rank` and `get_group_size`, for the group of `shardfn.cluster`."""

from __future__ import annotations

from typing import Any

import jax

from shardfn import cluster
from shardfn.errors import ClusterError, NotAvailableError, StrategyTypeError, a, fail
from shardfn.frontend.strategy import short
from shardfn.mindspore.context import current, get_ps_context

_BACKENDS = {"nccl": "GPU", "gloo": "CPU", "mccl": "CPU", "tpu": "TPU"}
"""The names of `backend_name`, and the devices that each is for. MindSpore's library for CPUs is mccl; JAX's is Gloo."""
_WORLD = ("hccl_world_group", "nccl_world_group", "mccl_world_group")
"""MindSpore's names of the group of all processes."""


def init(backend_name: str | None = None) -> None:
    """Join this process to the group that its environment names, as `shardfn.cluster.init`; another call changes nothing.

    With `set_ps_context(enable_ps=True)` and a scheduler's address, the process takes its role in a Ray cluster. A scheduler
    or server works in here until all workers have ended, and then ends itself, so the rest of the script is the workers'.

    Args:
      backend_name: "nccl" for GPUs, "gloo" or "mccl" for CPUs; by default what fits the devices.

    Raises:
      StrategyTypeError: the name is no string.
      ClusterError: the backend is not one of these devices, as "hccl" is not; or as `shardfn.cluster.init`.
      ExtraError: the process has a role in a job with parameter servers, and Ray is not installed.

    >>> init()
    >>> get_rank(), get_group_size()
    (0, 1)
    """
    if backend_name is not None and not isinstance(backend_name, str):
        fail(StrategyTypeError, f"`backend_name` must be a string, but it is {a(backend_name)}",
             where=f"init({short(backend_name)})", fix='leave it out, or write "nccl" or "gloo"')  # fmt: skip
    if backend_name is not None and backend_name not in _BACKENDS:
        why = "HCCL is the library of Ascend devices, which JAX does not have" if backend_name == "hccl" else ""
        fail(ClusterError, f"there is no backend {backend_name!r}", where=f"init({backend_name!r})",
             why=why or f"the backends are {', '.join(_BACKENDS)}",
             fix="leave backend_name out: JAX takes the one of its devices")  # fmt: skip
    target = current().device_target
    wanted = _BACKENDS[backend_name] if backend_name is not None else target
    if target is not None and wanted != target:
        _refuse(backend_name, f"device_target is {target}")
    if get_ps_context("enable_ps") and get_ps_context("scheduler_ip"):
        from shardfn.mindspore.roles import take_role  # needs Ray

        take_role()
    cluster.init()
    here = jax.default_backend().upper()
    if backend_name is not None and wanted != here:
        _refuse(backend_name, f"the devices here are of the kind {here}")


def get_rank(group: str = _WORLD[0]) -> int:
    """The number of this process in its group; before `init`, `RANK_ID` of the environment, or 0.

    Args:
      group: MindSpore's name of the group of all processes.

    Returns:
      The number, from 0.

    Raises:
      StrategyTypeError, NotAvailableError: another group.

    >>> get_rank()
    0
    """
    _check_group(group, "get_rank")
    return cluster.rank()


def get_group_size(group: str = _WORLD[0]) -> int:
    """The number of processes; before `init`, `RANK_SIZE` of the environment, or 1.

    MindSpore has one device in a process. Where processes have several, `device_num` of the context counts the devices.

    Args:
      group: MindSpore's name of the group of all processes.

    Raises:
      StrategyTypeError, NotAvailableError: another group.

    >>> get_group_size()
    1
    """
    _check_group(group, "get_group_size")
    return cluster.size()


def _refuse(backend_name: str | None, why: str) -> None:
    fail(ClusterError, f"the backend {backend_name!r} is not one of these devices", where=f"init({backend_name!r})",
         why=why, fix="leave backend_name out: JAX takes the one of its devices")  # fmt: skip


def _check_group(group: Any, function: str) -> None:
    if not isinstance(group, str):
        fail(StrategyTypeError, f"`group` must be a string, but it is {a(group)}", where=f"{function}({short(group)})",
             fix="leave it out")  # fmt: skip
    if group not in _WORLD:
        fail(NotAvailableError, f"there is no group {group!r}", where=f"{function}({group!r})",
             why="shardfn shards over mesh axes, and makes no groups of processes", fix="leave it out")  # fmt: skip
