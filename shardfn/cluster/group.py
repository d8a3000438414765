"""The group of processes that run one program: `init` starts it, `rank` and `size` say where this process stands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from shardfn.cluster.environment import BIND, LOOPBACK, Membership, group_size, membership, process_index
from shardfn.cluster.ports import check_free
from shardfn.errors import ClusterError, fail

TIMEOUT_S = 300
"""Seconds that a process waits for the others to start, as in `jax.distributed`."""

_OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
"""Variables of launchers that JAX detects: a number of processes, or their hosts with commas between."""


def init(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    local_devices: Sequence[int] | None = None,
    timeout_s: int = TIMEOUT_S,
) -> None:
    """Join this process to its group. Call it first, in every process; `jax.devices()` then lists the devices of all.

    Without arguments the environment says it: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`;
    or MindSpore's `RANK_ID`, `RANK_SIZE`, `MS_SCHED_HOST` and others; or Slurm, Open MPI and Cloud TPU, which JAX detects. If
    nothing names a group, this process is a group of one. Another call changes nothing.

    After `init`, an exception that nobody catches ends this process at once. JAX would wait for the other processes, which
    wait for this one. The devices start here, in all processes together: set JAX's options before.

    Args:
      coordinator: `host:port` of process 0.
      processes: the number of processes.
      process: which of them this is, from 0.
      local_devices: ids of the machine's GPUs that this process uses; all by default.
      timeout_s: seconds to wait for the other processes.

    Raises:
      ClusterError: JAX has started already, the environment is incomplete, the group has another size, or something listens
        where process 0 would.

    >>> init()
    >>> rank(), size()
    (0, 1)
    """
    given = (coordinator, processes, process)
    if any(value is not None for value in given):
        found = Membership(*given)
    elif not jax.distributed.is_initialized():
        found = membership(os.environ)
    else:
        found = None
    devices = local_devices if local_devices is not None else (found.devices if found else None)
    if jax.distributed.is_initialized():
        if processes not in (None, jax.process_count()) or process not in (None, jax.process_index()):
            fail(ClusterError, "the group of processes is another one",
                 where=f"init(processes={processes}, process={process})",
                 why=f"this process is number {jax.process_index()} of {jax.process_count()}",
                 fix="call init once, or leave its arguments out")  # fmt: skip
        return
    if (found is not None and found.count == 1) or (found is None and not _start_detected(devices, timeout_s)):
        return
    if found is not None:
        _start(found, devices, timeout_s)
    jax.devices()  # the backends of all processes start together: a process that plans alone would wait for the others
    if jax.process_count() > 1:
        _end_on_errors()


def rank() -> int:
    """The number of this process in its group, from 0; before `init`, what the environment says, or 0.

    >>> rank()
    0
    """
    return jax.process_index() if jax.distributed.is_initialized() else process_index(os.environ) or 0


def size() -> int:
    """The number of processes in the group; before `init`, what the environment says, or 1.

    >>> size()
    1
    """
    return jax.process_count() if jax.distributed.is_initialized() else group_size(os.environ) or 1


def backend() -> str:
    """The library that sends data between the devices of several processes, by the kind of devices.

    Returns:
      "gloo" for CPUs, "nccl" for GPUs, and for others the name of the platform, such as "tpu".

    >>> backend()
    'gloo'
    """
    platform = jax.default_backend()
    return {"cpu": "gloo", "gpu": "nccl", "cuda": "nccl"}.get(platform, platform)


def _start(found: Membership, devices: Sequence[int] | None, timeout_s: int) -> None:
    options = _local(devices)
    host, _, port = (found.coordinator or "").rpartition(":")
    if found.index == 0 and port.isdigit():
        check_free(host, int(port))
    if found.index == 0 and BIND not in os.environ and LOOPBACK.fullmatch(found.coordinator or ""):
        options["coordinator_bind_address"] = found.coordinator  # JAX would listen at all addresses of the machine
    try:
        with _explained():
            jax.distributed.initialize(
                found.coordinator, found.count, found.index, initialization_timeout=timeout_s, **options
            )
    except ValueError as error:
        if "must be defined" not in str(error):
            raise
        fail(ClusterError, "the group of processes is not known", where=f"coordinator {found.coordinator}", why=str(error),
             fix="give init(coordinator, processes, process), or set JAX_NUM_PROCESSES and JAX_PROCESS_ID too")  # fmt: skip


def _local(devices: Sequence[int] | None) -> dict[str, Any]:
    return {} if devices is None else {"local_device_ids": list(devices)}


def _start_detected(devices: Sequence[int] | None, timeout_s: int) -> bool:
    """Start the group that JAX detects; whether there is one."""
    is_launched = any(_is_several(os.environ.get(name, "")) for name in _OTHER_LAUNCHERS)
    try:
        with _explained():
            jax.distributed.initialize(initialization_timeout=timeout_s, **_local(devices))
    except ClusterError:  # this process uses its devices already, which a group of one may do
        if is_launched:
            raise
        return False
    except ValueError as error:
        if "should be defined" not in str(error):  # no launcher was detected
            raise
        return False
    return True


def _is_several(value: str) -> bool:
    return "," in value or (value.isdigit() and int(value) > 1)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        fail(ClusterError, "JAX has started already, with the devices of this process alone", where="shardfn.cluster.init",
             why=str(error).split(". ")[0], fix="call init before anything that makes an array or asks for devices")  # fmt: skip


def _end_on_errors() -> None:
    """Let an exception that nobody catches end this process at once.

    At its normal end a process waits until all have come to theirs, and the others wait for this one's part of a collective.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        show(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end
