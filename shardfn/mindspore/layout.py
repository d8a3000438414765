"""MindSpore's `Layout`: a device matrix with named axes, and for each dim of an array the axes that shard it.

Ranks fill the device matrix in row-major order, so the last axis is the fastest. With the matrix (2, 4) and the names
("dp", "mp"), rank 5 has the coordinates dp=1, mp=1. A dim over ("dp", "mp") has 8 shards, and dp is the major axis.
The class takes MindSpore's notation and gives JAX's: a mesh, a `PartitionSpec`, a `NamedSharding`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import DeviceError, LayoutError, fail, raise_problems
from shardfn.frontend.meshes import MeshLayout, abstract_mesh, mesh_on, partition_spec, shard_numbers, spec_of
from shardfn.ir.specs import strategy_of
from shardfn.mindspore import layout_checks as checks
from shardfn.mindspore.layout_checks import INTERLEAVED, UNSHARDED, axis_names, call_text, real_axes

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
        raise_problems(checks.matrix_problems(device_matrix, alias_name), LayoutError)
        ranks: Sequence[int] = range(math.prod(size for _, size in real_axes(device_matrix, alias_name)))
        raise_problems(checks.rank_problems(rank_list, ranks, math.prod(device_matrix)), LayoutError)
        if rank_list and rank_list != list(range(len(rank_list))):
            ranks = tuple(rank_list)
        values = {"device_matrix": device_matrix, "alias_name": alias_name, "rank_list": ranks}
        for name, value in {**values, "_spec": None, "_dims": None}.items():
            object.__setattr__(self, name, value)

    def __call__(self, *dims: Dim) -> Layout:
        """The layout of an array.

        Args:
          dims: for each dim an axis name, a tuple of names (major to minor), or "None" for an unsharded dim.

        Raises:
          LayoutError: an axis that does not exist or is used twice.
          LayoutTypeError: an entry that is no name.

        >>> Layout((2, 4), ("dp", "mp"))("None", "mp").strategy
        (1, 4)
        """
        raise_problems(checks.dim_problems(self.device_matrix, self.alias_name, dims), LayoutError)
        bound = copy.copy(self)
        object.__setattr__(bound, "_dims", dims)
        object.__setattr__(bound, "_spec", tuple(tuple(a for a in axis_names(dim) if a != UNSHARDED) for dim in dims))
        return bound

    def __repr__(self) -> str:
        plain = isinstance(self.rank_list, range)
        ranks = "" if plain else f", {list(self.rank_list)!r}"
        call = "" if self._dims is None else call_text(self._dims)
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
        raise_problems(checks.strategy_problems(strategy, device_num), LayoutError)
        layout = MeshLayout.of_strategy(strategy, device_num)
        return spec_layout(layout.axes, layout.spec)

    @classmethod
    def from_tensor_map(cls, device_matrix: Sequence[int], tensor_map: Sequence[int | Sequence[int]]) -> Layout:
        """The layout that MindSpore writes as numbers.

        Args:
          device_matrix: the size of each axis; the axes are called `axis0`, `axis1`, …
          tensor_map: for each dim the axis that shards it, counted from the last axis (0); -1 for unsharded; a tuple for
            several axes.

        Raises:
          LayoutError: the tensor map names an axis that does not exist.
          LayoutTypeError: the tensor map is no tuple of ints.

        >>> Layout.from_tensor_map((2, 4), (1, -1))
        Layout((2, 4), ('axis0', 'axis1'))('axis0', 'None')
        """
        matrix: Any = tuple(device_matrix) if isinstance(device_matrix, list) else device_matrix
        names = tuple(f"axis{i}" for i in range(len(matrix) if isinstance(matrix, tuple) else 1))
        layout = cls(matrix, names)
        raise_problems(checks.map_problems(matrix, tensor_map), LayoutError)
        number = {-1: UNSHARDED} | dict(enumerate(reversed(names)))
        return layout(*(number[d] if isinstance(d, int) else tuple(number[k] for k in d) for d in tensor_map))

    @classmethod
    def from_sharding(cls, sharding: NamedSharding, ndim: int, devices: Sequence[Any] | None = None) -> Layout:
        """The layout that equals a `NamedSharding`; its memory kind is dropped.

        Args:
          sharding: the sharding.
          ndim: the number of dims of the array.
          devices: the devices by rank; None is all devices of the mesh's platform.

        Raises:
          LayoutError: the sharding has more dims, or leaves one unconstrained.
          LayoutTypeError: `sharding` is no `NamedSharding`.
          DeviceError: a device of the mesh is not in `devices`.

        >>> Layout.from_sharding(NamedSharding(AbstractMesh((2, 4), ("dp", "mp")), PartitionSpec("mp")), ndim=2)
        Layout((2, 4), ('dp', 'mp'))('mp', 'None')
        """
        raise_problems(checks.sharding_problems(sharding, ndim), LayoutError)
        axes = tuple(sharding.mesh.shape.items()) or (("repeat", 1),)
        return spec_layout(axes, spec_of(sharding.spec, ndim), _ranks(sharding.mesh, devices))

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
        return real_axes(self.device_matrix, self.alias_name)

    @property
    def spec(self) -> Spec:
        """For each dim the axes that shard it, major to minor."""
        return self._bound()._spec or ()

    @property
    def strategy(self) -> tuple[int, ...]:
        """The number of shards of each dim."""
        return strategy_of(self.spec, self.axes)

    def slice_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one shard.

        Args:
          shape: the shape of the array.

        Raises:
          LayoutError: another number of dims, or a dim that its number of shards does not divide.
          LayoutTypeError: `shape` is no tuple of ints.
        """
        raise_problems(checks.shape_problems(self, shape), LayoutError)
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
        lengths = self.slice_shape(shape)
        numbers = shard_numbers(self.axes, self.spec)
        return tuple(tuple(slice(k * n, (k + 1) * n) for k, n in zip(row, lengths, strict=True)) for row in numbers)

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


def spec_layout(axes: Sequence[tuple[str, int]], spec: Spec, rank_list: list[int] | None = None) -> Layout:
    """The layout of an array from the mesh axes of each dim."""
    names, sizes = zip(*axes, strict=True)
    dims = (UNSHARDED if not dim else dim[0] if len(dim) == 1 else dim for dim in spec)
    return Layout(sizes, names, rank_list)(*dims)


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
