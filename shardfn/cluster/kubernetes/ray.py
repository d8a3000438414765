"""A job with parameter servers for KubeRay: a head that runs the command, workers with devices, servers without."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.jobset import metadata
from shardfn.cluster.kubernetes.pods import container, pod_template, variables
from shardfn.cluster.kubernetes.targets import platform_of

API = "ray.io/v1"
SERVER = "server"
"""The custom resource of Ray on a node for a parameter server: one each."""
BOUNDS = {"minReplicas": 0, "maxReplicas": 2**31 - 1}
"""KubeRay's own: a group may be scaled in both directions while the job runs."""
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}


def rayjob(job: Job) -> list[dict[str, Any]]:
    """The RayJob of a job with parameter servers. Each retry starts a new Ray cluster.

    >>> [made] = rayjob(Job("ctr", "ctr:1", ("python", "train.py"), processes=4, servers=2, retries=3))
    >>> made["spec"]["entrypoint"], made["spec"]["backoffLimit"]
    ('python train.py', 3)
    """
    spec: dict[str, Any] = {
        "entrypoint": shlex.join(job.command), "backoffLimit": job.retries, "shutdownAfterJobFinishes": True,
        **({} if job.deadline_s is None else {"activeDeadlineSeconds": job.deadline_s}),
        **({} if job.ttl_s is None else {"ttlSecondsAfterFinished": job.ttl_s}),
        "rayClusterSpec": cluster_spec(job),
    }  # fmt: skip
    return [{"apiVersion": API, "kind": "RayJob", "metadata": metadata(job), "spec": spec}]


def raycluster(job: Job) -> list[dict[str, Any]]:
    """The Ray cluster of a job alone, to which a driver connects; the job's command is not run.

    >>> raycluster(Job("ctr", "ctr:1", ("python", "train.py"), servers=2))[0]["kind"]
    'RayCluster'
    """
    return [{"apiVersion": API, "kind": "RayCluster", "metadata": metadata(job), "spec": cluster_spec(job)}]


def cluster_spec(job: Job) -> dict[str, Any]:
    """The head, the workers and the servers of a job. KubeRay makes a token, and only those who have it may connect."""
    head = _container(job, "ray-head", has_devices=False)
    head["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    is_slice = platform_of(job.device) == "tpu" and job.processes > 1
    return {
        "rayVersion": job.ray,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},  # neither servers nor workers on the head
            "template": pod_template(job, head, has_devices=False, restart=True),
        },
        "workerGroupSpecs": [
            _group(job, "workers", 1 if is_slice else job.processes, hosts=job.processes if is_slice else 1),
            _group(job, f"{SERVER}s", job.servers, is_server=True),
        ],
    }


def _container(job: Job, name: str, has_devices: bool) -> dict[str, Any]:
    values = (
        variables(job) if has_devices else variables(dataclasses.replace(job, devices=1)) | {"JAX_PLATFORMS": "cpu"}
    )
    return container(job, name, values, runs=False, has_devices=has_devices)


def _group(job: Job, name: str, replicas: int, hosts: int = 1, is_server: bool = False) -> dict[str, Any]:
    # Ray's own quoting: a shell takes the outer quotation marks, and JSON is left.
    asked = {"resources": json.dumps(json.dumps({SERVER: 1}))} if is_server else {}
    own = _container(job, name.removesuffix("s"), has_devices=not is_server)
    return {
        "groupName": name, "replicas": replicas, **BOUNDS,
        **({"numOfHosts": hosts} if hosts > 1 else {}),
        "rayStartParams": asked,
        "template": pod_template(job, own, has_devices=not is_server, restart=True),
    }  # fmt: skip
