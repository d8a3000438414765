"""A job as a JobSet: one indexed Job, whose pods are the processes, behind a headless service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.pods import container, group_variables, pod_template, variables
from shardfn.cluster.kubernetes.targets import platform_of

WORKERS = "workers"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
"""All pods of a Job on one node pool, which is one TPU slice, and no others there."""


def jobset(job: Job) -> list[dict[str, Any]]:
    """The JobSet of a job.

    >>> [made] = jobset(Job("gpt", "gpt:1", ("python", "train.py"), processes=4, devices=4, device="tpu-v5e:4x4", retries=3))
    >>> made["kind"], made["spec"]["failurePolicy"]["maxRestarts"]
    ('JobSet', 3)
    """
    values = group_variables(job, f"{job.name}-{WORKERS}-0-0.{job.name}") | variables(job)
    template = pod_template(job, container(job, "worker", values))
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata(job) | slices(job),
             "spec": jobset_spec(job, WORKERS, template, {"completionMode": "Indexed", "parallelism": job.processes,
                                                          "completions": job.processes})}]  # fmt: skip


def jobset_spec(job: Job, role: str, template: Mapping[str, Any], size: Mapping[str, Any],
                labels: Mapping[str, str] | None = None) -> dict[str, Any]:  # fmt: skip
    """The specification of a JobSet of one replicated job, which restarts as `shardfn launch --retries` does.

    A pod that fails is not started again by itself: the others wait for it in a collective. Its Job fails, and with it all
    of them. The next attempt begins when the pods of the last have ended, from the last checkpoint.
    """
    spec: dict[str, Any] = {"backoffLimit": 0, **size}
    failure: dict[str, Any] = {"maxRestarts": job.retries, "restartStrategy": "BlockingRecreate"}
    if job.deadline_s is not None and size:
        spec["activeDeadlineSeconds"] = job.deadline_s
        failure["rules"] = [{"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}]
    replicated = {"name": role, "replicas": 1, "template": {**({"metadata": {"labels": dict(labels)}} if labels else {}),
                                             "spec": {**spec, "template": dict(template)}}}  # fmt: skip
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": failure,
        **({} if job.ttl_s is None else {"ttlSecondsAfterFinished": job.ttl_s}),
        "replicatedJobs": [replicated],
    }


def metadata(job: Job, name: str = "", labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The metadata of an object of the job: `name`, or the job's own, its namespace, its labels and further ones."""
    every = {**job.labels, **(labels or {})}
    space = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name or job.name, **space, **({"labels": every} if every else {})}


def slices(job: Job) -> dict[str, Any]:
    """The annotation that keeps a job of several TPU machines on one slice."""
    return {"annotations": dict(EXCLUSIVE)} if platform_of(job.device) == "tpu" and job.processes > 1 else {}
