"""A job as a person describes it: image, command, processes, devices, plan, storage, retries, parameter servers."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfn.cluster.kubernetes.files import read
from shardfn.cluster.kubernetes.quantity import amount
from shardfn.cluster.kubernetes.targets import MAX_PROCESSES, share
from shardfn.errors import ClusterError, Problem, fail, nearest, raise_problems
from shardfn.files import read_bytes
from shardfn.frontend.value_checks import clipped
from shardfn.layoutfile import read_layout

MAX_NAME = 40
"""Characters of a job's name: a pod's is at most 63, and an operator adds a role, two numbers and a suffix."""
MAX_PLAN = 1 << 20
"""Bytes of a plan: it becomes a ConfigMap, which holds no more."""
NODES = ("gke", "nvidia", "any")
"""Whose labels choose the nodes of a job; with "any" none do."""
RAY = "2.60.0"
"""The Ray of the image, if the job does not say it."""

_NAME = re.compile(rf"(?=.{{1,{MAX_NAME}}}$)[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"(?=.{1,253}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([a-z0-9]([-.a-z0-9]{,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
"""Names as Kubernetes takes them: of objects, namespaces, claims, labels and their values, variables."""

_SET = {
    "pod": {"restartPolicy": "retries = 3 starts the job again"},
    "container": {"name": "operators look for theirs", "image": 'write image = "..." for the job',
                  "command": 'write command = ["..."] for the job', "env": "write [env] for the job"},
}  # fmt: skip
"""Fields of Kubernetes that `pod` and `container` do not have, and what to write in their place."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """Where checkpoints are, in every process.

    Attributes:
      path: the directory at which it is mounted.
      claim: the name of the PersistentVolumeClaim.
      size: its size, if it is to be made, such as "1Ti".
      storage_class: its storage class, if it is to be made; the cluster's default if empty.
    """

    path: str
    claim: str
    size: str = ""
    storage_class: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job of several processes that run one command.

    Attributes:
      name: the name of the objects; lower case letters, digits and `-`.
      image: the container image, which has the script and shardfn.
      command: the command and its arguments.
      processes: how many; each is a pod.
      devices: the devices of each process.
      device: a target, such as "tpu-v5e:4x4", or "cpu", "gpu", "tpu".
      retries: how many times a failed job starts again, from its last checkpoint.
      servers: parameter servers, which need Ray.
      namespace: the namespace of the objects; that of `kubectl` if empty.
      storage: where checkpoints are.
      plan: the text of a layout file that every process gets.
      plan_name: its file name, in `/etc/shardfn`.
      cpu, memory: what each process asks for, as Kubernetes' quantities: "8", "64Gi".
      deadline_s: seconds after which a running job fails.
      ttl_s: seconds after which an ended job is deleted.
      ray: the version of Ray in the image.
      labels: labels of the objects, such as that of a queue of Kueue.
      env: further variables: text, or what Kubernetes calls `valueFrom`.
      pod, container: further fields of the pods and of their container, under Kubernetes' names.
      nodes: whose node labels name a target's chips: "gke" or "nvidia", one of both if empty; "any" for no labels.
      state: the size of a checkpoint, such as "80Gi"; by default that of the plan's arguments.
      grace_s: seconds that a pod has to end; by default 30 and those of two saves.
      mindspore: whether the pods get the roles of MindSpore's parameter servers (`MS_ROLE` and others), as of an MSJob.
    """

    name: str
    image: str
    command: tuple[str, ...]
    processes: int = 1
    devices: int = 1
    device: str = "cpu"
    retries: int = 0
    servers: int = 0
    namespace: str = ""
    storage: Storage | None = None
    plan: str = ""
    plan_name: str = ""
    cpu: str = ""
    memory: str = ""
    deadline_s: int | None = None
    ttl_s: int | None = None
    ray: str = RAY
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pod: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    container: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nodes: str = ""
    state: str = ""
    grace_s: int | None = None
    mindspore: bool = False


def read_job(path: str | os.PathLike[str]) -> Job:
    """The job that a TOML or YAML file describes. A plan that it names is read too, beside the file.

    Args:
      path: the file.

    Raises:
      ClusterError: what is wrong with the description, all together.
      ExtraError: the file is YAML, and PyYAML is not installed.
      LayoutFileError: the plan is no layout file.
      OSError: a file cannot be read.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w+", suffix=".toml") as file:
    ...     print('name = "gpt"\\nimage = "gpt:1"\\nscript = "train.py"\\ndevice = "tpu-v5e:4x4"', file=file, flush=True)
    ...     job = read_job(file.name)
    >>> job.command, job.processes, job.devices
    (('python', 'train.py'), 4, 4)
    """
    documents = read(path)
    if len(documents) != 1:
        fail(ClusterError, f"{os.fspath(path)} has {len(documents)} documents", where=os.fspath(path),
             why="a description is one", fix="write each job in a file of its own")  # fmt: skip
    return job_of(documents[0], os.fspath(path))


def job_of(data: Mapping[str, Any], where: str = "job") -> Job:
    """The job of a description's data.

    Args:
      data: the keys of a description.
      where: the file that it was read from, for errors; plans are looked for beside it.

    Raises:
      ClusterError: what is wrong with it, all together.

    >>> job_of({"name": "a", "image": "a:1", "script": "a.py", "arguments": ["-v"], "device": "h100:16"}).command
    ('python', 'a.py', '-v')
    >>> job_of({"name": "a", "image": "a:1", "comand": ["a"]})
    Traceback (most recent call last):
    shardfn.errors.ClusterError: 2 problems:
    1. a job has no key `comand`
         where: job: comand
         why:   the keys are name, image, script, arguments, command, processes, devices, device, ...
         fix:   did you mean 'command'?
    2. nothing says what the job runs
         where: job
         why:   a process runs one command
         fix:   write script = "train.py", or command = ["python", "train.py"]
    """
    raise_problems(_problems(data, where), ClusterError)
    found = dict(data)
    script, arguments, plan = found.pop("script", None), found.pop("arguments", ()), found.pop("plan", None)
    command = ("python", script, *arguments) if script else found["command"]
    storage = Storage(**found.pop("storage")) if "storage" in found else None
    read_plan = _plan(plan, where) if plan else {}
    found = read_plan | found
    device = found.pop("device", "cpu")
    processes, devices = share(device, found.pop("processes", None), found.pop("devices", None))
    return Job(**{**found, "command": tuple(command), "storage": storage, "device": device, "processes": processes,
                  "devices": devices})  # fmt: skip


def _problems(data: Mapping[str, Any], where: str) -> list[Problem]:
    """What is wrong with the keys of a description."""
    problems = [
        Problem(f"a job has no key `{key}`", f"{where}: {key}", f"the keys are {', '.join(KEYS)}", nearest(key, KEYS))
        for key in data
        if key not in KEYS
    ]
    found = {key: value for key, value in data.items() if key in KEYS}
    for key, value in found.items():
        test, wanted, example = KEYS[key]
        if not test(value):
            problems.append(Problem(f"`{key}` is not {wanted}", f"{where}: {key}", f"it is {clipped(value)}",
                                    f"write {key} = {example}"))  # fmt: skip
    problems += [
        Problem(
            f"`{key}` has the field {field}",
            f"{where}: {key}.{field}",
            "the job sets it itself",
            f"leave it out; {fix}",
        )
        for key, fields in _SET.items()
        for field, fix in fields.items()
        if isinstance(found.get(key), Mapping) and field in found[key]
    ]
    for key in ("name", "image"):
        if key not in found:
            problems.append(
                Problem(f"the job has no {key}", where, "its pods need one", f"write {key} = {KEYS[key][2]}")
            )
    if ("script" in found) == ("command" in found):
        what = "the job has a script and a command" if "script" in found else "nothing says what the job runs"
        problems.append(Problem(what, where, "a process runs one command",
                                'write script = "train.py", or command = ["python", "train.py"]'))  # fmt: skip
    elif "command" in found and "arguments" in found:
        problems.append(Problem("the job has a command and arguments", where, "arguments are those of a script",
                                "write them into the command"))  # fmt: skip
    return problems


def _plan(name: str, where: str) -> dict[str, Any]:
    """The text of a plan, its file name, and the target it was made for."""
    path = pathlib.Path(where).parent / name
    layout = read_layout(os.fspath(path))
    if path.stat().st_size > MAX_PLAN:
        fail(ClusterError, f"{path} is too large to be passed to the pods", where=f"{where}: plan = {name}",
             why="a ConfigMap holds at most 1 MiB", fix="put it into the image, and leave plan out")  # fmt: skip
    found = {"plan": read_bytes(path, MAX_PLAN).decode(), "plan_name": re.sub(r"[^-._a-zA-Z0-9]", "_", path.name)}
    return found | ({"device": layout.device} if ":" in layout.device else {})


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)


def _number(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _quantity(value: Any) -> bool:
    return isinstance(value, str) and amount(value) is not None


def _like(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(pattern.fullmatch(value))


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _fields(**kinds: type) -> Callable[[Any], bool]:
    """Whether a value is a table whose fields that are merged with the job's own have these types."""
    return lambda value: (
        _mapping(value) and all(isinstance(value.get(key, kind()), kind) for key, kind in kinds.items())
    )


def _storage(value: Any) -> bool:
    fields = {field.name for field in dataclasses.fields(Storage)}
    texts = _mapping(value) and set(value) <= fields and all(map(_text, value.values()))
    return (
        texts
        and {"path", "claim"} <= set(value)
        and value["path"].startswith("/")
        and bool(_CLAIM.fullmatch(value["claim"]))
        and _quantity(value.get("size", "1"))
    )


def _labels(value: Any) -> bool:
    return _mapping(value) and all(
        isinstance(v, str) and _LABEL.fullmatch(k) and _VALUE.fullmatch(v) for k, v in value.items()
    )


def _variables(value: Any) -> bool:
    return _mapping(value) and all(isinstance(v, str | Mapping) and _VARIABLE.fullmatch(k) for k, v in value.items())


KEYS: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "name": (_like(_NAME), f"lower case letters, digits and -, at most {MAX_NAME}, a letter first", '"gpt"'),
    "image": (_text, "a container image", '"registry.example.com/gpt:1"'),
    "script": (_text, "the path of a script", '"train.py"'),
    "arguments": (_texts, "a list of texts", '["--steps", "100"]'),
    "command": (lambda value: _texts(value) and len(value) > 0, "a list of texts", '["python", "train.py"]'),
    "processes": (_number(1, MAX_PROCESSES), f"a number from 1 to {MAX_PROCESSES:,}", "4"),
    "devices": (_number(1), "a number from 1", "4"),
    "device": (_text, "a target or a kind of devices", '"tpu-v5e:4x4"'),
    "nodes": (lambda value: value in NODES, f"one of {', '.join(NODES)}", '"gke"'),
    "plan": (_text, "the path of a layout file", '"step.toml"'),
    "storage": (_storage, "an absolute path and the name of a claim, with or without size and storage_class",
                '{ path = "/checkpoints", claim = "gpt" }'),
    "retries": (_number(0), "a number from 0", "3"),
    "servers": (_number(0, MAX_PROCESSES), f"a number from 0 to {MAX_PROCESSES:,}", "2"),
    "namespace": (_like(_NAMESPACE), "lower case letters, digits and -, at most 63", '"training"'),
    "cpu": (_quantity, "a quantity, as text", '"8"'),
    "memory": (_quantity, "a quantity, as text", '"64Gi"'),
    "state": (_quantity, "a quantity, as text", '"80Gi"'),
    "grace_s": (_number(0), "a number of seconds", "600"),
    "deadline_s": (_number(1), "a number of seconds", "86400"),
    "ttl_s": (_number(0), "a number of seconds", "3600"),
    "ray": (_text, "a version of Ray", f'"{RAY}"'),
    "labels": (_labels, "a table of texts that Kubernetes takes as labels", '{ "kueue.x-k8s.io/queue-name" = "training" }'),
    "env": (_variables, "a table of names with texts, or with valueFrom", '{ XLA_FLAGS = "..." }'),
    "pod": (_fields(nodeSelector=dict, affinity=dict, securityContext=dict, containers=list, initContainers=list, volumes=list),
            "a table of fields of PodSpec", '{ serviceAccountName = "trainer" }'),
    "container": (_fields(volumeMounts=list, resources=dict, securityContext=dict),
                  "a table of fields of Container", '{ imagePullPolicy = "Always" }'),
}  # fmt: skip
"""The keys of a description: the test of a value, what it is, and an example."""
