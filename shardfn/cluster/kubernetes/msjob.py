"""MindSpore's `MSJob`, read, checked as its operator checks it, and translated.

An MSJob has replicas of three types: Scheduler, PS and Worker. Its operator runs three kinds of job: a single worker,
workers with parameter servers, and workers that a scheduler connects. Here process 0 does the scheduler's work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardfn.cluster.kubernetes.job import Job, job_of
from shardfn.cluster.kubernetes.pods import COMPLETION_INDEX
from shardfn.cluster.kubernetes.targets import RESOURCES
from shardfn.errors import ClusterError, Problem, fail, nearest, raise_problems

GROUP = "mindspore.gitee.com"
SCHEDULER, SERVER, WORKER = TYPES = ("Scheduler", "PS", "Worker")
_NAMES = {kind.lower(): kind for kind in TYPES}
CONTAINER, PORT = "mindspore", "msjob-port"
"""The names that the operator gives to the container that trains and to the scheduler's port."""
RETRIES = 6
"""Restarts where neither the job nor its restart policy bounds them: the default of a Kubernetes Job."""


def is_msjob(document: Mapping[str, Any]) -> bool:
    """Whether a document is an MSJob.

    >>> is_msjob({"apiVersion": "mindspore.gitee.com/v1", "kind": "MSJob"})
    True
    """
    return document.get("kind") == "MSJob" and str(document.get("apiVersion", "")).startswith(f"{GROUP}/")


def translate(document: Mapping[str, Any], where: str = "MSJob") -> tuple[Job, tuple[str, ...]]:
    """The job that an MSJob describes.

    Args:
      document: the MSJob.
      where: the file that it was read from, for errors.

    Returns:
      The job, and notes: what is done otherwise than by MindSpore's operator.

    Raises:
      ClusterError: what is wrong with the MSJob, all together, as its operator would say it.

    >>> pod = {"spec": {"containers": [{"name": "mindspore", "image": "net:1", "command": ["python", "train.py"],
    ...                                 "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}
    >>> job, notes = translate({"apiVersion": "mindspore.gitee.com/v1", "kind": "MSJob", "metadata": {"name": "net"},
    ...     "spec": {"msReplicaSpecs": {"Scheduler": {"template": pod}, "Worker": {"replicas": 4, "template": pod}}}})
    >>> job.processes, job.devices, job.device, notes[1]
    (4, 1, 'gpu', 'the Scheduler gets no pod: process 0 does its work')
    """
    try:
        return _translated(document, where)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fail(ClusterError, "MSJobSpec is not valid", where=where, why=f"{type(error).__name__}: {error}",
             fix="write each field as Kubernetes has it, such as env as a list of name and value")  # fmt: skip


def _translated(document: Mapping[str, Any], where: str) -> tuple[Job, tuple[str, ...]]:
    spec = document.get("spec")
    replicas = _replicas(spec if isinstance(spec, Mapping) else {}, where)
    assert isinstance(spec, Mapping)
    worker, policy = replicas[WORKER], spec.get("runPolicy") or {}
    own = next(c for c in worker["template"]["spec"]["containers"] if c.get("name") == CONTAINER)
    pod = {
        key: value for key, value in worker["template"]["spec"].items() if key not in ("containers", "restartPolicy")
    }
    others = [c for c in worker["template"]["spec"]["containers"] if c is not own]
    count, servers = worker["replicas"], replicas[SERVER]["replicas"] if SERVER in replicas else 0
    device, devices, beside = _devices(own, where)
    requests, limits = beside.get("requests", {}), beside.get("limits", {})
    asked = {"cpu": requests.get("cpu", limits.get("cpu")), "memory": limits.get("memory")}
    asked = {key: str(value) for key, value in asked.items() if value is not None}
    group: dict[str, Any] = {} if servers else {  # with servers the pods have different roles: `ray` sets them
        "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": str(count), "RANK_SIZE": str(count), "RANK_ID": COMPLETION_INDEX,
    }  # fmt: skip
    metadata = document.get("metadata") or {}
    data: dict[str, Any] = {
        "name": metadata.get("name", ""), "namespace": metadata.get("namespace"), "image": own["image"],
        "command": [*own.get("command", ()), *own.get("args", ())] or None,
        "processes": count, "devices": devices, "device": device, "servers": servers,
        "retries": 0 if worker.get("restartPolicy", "Never") == "Never" else policy.get("backoffLimit", RETRIES),
        "deadline_s": policy.get("activeDeadlineSeconds"), "ttl_s": policy.get("ttlSecondsAfterFinished"),
        "env": group | {e["name"]: _value(e) for e in own.get("env") or ()},
        "pod": {**pod, **({"containers": others} if others else {})},
        "container": {**_rest(own), **({"resources": beside} if beside else {})}, **asked,
    }  # fmt: skip
    job = job_of({key: value for key, value in data.items() if value is not None}, where)
    job = dataclasses.replace(job, mindspore=servers > 0)
    return job, tuple(_notes(spec, replicas, job))


def _replicas(spec: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """The replicas by their type, each with a count.

    Raises:
      ClusterError: all that is wrong with them. The first words of each problem are those of MindSpore's operator.
    """
    given = spec.get("msReplicaSpecs")
    if not isinstance(given, Mapping) or not given:
        fail(ClusterError, "MSJobSpec is not valid", where=f"{where}: spec.msReplicaSpecs", why="it names no replicas",
             fix="write msReplicaSpecs with a Worker, and what else the job needs: Scheduler, PS")  # fmt: skip
    found = {_NAMES.get(str(key).lower(), ""): value for key, value in given.items()}
    problems = [problem for key, value in given.items() for problem in _replica_problems(key, value, where)]
    counts = [_count(value) for key, value in given.items() if _NAMES.get(str(key).lower()) == SCHEDULER]
    if (schedulers := max(len(counts), *(count for count in counts if type(count) is int), 0)) > 1:
        problems.append(Problem(f"MSJobSpec is not valid: {schedulers} Scheduler found", f"{where}: spec.msReplicaSpecs",
                                "one scheduler connects all others", "leave one"))  # fmt: skip
    if WORKER not in found:
        problems.append(Problem("the MSJob has no Worker", f"{where}: spec.msReplicaSpecs",
                                "a scheduler and parameter servers train nothing", "write a Worker"))  # fmt: skip
    raise_problems(problems, ClusterError)
    return {kind: {**value, "replicas": _count(value)} for kind, value in found.items()}


def _count(replica: Any) -> Any:
    return replica.get("replicas", 1) if isinstance(replica, Mapping) else 1


def _replica_problems(key: Any, value: Any, where: str) -> Iterator[Problem]:
    """What is wrong with the replicas of one type."""
    kind, at = _NAMES.get(str(key).lower()), f"{where}: spec.msReplicaSpecs.{key}"
    if kind is None:
        yield Problem(f"there is no replica type {key}", at, f"the types are {', '.join(TYPES)}", nearest(key, TYPES))
        return
    template = value.get("template") if isinstance(value, Mapping) else None
    pod = template.get("spec") if isinstance(template, Mapping) else None
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    if not isinstance(containers, list) or not containers or not all(isinstance(c, Mapping) for c in containers):
        yield Problem(f"MSJobSpec is not valid: containers definition expected in {kind}", at, "its pods have no containers",
                      f"write template.spec.containers, with one named {CONTAINER}")  # fmt: skip
        return
    if not all(c.get("image") for c in containers):
        yield Problem(f"MSJobSpec is not valid: Image is undefined in the container of {kind}", at,
                      "every container is made from an image", "write image")  # fmt: skip
    if all(c.get("name") != CONTAINER for c in containers):
        yield Problem(f"MSJobSpec is not valid: There is no container named {CONTAINER} in {kind}", at,
                      "that one trains, and others help it", f"name it {CONTAINER}")  # fmt: skip
    count = _count(value)
    if type(count) is not int or count < 1:
        yield Problem(f"the number of replicas of {kind} is {count}", f"{at}.replicas", "it is a number from 1",
                      "write 1, or more")  # fmt: skip


def _value(variable: Mapping[str, Any]) -> Any:
    """The value of a variable; empty where YAML has none."""
    given = variable.get("value")
    return variable.get("valueFrom") or ("" if given is None else str(given))


def _devices(own: Mapping[str, Any], where: str) -> tuple[str, int, dict[str, Any]]:
    """What a worker asks for: the kind of its devices, their number, and the requests and limits beside them."""
    given = own.get("resources") or {}
    asked = {**(given.get("requests") or {}), **(given.get("limits") or {})}
    kinds = {resource: kind for kind, resource in RESOURCES.items()}
    beside = {
        part: {name: value for name, value in values.items() if name not in kinds}
        if isinstance(values, Mapping)
        else values
        for part, values in given.items()
    }
    beside = {part: values for part, values in beside.items() if values}
    for resource, number in asked.items():
        if resource in kinds:
            return kinds[resource], int(number), beside
        if "ascend" in resource.lower() or "npu" in resource.lower():
            fail(ClusterError, f"a worker asks for {resource}", where=f"{where}: resources of the Worker",
                 why="JAX has no backend for Ascend", fix=f"ask for {' or '.join(kinds)}, or for none on CPUs")  # fmt: skip
    return "cpu", 1, beside


def _rest(own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the container that are taken over as they are."""
    said = ("name", "image", "command", "args", "env", "resources", "ports")
    ports = [port for port in own.get("ports", ()) if port.get("name") != PORT]
    return {key: value for key, value in own.items() if key not in said} | ({"ports": ports} if ports else {})


def _notes(spec: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Any]], job: Job) -> Iterator[str]:
    policy, worker = spec.get("runPolicy") or {}, replicas[WORKER]
    yield f"the image {job.image} and its script have to be of JAX: shardfn.mindspore in the place of mindspore"
    if SERVER in replicas:
        yield ("the command of the Worker runs once, on the head, which is the Scheduler; parameter servers and workers are "
               "actors of Ray")  # fmt: skip
    elif SCHEDULER in replicas:
        yield "the Scheduler gets no pod: process 0 does its work"
    if spec.get("successPolicy") != "AllWorkers" and job.processes > 1 and not job.servers:
        yield "the job has succeeded when all workers have; MindSpore's operator looks at worker 0"
    if worker.get("restartPolicy", "Never") != "Never":
        bound = "runPolicy.backoffLimit" if "backoffLimit" in policy else "the default of a Kubernetes Job"
        yield f"a failed worker restarts all of them, {job.retries} times at most ({bound}), from the last checkpoint"
    if spec.get("enableDynamicWorker") and not job.servers:
        yield "enableDynamicWorker has no effect: workers of one collective fail together, and start again together"
    if policy.get("cleanPodPolicy") == "All":
        yield "ended pods are kept until the job is deleted; set ttlSecondsAfterFinished for that"
    if policy.get("schedulingPolicy"):
        yield "runPolicy.schedulingPolicy is left out: queue the job with Kueue, by a label, or with Volcano"
    if (worker["template"].get("metadata") or {}).keys() - {"creationTimestamp"}:
        yield "labels and annotations of the pods are left out"
