"""The compilers' names of the hardware of a plan, and its devices, present or not."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
from jax.experimental import topologies

from shardfn.cost.devices.chips import CHIPS, Chip, Hardware
from shardfn.errors import DeviceError, fail, with_extra


@dataclasses.dataclass(frozen=True)
class Retry:
    """A second attempt of a compiler that gave up without a device to try on."""

    error: str
    """A part of the error after which it is made."""
    options: Mapping[str, bool]
    """Its compiler options."""
    note: str


RETRIES = {
    "cuda": Retry(
        "output tile sizes",
        {"xla_gpu_enable_triton_gemm": False},
        "compiled with `xla_gpu_enable_triton_gemm=False`: without a GPU, XLA finds no tiles for a matmul by Triton",
    )
}
"""By a target's platform."""


def compiled_for(platform: str, lowered: Any) -> tuple[Any, tuple[str, ...]]:
    """What a platform's compiler makes of a lowered function, with a note if that took a second attempt (`RETRIES`)."""
    retry = RETRIES.get(platform)
    try:
        return lowered.compile(), ()
    except RuntimeError as error:
        if retry is None or retry.error not in str(error):
            raise
    return lowered.compile(dict(retry.options)), (retry.note,)


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
    """The compiler's name of a target.

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
    if not hardware.chip.aot_name:
        _unknown(hardware, "TPU", "tpu-v5e:4x4")
    if importlib.util.find_spec("libtpu") is None:
        fail(DeviceError, "the TPU compiler is not installed", where=f"device = {hardware.name!r}",
             why="libtpu compiles for TPUs that are not here", fix=with_extra("tpu-aot"))  # fmt: skip
    dims = hardware.topology + (1,) * (hardware.chip.torus - len(hardware.topology))
    return Target("tpu", hardware.count, f"{hardware.chip.aot_name}:{'x'.join(map(str, dims))}",
                  str(dict(hardware.chip.aot).get("chip_config_name", "")))  # fmt: skip


def has_gpu_compiler() -> bool:
    """Whether JAX's CUDA plugin, of either version of CUDA, is installed: XLA's GPU compiler is in it."""
    return any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def _gpu(hardware: Hardware) -> Target:
    if hardware.platform != "cuda" or not hardware.chip.aot_name:
        _unknown(hardware, "GPU", "h100:8")
    if not has_gpu_compiler():
        fail(DeviceError, "XLA's GPU compiler is not installed", where=f"device = {hardware.name!r}",
             why="JAX's CUDA plugin contains it, and compiles for GPUs that are not here",
             fix=with_extra("gpu-aot"))  # fmt: skip
    # Hosts are all alike: 12 GPUs are three hosts of four where a node has eight.
    inside = math.gcd(hardware.count, hardware.chip.node) if hardware.count > hardware.chip.node else hardware.count
    return Target("cuda", hardware.count, f"1x{hardware.count // inside}x{inside}", _described(hardware.chip))


def _described(chip: Chip) -> str:
    facts = (f"{key}{'' if str(value).startswith('{') else ':'} {value}" for key, value in chip.aot)
    return f'gpu_device_info {{ {" ".join(facts)} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}'


def _unknown(hardware: Hardware, kind: str, such: str) -> NoReturn:
    known = ", ".join(c.aot_name for c in CHIPS.values() if c.aot_name and c.platform == hardware.chip.platform)
    fail(DeviceError, f"the {kind} compiler has no chip {hardware.chip.name!r}", where=f"device = {hardware.name!r}",
         why=f"it knows {known}", fix=f'plan for one of them, as in device="{such}"')  # fmt: skip
