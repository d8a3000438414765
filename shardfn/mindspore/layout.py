"""MindSpore's `Layout`: a device matrix with named axes, and for each dim of an array the axes that shard it.

Ranks fill the device matrix in row-major order, so the last axis is the fastest. With the matrix (2, 4) and the names
("dp", "mp"), rank 5 has the coordinates dp=1, mp=1. A dim over ("dp", "mp") has 8 shards, and dp is the major axis.
The class takes MindSpore's notation and gives JAX's: a mesh, a `PartitionSpec`, a `NamedSharding`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import DeviceError, LayoutError, LayoutTypeError, Problem, fail
from shardfn.frontend.meshes import abstract_mesh, mesh_on, partition_spec

INTERLEAVED = "interleaved_parallel"
UNSHARDED = "None"

Dim = str | tuple[str, ...]  # one dim as typed: an axis, several axes (major to minor), or "None" for unsharded
Spec = tuple[tuple[str, ...], ...]  # for each dim the axes that shard it, major to minor; () for unsharded


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Layout:
    """A device matrix with named axes. Call it with one entry for each dim to get the layout of an array.

    A last axis called "interleaved_parallel" is virtual: it counts no devices and shards no dim.

    Args:
      device_matrix: the size of each axis.
      alias_name: the name of each axis.
      rank_list: the rank (index of a device) at each position of the matrix, in row-major order; None is 0, 1, 2, …

    Raises:
      LayoutError: sizes, names or ranks do not fit together.
      LayoutTypeError: an argument has the wrong type.

    >>> layout = Layout((2, 4), ("dp", "mp"))
    >>> layout("dp", "None").slice_shape((32, 16))
    (16, 16)
    >>> layout(("dp", "mp"), "None").partition_spec
    P(('dp', 'mp'), None)
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: Sequence[int]  # a range where nothing else was said, so that comparing 4,096 ranks costs nothing
    _spec: Spec | None
    _dims: tuple[Dim, ...] | None = dataclasses.field(compare=False)  # as typed: "dp" and ("dp",) are one layout

    def __init__(
        self, device_matrix: tuple[int, ...], alias_name: tuple[str, ...], rank_list: list[int] | None = None
    ) -> None:
        _raise(_matrix_problems(device_matrix, alias_name))
        ranks: Sequence[int] = range(math.prod(size for _, size in _real_axes(device_matrix, alias_name)))
        _raise(_rank_problems(rank_list, ranks, math.prod(device_matrix)))
        if rank_list and rank_list != list(range(len(rank_list))):
            ranks = tuple(rank_list)
        values = {"device_matrix": device_matrix, "alias_name": alias_name, "rank_list": ranks}
        for name, value in {**values, "_spec": None, "_dims": None}.items():
            object.__setattr__(self, name, value)

    def __call__(self, *dims: Dim) -> Layout:
        """The layout of an array.

        Args:
          dims: for each dim an axis name, a tuple of names (major to minor), or "None" for an unsharded dim.

        Returns:
          The layout with these dims.

        Raises:
          LayoutError: an axis that does not exist or is used twice.
          LayoutTypeError: an entry that is no name.

        >>> Layout((2, 4), ("dp", "mp"))("None", "mp").strategy
        (1, 4)
        """
        _raise(_dim_problems(self.device_matrix, self.alias_name, dims))
        bound = copy.copy(self)
        object.__setattr__(bound, "_dims", dims)
        object.__setattr__(bound, "_spec", tuple(tuple(a for a in _names(dim) if a != UNSHARDED) for dim in dims))
        return bound

    def __repr__(self) -> str:
        plain = isinstance(self.rank_list, range)
        ranks = "" if plain else f", {list(self.rank_list)!r}"
        call = "" if self._dims is None else _call(self._dims)
        return f"Layout({self.device_matrix!r}, {self.alias_name!r}{ranks}){call}"

    # Built from something else

    @classmethod
    def from_strategy(cls, strategy: tuple[int, ...], device_num: int) -> Layout:
        """The layout of a single array on a device matrix of its own.

        Args:
          strategy: the number of shards of each dim.
          device_num: the number of devices, a multiple of the product of the strategy.

        Returns:
          A layout with one axis for each sharded dim. A last axis `repeat` holds the replicas.

        Raises:
          LayoutError: the product does not divide the device count, or a number is below 1.
          LayoutTypeError: the strategy is no tuple of ints.

        >>> Layout.from_strategy((4, 1), 8)
        Layout((4, 2), ('dim0', 'repeat'))('dim0', 'None')
        """
        _raise(_strategy_problems(strategy, device_num))
        axes = [(f"dim{i}", n) for i, n in enumerate(strategy) if n > 1]
        repeat = device_num // math.prod(strategy)
        if repeat > 1 or not axes:
            axes.append(("repeat", repeat))
        names, sizes = zip(*axes, strict=True)
        return cls(sizes, names)(*(f"dim{i}" if n > 1 else UNSHARDED for i, n in enumerate(strategy)))

    @classmethod
    def from_tensor_map(cls, device_matrix: Sequence[int], tensor_map: Sequence[int | Sequence[int]]) -> Layout:
        """The layout that MindSpore writes as numbers.

        Args:
          device_matrix: the size of each axis; the axes are called `axis0`, `axis1`, …
          tensor_map: for each dim the axis that shards it, counted from the last axis (0); -1 for unsharded; a tuple for
            several axes.

        Returns:
          The layout.

        Raises:
          LayoutError: the tensor map names an axis that does not exist.
          LayoutTypeError: the tensor map is no tuple of ints.

        >>> Layout.from_tensor_map((2, 4), (1, -1))
        Layout((2, 4), ('axis0', 'axis1'))('axis0', 'None')
        """
        matrix: Any = tuple(device_matrix) if isinstance(device_matrix, list) else device_matrix
        names = tuple(f"axis{i}" for i in range(len(matrix) if isinstance(matrix, tuple) else 1))
        layout = cls(matrix, names)
        _raise(_map_problems(matrix, tensor_map))
        number = {-1: UNSHARDED} | dict(enumerate(reversed(names)))
        return layout(*(number[d] if isinstance(d, int) else tuple(number[k] for k in d) for d in tensor_map))

    @classmethod
    def from_sharding(cls, sharding: NamedSharding, ndim: int, devices: Sequence[Any] | None = None) -> Layout:
        """The layout that equals a `NamedSharding`; its memory kind is dropped.

        Args:
          sharding: the sharding.
          ndim: the number of dims of the array.
          devices: the devices by rank; None is all devices of the mesh's platform.

        Returns:
          The layout.

        Raises:
          LayoutError: the sharding has more dims, or leaves one unconstrained.
          LayoutTypeError: `sharding` is no `NamedSharding`.
          DeviceError: a device of the mesh is not in `devices`.

        >>> Layout.from_sharding(NamedSharding(AbstractMesh((2, 4), ("dp", "mp")), PartitionSpec("mp")), ndim=2)
        Layout((2, 4), ('dp', 'mp'))('mp', 'None')
        """
        _raise(_sharding_problems(sharding, ndim))
        entries = sharding.spec.partitions + (None,) * (ndim - len(sharding.spec))
        mesh = sharding.mesh
        axes = dict(mesh.shape) or {"repeat": 1}
        layout = cls(tuple(axes.values()), tuple(axes), _ranks(mesh, devices))
        return layout(*(UNSHARDED if entry is None else entry for entry in entries))

    # As MindSpore writes it

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """For each dim the axis that shards it, counted from the last axis (0); -1 for unsharded; a tuple for several."""
        last = len(self.alias_name) - 1
        number = {UNSHARDED: -1} | {name: last - i for i, name in enumerate(self.alias_name)}
        dims = self._bound()._dims or ()
        return tuple(number[dim] if isinstance(dim, str) else tuple(number[axis] for axis in dim) for dim in dims)

    def to_dict(self) -> dict[str, Any]:
        """MindSpore's dict form. Its default ranks count the virtual axis too.

        Returns:
          A dict with `device_matrix`, `tensor_map`, `interleaved_parallel`, `alias_name` and `rank_list`.

        >>> Layout((2, 2), ("a", "b"))("b", "None").to_dict()["tensor_map"]
        (0, -1)
        """
        plain = isinstance(self.rank_list, range)
        return {
            "device_matrix": self.device_matrix,
            "tensor_map": self.tensor_map,
            "interleaved_parallel": INTERLEAVED in self.alias_name,
            "alias_name": self.alias_name,
            "rank_list": list(range(math.prod(self.device_matrix)) if plain else self.rank_list),
        }

    # As numbers

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.rank_list)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each real axis."""
        return _real_axes(self.device_matrix, self.alias_name)

    @property
    def spec(self) -> Spec:
        """For each dim the axes that shard it, major to minor."""
        return self._bound()._spec or ()

    @property
    def strategy(self) -> tuple[int, ...]:
        """The number of shards of each dim."""
        sizes = dict(self.axes)
        return tuple(math.prod(sizes[axis] for axis in dim) for dim in self.spec)

    def slice_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one shard.

        Args:
          shape: the shape of the array.

        Returns:
          The shape on each device.

        Raises:
          LayoutError: another number of dims, or a dim that its number of shards does not divide.
          LayoutTypeError: `shape` is no tuple of ints.
        """
        _raise(_shape_problems(self, shape))
        return tuple(int(n) // count for n, count in zip(shape, self.strategy, strict=True))

    def slices(self, shape: Sequence[int]) -> tuple[tuple[slice, ...], ...]:
        """The part of an array that each device holds.

        Args:
          shape: the shape of the array.

        Returns:
          A tuple of slices for each device; entry i is for rank `rank_list[i]`.

        Raises:
          LayoutError: the array cannot be sharded so (`slice_shape`).

        >>> Layout((2, 2), ("dp", "mp"))("mp").slices((6,))[1]
        (slice(3, 6, None),)
        """
        shard_shape = self.slice_shape(shape)
        sizes = dict(self.axes)
        coordinates = dict(zip(sizes, np.unravel_index(np.arange(self.size), tuple(sizes.values())), strict=True))
        columns = []
        for axes, count, length in zip(self.spec, self.strategy, shard_shape, strict=True):
            number = np.zeros(self.size, np.int64)
            for axis in axes:
                number = number * sizes[axis] + coordinates[axis]
            shards = [slice(i * length, (i + 1) * length) for i in range(count)]
            columns.append([shards[i] for i in number.tolist()])
        return tuple(zip(*columns, strict=True)) if columns else ((),) * self.size

    # As JAX writes it

    @property
    def partition_spec(self) -> PartitionSpec:
        """The `PartitionSpec`, one entry for each dim."""
        return partition_spec(self.spec)

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh with device `devices[rank]` at the position of each rank.

        Args:
          devices: the devices by rank; None is `jax.devices()`.

        Returns:
          The mesh, with the layout's axes.

        Raises:
          DeviceError: too few devices, or one that is listed twice.
        """
        pool = list(jax.devices() if devices is None else devices)
        if (last := max(self.rank_list)) >= len(pool):
            what = f"the layout needs device {last}, and there are {len(pool)} devices, counted from 0"
            virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={last + 1}"
            fix = f"pass a longer list as devices=, plan with abstract_mesh(), or start Python with {virtual}"
            fail(DeviceError, what, where=repr(self), fix=fix)
        placed = np.empty(self.size, dtype=object)
        placed[:] = [pool[rank] for rank in self.rank_list]
        if len(set(placed)) < self.size:
            where, fix = f"devices={reprlib.repr(pool)}", "list each device once"
            fail(DeviceError, "a device stands at two places of the device matrix", where=where, fix=fix)
        return mesh_on(placed, self.axes)

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices.

        Returns:
          An abstract mesh with the layout's axes; `rank_list` has no effect.
        """
        return abstract_mesh(self.axes)

    def sharding(self, devices: Sequence[Any] | None = None) -> NamedSharding:
        """The `NamedSharding` of the layout.

        Args:
          devices: the devices by rank; None is `jax.devices()`.

        Returns:
          The sharding on `mesh(devices)`.

        Raises:
          DeviceError: too few devices, or one that is listed twice.
        """
        return NamedSharding(self.mesh(devices), self.partition_spec)

    def _bound(self) -> Layout:
        if self._dims is None:
            fix = f'call it with one entry for each dim, as in layout("{self.alias_name[0]}", "None")'
            why = "the device matrix alone does not say which axis shards which dim"
            fail(LayoutError, "this layout is not yet the layout of an array", where=repr(self), why=why, fix=fix)
        return self


def _names(dim: Any) -> tuple[Any, ...]:
    return dim if isinstance(dim, tuple) else (dim,)


def _count(n: int) -> str:
    return f"{n} {'entry' if n == 1 else 'entries'}"


def _call(dims: Iterable[Any]) -> str:
    return f"({', '.join(map(repr, dims))})"


def _either(choices: Sequence[Any]) -> str:
    return " or ".join(part for part in (", ".join(map(str, choices[:-1])), str(choices[-1])) if part)


def _divisors(*numbers: int) -> list[int]:
    common = math.gcd(*numbers)
    return [d for d in range(1, common + 1) if common % d == 0]


def _real_axes(matrix: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in zip(names, matrix, strict=True) if name != INTERLEAVED)


def _ranks(mesh: Mesh | AbstractMesh, devices: Sequence[Any] | None) -> list[int] | None:
    if not isinstance(mesh, Mesh):
        return None
    placed = list(mesh.devices.flat)
    try:
        pool = jax.devices(placed[0].platform) if devices is None else devices
        index = {device: rank for rank, device in enumerate(pool)}
        return [index[device] for device in placed]
    except (KeyError, RuntimeError):  # RuntimeError: a compile-only topology, whose platform is not on this machine
        why = "a rank is the index of a device in a list, by default jax.devices()"
        what, fix = "the mesh has devices that are not listed", "pass a list with all of them as devices="
        fail(DeviceError, what, where=repr(mesh), why=why, fix=fix)


# Each of these yields what is wrong; the caller raises it all at once.


def _raise(problems: Iterable[Problem]) -> None:
    found = tuple(problems)
    if found:
        raise (LayoutTypeError if all(p.is_type for p in found) else LayoutError)(found)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


WHY = {
    "device_matrix": "a size counts the devices along an axis",
    "rank_list": "a rank is the index of a device",
    "strategy": "an entry is the number of shards of a dim; 1 leaves it unsharded",
}


def _int_problems(name: str, values: Any, where: str, least: int = 1, kind: type = tuple) -> Iterator[Problem]:
    if not isinstance(values, kind):
        example = kind(values if isinstance(values, tuple | list) else (values if _is_int(values) else 8,))
        what, fix = f"{name} must be a {kind.__name__}, not {type(values).__name__}", f"write it as {example}"
        yield Problem(what, where, WHY[name], fix, is_type=True)
        return
    for i, value in enumerate(values):
        if not _is_int(value):
            what, fix = f"{name}[{i}] must be an int, not {type(value).__name__}", f"write an int, {least} or more"
            yield Problem(what, where, WHY[name], fix, is_type=True)
        elif value < least:
            yield Problem(f"{name}[{i}] is {value}", where, WHY[name], f"use {least} or more")


def _matrix_problems(matrix: Any, names: Any) -> Iterator[Problem]:
    where = f"Layout({matrix!r}, {names!r})"
    found = list(_int_problems("device_matrix", matrix, where))
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        what, fix = "alias_name must be a tuple of strings", 'name each axis, as in ("dp", "mp")'
        found.append(Problem(what, where, "a dim is sharded over an axis by its name", fix, is_type=True))
    yield from found
    if any(p.is_type for p in found):
        return
    counts = f"device_matrix has {len(matrix)} entries and alias_name {len(names)}"
    rules = (
        (len(matrix) != len(names), counts, "each axis has a size and a name", "write as many names as sizes"),
        (
            "" in names,
            "an axis has an empty name",
            "a dim is sharded over an axis by its name",
            "give each axis a name",
        ),
        (UNSHARDED in names, 'an axis is called "None"', 'in a call "None" means an unsharded dim', "rename the axis"),
        (
            len(set(names)) < len(names),
            "two axes share a name",
            "a dim is sharded over an axis by its name",
            "rename one of them",
        ),
        (
            INTERLEAVED in names[:-1],
            f"axis {INTERLEAVED!r} is not last",
            "it is virtual, no axis of devices",
            "put it last",
        ),
        (not set(names) - {INTERLEAVED}, "no axis has devices", "", 'for one device write Layout((1,), ("dp",))'),
    )
    yield from (Problem(what, where, why, fix) for wrong, what, why, fix in rules if wrong)


def _rank_problems(ranks: Any, default: range, virtual: int) -> Iterator[Problem]:
    if ranks is None:
        return
    where = f"rank_list={reprlib.repr(ranks)}"
    found = list(_int_problems("rank_list", ranks, where, least=0, kind=list))
    yield from found
    if found or ranks == list(range(virtual)):  # MindSpore's own default counts the virtual axis
        return
    if len(ranks) != len(default):
        fix = f"list {len(default)} ranks, one for each device of the matrix, or leave rank_list out"
        yield Problem(f"rank_list has {len(ranks)} entries for {len(default)} devices", where, fix=fix)
    rank, times = collections.Counter(ranks).most_common(1)[0] if ranks else (0, 0)
    if times > 1:
        why = "a device has one place in the device matrix"
        yield Problem(f"rank {rank} is listed {times} times", where, why, "list each rank once")


def _dim_problems(matrix: tuple[int, ...], names: tuple[str, ...], dims: tuple[Any, ...]) -> Iterator[Problem]:
    where = f"Layout({matrix!r}, {names!r}){_call(dims)}"
    use = "use " + _either([f'"{name}"' for name in (*names, UNSHARDED) if name != INTERLEAVED])
    seen: dict[str, int] = {}
    for i, axis in ((i, axis) for i, dim in enumerate(dims) for axis in _names(dim)):
        if axis is None:
            why, fix = "only the string means an unsharded dim", 'write the string "None" there'
            yield Problem(f"dim {i} is None", where, why, fix)
        elif not isinstance(axis, str):
            why = "a dim is an axis name or a tuple of names"
            yield Problem(f"dim {i} is {axis!r}, which is no axis name", where, why, use, is_type=True)
        elif axis == UNSHARDED:
            continue
        elif axis not in names:
            yield Problem(f"dim {i} cannot be sharded over {axis!r}", where, "the device matrix has no such axis", use)
        elif axis == INTERLEAVED:
            why = "XLA overlaps communication with computation by itself: no array is split again on its device"
            yield Problem(f"dim {i} cannot be sharded over {axis!r}", where, why, f"leave it out of the call: {use}")
        elif axis in seen:
            what = f"axis {axis!r} is used twice" + (f", on dims {seen[axis]} and {i}" if seen[axis] != i else "")
            fix = 'use each axis once, and "None" for an unsharded dim'
            yield Problem(what, where, "an axis shards one dim of an array, once", fix)
        else:
            seen[axis] = i


def _strategy_problems(strategy: Any, device_num: Any) -> Iterator[Problem]:
    where = f"strategy {strategy!r} on {device_num!r} devices"
    found = list(_int_problems("strategy", strategy, where))
    if not _is_int(device_num) or device_num < 1:
        what, fix = f"device_num is {device_num!r}", "give the number of devices, an int of 1 or more"
        found.append(Problem(what, where, fix=fix, is_type=not _is_int(device_num)))
    yield from found
    if not found and device_num % math.prod(strategy):
        needed = math.prod(strategy)
        what, why = f"the strategy needs {needed} devices", f"{device_num} is not divisible by {needed}"
        yield Problem(what, where, why, f"choose a strategy whose product is {_either(_divisors(device_num))}")


def _map_problems(matrix: tuple[int, ...], tensor_map: Any) -> Iterator[Problem]:
    where = f"tensor_map {tensor_map!r} of device_matrix {matrix!r}"
    nested = isinstance(tensor_map, tuple | list)
    values = [k for dim in tensor_map for k in (dim if isinstance(dim, tuple | list) else (dim,))] if nested else ()
    if not nested or not all(map(_is_int, values)):
        fix = "write a tuple of ints, or of tuples of ints for a dim that several axes shard"
        yield Problem("a tensor map must be a tuple of ints", where, fix=fix, is_type=True)
    elif any(not -1 <= k < len(matrix) for k in values):
        fix = f"use 0 for the last axis, up to {len(matrix) - 1} for the first, and -1 for an unsharded dim"
        yield Problem("the tensor map names an axis that does not exist", where, fix=fix)


def _sharding_problems(sharding: Any, ndim: int) -> Iterator[Problem]:
    where = repr(sharding)
    if not isinstance(sharding, NamedSharding):
        what, fix = f"a layout cannot be read from a {type(sharding).__name__}", "give a jax.sharding.NamedSharding"
        yield Problem(what, where, fix=fix, is_type=True)
        return
    spec, names = sharding.spec, tuple(sharding.mesh.axis_names)
    rules = (
        (len(spec) > ndim, f"the spec has {len(spec)} entries for {ndim} dims", "give at most one entry for each dim"),
        (
            PartitionSpec.UNCONSTRAINED in spec.partitions,
            "the spec leaves a dim unconstrained",
            "say an axis or None for each dim",
        ),
        (bool(spec.unreduced), "the array still has to be summed over an axis", "reduce it first"),
        (INTERLEAVED in names, f"the mesh has an axis called {INTERLEAVED!r}", "rename it: here that axis is virtual"),
    )
    yield from (Problem(what, where, fix=fix) for wrong, what, fix in rules if wrong)


def _shape_problems(layout: Layout, shape: Any) -> Iterator[Problem]:
    where = f"shape {shape!r} under {layout!r}"
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) for n in shape):
        yield Problem("a shape must be a tuple of ints", where, fix="pass array.shape", is_type=True)
    elif len(shape) != len(layout.strategy):
        what = f"the layout has {len(layout.strategy)} dims and the array has {len(shape)}"
        why = 'each dim has an entry, which is "None" for an unsharded dim'
        yield Problem(what, where, why, f"call the layout with {_count(len(shape))}, one for each dim")
    else:
        for i, (n, count) in enumerate(zip(shape, layout.strategy, strict=True)):
            if n % count:
                ways = _either(_divisors(int(n), layout.size))
                other = f"shard it {ways} ways on {layout.size} devices" if ways != "1" else "leave it unsharded"
                fix = f"{other}, or pad it to {-(-n // count) * count}"
                yield Problem(f"dim {i} cannot be sharded {count} ways", where, f"{n} is not divisible by {count}", fix)
