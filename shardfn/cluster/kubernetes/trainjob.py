"""A job for Kubeflow Trainer: a TrainJob, and a TrainingRuntime of its own with what a TrainJob cannot say."""

from __future__ import annotations

from typing import Any

from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.jobset import jobset_spec, metadata, slices
from shardfn.cluster.kubernetes.pods import container, env, pod_template, resources, variables

API = "trainer.kubeflow.org/v1alpha1"
NODE = "node"
"""Kubeflow Trainer's name of the replicated job and of the container that it trains in."""
FRAMEWORK = {"trainer.kubeflow.org/framework": "jax"}
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def trainjob(job: Job) -> list[dict[str, Any]]:
    """The TrainingRuntime and the TrainJob of a job.

    Kubeflow Trainer sets `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, by `mlPolicy.jax`.
    Restarts, volumes and node labels are in the runtime: a TrainJob has no field for restarts.

    >>> [runtime, made] = trainjob(Job("gpt", "gpt:1", ("python", "train.py"), processes=2))
    >>> runtime["spec"]["mlPolicy"], made["spec"]["runtimeRef"]["kind"], made["spec"]["trainer"]["numNodes"]
    ({'numNodes': 2, 'jax': {}}, 'TrainingRuntime', 2)
    """
    own = container(job, NODE, {}, runs=False)
    own = {key: value for key, value in own.items() if key not in ("env", "resources")}
    spec = jobset_spec(job, NODE, pod_template(job, own), {}, STEP)
    runtime = {
        "apiVersion": API, "kind": "TrainingRuntime", "metadata": metadata(job, labels=FRAMEWORK),
        "spec": {"mlPolicy": {"numNodes": job.processes, "jax": {}},
                 "template": {**({"metadata": slices(job)} if slices(job) else {}), "spec": spec}},
    }  # fmt: skip
    asked = resources(job)
    train = {
        "apiVersion": API, "kind": "TrainJob", "metadata": metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime", "name": job.name},
            **({} if job.deadline_s is None else {"activeDeadlineSeconds": job.deadline_s}),
            "trainer": {"image": job.image, "command": list(job.command), "numNodes": job.processes,
                        "env": env(variables(job)), **({"resourcesPerNode": asked} if asked else {})},
        },
    }  # fmt: skip
    return [runtime, train]
