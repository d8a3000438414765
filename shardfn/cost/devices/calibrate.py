"""What this machine's virtual CPU devices do per second, measured while all of them are busy."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.devices.chips import CHIPS, Chip

_SIDE = 512
_LARGE = 2**22
"""Elements of an array that no cache holds, on each device."""


def calibrate(devices: Sequence[Any], seconds: float = 1.0) -> Chip:
    """One of these devices as a chip, from measurements of some seconds; the memory is the preset's.

    Products of 512 x 512 matrices, a pass over 16 MiB, a chain of 256 operations on each element of 1 MiB, all-reduces of
    4 MiB and of one number; of each, the best run in `seconds` counts.
    """
    best = functools.partial(_seconds, at_most=seconds)
    mesh = Mesh(np.array(devices), ("d",))
    count = len(devices)
    memory_bytes_s = _REPEATS * 2 * 4 * _LARGE / best(_pass_over(mesh))
    vector = 256 * 2**18 / best(_chain(mesh))
    rates = {name: 3 * 2 * _SIDE**3 / best(run) for name, run in _products(mesh)}
    latency, link = CHIPS["cpu"].latency_s, CHIPS["cpu"].link_bytes_s
    if count > 1:
        latency = best(_all_reduce(mesh, 1)) / _REPEATS
        large = max(best(_all_reduce(mesh, 2**20)) / _REPEATS - latency, 1e-6)
        link = bytes_sent("all-reduce", count, 4 * 2**20) / large
    return dataclasses.replace(
        CHIPS["cpu"],
        flops=rates.pop("f32"),
        memory_bytes_s=memory_bytes_s,
        link_bytes_s=link,
        latency_s=latency,
        source=f"measured on {count} virtual devices of this machine, {os.cpu_count()} cores",
        vector_flops=vector,
        dtype_flops=tuple(rates.items()),
    )


def table(chip: Chip) -> str:
    """A chip's figures as text, one a line."""
    rows = [
        ("matmuls, f32", chip.flops / 1e9, "GFLOP/s"),
        *((f"matmuls, {name}", rate / 1e9, "GFLOP/s") for name, rate in chip.dtype_flops),
        ("operations on elements", chip.vector_flops / 1e9, "GFLOP/s"),
        ("memory", chip.memory_bytes_s / 1e9, "GB/s"),
        ("sent in an all-reduce", chip.link_bytes_s / 1e9, "GB/s"),
        ("an empty all-reduce", chip.latency_s * 1e6, "us"),
    ]
    lines = [f"{what:<24} {figure:>10,.3g} {unit}" for what, figure, unit in rows]
    return "\n".join([f"one of the devices ({chip.source}), while all are busy", *lines])


_REPEATS = 20


def _seconds(run: Callable[[], Any], at_most: float) -> float:
    """The best of up to 20 runs, after one that compiles."""
    jax.block_until_ready(run())
    best, until = float("inf"), time.perf_counter() + at_most
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > until:
            break
    return best


def _cut(mesh: Mesh, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Ones, `shape` on each device, stacked along dim 0."""
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    return jax.jit(lambda: jnp.ones((mesh.size * shape[0], *shape[1:]), dtype), out_shardings=sharding)()


def _each(mesh: Mesh, fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> Callable[[], Any]:
    spec = PartitionSpec("d")
    return functools.partial(jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)), x)


def _products(mesh: Mesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16}
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        dtypes["f64"] = jnp.float64
    for name, dtype in dtypes.items():

        def chain(x: jax.Array) -> jax.Array:
            return x @ (x @ (x @ x))

        yield name, _each(mesh, chain, _cut(mesh, (_SIDE, _SIDE), dtype))


def _pass_over(mesh: Mesh) -> Callable[[], Any]:
    def passes(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _REPEATS, lambda _, x: x + 1.0, x)

    return _each(mesh, passes, _cut(mesh, (_LARGE,)))


def _chain(mesh: Mesh) -> Callable[[], Any]:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(128):
            x = x * 0.5 + 1.0
        return x

    return _each(mesh, chain, _cut(mesh, (2**18,)))


def _all_reduce(mesh: Mesh, elements: int) -> Callable[[], Any]:
    def body(_: int, x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x, "d") / mesh.size
        return jax.lax.pcast(total, "d", to="varying")

    return _each(mesh, lambda x: jax.lax.fori_loop(0, _REPEATS, body, x), _cut(mesh, (elements,)))
