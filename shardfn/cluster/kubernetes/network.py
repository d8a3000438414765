"""A NetworkPolicy that keeps other pods away from a job: from its coordinator, its collectives and its Ray cluster."""

from __future__ import annotations

from typing import Any

from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.jobset import metadata
from shardfn.cluster.kubernetes.pods import INSTANCE
from shardfn.cluster.kubernetes.ray import PORTS

JOBSET = "jobset.sigs.k8s.io/jobset-name"
"""The label that JobSet gives to its pods. The JobSet of a TrainJob has the TrainJob's name."""
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
"""The label of KubeRay's operator, which asks the dashboard how a job is."""


def around(job: Job, is_on_ray: bool) -> dict[str, Any]:
    """A NetworkPolicy that lets the pods of a job reach each other, and nobody else reach them.

    Pods of the job reach each other at all ports: Gloo, NCCL and Ray choose ports of their own. KubeRay's operator reaches the
    dashboard. What the pods send is not limited.

    >>> around(Job("gpt", "gpt:1", ("a",)), False)["spec"]["ingress"]
    [{'from': [{'podSelector': {'matchLabels': {'jobset.sigs.k8s.io/jobset-name': 'gpt'}}}]}]
    """
    own = {"matchLabels": {INSTANCE if is_on_ray else JOBSET: job.name}}
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": own}]}]
    if is_on_ray:
        ingress.append({"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": dict(OPERATOR)}}],
                        "ports": [{"protocol": "TCP", "port": PORTS["dashboard"]}]})  # fmt: skip
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata(job),
            "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": ingress}}  # fmt: skip
