"""The cost of resharding a value over mesh axes, for all pairs of layouts.

Bytes are what one device sends. Seconds are bytes over each axis's own link, plus its latency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from shardfn.ir.divisors import primes
from shardfn.ir.model import Spec, axes_of
from shardfn.partition.tile_assignment import DeviceGroup
from shardfn.search.labels.mesh_model import MeshModel
from shardfn.solver.labelling import Array


def resharding_cost(
    before: Array,
    after: Array,
    full_bytes: float,
    mesh: MeshModel,
    share: float = 1.0,
    gathers: int = 1,
    others: int = 1,
) -> tuple[Array, Array]:
    """Bytes sent and seconds to reshard a value, for all pairs of layouts: [before, after].

    The collectives are those of `partition.resharding`: where XLA finds no sequence of slices, all-to-alls and gathers, it
    gathers everything first.

    Args:
      before: [labels, axes], the dimension that each axis shards, -1 for none.
      after: the same after the change.
      full_bytes: bytes of the unsharded value.
      mesh: the axes with their links.
      share: the part of the bytes that all-gathers move, 0 to 1.
      gathers: how often the all-gathers run.
      others: how often the other collectives run.
    """
    columns = [before[:, None, axis] for axis in range(len(mesh.sizes))]
    columns += [after[None, :, axis] for axis in range(len(mesh.sizes))]
    # Only the order of the dimensions matters: each is numbered by how many sharded ones precede it.
    base = len(columns) + 1
    codes, words = np.zeros((len(before), len(after)), np.int64), []
    for at, column in enumerate(columns):
        if at and at % _digits_of_word(base) == 0:
            codes, words = np.zeros_like(codes), [*words, codes]
        place = sum(((other >= 0) & (other < column)).astype(np.int64) for other in columns)
        codes = codes * base + np.where(column < 0, 0, place + 1)
    found, inverse = _distinct((*words, codes), base ** len(columns))
    is_reduced = share * full_bytes <= mesh.max_reduced_gather_bytes
    known = _cached_costs(mesh, is_reduced)
    for code in found:
        if code not in known:
            known[code] = _cost_of_code(code, mesh, is_reduced)
    rows = np.array([known[code] for code in found]).reshape(-1, 5)
    gathered, other, gathered_s, other_s, latency = (rows[:, n][inverse] for n in range(5))
    sent = gathers * share * gathered + others * other
    latencies = np.where(gathered > 0, gathers, others) * latency
    return full_bytes * sent, full_bytes * (gathers * share * gathered_s + others * other_s) + latencies


def _digits_of_word(base: int) -> int:
    """How many digits of a base fit into 62 bits."""
    return int(62 / math.log2(base))


DENSE = 1 << 18
"""Codes up to which a table marks those that occur; more are sorted."""


def _distinct(words: tuple[Array, ...], count: int) -> tuple[list[tuple[int, ...]], Array]:
    """The distinct codes, of one or more words each below `count`, and for each place the index of its code."""
    codes = words[0]
    if count <= DENSE:
        place = np.zeros(count, np.int64)
        place[codes.reshape(-1)] = 1
        found = np.flatnonzero(place)
        place[found] = np.arange(len(found))
        return [(code,) for code in found.tolist()], place[codes]
    for word in words[1:]:  # renumbered: few codes occur
        numbers = [np.unique(each, return_inverse=True)[1].reshape(codes.shape) for each in (codes, word)]
        codes = numbers[0] * (int(numbers[1].max()) + 1) + numbers[1]
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    found = zip(*(word.reshape(-1)[first].tolist() for word in words), strict=True)
    return list(found), inverse.reshape(codes.shape)


@functools.lru_cache(maxsize=1 << 10)
def _cached_costs(mesh: MeshModel, is_reduced: bool) -> dict[tuple[int, ...], tuple[float, float, float, float, float]]:
    """A cache of `_cost_of_code` by code, for one mesh: comparing meshes takes longer than comparing codes."""
    return {}


def _cost_of_code(code: tuple[int, ...], mesh: MeshModel, is_reduced: bool) -> tuple[float, float, float, float, float]:
    """Per byte of a value: what a device sends in all-gathers and otherwise, the seconds of both, and the latency.

    `is_reduced`: whether a gather over all axes is an all-reduce.
    """
    count = len(mesh.sizes)
    base, long = 2 * count + 1, _digits_of_word(2 * count + 1)
    lengths = [min(long, 2 * count - at) for at in range(0, 2 * count, long)]
    digits = [
        word // base**n % base - 1 for word, length in zip(code, lengths, strict=True) for n in reversed(range(length))
    ]
    gathered = other = gathered_s = other_s = latency = 0.0
    for kind, taken, shard in _path(tuple(digits), mesh.sizes):
        if kind == "all-gather":
            n = math.prod(size for _, size in taken)
            if is_reduced and n == math.prod(mesh.sizes):
                gathered += 2 * (n - 1) * shard
                gathered_s += 2 * (n - 1) * shard / mesh.over_all.bytes_s
                latency += mesh.over_all.latency_s
                continue
            for axis, size in taken:  # slow outer links first, while shards are small
                gathered += (size - 1) * shard
                gathered_s += (size - 1) * shard / mesh.links[axis].bytes_s
                latency += mesh.links[axis].latency_s
                shard *= size
            continue
        n = math.prod(size for _, size in taken)
        sent = shard if kind == "collective-permute" else (n - 1) / n * shard
        slowest = min((mesh.links[axis] for axis, _ in taken), key=lambda link: link.exchange_bytes_s)
        other += sent
        other_s += sent / slowest.exchange_bytes_s
        latency += slowest.latency_s
    return gathered, other, gathered_s, other_s, latency


@functools.lru_cache
def _parts(sizes: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], ...], dict[str, int], DeviceGroup]:
    """The names of the prime factors of each axis, the axis of each name, and the devices of a mesh of them all."""
    parts = [[(f"{axis}:{at}", n) for at, n in enumerate(primes(size))] for axis, size in enumerate(sizes)]
    names = tuple(tuple(name for name, _ in row) for row in parts)
    axis_of = {name: axis for axis, row in enumerate(names) for name in row}
    return names, axis_of, DeviceGroup({name: n for row in parts for name, n in row})


@functools.lru_cache(maxsize=1 << 16)
def _path(
    digits: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[str, tuple[tuple[int, int], ...], float], ...]:
    """The collectives of a resharding: kind, (axis, size) of what takes part, and the share of the value on a device before.

    `digits` are the dimensions that the axes shard before, then after; -1 for none.
    """
    parts_of, axis_of, devices = _parts(sizes)
    place = {dim: at for at, dim in enumerate(sorted({*digits} - {-1}))}

    def spec(row: Sequence[int]) -> Spec:
        dims: list[tuple[str, ...]] = [()] * min(len(place) + 1, len(digits))
        for axis, dim in enumerate(row):
            if dim >= 0:
                dims[place[dim]] += parts_of[axis]
        return tuple(dims)

    now, to = (devices.tile(spec(row)) for row in (digits[: len(sizes)], digits[len(sizes) :]))
    here, found = now.dims, []
    for step in devices.path(now, to):
        if step.kind:
            taken: dict[int, int] = {}
            for name in step.axes:
                axis = axis_of[name]
                taken[axis] = taken.get(axis, 1) * devices.sizes[name]
            found.append((step.kind, tuple(sorted(taken.items())), 1 / devices.count(axes_of(here))))
        here = step.after
    return tuple(found)
