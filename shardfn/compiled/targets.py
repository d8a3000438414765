"""What the compilers call the hardware that a plan is for, and its devices there, present or not."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any, NoReturn

import jax
from jax.experimental import topologies

from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import DeviceError, fail


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    platform: str
    """As JAX lowers for it: cpu, cuda, tpu."""
    count: int
    name: str = ""
    """A topology by the compiler's name: libtpu's (`v5e:4x4`); of GPUs slices x hosts x GPUs of a host (`1x2x8`)."""
    config: str = ""
    """Of a TPU how its cores are set up, where the default is not one device a chip; of a GPU all that XLA asks about it."""


def target(hardware: Hardware) -> Target:
    """What the compiler calls a piece of hardware.

    Raises:
      DeviceError: there is no compiler for it here.

    >>> from shardfn.cost.devices.hardware import resolve
    >>> target(resolve("cpu:64"))
    Target(platform='cpu', count=64, name='', config='')
    """
    if hardware.platform == "cpu":
        return Target("cpu", hardware.count)
    return _tpu(hardware) if hardware.platform == "tpu" else _gpu(hardware)


def devices(of: Target) -> list[Any]:
    """The devices of a target in the order in which plans number them: the last dim of the torus fastest; GPUs host by host."""
    if of.platform == "cpu":
        return jax.devices("cpu")
    if of.platform == "tpu":
        options = {"chip_config_name": of.config} if of.config else {}
        found = topologies.get_topology_desc(platform="tpu", topology_name=of.name, **options)
        return sorted(found.devices, key=lambda device: tuple(device.coords))
    found = topologies.get_topology_desc("", platform="cuda", topology=of.name, target_config=of.config)
    return sorted(found.devices, key=lambda device: device.id)


def _tpu(hardware: Hardware) -> Target:
    generation = hardware.chip.name.removeprefix("tpu-")
    if generation not in _CORES:
        _unknown(hardware, "TPU", ", ".join(_CORES), "tpu-v5e:4x4")
    if importlib.util.find_spec("libtpu") is None:
        fail(DeviceError, "the TPU compiler is not installed", where=f"device = {hardware.name!r}",
             why="libtpu compiles for TPUs that are not here", fix="pip install 'shardfn[tpu-aot]'")  # fmt: skip
    dims = hardware.topology + (1,) * (hardware.chip.torus - len(hardware.topology))
    return Target("tpu", hardware.count, f"{generation}:{'x'.join(map(str, dims))}", _CORES[generation])


_CORES = {"v4": "megacore", "v5e": "", "v5p": "", "v6e": ""}


def has_gpu_compiler() -> bool:
    """Whether JAX's CUDA plugin, of either version of CUDA, is installed: XLA's GPU compiler is in it."""
    return any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def _gpu(hardware: Hardware) -> Target:
    if hardware.platform != "cuda" or hardware.chip.name not in _GPUS:
        _unknown(hardware, "GPU", ", ".join(_GPUS), "h100:8")
    if not has_gpu_compiler():
        fail(DeviceError, "XLA's GPU compiler is not installed", where=f"device = {hardware.name!r}",
             why="JAX's CUDA plugin holds it, and compiles for GPUs that are not here",
             fix="pip install 'shardfn[gpu-aot]'")  # fmt: skip
    # Hosts are all alike: 12 GPUs are three hosts of four where a node has eight.
    inside = math.gcd(hardware.count, hardware.chip.node) if hardware.count > hardware.chip.node else hardware.count
    return Target("cuda", hardware.count, f"1x{hardware.count // inside}x{inside}", _described(hardware.chip.name))


# XLA's description of a GPU (`GpuTargetConfigProto`): what it plans tiles, fusions and schedules by.
_SAME = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
}  # fmt: skip
_HOPPER = {
    "core_count": 132, "fpus_per_core": 128, "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448,
    "clock_rate_ghz": 1.98, "l2_cache_size": 50 * 2**20, "cuda_compute_capability": "{ major: 9 minor: 0 }",
}  # fmt: skip
_GPUS: dict[str, dict[str, object]] = {
    "a100": {
        "core_count": 108, "fpus_per_core": 64, "shared_memory_per_core": 167936, "shared_memory_per_block_optin": 166912,
        "clock_rate_ghz": 1.41, "l2_cache_size": 40 * 2**20, "cuda_compute_capability": "{ major: 8 minor: 0 }",
        "memory_bandwidth": 2039 * 10**9, "device_memory_size": 80 * 2**30,
    },
    "h100": {**_HOPPER, "memory_bandwidth": 3352 * 10**9, "device_memory_size": 79 * 2**30},
    "h200": {**_HOPPER, "memory_bandwidth": 4800 * 10**9, "device_memory_size": 140 * 2**30},
}  # fmt: skip


def _described(name: str) -> str:
    facts = (
        f"{key}{'' if str(value).startswith('{') else ':'} {value}" for key, value in (_SAME | _GPUS[name]).items()
    )
    return f'gpu_device_info {{ {" ".join(facts)} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}'


def _unknown(hardware: Hardware, kind: str, known: str, such: str) -> NoReturn:
    fail(DeviceError, f"the {kind} compiler has no chip {hardware.chip.name!r}", where=f"device = {hardware.name!r}",
         why=f"it knows {known}", fix=f'plan for one of them, as in device="{such}"')  # fmt: skip
