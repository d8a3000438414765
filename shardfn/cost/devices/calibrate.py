"""What the devices of this machine do per second, measured while all of them are busy."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.cost.collectives import COLLECTIVE_KINDS, bytes_sent
from shardfn.cost.devices.chips import Chip, Hardware
from shardfn.cost.devices.hardware import preset_of, torus
from shardfn.cost.devices.kind_rates import kind_rate, kind_steps
from shardfn.cost.devices.links import Link, link_over


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Seconds of one collective of all devices, whose operand has `operand_bytes` on each; `modelled_s` by the chip measured."""

    kind: str
    operand_bytes: int
    seconds: float
    modelled_s: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A chip with measured rates, and the collectives that its link rate and latency were computed from."""

    chip: Chip
    collectives: tuple[MeasuredCollective, ...]
    kinds: tuple[str, ...] = ()
    """The kinds of kernels (`Chip.kind_rates`) that were measured."""

    def __str__(self) -> str:
        chip = self.chip
        names = dict.fromkeys(name for name, _ in chip.weight_gradient_efficiency)  # those that were measured
        rows = [
            *((f"matmuls, {name}", chip.rate(name) / 1e9, "GFLOP/s") for name in names),
            *(
                (f"weight gradients, {name}", chip.rate(name, is_weight_gradient=True) / 1e9, "GFLOP/s")
                for name in names
            ),
            ("operations on elements", chip.vector_flops / 1e9, "GFLOP/s"),
            ("memory", chip.memory_bytes_s / 1e9, "GB/s"),
            ("a kernel's launch", chip.launch_s * 1e6, "µs"),
        ]
        if self.collectives:
            rows += [
                ("sent over a link", chip.link_bytes_s / 1e9, "GB/s"),
                ("an empty collective", chip.latency_s * 1e6, "µs"),
            ]
        lines = [f"{what:<24} {figure:>10,.3g} {unit}" for what, figure, unit in rows]
        for c in self.collectives:
            ratio = c.seconds / c.modelled_s
            lines.append(
                f"{c.kind:<24} {c.seconds * 1e6:>10,.3g} µs for {c.operand_bytes:,} bytes, {ratio:.2f} of the model"
            )
        lines += [f"{kind:<30} {chip.kind_rate(kind):>8.3g} of the chip's rate" for kind in self.kinds]
        presets = ["the size of memory", *(["links"] if not self.collectives else [])]
        presets += [kind for kind, _ in chip.kind_rates if kind not in self.kinds]
        lines.append(f"not measured, from the preset: {', '.join(presets)}")
        return "\n".join([f"one device ({chip.source}), while all are busy", *lines])


def calibrate(devices: Sequence[Any], seconds: float = 0.5) -> Calibration:
    """The rates of some devices that are here. Sizes of memory, topology, and what is not measured are the preset's.

    Measured: matmuls of square matrices, also those that contract the rows of both as for a weight's gradient; chains of
    multiplications and additions, with arrays that grow while that makes them a tenth faster; passes over an array that no cache
    holds; kernels with nearly no work; of GPUs the kinds of kernels that have rates of their own (`kind_rates`); each kind of
    collective over all devices of one node, with little and with much to send.
    Each is the median of its runs.

    Args:
      devices: all of one kind.
      seconds: for which each is repeated.
    """
    known = preset_of(devices[0].platform, devices[0].device_kind)
    mesh = Mesh(np.array(devices), ("d",))
    most = known.memory_bytes / 256
    rates, gradient_rates = (
        {name: _fastest(functools.partial(run, mesh, dtype), most, seconds) for name, dtype in _dtypes()}
        for run in (_matmul, _weight_gradient)
    )
    chip = dataclasses.replace(
        known,
        weight_gradient_efficiency=tuple((name, min(1.0, rate / rates[name])) for name, rate in gradient_rates.items()),
        flops=rates.pop("f32" if known.platform == "cpu" else "bf16"),
        dtype_flops=tuple((dict(known.dtype_flops) | rates).items()),
        vector_flops=_fastest(functools.partial(_chain, mesh), most, seconds),
        memory_bytes_s=_pass_over(mesh, int(known.memory_bytes / 1024), seconds),
        launch_s=_launch(mesh, seconds),
        source=f"measured on {len(devices)} {devices[0].device_kind} devices of this machine, {os.cpu_count()} cores, "
        f"{datetime.date.today()}; the rest: {known.source}",
    )
    kinds = _kinds(mesh, chip, int(known.memory_bytes / 2048), seconds) if known.kind_rates else {}
    chip = dataclasses.replace(chip, kind_rates=tuple((dict(_rescaled(known, chip)) | kinds).items()))
    node = devices[: chip.node or None]
    found = _with_links(chip, node, seconds) if len(node) > 1 else Calibration(chip, ())
    return dataclasses.replace(found, kinds=tuple(kinds))


def _kinds(mesh: Mesh, chip: Chip, elements: int, seconds: float) -> dict[str, float]:
    """The part of the chip's rates that each kind of kernel reaches, with arrays of about so many elements."""
    found: dict[str, float] = {}
    for kind, step in kind_steps(elements).items():
        x = _random(mesh, step.shape, step.dtype)
        run = _each(mesh, step.function, x)
        took = _seconds(lambda run=run: [run() for _ in range(_QUEUED)], seconds) / _QUEUED
        found[kind] = kind_rate(kind, step.work, took, chip)
    return found


def _rescaled(preset: Chip, chip: Chip) -> Iterator[tuple[str, float]]:
    """A preset's parts of its rates as parts of the measured ones: the rates of the kinds stay what they are."""
    for kind, part in preset.kind_rates:
        yield kind, part * kind_rate(kind, 1.0, 1.0, chip) / kind_rate(kind, 1.0, 1.0, preset)


_ELEMENTS = 512 * 512
"""Of the first array that is tried."""
_REPEATS = 10
_QUEUED = 4
"""Calls that are started one after the other, so that the device does not wait for the next."""
_GAIN = 1.1
"""How much faster a larger size must be for a still larger one to be tried."""


def _seconds(run: Callable[[], Any], at_most: float) -> float:
    """The median of up to 20 runs in `at_most` seconds, after one that compiles."""
    jax.block_until_ready(run())
    took, until = list[float](), time.perf_counter() + at_most
    while len(took) < 20 and (not took or time.perf_counter() < until):
        start = time.perf_counter()
        jax.block_until_ready(run())
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _fastest(measure: Callable[[int, float], tuple[float, float]], most: float, seconds: float) -> float:
    """The rate of `measure(elements, seconds)`, which returns work and seconds: arrays grow up to `most` elements while that
    gains much.
    """
    elements = _ELEMENTS
    work, took = measure(elements, seconds)
    rate = work / took
    while took < seconds and 4 * elements <= most:
        elements *= 4
        work, took = measure(elements, seconds)
        before, rate = rate, max(rate, work / took)
        if rate < _GAIN * before:
            break
    return rate


def _random(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Random numbers, `shape` on each device, stacked along dim 0: products of constants can be faster."""
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    make = lambda: jax.random.normal(jax.random.key(0), (mesh.size * shape[0], *shape[1:])).astype(dtype)  # noqa: E731
    return jax.jit(make, out_shardings=sharding)()


def _each(mesh: Mesh, fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], Any]:
    spec = PartitionSpec("d")
    return functools.partial(jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)), x)


def _one_more(
    mesh: Mesh, steps: Callable[[int], Callable[[jax.Array], jax.Array]], x: jax.Array, seconds: float
) -> float:
    """Seconds of one step more: of a call with many of them and one with few."""
    few, many = (_seconds(_each(mesh, steps(n), x), seconds) for n in (_REPEATS, 5 * _REPEATS))
    return max(0.0, (many - few) / (4 * _REPEATS))


def _dtypes() -> Iterator[tuple[str, Any]]:
    yield from (("f32", jnp.float32), ("bf16", jnp.bfloat16))
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        yield "f64", jnp.float64


def _matmul(mesh: Mesh, dtype: Any, elements: int, seconds: float) -> tuple[float, float]:
    side = math.isqrt(elements)
    x = _random(mesh, (side, side), dtype)
    return 3 * 2.0 * side**3, _seconds(_each(mesh, lambda x: x @ (x @ (x @ x)), x), seconds)


def _weight_gradient(mesh: Mesh, dtype: Any, elements: int, seconds: float) -> tuple[float, float]:
    side = math.isqrt(elements)

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())))

    return 2.0 * side**3, _seconds(_each(mesh, product, _random(mesh, (side, side), dtype)), seconds)


def _chain(mesh: Mesh, elements: int, seconds: float) -> tuple[float, float]:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(128):
            x = x * 0.5 + 1.0
        return x

    return 256.0 * elements, _seconds(_each(mesh, chain, _random(mesh, (elements,))), seconds)


def _pass_over(mesh: Mesh, elements: int, seconds: float) -> float:
    def passes(count: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.fori_loop(0, count, lambda _, x: x + 1.0, x)

    took = _one_more(mesh, passes, _random(mesh, (elements,)), seconds)
    return 2 * 4 * elements / max(took, 1e-9)


def _launch(mesh: Mesh, seconds: float) -> float:
    """Seconds of a kernel with nearly no work: XLA fuses no matmul with another."""

    def products(count: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: functools.reduce(lambda x, _: x @ x, range(count), x)

    return _one_more(mesh, products, _random(mesh, (8, 8)), seconds)


# ---- collectives


def _with_links(chip: Chip, devices: Sequence[Any], seconds: float) -> Calibration:
    mesh = Mesh(np.array(devices), ("d",))
    small = 4 * len(devices)  # one number for each device
    large = small * int(chip.memory_bytes / (1024 * small))
    took = {
        (kind, size): _collective(mesh, kind, size // 4, seconds)
        for kind in COLLECTIVE_KINDS
        for size in (small, large)
    }

    def link(chip: Chip) -> Link:
        hardware = Hardware(chip, chip.platform, mesh.size, topology=torus(devices) if chip.torus else ())
        return link_over(hardware, (("d", mesh.size),), ("d",))

    def modelled(link: Link, kind: str, size: int) -> float:
        return link.seconds(kind, bytes_sent(kind, mesh.size, size))

    empty, before = statistics.median(took[kind, small] for kind in COLLECTIVE_KINDS), link(chip)
    sending = sum(max(took[kind, large] - took[kind, small], 1e-9) for kind in COLLECTIVE_KINDS)
    expected = sum(modelled(before, kind, large) - before.latency_s for kind in COLLECTIVE_KINDS)
    chip = dataclasses.replace(
        chip,
        latency_s=chip.latency_s * empty / before.latency_s,
        link_bytes_s=chip.link_bytes_s * expected / sending,
    )
    after = link(chip)
    return Calibration(chip, tuple(MeasuredCollective(*key, s, modelled(after, *key)) for key, s in took.items()))


def _collective(mesh: Mesh, kind: str, elements: int, seconds: float) -> float:
    """Seconds of one collective whose operand has so many elements on each device: one of several in a loop, each of which
    waits for the one before.
    """
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    run = {
        "all-reduce": lambda x: jax.lax.psum(x, "d"),
        "all-gather": lambda x: jax.lax.all_gather(x, "d"),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "d", tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, "d", ring),
    }[kind]

    def body(_: int, x: jax.Array) -> jax.Array:
        result = jax.lax.optimization_barrier(run(x))
        return jax.lax.dynamic_update_slice(x, result.reshape(-1)[:1] / mesh.size, (0,))

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, body, x)

    return _seconds(_each(mesh, loop, _random(mesh, (elements,))), seconds) / _REPEATS
