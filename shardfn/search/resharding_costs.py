"""What it costs to change the layout of a value on the axes of a grid.

Bytes are what one device sends; seconds are bytes over each axis's own link plus its latency.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardfn.cost.devices.hardware import Chip, Hardware, Link, links
from shardfn.cost.schedule import max_combined_bytes
from shardfn.ir.model import Axes, OpConstraint, Spec
from shardfn.partition.libtpu import never_scatters_over
from shardfn.partition.resharding import flat, primes
from shardfn.partition.tile_assignment import DeviceGroup

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class MeshModel:
    """The axes that labels speak of, one link each, and the chip that prices the work.

    `scatters` says whether the compiler makes reduce-scatters; XLA on CPU keeps an all-reduce and a slice. `narrows`:
    whether `f32` is gathered for a matmul as `bf16`, in which the matmul reads it. `never_scatters_over`: whether a sum over all
    axes is an all-reduce all the same (`libtpu.never_scatters_over`).
    """

    axes: Axes
    links: tuple[Link, ...]
    chip: Chip
    scatters: bool = True
    narrows: bool = False
    never_scatters_over: bool = False

    @classmethod
    def on(cls, hardware: Hardware, axes: Axes) -> MeshModel:
        """The grid of these axes on the hardware."""
        platform, on_tpu = hardware.platform, hardware.platform == "tpu"
        whole = on_tpu and never_scatters_over(hardware.topology)
        return cls(axes, links(hardware, axes), hardware.chip, platform != "cpu", on_tpu, whole)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def merges(self) -> Mapping[str, float]:
        """Kinds of collectives of which the compiler makes one of several, and of how many bytes that is at most."""
        return max_combined_bytes(self.chip.platform)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(name for name, _ in self.axes)


def pieces(layouts: Array, sizes: tuple[int, ...]) -> Array:
    """How many pieces each layout makes: the product of the axes that cut something.

    >>> pieces(np.array([[-1, 0], [1, 0]]), (4, 2)).tolist()
    [2.0, 8.0]
    """
    return np.prod(np.where(layouts >= 0, np.array(sizes, float), 1.0), axis=-1)


def change(before: Array, after: Array, full_bytes: float, grid: MeshModel, share: float = 1.0) -> tuple[Array, Array]:
    """Bytes sent and seconds to change the layout of a value, for all pairs: [before, after].

    The collectives are those that XLA takes (`graph.moves`): where it can't slice, exchange and gather one after the other,
    it gathers everything first.

    Args:
      before: [labels, axes] of the dim that each axis cuts, -1 for none.
      after: the same, wanted.
      full_bytes: of the whole value.
      share: how much of its bytes travels in gathers, 0 to 1.
    """
    columns = [before[:, None, axis] for axis in range(len(grid.sizes))]
    columns += [after[None, :, axis] for axis in range(len(grid.sizes))]
    # How the dims follow each other tells all: each is numbered by how many cuts lie before it.
    base = len(columns) + 1
    codes, words = np.zeros((len(before), len(after)), np.int64), []
    for at, column in enumerate(columns):
        if at and at % _digits_of_word(base) == 0:
            codes, words = np.zeros_like(codes), [*words, codes]
        place = sum(((other >= 0) & (other < column)).astype(np.int64) for other in columns)
        codes = codes * base + np.where(column < 0, 0, place + 1)
    found, inverse = _distinct((*words, codes), base ** len(columns))
    known = _moves(grid)
    for code in found:
        if code not in known:
            known[code] = _moved(code, grid)
    rows = np.array([known[code] for code in found]).reshape(-1, 5)
    gathered, other, gathered_s, other_s, latency = (rows[:, n][inverse] for n in range(5))
    gathered, gathered_s = share * gathered, share * gathered_s
    return full_bytes * (gathered + other), full_bytes * (gathered_s + other_s) + latency


def _digits_of_word(base: int) -> int:
    """How many digits of a base go into 62 bits."""
    return int(62 / math.log2(base))


DENSE = 1 << 18
"""Codes up to which those that occur are marked in a table; more are sorted."""


def _distinct(words: tuple[Array, ...], count: int) -> tuple[list[tuple[int, ...]], Array]:
    """Which codes of one or more words, of `count`, occur, and for each place which of them."""
    codes = words[0]
    if count <= DENSE:
        place = np.zeros(count, np.int64)
        place[codes.reshape(-1)] = 1
        found = np.flatnonzero(place)
        place[found] = np.arange(len(found))
        return [(code,) for code in found.tolist()], place[codes]
    for word in words[1:]:  # numbered by those that occur, which are few
        numbers = [np.unique(each, return_inverse=True)[1].reshape(codes.shape) for each in (codes, word)]
        codes = numbers[0] * (int(numbers[1].max()) + 1) + numbers[1]
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    found = zip(*(word.reshape(-1)[first].tolist() for word in words), strict=True)
    return list(found), inverse.reshape(codes.shape)


@functools.lru_cache(maxsize=1 << 10)
def _moves(grid: MeshModel) -> dict[tuple[int, ...], tuple[float, float, float, float, float]]:
    """`_moved` of each code on a grid that was asked for: telling grids apart takes longer than telling codes apart."""
    return {}


def _moved(code: tuple[int, ...], grid: MeshModel) -> tuple[float, float, float, float, float]:
    """For each byte of a value what one device sends in gathers and else, seconds of both, and latency beside them."""
    count = len(grid.sizes)
    base, long = 2 * count + 1, _digits_of_word(2 * count + 1)
    lengths = [min(long, 2 * count - at) for at in range(0, 2 * count, long)]
    digits = [
        word // base**n % base - 1 for word, length in zip(code, lengths, strict=True) for n in reversed(range(length))
    ]
    gathered = other = gathered_s = other_s = latency = 0.0
    for kind, taken, piece in _path(tuple(digits), grid.sizes):
        if kind == "all-gather":
            for axis, size in taken:  # outer axes, whose links are slower, first: the pieces are small then
                gathered += (size - 1) * piece
                gathered_s += (size - 1) * piece / grid.links[axis].bytes_s
                latency += grid.links[axis].latency_s
                piece *= size
            continue
        n = math.prod(size for _, size in taken)
        sent = piece if kind == "collective-permute" else (n - 1) / n * piece
        slowest = min((grid.links[axis] for axis, _ in taken), key=lambda link: link.exchange_bytes_s)
        other += sent
        other_s += sent / slowest.exchange_bytes_s
        latency += slowest.latency_s
    return gathered, other, gathered_s, other_s, latency


@functools.lru_cache
def _parts(sizes: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], ...], dict[str, int], DeviceGroup]:
    """The names of the prime parts of each axis, the axis of each, and the devices of a grid of them all."""
    parts = [[(f"{axis}:{at}", n) for at, n in enumerate(primes(size))] for axis, size in enumerate(sizes)]
    names = tuple(tuple(name for name, _ in row) for row in parts)
    axis_of = {name: axis for axis, row in enumerate(names) for name in row}
    return names, axis_of, DeviceGroup({name: n for row in parts for name, n in row})


@functools.lru_cache(maxsize=1 << 16)
def _path(
    digits: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[str, tuple[tuple[int, int], ...], float], ...]:
    """The collectives from one layout to another: kind, (axis, size) of what takes part, and which part of the value one
    device holds before. `digits` are the dims that the axes cut before, then after; -1 for none."""
    parts_of, axis_of, devices = _parts(sizes)
    place = {dim: at for at, dim in enumerate(sorted({*digits} - {-1}))}

    def laid(row: Sequence[int]) -> Spec:
        dims: list[tuple[str, ...]] = [()] * min(len(place) + 1, len(digits))
        for axis, dim in enumerate(row):
            if dim >= 0:
                dims[place[dim]] += parts_of[axis]
        return tuple(dims)

    now, to = (devices.tile(laid(row)) for row in (digits[: len(sizes)], digits[len(sizes) :]))
    here, found = now.dims, []
    for step in devices.path(now, to):
        if step.kind:
            taken: dict[int, int] = {}
            for name in step.axes:
                axis = axis_of[name]
                taken[axis] = taken.get(axis, 1) * devices.sizes[name]
            found.append((step.kind, tuple(sorted(taken.items())), 1 / devices.count(flat(here))))
        here = step.after
    return tuple(found)


def merge_axes(
    axes: Axes, specs: Sequence[Spec], constraints: Mapping[int, OpConstraint]
) -> tuple[Axes, list[Spec], dict[int, OpConstraint]]:
    """Neighbouring axes that always cut together, in order, as one.

    >>> merge_axes((("a", 2), ("b", 2)), [(("a", "b"), ())], {})[:2]
    ((('a', 4),), [(('a',), ())])
    """
    every = [
        *specs,
        *(
            s
            for constraint in constraints.values()
            for s in (*constraint.operands, *constraint.results)
            if s is not None
        ),
    ]
    dims = {dim for spec in every for dim in spec}
    groups: list[list[tuple[str, int]]] = []
    for axis in axes:
        last = groups[-1][-1][0] if groups else ""
        if groups and all((last in dim) == (axis[0] in dim) and
                          (last not in dim or dim.index(axis[0]) == dim.index(last) + 1) for dim in dims):  # fmt: skip
            groups[-1].append(axis)
        else:
            groups.append([axis])
    names = [chr(ord("a") + i) for i in range(len(groups))]
    first = {group[0][0]: name for group, name in zip(groups, names, strict=True)}

    def renamed(spec: Spec) -> Spec:
        return tuple(tuple(first[a] for a in dim if a in first) for dim in spec)

    sizes = tuple((name, math.prod(size for _, size in group)) for group, name in zip(groups, names, strict=True))
    held = {i: OpConstraint(tuple(s if s is None else renamed(s) for s in p.operands),
                   tuple(s if s is None else renamed(s) for s in p.results)) for i, p in constraints.items()}  # fmt: skip
    return sizes, [renamed(spec) for spec in specs], held


def label_of_spec(spec: Spec, names: Sequence[str]) -> list[int]:
    """A spec as the dim that each axis cuts.

    >>> label_of_spec((("b",), (), ("a",)), ("a", "b", "c"))
    [2, 0, -1]
    """
    where = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
    return [where.get(name, -1) for name in names]


def spec_of_label(row: Sequence[int], rank: int, names: Sequence[str]) -> Spec:
    """The reverse of `label_of_spec`.

    >>> spec_of_label([2, 0, -1], 3, ("a", "b", "c"))
    (('b',), (), ('a',))
    """
    return tuple(tuple(n for n, d in zip(names, row, strict=True) if d == dim) for dim in range(rank))


def strategy_of(spec: Spec, axes: Axes) -> tuple[int, ...]:
    """How many ways a layout cuts each dim.

    >>> strategy_of((("a",), ()), (("a", 4), ("b", 2)))
    (4, 1)
    """
    sizes = dict(axes)
    return tuple(math.prod(sizes[a] for a in dim) for dim in spec)
