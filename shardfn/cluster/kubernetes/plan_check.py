"""A manifest compared with a plan: processes, devices, the shape of a TPU slice, memory."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardfn.cluster.environment import COUNT
from shardfn.cluster.kubernetes.msjob import is_msjob, translate
from shardfn.cluster.kubernetes.quantity import amount
from shardfn.cluster.kubernetes.ray import SERVER
from shardfn.cluster.kubernetes.targets import ACCELERATOR, GPU, PRODUCT, RESOURCES, TOPOLOGY, target, topology
from shardfn.cost.devices.chips import CHIPS, Hardware
from shardfn.cost.devices.cloud_names import CHIP_NAMES
from shardfn.errors import ClusterError, DeviceError, Problem, fail, raise_problems
from shardfn.files import read_bytes
from shardfn.layoutfile import read_layout
from shardfn.layoutfile.plan_file import estimated_peak
from shardfn.layoutfile.toml import MAX_BYTES
from shardfn.planning.layout_rules import LayoutFile
from shardfn.units import bytes_text


@dataclasses.dataclass(frozen=True)
class Allocation:
    """What a manifest asks for.

    Attributes:
      what: kind and name of the object.
      processes: its pods.
      devices: the devices of each.
      platform: cpu, gpu or tpu.
      chip: the chip that its node labels name; empty if none does.
      shape: the shape of the TPU slice that its node labels name.
      memory: the memory limit of a pod in bytes; None if there is none.
      said: the number of processes that its variables name; None if the operator sets it.
    """

    what: str
    processes: int
    devices: int
    platform: str
    chip: str = ""
    shape: str = ""
    memory: float | None = None
    said: int | None = None

    def __str__(self) -> str:
        on = f"{self.chip or self.platform}:{self.shape}" if self.shape else self.chip or self.platform
        return f"{self.what}: {self.size} ({on})"

    @property
    def size(self) -> str:
        """The processes and the devices of each, in words."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{processes} × {self.devices} device{'s' if self.devices > 1 else ''}"


def check(manifests: Sequence[Mapping[str, Any]], plan: str | os.PathLike[str], where: str = "manifest") -> str:
    """Compare manifests with a plan.

    Args:
      manifests: the documents of a file; one of them is a JobSet, TrainJob, RayJob, RayCluster or MSJob.
      plan: a layout file, as `plan --save` writes it.
      where: the name of the manifest's file, for errors.

    Returns:
      What the manifest asks for, and how much memory the plan needs.

    Raises:
      ClusterError: in what they differ, all together.
      LayoutFileError: the plan is no layout file.

    >>> from shardfn.cluster.kubernetes.job import Job
    >>> from shardfn.cluster.kubernetes.jobset import jobset
    >>> made = jobset(Job("gpt", "gpt:1", ("a",), processes=4, devices=4, device="tpu-v5e:4x4"))
    >>> print(check(made, "gpt2/data-parallel"))
    JobSet gpt: 4 processes × 4 devices (tpu-v5e:4x4)
    """
    found, layout = allocation(manifests, where), read_layout(plan)
    peak = _peak(plan)
    raise_problems(_differences(found, layout, peak, where), ClusterError)
    return str(found) + (f"; the plan needs {bytes_text(peak)} of each device" if peak else "")


def allocation(manifests: Sequence[Mapping[str, Any]], where: str = "manifest") -> Allocation:
    """What manifests ask for. Of several groups of pods, that with the most devices counts.

    Args:
      manifests: the documents of a file.
      where: the name of the file, for errors.

    Raises:
      ClusterError: no document is a job that is known, or it is not complete.

    >>> pod = {"spec": {"containers": [{"name": "a", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
    >>> allocation([{"kind": "JobSet", "metadata": {"name": "a"}, "spec": {"replicatedJobs": [
    ...     {"name": "w", "template": {"spec": {"parallelism": 2, "template": pod}}}]}}])
    Allocation(what='JobSet a', processes=2, devices=8, platform='gpu', chip='', shape='', memory=None, said=None)
    """
    jobs = [m for m in manifests if str(m.get("kind")) in _GROUPS or is_msjob(m)]
    if len(jobs) != 1:
        fail(ClusterError, f"the file has {len(jobs)} jobs" if jobs else "the file has no job", where=where,
             why=f"one of {', '.join(_GROUPS)} or MSJob is compared", fix="give a file with one job")  # fmt: skip
    job = jobs[0]
    metadata = job.get("metadata")
    what = f"{job['kind']} {metadata.get('name', '') if isinstance(metadata, Mapping) else ''}".strip()
    if is_msjob(job):
        made, _ = translate(job, where)
        memory = amount(made.memory) if made.memory else None
        return Allocation(what, made.processes, made.devices, made.device, memory=memory)
    try:
        groups = [_group(what, pods, template) for pods, template in _GROUPS[job["kind"]](job, manifests)]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        fail(ClusterError, f"{what} is not complete", where=where, why=f"{type(error).__name__}: {error}",
             fix="give it a pod template with a container, and numbers of pods")  # fmt: skip
    if not groups:
        fail(
            ClusterError, f"{what} has no pods", where=where, why="its groups are empty", fix="give it a group of pods"
        )
    return max(groups, key=lambda group: group.processes * group.devices)


def _jobset_groups(job: Mapping[str, Any], _: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for replicated in job["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        at_once = 1 if spec.get("parallelism") is None else spec["parallelism"]
        pods = at_once if spec.get("completions") is None else min(at_once, spec["completions"])
        yield replicated.get("replicas", 1) * pods, spec["template"]["spec"]


def _trainjob_groups(
    job: Mapping[str, Any], all_: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The trainer's pods: the runtime's, if it is in the file, with the fields of the TrainJob in their place."""
    trainer, name = job["spec"].get("trainer") or {}, job["spec"]["runtimeRef"]["name"]
    runtime = next((m["spec"] for m in all_ if m.get("kind") in ("TrainingRuntime", "ClusterTrainingRuntime")
                    and m["metadata"]["name"] == name), None)  # fmt: skip
    pods: list[Mapping[str, Any]] = [{"containers": [{"name": "node"}]}]
    if runtime is not None:
        pods = [r["template"]["spec"]["template"]["spec"] for r in runtime["template"]["spec"]["replicatedJobs"]]
    pod, own = next(((pod, dict(c)) for pod in pods for c in pod["containers"] if c["name"] == "node"), (None, {}))
    if pod is None:
        raise ValueError("no container of the runtime is named node")
    own["env"] = [*own.get("env", ()), *trainer.get("env", ())]
    if "resourcesPerNode" in trainer:
        own["resources"] = trainer["resourcesPerNode"]
    nodes = trainer.get("numNodes") or ((runtime or {}).get("mlPolicy") or {}).get("numNodes") or 1
    yield nodes, {**pod, "containers": [own]}


def _ray_groups(job: Mapping[str, Any], _: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    spec = job["spec"]["rayClusterSpec"] if job["kind"] == "RayJob" else job["spec"]
    for group in spec.get("workerGroupSpecs", ()):
        if f'"{SERVER}"' in (group.get("rayStartParams") or {}).get("resources", "").replace("\\", ""):
            continue  # parameter servers, which no plan counts
        yield group.get("replicas", 0) * group.get("numOfHosts", 1), group["template"]["spec"]


_GROUPS = {"JobSet": _jobset_groups, "TrainJob": _trainjob_groups, "RayJob": _ray_groups, "RayCluster": _ray_groups}
"""The groups of pods of each kind of job: how many, and their specification."""


def _group(what: str, pods: int, pod: Mapping[str, Any]) -> Allocation:
    containers = pod["containers"]
    own = next((c for c in containers if not _asked(c).keys().isdisjoint(RESOURCES.values())), containers[0])
    asked, values = _asked(own), {e["name"]: e.get("value") for e in own.get("env") or ()}
    labels = _labels(pod)
    platform, resource = next(((k, r) for k, r in RESOURCES.items() if r in asked), ("cpu", ""))
    devices = int(asked[resource]) if resource else int(values.get("JAX_NUM_CPU_DEVICES") or 1)
    said, memory = values.get(COUNT), _asked(own, "limits").get("memory")
    return Allocation(
        what, int(pods), devices, platform, _chip(labels), next(iter(labels.get(TOPOLOGY, ())), ""),
        memory=None if memory is None else _bytes(str(memory)), said=None if said is None else int(said),
    )  # fmt: skip


def _asked(container: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """What a container asks for, in `requests` and `limits` or one of them."""
    given = container.get("resources") or {}
    return {name: value for kind in kinds or ("requests", "limits") for name, value in (given.get(kind) or {}).items()}


def _bytes(quantity: str) -> float:
    found = amount(quantity)
    if found is None:
        raise ValueError(f"{quantity} is no quantity of memory")
    return found


def _labels(pod: Mapping[str, Any]) -> dict[str, list[str]]:
    """The values that a pod's node selector and its required node affinity take of each label."""
    found = {key: [str(value)] for key, value in (pod.get("nodeSelector") or {}).items()}
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    for term in (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ():
        for row in term.get("matchExpressions") or ():
            if row["operator"] == "In":
                found.setdefault(row["key"], []).extend(row["values"])
    return found


def _chip(labels: Mapping[str, list[str]]) -> str:
    """The chip that node labels name; empty if they name none, or several."""
    named = {CHIP_NAMES.get(value, "") for key in (ACCELERATOR, GPU) for value in labels.get(key, ())}
    named |= {_product(value) for value in labels.get(PRODUCT, ())}
    return named.pop() if len(named) == 1 else ""


def _product(label: str) -> str:
    """The chip of a GPU's product name, by the longest beginning that fits."""
    kinds = [(kind, chip.name) for chip in CHIPS.values() for kind in chip.device_kinds]
    return max(((kind, name) for kind, name in kinds if label.replace("-", " ").startswith(kind.replace("-", " "))),
               key=lambda pair: len(pair[0]), default=("", ""))[1]  # fmt: skip


def _peak(plan: str | os.PathLike[str]) -> int | None:
    """The memory that a plan's file says it needs; None for a recipe and for a file written by hand."""
    try:
        return estimated_peak(read_bytes(plan, MAX_BYTES).decode())
    except (OSError, ValueError):
        return None


def _differences(found: Allocation, layout: LayoutFile, peak: int | None, where: str) -> Iterator[Problem]:
    sizes, here = [size for _, size in layout.mesh], f"{where}: {found.what}"
    hardware = _hardware(layout)
    wanted = hardware.count if hardware else math.prod(size or 1 for size in sizes)
    count, plan = found.processes * found.devices, f"{layout.name} is for"
    is_open = hardware is None and None in sizes
    if count % wanted if is_open else count != wanted:
        yield Problem(f"the manifest has {count} devices, and the plan {'a multiple of ' if is_open else ''}{wanted}",
                      f"{here}: {found.size}", f"{plan} {layout.device or 'its mesh'}",
                      "change the numbers of processes or devices, or plan again for as many devices")  # fmt: skip
    if found.said not in (None, found.processes):
        yield Problem(f"{COUNT} is {found.said}, and there are {found.processes} pods", here,
                      "process 0 would wait for the others for ever", f"set it to {found.processes}")  # fmt: skip
    if hardware and hardware.chip.platform != found.platform:
        yield Problem(f"the manifest asks for {found.platform.upper()} devices, and the plan is for {layout.device}", here,
                      "costs, memory and workarounds depend on the device", f"plan again for {found.platform}")  # fmt: skip
    elif hardware and found.chip and hardware.chip.name != found.chip:
        yield Problem(f"the node labels name {found.chip}, and the plan is for {layout.device}", here,
                      "rates and memory differ", "change the node labels, or plan again")  # fmt: skip
    elif hardware and found.shape and topology(hardware.topology) != found.shape:
        yield Problem(f"the slice has the shape {found.shape}, and the plan is for {layout.device}", here,
                      "the mesh follows the rings of the torus", f"set {TOPOLOGY} to {topology(hardware.topology)}")  # fmt: skip
    yield from _memory(found, hardware, peak, here)


def _memory(found: Allocation, hardware: Hardware | None, peak: int | None, here: str) -> Iterator[Problem]:
    """Whether the plan's peak fits a device, or as many CPU devices fit a pod."""
    if peak is None:
        return
    if found.platform == "cpu":
        needed = peak * found.devices
        if found.memory is not None and needed > found.memory:
            yield Problem(f"{found.devices} devices need {bytes_text(needed)}, and a pod has {bytes_text(found.memory)}",
                          here, "the devices of a process share its memory",
                          "raise the memory limit of the pods, or plan with --memory-limit")  # fmt: skip
        return
    chip = CHIPS.get(found.chip) or (hardware.chip if hardware and hardware.chip.platform == found.platform else None)
    if chip and peak > chip.memory_bytes:
        yield Problem(f"the plan needs {bytes_text(peak)} of each device, and {chip.name} has {bytes_text(chip.memory_bytes)}",
                      here, "its peak is above the memory of the device",
                      "plan with --memory-limit, or for more devices")  # fmt: skip


def _hardware(layout: LayoutFile) -> Hardware | None:
    """The target that a plan was made for; None for devices that were there, and for recipes."""
    try:
        return target(layout.device) if ":" in layout.device else None
    except DeviceError:
        return None
