"""Conversions to JAX's types and back: mesh axes to a `Mesh`, a spec to a `PartitionSpec`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import StrategyTypeError, a, fail
from shardfn.ir.model import Spec, mesh_sizes


@dataclasses.dataclass(frozen=True)
class MeshLayout(metaclass=abc.ABCMeta):
    """The layout of an array over named mesh axes. MindSpore's `Layout` counts as one: it has these attributes.

    Args:
      axes: name and size of each mesh axis.
      spec: for each dimension the axes that shard it, major to minor.
      rank_list: the index of the device at each position of the mesh, in row-major order.
    """

    axes: tuple[tuple[str, int], ...]
    spec: Spec
    rank_list: Sequence[int]

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return (hasattr(other, "axes") and hasattr(other, "spec")) or NotImplemented

    @classmethod
    def of_strategy(cls, strategy: Sequence[int], devices: int) -> MeshLayout:
        """The layout of a lone array: one axis for each dimension that is sharded, then `repeat` for the copies.

        >>> MeshLayout.of_strategy((4, 1), 8)
        MeshLayout(axes=(('dim0', 4), ('repeat', 2)), spec=(('dim0',), ()), rank_list=range(0, 8))
        """
        axes = [(f"dim{i}", n) for i, n in enumerate(strategy) if n > 1]
        copies = devices // math.prod(strategy)
        if copies > 1 or not axes:
            axes.append(("repeat", copies))
        return cls(tuple(axes), tuple((f"dim{i}",) if n > 1 else () for i, n in enumerate(strategy)), range(devices))

    def sharding(self, devices: Sequence[Any] | None = None) -> NamedSharding:
        """The `NamedSharding` on these devices, each found by its rank; on an abstract mesh without devices."""
        mesh = abstract_mesh(self.axes) if devices is None else mesh_on([devices[i] for i in self.rank_list], self.axes)
        return NamedSharding(mesh, partition_spec(self.spec))


def mesh_and_spec(layout: Any, ndim: int, name: str, why: str) -> tuple[Mesh | AbstractMesh, Spec]:
    """The mesh of a layout that a user gave, and for each dimension of an array the axes that shard it.

    Args:
      layout: a `NamedSharding`, or a Layout.
      ndim: the dimensions of the array.
      name: the argument that the layout is.
      why: what needs named mesh axes.

    Raises:
      StrategyTypeError: another type, or a layout of an array with other dimensions.

    >>> mesh_and_spec(NamedSharding(abstract_mesh([("a", 2)]), PartitionSpec("a")), 2, "layout", "")[1]
    (('a',), ())
    """
    if not isinstance(layout, MeshLayout | NamedSharding):
        fail(StrategyTypeError, f"`{name}` must be a Layout or a NamedSharding, but it is {a(layout)}",
             where=f"{name} = {layout!r:.80}", why=why,
             fix='build one: NamedSharding(mesh, PartitionSpec("data")), or pass x.sharding of an array x')  # fmt: skip
    is_jax = isinstance(layout, NamedSharding)
    spec = spec_of(layout.spec, ndim) if is_jax else layout.spec
    if len(spec) != ndim:
        fail(StrategyTypeError, f"`{name}` has {len(spec)} dims, and the array has {ndim}",
             where=f"{name} = {layout!r:.80}", fix='give each dimension an entry; "None" is unsharded')  # fmt: skip
    return layout.mesh if is_jax else _mesh(layout), spec


@functools.lru_cache(maxsize=64)
def _mesh(layout: Any) -> Mesh:
    return layout.mesh()


def on_devices_of(value: Any, target: NamedSharding) -> Any:
    """A concrete array on other devices than those of `target`, moved there; `jax.jit` places all others."""
    if isinstance(value, Tracer) or isinstance(target.mesh, AbstractMesh):
        return value
    if isinstance(value, jax.Array) and value.committed and value.sharding.device_set == target.device_set:
        return value
    return jax.device_put(value, target)


def shard_numbers(
    axes: Sequence[tuple[str, int]], spec: Sequence[Sequence[str]], places: Any = None
) -> list[list[int]]:
    """The number of the shard of each dimension that the device at each place of a mesh holds.

    Args:
      axes: name and size of each mesh axis.
      spec: for each dimension the axes that shard it, major to minor.
      places: indices into the mesh, an array of (place, axis); all places in row-major order if None.

    >>> shard_numbers((("a", 2), ("b", 2)), (("b",), ("a", "b")))
    [[0, 0], [1, 1], [0, 2], [1, 3]]
    """
    sizes = dict(axes)
    places = np.array(list(np.ndindex(*sizes.values()))) if places is None else places
    position = dict(zip(sizes, places.T, strict=True))
    numbers = np.zeros((len(places), len(spec)), np.int64)
    for dim, names in enumerate(spec):
        for name in names:
            numbers[:, dim] = numbers[:, dim] * sizes[name] + position[name]
    return numbers.tolist()


def mesh_on(devices: Any, axes: Sequence[tuple[str, int]]) -> Mesh:
    """The mesh of some devices in row-major order, with axes of type Auto.

    Args:
      devices: a sequence or an array of devices, as many as the product of the sizes.
      axes: name and size of each axis.

    >>> import jax
    >>> dict(mesh_on(jax.devices()[:1], [("data", 1), ("model", 1)]).shape)
    {'data': 1, 'model': 1}
    """
    names, sizes = tuple(name for name, _ in axes), mesh_sizes(axes)
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def wired(devices: Sequence[Any], axes: Sequence[tuple[str, int]]) -> Mesh:
    """A mesh of TPUs whose axes follow the torus where possible, so that neighbours on an axis share a link."""
    if len(devices) > 1:
        names, sizes = zip(*axes, strict=True)
        with contextlib.suppress(NotImplementedError):  # sizes that do not divide along the torus
            return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    return mesh_on(devices, axes)


def abstract_mesh(axes: Sequence[tuple[str, int]]) -> AbstractMesh:
    """A mesh without devices.

    >>> abstract_mesh([("data", 2), ("model", 4)]).size
    8
    """
    names, sizes = tuple(name for name, _ in axes), mesh_sizes(axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def partition_spec(spec: Sequence[Sequence[str]]) -> PartitionSpec:
    """The `PartitionSpec` of a spec, which has the mesh axes of each dimension.

    >>> partition_spec((("a",), (), ("b", "c")))
    P...('a', None, ('b', 'c'))
    """
    return PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else tuple(dim) for dim in spec))


def spec_of(named: PartitionSpec, ndim: int) -> Spec:
    """The inverse of `partition_spec`, for an array of `ndim` dimensions.

    >>> spec_of(PartitionSpec("a", None, ("b", "c")), 4)
    (('a',), (), ('b', 'c'), ())
    """
    dims = (*named, *[None] * (ndim - len(named)))
    return tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in dims)
