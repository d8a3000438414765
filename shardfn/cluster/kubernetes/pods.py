"""A process of a job as a pod template: container, variables, resources, volumes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardfn.cluster.environment import COORDINATOR, COUNT, INDEX
from shardfn.cluster.kubernetes.grace import grace_s, state_bytes
from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.security import CONTAINER, POD, restricted
from shardfn.cluster.kubernetes.targets import RESOURCES, node_affinity, node_labels, platform_of
from shardfn.layoutfile.plan_file import estimated_peak

PORT = 8476
"""Where process 0 listens."""
PLAN_FOLDER = "/etc/shardfn"
"""Where every process finds the plan of its job."""
GIB = 1 << 30
PROCESS_BYTES = 4 * GIB
"""Requested for a process of which nothing is said: Python, JAX, a compilation, a batch. Not measured; `memory` replaces it."""
INSTANCE = "app.kubernetes.io/instance"
"""The label of a job's pods on Ray, with its name."""
_OWN = ("image", "name", "command", "env", "resources", "volumeMounts")
COMPLETION_INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}


def variables(job: Job) -> dict[str, Any]:
    """The variables of every process but those of its group: what its platform needs, then the job's own.

    >>> variables(Job("a", "a:1", ("a",), devices=4))
    {'PYTHONUNBUFFERED': '1', 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '4', 'NPROC': '16'}
    """
    found: dict[str, Any] = {"PYTHONUNBUFFERED": "1"}
    if platform_of(job.device) == "cpu":
        # As `shardfn launch` sets them: XLA's thread pool is at least twice the devices.
        found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices), "NPROC": str(4 * job.devices)}
    return found | dict(job.env)


def group_variables(job: Job, coordinator: str) -> dict[str, Any]:
    """The variables from which `cluster.init` knows its group: one pod of an indexed Job is one process.

    Args:
      job: the job.
      coordinator: the host of process 0.

    >>> group_variables(Job("a", "a:1", ("a",), processes=4), "a-workers-0-0.a")["JAX_COORDINATOR_ADDRESS"]
    'a-workers-0-0.a:8476'
    """
    return {COORDINATOR: f"{coordinator}:{PORT}", COUNT: str(job.processes), INDEX: COMPLETION_INDEX}


def env(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Variables as a container lists them.

    >>> env({"A": "1", "B": {"fieldRef": {"fieldPath": "metadata.name"}}})
    [{'name': 'A', 'value': '1'}, {'name': 'B', 'valueFrom': {'fieldRef': {'fieldPath': 'metadata.name'}}}]
    """
    return [
        {"name": name, **({"value": v} if isinstance(v, str) else {"valueFrom": dict(v)})} for name, v in values.items()
    ]


def default_requests(job: Job, has_devices: bool = True) -> dict[str, str]:
    """What a process asks for where the job does not say it, so that the scheduler does not take it for nothing.

    A CPU for each device. Memory: 4 GiB, the process's part of the state (a save in the background copies it first), and for
    each CPU device the plan's peak, or 1 GiB without a plan.

    >>> default_requests(Job("a", "a:1", ("a",), processes=2, devices=8, device="h100:16", state="64Gi"))
    {'cpu': '8', 'memory': '36Gi'}
    """
    devices, holders = (job.devices, job.processes) if has_devices else (1, max(job.servers, 1))
    size = PROCESS_BYTES + (state_bytes(job) or 0) / holders
    if has_devices and platform_of(job.device) == "cpu":
        size += devices * (estimated_peak(job.plan) or GIB)
    return {"cpu": str(devices), "memory": f"{math.ceil(size / GIB)}Gi"}


def resources(job: Job, has_devices: bool = True) -> dict[str, Any]:
    """What a process asks for, with what the container's own `resources` add. Memory is a limit too, so that a pod is not
    evicted for another's sake; a default of `default_requests` is not.

    >>> resources(Job("a", "a:1", ("a",), devices=8, device="h100:8", memory="64Gi"))
    {'requests': {'memory': '64Gi', 'cpu': '8'}, 'limits': {'memory': '64Gi', 'nvidia.com/gpu': '8'}}
    """
    asked = {key: value for key, value in (("cpu", job.cpu), ("memory", job.memory)) if value}
    limits = {key: value for key, value in asked.items() if key == "memory"}
    resource = RESOURCES.get(platform_of(job.device))
    if resource and has_devices:
        limits[resource] = str(job.devices)
    given = job.container.get("resources", {})
    merged = {kind: {**own, **(given.get(kind) or {})} for kind, own in (("requests", asked), ("limits", limits))}
    for name, value in default_requests(job, has_devices).items():
        if name not in merged["limits"]:  # Kubernetes takes a limit for the request
            merged["requests"].setdefault(name, value)
    return {kind: value for kind, value in (merged | given | merged).items() if value}


def container(job: Job, name: str, values: Mapping[str, Any] | None = None, *, runs: bool = True,
              has_devices: bool = True) -> dict[str, Any]:  # fmt: skip
    """The container of a process.

    Args:
      job: the job.
      name: the container's name.
      values: its variables; those of `variables` by default.
      runs: whether it runs the job's command, and not that of its operator.
      has_devices: whether it asks for devices.
    """
    found: dict[str, Any] = {"name": name, "image": job.image}
    if runs:
        found["command"] = list(job.command)
    found["env"] = env(variables(job) if values is None else values)
    found["resources"] = resources(job, has_devices)
    if mounts := [*_mounts(job), *job.container.get("volumeMounts", ())]:
        found["volumeMounts"] = mounts
    return restricted(found | {key: value for key, value in job.container.items() if key not in _OWN}, CONTAINER)


def pod_template(job: Job, own: Mapping[str, Any], *, has_devices: bool = True, restart: bool = False,
                 labels: Mapping[str, str] | None = None) -> dict[str, Any]:  # fmt: skip
    """The pod template around a container. Fields of `job.pod` take precedence.

    Args:
      job: the job.
      own: the container; further ones of `job.pod` follow it.
      has_devices: whether it is placed on a node with the job's devices.
      restart: whether a container that fails starts again by itself; otherwise the pod fails with it.
      labels: labels of the pods.
    """
    given, is_placed = job.pod, has_devices and job.nodes != "any"
    # A pod that mounts the token of a service account may ask the API server; a process of a job asks it nothing.
    found: dict[str, Any] = {
        "terminationGracePeriodSeconds": grace_s(job),
        "automountServiceAccountToken": False,
        **given,
    }
    if not restart:
        found["restartPolicy"] = "Never"
    nodes = node_affinity(job.device, job.nodes) if is_placed else {}
    merged = {
        "nodeSelector": {**(node_labels(job.device) if is_placed else {}), **given.get("nodeSelector", {})},
        "affinity": {**({"nodeAffinity": nodes} if nodes else {}), **given.get("affinity", {})},
        "initContainers": [restricted(one, CONTAINER) for one in given.get("initContainers", ())],
        "containers": [dict(own), *(restricted(one, CONTAINER) for one in given.get("containers", ()))],
        "volumes": [*_volumes(job), *given.get("volumes", ())],
    }
    found |= {key: value for key, value in merged.items() if value}
    return {**({"metadata": {"labels": dict(labels)}} if labels else {}), "spec": restricted(found, POD)}


def plan_claim(job: Job) -> str:
    """The name of the ConfigMap with the job's plan."""
    return f"{job.name}-plan"


def _mounted(job: Job) -> Iterable[tuple[str, str, dict[str, Any], bool]]:
    """Each volume: its name, its path in the container, its source, whether it is only read."""
    if job.storage:
        yield "checkpoints", job.storage.path, {"persistentVolumeClaim": {"claimName": job.storage.claim}}, False
    if job.plan:
        yield "plan", PLAN_FOLDER, {"configMap": {"name": plan_claim(job)}}, True
    if platform_of(job.device) == "gpu":  # NCCL's transport within a machine; a container has 64 MiB of it otherwise
        yield "shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}, False


def _mounts(job: Job) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": path} | ({"readOnly": True} if is_read else {})
            for name, path, _, is_read in _mounted(job)]  # fmt: skip


def _volumes(job: Job) -> list[dict[str, Any]]:
    return [{"name": name, **source} for name, _, source, _ in _mounted(job)]
