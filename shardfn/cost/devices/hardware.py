"""The devices a plan is for: real ones, or a target that is not here."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardfn.cost.devices import cloud_names
from shardfn.cost.devices.chips import CHIPS, Chip, Hardware, load_chip
from shardfn.errors import DeviceError, Problem, a, closest, fail

CHIP_FILES = "SHARDFN_CHIPS"
"""Environment variable: the directory of the files that `python -m shardfn calibrate --save` writes; empty for none."""

_DEFAULT_CHIP = {"cpu": "cpu", "gpu": "h100", "cuda": "h100", "rocm": "h100", "tpu": "tpu-v5e"}
"""Whose figures stand for those of a device that no chip names among its `device_kinds`, by platform; the report says so."""


def resolve(device: Any, *, count: int | None = None, default: str | None = None) -> Hardware:
    """The hardware that `device` names.

    Args:
      device: None (the default backend), "CPU", "GPU", "TPU" in any case (or another platform that JAX has here), a
        device or a sequence of them, a `Mesh`, a target as "tpu-v5e:4x8" (the shape of a torus), "h200:64", "cpu:4096", a cloud's
        name of one ("v5p-512", "a3-highgpu-8g"), or a `Hardware`, as `Chip.pod` makes it.
      count: how many of the devices to use; all of them if None.
      default: the platform that None stands for, if not JAX's own default.

    Raises:
      DeviceError: the name is unknown, or that device is not here.

    >>> resolve("tpu-v5e:4x8").count
    32
    """
    if isinstance(device, Hardware):
        return device
    if isinstance(device, jax.Device):
        device = [device]
    if isinstance(device, Mesh):
        if count == 1:
            return _real((device.devices.flat[0],), None)
        if count not in (None, device.size):
            fail(DeviceError, f"{count} devices are wanted, but the mesh has {device.size}",
                 where=f"device_num = {count}, device = {_short(device)}", why="all devices of a mesh are used",
                 fix=f"set_auto_parallel_context(device_num={device.size}), or pass a mesh of {count} devices")  # fmt: skip
        return _real(tuple(device.devices.flat), device)
    if (isinstance(device, Sequence) and not isinstance(device, str)) or isinstance(device, np.ndarray):
        devices = tuple(np.asarray(device, dtype=object).flat)
        bad = [d for d in devices if not isinstance(d, jax.Device)]
        if bad or not devices:
            what = f"`device` holds {a(bad[0])}, which is no JAX device" if bad else "`device` holds no devices"
            fail(DeviceError, what, where=f"device = {_short(device)}",
                 why="a sequence there lists the devices to use, in the order of their ranks",
                 fix="pass jax.devices() or a part of it, a mesh, or a name")  # fmt: skip
        if twice := [d for d, n in collections.Counter(devices).items() if n > 1]:
            fail(DeviceError, f"`device` holds {twice[0]} more than once", where=f"device = {_short(device)}",
                 why="each shard of an array is on a device of its own", fix="list each device once")  # fmt: skip
        return _real(_take(devices, count, is_list=True), None)
    if device is not None and not isinstance(device, str):
        raise DeviceTypeError(
            Problem(
                f"`device` must be a name, a list of devices or a mesh, but it is {a(device)}",
                where=f"device = {_short(device)}",
                why="a list of devices, or device_num of the context, sets the number of devices",
                fix=_one_or_some(device),
                is_type=True,
            )
        )
    if device is None:
        return _of_context(default, count) if default else _real(_take(_devices(None, count), count), None)
    device = cloud_names.target_of(device) or device
    if what := cloud_names.without_figures(device):
        fail(DeviceError, f"there are no figures for {what}", where=f"device = {device!r}",
             why=f"shardfn has those of {', '.join(CHIPS)}",
             fix="give them: device=shardfn.Chip(name, flops=..., ...).pod(8), as in docs/reference/devices.md")  # fmt: skip
    if ":" in device:
        return _target(device)
    return _platform(device, count)


def _of_context(platform: str, count: int | None) -> Hardware:
    """The devices of the platform that MindSpore's context names."""
    try:
        return _platform(platform, count)
    except DeviceError as error:
        (problem,) = error.problems
        where, fix = (
            f"set_context(device_target={platform!r})",
            f"{problem.fix}; leave device_target out for JAX's own default",
        )
        raise DeviceError(dataclasses.replace(problem, where=where, fix=fix)) from None


def _devices(platform: str | None, count: int | None) -> list[Any]:
    """The devices of a platform; for one device those of this process, so that each of several runs alone."""
    return jax.local_devices(backend=platform) if count == 1 else jax.devices(platform)


def _one_or_some(device: Any) -> str:
    if isinstance(device, Chip):
        return "say how many of them: chip.pod(8)"
    if isinstance(device, int) and not isinstance(device, bool) and device > 0:
        return f"write device=jax.devices()[:{device}] for {device} of them"
    return 'use "CPU", "GPU", "TPU", jax.devices(), a Mesh, or a target such as "tpu-v5e:4x8"'


class DeviceTypeError(DeviceError, TypeError):
    """A `device` of the wrong type."""


def _platform(name: str, count: int | None) -> Hardware:
    key = name.strip().lower()
    if key in CHIPS and key != "cpu":
        fail(DeviceError, f"device {name!r} is a target without a size", where=f"device = {name!r}",
             why="a target is planned for without being here, so it must say how many there are",
             fix=f"write {_eight_of(key)}")  # fmt: skip
    try:
        devices = _devices(key, count) if key else None
    except RuntimeError as error:
        devices = None
        reason = f"JAX has no backend for {name!r} on this machine"
        if not str(error).startswith("Unknown backend"):
            reason += f": {str(error).split('. ')[0]}"
    else:
        reason = "the name is empty"
    if devices is None:
        here = ", ".join(dict.fromkeys(d.platform.upper() for d in jax.devices()))
        close = closest(key, ["cpu", "gpu", "tpu", "ascend"])
        known = key in ("cpu", "gpu", "tpu", "ascend", "cuda", "rocm")
        fix = f'use {here}, which is here; to plan without the hardware, name a target such as "tpu-v5e:4x4"'
        if sized := _SIZED.fullmatch(key) or _SIZED_FAMILY.fullmatch(key):
            fix = _said_otherwise(sized["chip"], sized["count"] or sized["first"]) or fix
        elif close and not known:
            fix = f"did you mean {close[0].upper()!r}?"
        fail(
            DeviceError,
            f"device {name!r} is not here" if known else f"device {name!r} is unknown",
            where=f"device = {name!r}",
            why=reason if known else "the names of devices here are CPU, GPU and TPU, in any case",
            fix=fix,
        )
    return _real(_take(devices, count), None)


def _said_otherwise(name: str, count: str) -> str:
    """The fix for a name like `tpu-v5p-16`: a target. Google Cloud's names of some slices count cores."""
    meant = _meant(name, count)
    chip, _, chips = meant.partition(":")
    text, cores = f"a target is a chip and how many: did you mean {_quoted(meant)}?", cloud_names.CORES.get(chip, 1)
    if chips.isdecimal() and cores > 1 and int(chips) % cores == 0:
        fewer = int(chips) // cores
        text += f' A slice that is sold under that name has {fewer}, as its cores are counted: "{chip}:{fewer}"'
    return text if meant else ""


def _quoted(targets: str) -> str:
    return " or ".join(f'"{target}"' for target in targets.split(" or "))


def _meant(name: str, size: str) -> str:
    """The target, or a few, near to a chip and a size that were misspelt; "" where no chip is near.

    >>> _meant("tpuv5e", "8"), _meant("gpu", "8"), _meant("a100", "0"), _meant("tpu-v5e", "17"), _meant("quantum", "2")
    ('tpu-v5e:8', 'h100:8', 'a100:8', 'tpu-v5e:16 or tpu-v5e:32', '')
    >>> _meant("nvidia-h200-sxm", "8")
    'h200:8'
    """
    chips = {
        **dict.fromkeys(("nvidia",), "h100"),
        **_DEFAULT_CHIP,
        **cloud_names.CHIP_NAMES,
        **{chip: chip for chip in CHIPS},
    }
    inside = max((chip for chip in chips if chip in CHIPS and chip in name), key=len, default="")
    close = [name] if name in chips else [inside] if inside else closest(name, chips)
    found = re.match(r" *(\d+(x\d+)*)", size, re.ASCII)
    shape = found[1] if found and math.prod(map(int, found[1].split("x"))) else "8"
    if not close:
        return ""
    try:
        return _chip(chips[close[0]]).pod(shape).name
    except DeviceError as error:
        return " or ".join(re.findall(r'"([^"]+)"', error.problems[0].fix))


def _take(devices: Sequence[Any], count: int | None, is_list: bool = False) -> tuple[Any, ...]:
    if count is not None and count > len(devices):
        platform = devices[0].platform
        fix = f'set_auto_parallel_context(device_num={len(devices)}), or plan for a target: "{platform}:{count}"'
        if platform == "cpu":
            fix = f'jax.config.update("jax_num_cpu_devices", {count}) before JAX starts; or {fix}'
        if is_list:
            fix = f"list {count} devices, or set_auto_parallel_context(device_num={len(devices)})"
        there = "are listed" if is_list else f"{platform} devices are here"
        fail(DeviceError, f"{count} devices are wanted, but {len(devices)} {there}",
             where=f"device_num = {count}", why="device_num is how many of the devices are used", fix=fix)  # fmt: skip
    return tuple(devices[:count])


def _real(devices: tuple[Any, ...], mesh: Mesh | None) -> Hardware:
    platform = devices[0].platform
    chip = chip_of(platform, devices[0].device_kind)
    name = f"{len(devices)} x {devices[0].device_kind}"
    lowered = "cuda" if platform == "gpu" else platform
    return Hardware(chip, lowered, len(devices), devices, mesh, name, torus(devices) if chip.torus else ())


def chip_of(platform: str, kind: str) -> Chip:
    """The figures of a device that is here, by its platform and its `device_kind` in JAX: those that were measured on this
    machine (`chip_file`), or else a preset; for an unknown kind those of another chip, whose `source` says so.

    >>> chip_of("tpu", "TPU v5 lite").name, chip_of("tpu", "TPU v5").name, chip_of("gpu", "NVIDIA H100 80GB HBM3").name
    ('tpu-v5e', 'tpu-v5p', 'h100')
    >>> chip_of("gpu", "NVIDIA L4").source
    'NVIDIA H100 SXM datasheet, for want of figures of NVIDIA L4'
    """
    return _measured(kind) or preset_of(platform, kind)


def preset_of(platform: str, kind: str) -> Chip:
    """`chip_of` without what was measured."""
    known = [(name, chip) for chip in CHIPS.values() for name in chip.device_kinds if kind.startswith(name)]
    if known:
        return max(known, key=lambda row: len(row[0]))[1]
    chip = CHIPS[_DEFAULT_CHIP.get(platform, "cpu")]
    return (
        chip if platform == "cpu" else dataclasses.replace(chip, source=f"{chip.source}, for want of figures of {kind}")
    )


def is_of(kind: str, chip: Chip) -> bool:
    """Whether a device of that `device_kind` in JAX is such a chip, and no chip names its kind more closely. A chip that names no
    kinds may be any.

    >>> is_of("NVIDIA H100 80GB HBM3", CHIPS["h100"]), is_of("NVIDIA A100-SXM4-40GB", CHIPS["a100"])
    (True, False)
    """
    if not chip.device_kinds:
        return True
    known = {name for each in (*CHIPS.values(), chip) for name in each.device_kinds if kind.startswith(name)}
    return max(known, key=len, default="") in chip.device_kinds


def torus(devices: Sequence[Any]) -> tuple[int, ...]:
    """Dims of the box that devices fill by their `coords`, listed with the first coordinate fastest; else ()."""
    places = [tuple(getattr(d, "coords", None) or ()) for d in devices]
    if len({len(place) for place in places}) != 1 or not places[0]:
        return ()
    columns = list(zip(*places, strict=True))
    dims = tuple(max(c) - min(c) + 1 for c in reversed(columns))
    first = [min(c) for c in columns]
    walk = [tuple(first[i] + step for i, step in enumerate(reversed(at))) for at in np.ndindex(*dims)]
    return dims if walk == places else ()


def chip_file(kind: str) -> str:
    """Where the figures of devices of a kind are, once measured on this machine; "" if the variable says: nowhere.

    The variable `SHARDFN_CHIPS` names the directory. Unset, it is `shardfn/chips` where the user's settings are: below
    `XDG_CONFIG_HOME`, or else `~/.config`.
    """
    settings = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser(os.path.join("~", ".config"))
    directory = os.environ.get(CHIP_FILES, os.path.join(settings, "shardfn", "chips"))
    return directory and os.path.join(directory, re.sub(r"[^a-z0-9.]+", "-", kind.lower()) + ".json")


def _measured(kind: str) -> Chip | None:
    path = chip_file(kind)
    return _read(path, os.stat(path).st_mtime_ns) if path and os.path.exists(path) else None


def _chip(name: str) -> Chip:
    """A preset, or of the CPU, whose devices stand for each other, what was measured here."""
    return (name == "cpu" and _measured(name)) or CHIPS[name]


@functools.lru_cache
def _read(path: str, changed: int) -> Chip:
    return load_chip(path)


def used_here(target: Hardware) -> str:
    """What to write for devices of a target's platform that are here, where there are at least as many; else "".

    >>> used_here(resolve("tpu-v5e:4"))
    ''
    """
    try:
        devices = jax.devices(target.platform)
    except RuntimeError:  # none of that platform
        return ""
    there, wanted = len(devices), target.count
    if there < wanted:
        return ""
    here = f"the {there} {devices[0].platform} device{'s'[: there != 1]} here"
    is_default = devices[0].platform == jax.devices()[0].platform
    if there == wanted:
        return f"{'leave `device` out' if is_default else f'write device={devices[0].platform!r}'} for {here}"
    listed = f"write device=jax.devices({'' if is_default else repr(devices[0].platform)})[:{wanted}]"
    fewer = f", or leave it out and set_auto_parallel_context(device_num={wanted})," if is_default else ""
    return f"{listed}{fewer} for {wanted} of {here}"


_SIZED = re.compile(
    r"((?P<first>\d+) ?[x* ] ?)?(?P<chip>(tpu-?)?[a-z]+\d+[a-z]*)(?(first)|[-x ](?P<count>\d+))", re.ASCII
)
"""A chip and a count, written otherwise than as a target."""

_SIZED_FAMILY = re.compile(
    r"((?P<first>\d+) ?[x* ] ?)?(?P<chip>cpu|gpu|tpu|cuda|nvidia)(?(first)s?|[-x ]?(?P<count>\d+))", re.ASCII
)
"""The same for devices of no certain chip."""

_INDEXED = re.compile(r"(cpu|gpu|tpu):0|cuda:[0-7]", re.ASCII)
"""A single device by its number, as PyTorch names one; a number above 0 of another kind is read as a count."""

_TARGET = re.compile(r"(?P<chip>[a-z0-9-]+):(?P<shape>\d+(x\d+)*)", re.ASCII)


def _target(text: str) -> Hardware:
    key = re.sub("^tpu:v", "tpu-v", text.strip().lower().replace("_", "-"))
    found = _TARGET.fullmatch(text.strip().lower())
    if found is None or found["chip"] not in CHIPS or math.prod(map(int, found["shape"].split("x"))) < 1:
        name, _, size = key.partition(":")
        sizes = "the size is a count" + (", or a shape such as 4x8" if name in CHIPS and CHIPS[name].torus else "")
        is_chip = text.strip().lower().startswith(tuple(f"{chip}:" for chip in CHIPS))
        why = sizes if is_chip else f"the chips are {', '.join(CHIPS)}"
        fix = f"name one of the chips, such as {_eight_of('h100')}"
        if _INDEXED.fullmatch(key):
            kind, _, number = key.partition(":")
            every = "GPU" if kind == "cuda" else kind.upper()
            why = f'a name is that of all devices of a kind, "{every}", or of a target, such as "h100:8"'
            single = f'device=[jax.devices("{kind}")[{number}]]'
            fix = f"for that single device write {single}, and leave `device` out for all"
            here = {device.platform for device in jax.devices()}
            if kind == "cpu":
                fix += '; a target of eight is "cpu:8"'
            if {"cuda": "gpu", "rocm": "gpu"}.get(kind, kind) not in here:
                fix = (
                    f"no {every} is here: leave `device` out, or name a target; elsewhere {single} is that device alone"
                )
        elif several := cloud_names.machines(name, size):
            fix = f'a target is a chip and how many of it: did you mean "{several}"?'
        elif meant := _meant(name, size):
            fix = f"did you mean {_quoted(meant)}?"
        fail(DeviceError, f"target {text!r} is unknown", where=f"device = {text!r}", why=why, fix=fix)
    return _chip(found["chip"]).pod(found["shape"])


def _eight_of(chip: str) -> str:
    """How eight of a chip are written: a shape is that of a torus."""
    return f'"{chip}:8"' + (f', or with a shape "{chip}:2x4"' if CHIPS[chip].torus else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:79] + "…"
