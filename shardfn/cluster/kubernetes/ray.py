"""A job with parameter servers for KubeRay: a head that runs the command, workers with devices, servers without."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from shardfn.cluster.kubernetes.grace import END_S
from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.jobset import metadata
from shardfn.cluster.kubernetes.pods import INSTANCE, container, pod_template, variables
from shardfn.cluster.kubernetes.targets import platform_of

API = "ray.io/v1"
SERVER = "server"
"""The custom resource of Ray on a node for a parameter server: one each."""
BOUNDS = {"minReplicas": 0, "maxReplicas": 2**31 - 1}
"""KubeRay's own: a group may be scaled in both directions while the job runs."""
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
SUBMITTER = "ray-job-submitter"
"""KubeRay's name of the container that hands the command to the head."""
SUBMITTER_CPU, SUBMITTER_MEMORY = "500m", "1Gi"
"""What it asks for: it runs `ray job submit`, and waits."""
SCHEDULER, WORKER, PARAMETER_SERVER = "MS_SCHED", "MS_WORKER", "MS_PSERVER"
"""MindSpore's roles, as its operator sets them."""
POD_IP = {"fieldRef": {"fieldPath": "status.podIP"}}


def rayjob(job: Job) -> list[dict[str, Any]]:
    """The RayJob of a job with parameter servers. Each retry starts a new Ray cluster.

    >>> [made] = rayjob(Job("ctr", "ctr:1", ("python", "train.py"), processes=4, servers=2, retries=3))
    >>> made["spec"]["entrypoint"], made["spec"]["backoffLimit"]
    ('python train.py', 3)
    """
    # The command is the one worker that `ms.init` counts: Ray's actors are none.
    roles = ("env", f"MS_ROLE={WORKER}", "MS_WORKER_NUM=1") if job.mindspore else ()
    spec: dict[str, Any] = {
        "entrypoint": shlex.join((*roles, *job.command)), "submitterPodTemplate": _submitter(job),
        "backoffLimit": job.retries, "shutdownAfterJobFinishes": True,
        **({} if job.deadline_s is None else {"activeDeadlineSeconds": job.deadline_s}),
        **({} if job.ttl_s is None else {"ttlSecondsAfterFinished": job.ttl_s}),
        "rayClusterSpec": cluster_spec(job),
    }  # fmt: skip
    return [*_head_service(job), {"apiVersion": API, "kind": "RayJob", "metadata": metadata(job), "spec": spec}]


def raycluster(job: Job) -> list[dict[str, Any]]:
    """The Ray cluster of a job alone, to which a driver connects; the job's command is not run.

    >>> raycluster(Job("ctr", "ctr:1", ("python", "train.py"), servers=2))[0]["kind"]
    'RayCluster'
    """
    made = {"apiVersion": API, "kind": "RayCluster", "metadata": metadata(job), "spec": cluster_spec(job)}
    return [*_head_service(job), made]


def cluster_spec(job: Job) -> dict[str, Any]:
    """The head, the workers and the servers of a job. KubeRay makes a token, and only those who have it may connect."""
    head = _container(job, "ray-head", False, SCHEDULER)
    head["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    is_slice = platform_of(job.device) == "tpu" and job.processes > 1
    return {
        "rayVersion": job.ray,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},  # neither servers nor workers on the head
            "template": _template(job, head, has_devices=False),
        },
        "workerGroupSpecs": [
            _group(job, "workers", 1 if is_slice else job.processes, hosts=job.processes if is_slice else 1),
            _group(job, f"{SERVER}s", job.servers, is_server=True),
        ],
    }


def _container(job: Job, name: str, has_devices: bool, role: str) -> dict[str, Any]:
    values = (
        variables(job) if has_devices else variables(dataclasses.replace(job, devices=1)) | {"JAX_PLATFORMS": "cpu"}
    )
    return container(job, name, values | _role(job, role), runs=False, has_devices=has_devices)


def _template(job: Job, own: dict[str, Any], has_devices: bool) -> dict[str, Any]:
    return pod_template(job, own, has_devices=has_devices, restart=True, labels={INSTANCE: job.name})


def _role(job: Job, role: str) -> dict[str, Any]:
    """The variables of MindSpore's roles. `shardfn.mindspore.init` looks for Ray at the port after the scheduler's."""
    if not job.mindspore:
        return {}
    host = POD_IP if role == SCHEDULER else head_name(job)
    return {"MS_ROLE": role, "MS_SCHED_HOST": host, "MS_SCHED_PORT": str(PORTS["gcs"] - 1),
            "MS_WORKER_NUM": str(job.processes), "MS_SERVER_NUM": str(job.servers)}  # fmt: skip


def head_name(job: Job) -> str:
    """The host name of the head. KubeRay's own service of a RayJob has a name that nobody knows before."""
    return f"{job.name}-head"


def _head_service(job: Job) -> list[dict[str, Any]]:
    """The service that gives the head its name, where the pods' variables have it."""
    if not job.mindspore:
        return []
    return [{
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(job, head_name(job)),
        "spec": {"clusterIP": "None", "selector": {INSTANCE: job.name, "ray.io/node-type": "head"},
                 "ports": [{"name": "gcs", "port": PORTS["gcs"]}]},
    }]  # fmt: skip


def _submitter(job: Job) -> dict[str, Any]:
    """The pod that hands the command to the head, without what the command needs: devices, storage and other containers."""
    kept = ("imagePullPolicy", "securityContext", "envFrom")
    small = dataclasses.replace(
        job, device="cpu", storage=None, plan="", cpu=SUBMITTER_CPU, memory=SUBMITTER_MEMORY, grace_s=END_S,
        pod={key: value for key, value in job.pod.items() if key not in ("containers", "initContainers")},
        container={key: value for key, value in job.container.items() if key in kept},
    )  # fmt: skip
    own = container(small, SUBMITTER, {}, runs=False, has_devices=False)
    return pod_template(small, own, has_devices=False, labels={INSTANCE: job.name})


def _group(job: Job, name: str, replicas: int, hosts: int = 1, is_server: bool = False) -> dict[str, Any]:
    # Ray's own quoting: a shell takes the outer quotation marks, and JSON is left.
    asked = {"resources": json.dumps(json.dumps({SERVER: 1}))} if is_server else {}
    own = _container(job, name.removesuffix("s"), not is_server, PARAMETER_SERVER if is_server else WORKER)
    return {
        "groupName": name, "replicas": replicas, **BOUNDS,
        **({"numOfHosts": hosts} if hosts > 1 else {}),
        "rayStartParams": asked,
        "template": _template(job, own, has_devices=not is_server),
    }  # fmt: skip
