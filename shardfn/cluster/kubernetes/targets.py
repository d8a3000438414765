"""The devices that a job asks Kubernetes for: resource names, node labels of TPU slices, devices of each process."""

from __future__ import annotations

import math
from typing import Any

from shardfn.cost.devices.chips import Hardware
from shardfn.cost.devices.cloud_names import CHIP_NAMES
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import ClusterError, fail

RESOURCES = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu"}
"""The resource by which a container asks for devices of a platform. CPU devices are virtual."""

ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
GPU = "cloud.google.com/gke-accelerator"
"""Node labels of Google Kubernetes Engine."""
PRODUCT = "nvidia.com/gpu.product"
"""The node label of NVIDIA's GPU feature discovery, which the GPU operator installs: the device's name, with `-` for spaces."""

TPU_NAMES = {
    "tpu-v4": "tpu-v4-podslice", "tpu-v5e": "tpu-v5-lite-podslice", "tpu-v5p": "tpu-v5p-slice", "tpu-v6e": "tpu-v6e-slice",
}  # fmt: skip
"""What Google Kubernetes Engine calls the slices of a chip."""

GPU_PRODUCTS = {
    "a100-40gb": "NVIDIA-A100-SXM4-40GB", "a100": "NVIDIA-A100-SXM4-80GB", "h100": "NVIDIA-H100-80GB-HBM3",
    "h200": "NVIDIA-H200", "b200": "NVIDIA-B200",
}  # fmt: skip
"""What GPU feature discovery calls the chips that there are figures of: those on SXM boards."""

MAX_PROCESSES = 100_000
"""Pods of an indexed Job; Kubernetes' API server takes no more."""
TPU_HOST = 4
"""Chips of a machine in a slice of several."""


def platform_of(device: str) -> str:
    """The platform of a target, or of a kind of devices.

    >>> platform_of("tpu-v5e:4x4"), platform_of("h100:16"), platform_of("GPU"), platform_of("cpu:8")
    ('tpu', 'gpu', 'gpu', 'cpu')
    """
    hardware = target(device)
    return hardware.chip.platform if hardware else device.lower()


def target(device: str) -> Hardware | None:
    """The hardware of a target; None for a kind of devices: "cpu", "gpu" or "tpu".

    Raises:
      DeviceError: the target is unknown.
    """
    return None if device.lower() in ("cpu", "gpu", "tpu") else resolve(device)


def share(device: str, processes: int | None, devices: int | None) -> tuple[int, int]:
    """The processes of a job and the devices of each. What is None follows from the target: a process for each machine.

    Args:
      device: a target ("tpu-v5e:4x4"), or a kind of devices ("gpu").
      processes: the number of processes.
      devices: the devices of each.

    Raises:
      ClusterError: they are not as many as the target has.

    >>> share("tpu-v5e:4x4", None, None), share("h100:16", None, None), share("cpu:8", 2, None), share("gpu", 2, 1)
    ((4, 4), (2, 8), (2, 4), (2, 1))
    """
    hardware = target(device)
    if hardware is None:
        return processes or 1, devices or 1
    count = hardware.count
    if processes is None:
        machine = devices or {"tpu": TPU_HOST, "gpu": hardware.chip.node}.get(hardware.chip.platform, count)
        processes = math.ceil(count / machine)
    devices = devices or max(1, count // processes)
    if processes > MAX_PROCESSES:
        fail(ClusterError, f"{device} has {processes:,} processes", where=f"device = {device}",
             why=f"an indexed Job has at most {MAX_PROCESSES:,} pods",
             fix="choose fewer devices, or more for each process")  # fmt: skip
    if processes * devices != count:
        fail(ClusterError, f"{processes} processes with {devices} devices each are not the {count} of {device}",
             where=f"processes = {processes}, devices = {devices}", why="the plan is made for all of them",
             fix=f"leave both out for one process on each machine, or let their product be {count}")  # fmt: skip
    return processes, devices


def node_labels(device: str) -> dict[str, str]:
    """The node labels that place a job on a slice of the target's shape; none for GPUs (`node_affinity`) and CPUs.

    >>> node_labels("tpu-v5e:4x8")
    {'cloud.google.com/gke-tpu-accelerator': 'tpu-v5-lite-podslice', 'cloud.google.com/gke-tpu-topology': '4x8'}
    >>> node_labels("tpu-v4:4")["cloud.google.com/gke-tpu-topology"], node_labels("h100:8")
    ('2x2x1', {})
    """
    hardware = target(device)
    if hardware is None or hardware.chip.platform != "tpu":
        return {}
    if (name := TPU_NAMES.get(hardware.chip.name)) is None:
        fail(ClusterError, f"no node label is known for {hardware.chip.name}", where=f"device = {device}",
             why=f"Google Kubernetes Engine has slices of {', '.join(TPU_NAMES)}",
             fix="give the labels as pod.nodeSelector, and device = \"tpu\"")  # fmt: skip
    return {ACCELERATOR: name, TOPOLOGY: topology(hardware.topology)}


def node_affinity(device: str, nodes: str = "") -> dict[str, Any]:
    """The affinity that places a job on nodes with the target's GPUs; none for TPUs (`node_labels`), CPUs and kinds of devices.

    Args:
      device: a target.
      nodes: whose label names the GPU, "gke" or "nvidia". If empty, one of both is enough: of several terms of a node
        affinity one has to hold.

    >>> node_affinity("a100:8", "gke")["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    [{'matchExpressions': [{'key': 'cloud.google.com/gke-accelerator', 'operator': 'In', 'values': ['nvidia-a100-80gb']}]}]
    >>> node_affinity("gpu"), node_affinity("tpu-v5e:4x4")
    ({}, {})
    """
    hardware = target(device)
    if hardware is None or hardware.chip.platform != "gpu":
        return {}
    chip = hardware.chip.name
    labels = {
        "gke": (GPU, [name for name, named in CHIP_NAMES.items() if named == chip and name.startswith("nvidia-")]),
        "nvidia": (PRODUCT, [GPU_PRODUCTS[chip]] if chip in GPU_PRODUCTS else []),
    }
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": values}]}
        for whose, (key, values) in labels.items()
        if values and nodes in ("", whose)
    ]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}} if terms else {}


def topology(dims: tuple[int, ...]) -> str:
    """The shape of a slice as its node label has it.

    >>> topology((4, 4)), topology((1, 2, 2)), topology((8, 4, 4))
    ('4x4', '2x2x1', '4x4x8')
    """
    rising = sorted(dims)
    # A machine of 4 chips in three dims is the one shape that is written with its 1 last.
    return "x".join(map(str, rising if rising != [1, 2, 2] else [2, 2, 1]))
