"""A job as manifests, of the kind that is asked for or that fits it, with its volume claim and its plan."""

from __future__ import annotations

from typing import Any

from shardfn.cluster.kubernetes import network
from shardfn.cluster.kubernetes.grace import END_S, state_bytes
from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.jobset import jobset, metadata
from shardfn.cluster.kubernetes.pods import plan_claim
from shardfn.cluster.kubernetes.ray import raycluster, rayjob
from shardfn.cluster.kubernetes.trainjob import trainjob
from shardfn.errors import ClusterError, fail, nearest

KINDS = {"trainjob": trainjob, "jobset": jobset, "rayjob": rayjob, "raycluster": raycluster}
"""What a job becomes, by the name of its kind."""
ON_RAY = ("rayjob", "raycluster")


def render(job: Job, kind: str | None = None, *, network_policy: bool = False) -> list[dict[str, Any]]:
    """The manifests of a job.

    Args:
      job: the job.
      kind: a name of `KINDS`; by default "rayjob" for a job with parameter servers, and "trainjob" for others.
      network_policy: whether a NetworkPolicy keeps other pods away from those of the job.

    Returns:
      The manifests, in the order in which they are to be made.

    Raises:
      ClusterError: there is no such kind, or the job does not fit it.

    >>> [made["kind"] for made in render(Job("gpt", "gpt:1", ("python", "train.py")))]
    ['TrainingRuntime', 'TrainJob']
    """
    kind = kind or ("rayjob" if job.servers else "trainjob")
    if kind not in KINDS:
        fail(ClusterError, f"there is no kind {kind}", where=f"kind = {kind}", why=f"there are {', '.join(KINDS)}",
             fix=nearest(kind, KINDS))  # fmt: skip
    if (kind in ON_RAY) != bool(job.servers):
        what = (
            f"a {kind} has no parameter servers"
            if job.servers
            else f"a {kind} is for parameter servers, and there are none"
        )
        fail(ClusterError, what, where=f"kind = {kind}, servers = {job.servers}", why="parameter servers are actors of Ray",
             fix="take rayjob, or leave servers out" if job.servers else "take trainjob or jobset, or set servers")  # fmt: skip
    policy = [network.around(job, kind in ON_RAY)] if network_policy else []
    return [*_claim(job), *_plan(job), *policy, *KINDS[kind](job)]


def notes(job: Job) -> tuple[str, ...]:
    """What of a job may surprise who runs it, a line each.

    >>> notes(Job("gpt", "gpt:1", ("python", "train.py"), state="80Gi"))
    ()
    """
    return tuple(text for is_so, text in (
        (job.servers and job.storage is None,
         "the parameter servers have no storage: what they hold ends with their pods; write [storage]"),
        (job.storage and job.storage.size and not job.storage.storage_class,
         "the claim of [storage] is ReadWriteMany, and few default storage classes give that: it would stay Pending; write "
         "storage_class, such as that of Filestore, EFS, Azure Files or NFS"),
        (job.storage and job.grace_s is None and state_bytes(job) is None,
         f"nothing says how large the state is, so that a pod has {END_S} s to save it; write state or grace_s"),
    ) if is_so)  # fmt: skip


def _claim(job: Job) -> list[dict[str, Any]]:
    """The volume claim of checkpoints, if it is to be made. All processes write there."""
    if job.storage is None or not job.storage.size:
        return []
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": job.storage.size}}}
    if job.storage.storage_class:
        spec["storageClassName"] = job.storage.storage_class
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(job, job.storage.claim),
            "spec": spec,
        }
    ]


def _plan(job: Job) -> list[dict[str, Any]]:
    if not job.plan:
        return []
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, plan_claim(job)),
             "data": {job.plan_name: job.plan}}]  # fmt: skip
