"""The processes of a job, and the variables that each gets: a plain count, or MindSpore's RANK_TABLE_FILE."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.cluster.environment import BIND, COORDINATOR, COUNT, INDEX, LOOPBACK
from shardfn.errors import ClusterError, fail
from shardfn.files import read_bytes

LOCAL = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a job.

    Attributes:
      rank: its number, from 0.
      host: the address of its machine.
      devices: ids of the machine's devices that it uses.
    """

    rank: int
    host: str = LOCAL
    devices: tuple[int, ...] = (0,)


def local_job(processes: int, devices: int = 1, hosts: Sequence[str] = (LOCAL,)) -> tuple[Process, ...]:
    """As many processes on each host, which share its devices out in their order.

    Args:
      processes: the number of processes on each host.
      devices: how many devices each process uses.
      hosts: the addresses of the hosts; process 0 is on the first.

    Returns:
      The processes of the job.

    Raises:
      ClusterError: a number below 1, or hosts that are empty or there twice.

    >>> [p.devices for p in local_job(2, devices=2)]
    [(0, 1), (2, 3)]
    """
    for name, value in (("processes", processes), ("devices-per-process", devices)):
        if value < 1:
            fail(ClusterError, f"a job cannot have {value} {name}", where=f"--{name} {value}", why="it has one at least",
                 fix=f"write --{name} 1, or more")  # fmt: skip
    if not hosts or "" in hosts or len({*hosts}) < len(hosts):
        fail(ClusterError, "these are not the hosts of a job", where=f"--hosts {','.join(hosts)}",
             why="each host is there once, by its address", fix="write --hosts 10.0.0.1,10.0.0.2, or leave it out")  # fmt: skip
    return tuple(
        Process(at * processes + i, host, tuple(range(i * devices, (i + 1) * devices)))
        for at, host in enumerate(hosts)
        for i in range(processes)
    )


MAX_BYTES = 64 << 20
"""More than any rank table has."""


def read_rank_table(path: str | os.PathLike[str]) -> tuple[Process, ...]:
    """The processes of MindSpore's RANK_TABLE_FILE, version 1.0: one for each device of its `server_list`.

    Args:
      path: the file, JSON.

    Returns:
      The processes by rank.

    Raises:
      ClusterError: the file is not such a table, or its ranks are not 0 to n - 1.
      OSError: the file cannot be read.

    >>> import tempfile
    >>> server = {"server_id": "10.0.0.1", "device": [{"device_id": "4", "device_ip": "10.1.0.1", "rank_id": "0"}]}
    >>> with tempfile.NamedTemporaryFile("w+") as file:
    ...     json.dump({"version": "1.0", "server_count": "1", "server_list": [server]}, file)
    ...     file.flush()
    ...     read_rank_table(file.name)
    (Process(rank=0, host='10.0.0.1', devices=(4,)),)
    """
    try:
        table = json.loads(read_bytes(path, MAX_BYTES))
        found = [
            Process(int(device["rank_id"]), str(server["server_id"]), (int(device["device_id"]),))
            for server in table["server_list"]
            for device in server["device"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        missing = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        fail(ClusterError, f"{path} is not a rank table", where=f"--ranktable {path}", why=missing,
             fix="give a RANK_TABLE_FILE of version 1.0: a server_list, whose servers have server_id and a list device "
                 "of device_id and rank_id")  # fmt: skip
    found.sort(key=lambda process: process.rank)
    if not found or [process.rank for process in found] != list(range(len(found))):
        fail(ClusterError, f"{path} does not number its processes", where=f"rank_id: {[p.rank for p in found]}",
             why="each rank from 0 on has one device", fix=f"write rank_id 0 to {max(len(found) - 1, 0)}")  # fmt: skip
    return tuple(found)


def without(job: Sequence[Process], rank: int) -> tuple[Process, ...]:
    """The job of the other processes, which keep their devices and get new numbers.

    >>> without(local_job(3, devices=2), 1)[1]
    Process(rank=1, host='127.0.0.1', devices=(4, 5))
    """
    left = (process for process in job if process.rank != rank)
    return tuple(dataclasses.replace(process, rank=i) for i, process in enumerate(left))


def variables(job: Sequence[Process], process: Process, port: int, outer: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process: that of the launcher, and what `cluster.init`, MindSpore's scripts and XLA read.

    Args:
      job: the processes; the first is the coordinator.
      process: one of them.
      port: where process 0 listens.
      outer: the environment of the launcher.

    >>> found = variables(local_job(2), Process(1), 5000, {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    >>> found["JAX_COORDINATOR_ADDRESS"], found["RANK_ID"], found["RANK_SIZE"], found["XLA_FLAGS"]
    ('127.0.0.1:5000', '1', '2', '')
    """
    host, devices = job[0].host, process.devices
    # XLA's thread pool is at least twice the devices: JAX before 0.12 can wait for ever otherwise.
    threads = max(4 * len(devices), os.cpu_count() or 1)
    found = {"NPROC": str(threads), **outer}
    found["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+ ?", "", found.get("XLA_FLAGS", ""))
    address = f"{host}:{port}"
    if LOOPBACK.fullmatch(host):
        found[BIND] = address
    said: dict[str, Any] = {
        COORDINATOR: address, COUNT: len(job), INDEX: process.rank,
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices)), "JAX_NUM_CPU_DEVICES": len(devices),
        "RANK_ID": process.rank, "RANK_SIZE": len(job), "DEVICE_ID": devices[0],
        "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": len(job), "MS_NODE_ID": process.rank,
        "MS_SCHED_HOST": host, "MS_SCHED_PORT": port, "PYTHONUNBUFFERED": 1,
    }  # fmt: skip
    return found | {name: str(value) for name, value in said.items()}
