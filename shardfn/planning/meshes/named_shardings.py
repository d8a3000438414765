"""The entries of a call on one mesh that the user gave: named shardings (Layout, PartitionSpec, NamedSharding) and integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import LayoutError, Problem, closest, did_you_mean
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.validation import check_strategy
from shardfn.ir.model import Spec, mesh_text
from shardfn.ir.specs import strategy_of
from shardfn.planning.meshes.given_mesh import place_on_axes
from shardfn.planning.meshes.mesh_inference import Placement


def names_axes(leaf: Leaf) -> bool:
    """Whether the leaf's entry names mesh axes, rather than counting shards."""
    return isinstance(leaf.entry, MeshLayout | PartitionSpec | NamedSharding)


def place_named(
    leaves: Sequence[Leaf],
    strategies: Sequence[tuple[int, ...] | None],
    devices: int,
    mesh: Mesh | AbstractMesh | None,
    problems: list[Problem],
    used: Sequence[Any] | None = None,
    groups: Sequence[tuple[int, ...]] = (),
    values: Sequence[tuple[int, ...]] = (),
    sizes: Sequence[int] = (),
    instead: str = "",
) -> Placement:
    """Put every leaf on the user's mesh: that of the named shardings, or of the call.

    Args:
      leaves: all arrays of the call; at least one `names_axes`, or `mesh` is given.
      strategies: that of each leaf that is given by integers (`None` entries: dimension 0 over all devices); else None.
      devices: the device count.
      mesh: the mesh of the call, where the user gave one.
      problems: receives unknown and repeated axes, meshes that do not fit each other or the devices, and integers that the
        mesh has no axes for.
      used: the devices in the order of their ranks; None for hardware that is not here.
      groups: the dimension group of each dimension of each leaf.
      values: the dimension groups of every value inside the function.
      sizes: elements of each of these values.
      instead: another fix for integers that the mesh has no axes for.
    """
    mesh_axes = _call_axes(leaves, mesh)
    specs: list[Spec | None] = []
    before = len(problems)
    for leaf, strategy in zip(leaves, strategies, strict=True):
        if names_axes(leaf):
            specs.append(_named_spec(leaf, leaves, mesh_axes, devices, problems, used))
        elif strategy is None:
            specs.append(None)
        elif max(strategy, default=1) == 1:
            specs.append(((),) * len(strategy))
        elif leaf.entry is None:
            specs.append((tuple(name for name, _ in mesh_axes), *((),) * (len(strategy) - 1)))
        else:
            specs.append(None)
    if len(problems) == before and devices > 1:
        integers = [None if names_axes(leaf) else row for leaf, row in zip(leaves, strategies, strict=True)]
        specs = list(place_on_axes(leaves, integers, specs, mesh_axes, groups, problems, values, sizes, instead))
    if len(problems) > before or devices == 1:
        return Placement((), tuple(None if s is None else ((),) * len(s) for s in specs))
    order = next((tuple(leaf.entry.rank_list) for leaf in leaves if isinstance(leaf.entry, MeshLayout)), None)
    return Placement(mesh_axes, tuple(specs), None if order == tuple(range(devices)) else order)


def mesh_of(entries: Iterable[Any]) -> Mesh | None:
    """The mesh of the first NamedSharding among the entries, if there is one."""
    for entry in entries:
        if isinstance(entry, NamedSharding) and isinstance(entry.mesh, Mesh):
            return entry.mesh
    return None


def _call_axes(leaves: Sequence[Leaf], mesh: Mesh | AbstractMesh | None) -> tuple[tuple[str, int], ...]:
    """The axes of the first Layout or mesh."""
    for leaf in leaves:
        if isinstance(leaf.entry, MeshLayout | NamedSharding):
            return _axes(leaf, ())
    return tuple(mesh.shape.items()) if mesh is not None else ()


def _named_spec(
    leaf: Leaf,
    leaves: Sequence[Leaf],
    mesh_axes: tuple[tuple[str, int], ...],
    devices: int,
    problems: list[Problem],
    used: Sequence[Any] | None,
) -> Spec | None:
    problem = next(_refusals(leaf, leaves, mesh_axes, devices, used), None)
    if problem is not None:
        problems.append(problem)
        return None
    spec = _spec(leaf)
    strategy = strategy_of(spec, _axes(leaf, mesh_axes))
    return None if check_strategy(leaf, strategy, devices, problems) is None else spec


def _refusals(
    leaf: Leaf, leaves: Sequence[Leaf], mesh_axes: tuple[tuple[str, int], ...], devices: int, used: Sequence[Any] | None
) -> Iterator[Problem]:
    """The problems of an entry; the caller takes the first."""
    entry, own, where = leaf.entry, _axes(leaf, mesh_axes), leaf.source
    if isinstance(entry, MeshLayout):
        try:
            entry.spec  # noqa: B018
        except LayoutError:
            yield Problem(f"the Layout of {leaf.label} is not called with axes", where,
                          "the device matrix alone does not say which axis shards which dimension",
                          'call it with an axis name, or "None", for each dimension: '
                          f"{leaf.where} = {_called(leaf)}")  # fmt: skip
        first = next(other.entry for other in leaves if isinstance(other.entry, MeshLayout))
        if list(entry.rank_list) != list(first.rank_list):
            yield Problem(f"{leaf.label} has another rank_list than the Layouts before it", where,
                          "a call has one device order",
                          "use one rank_list for all Layouts of a call: build one Layout and call it for each array")  # fmt: skip
    elif isinstance(entry, NamedSharding):
        if used is not None and isinstance(entry.mesh, Mesh):
            yield from _of_devices(leaf, list(entry.mesh.devices.flat), used)
    elif not mesh_axes:
        yield without_mesh(leaf)
    if own != mesh_axes:
        yield Problem(f"{leaf.label} is on another mesh than the other arrays", where,
                      f"{mesh_text(own)} is not {mesh_text(mesh_axes)}",
                      "use one mesh with the same axis names for all arrays of a call, or integers")  # fmt: skip
    size = math.prod(n for _, n in own)
    if size != devices and devices != 1:
        fewer = f", or use {size} of the devices: device=jax.devices()[:{size}]" if size < devices else ""
        yield Problem(f"the mesh of {leaf.label} has {size} devices, but there are {devices}", where,
                      f"the product of {mesh_text(own)} must be the device count",
                      f"choose sizes with a product of {devices}{fewer}")  # fmt: skip
    axes, known = [a for dim in _spec(leaf) for a in dim], [name for name, _ in own]
    for name in axes:
        if name not in known:
            otherwise = "use one of these axes, or None to leave the dimension unsharded"
            yield Problem(f"{leaf.label} is sharded over `{name}`, which is not a mesh axis", where,
                          f"the axes are {', '.join(known)}", did_you_mean(closest(name, known, 0.5)) or otherwise)  # fmt: skip
    if len(set(axes)) < len(axes):
        twice = next(a for a in axes if axes.count(a) > 1)
        yield Problem(f"two dimensions of {leaf.label} are sharded over the axis `{twice}`", where,
                      "a mesh axis can shard one dimension of an array",
                      "give each dimension its own axis, or leave one unsharded")  # fmt: skip


def without_mesh(leaf: Leaf) -> Problem:
    """The problem of a `PartitionSpec` where no mesh is given."""
    return Problem(f"{leaf.label} has a PartitionSpec, but there is no mesh", leaf.source,
                   "a PartitionSpec names the axes of a mesh",
                   "pass the mesh as device=, or write a NamedSharding, a Layout or integers there")  # fmt: skip


def _of_devices(leaf: Leaf, own: Sequence[Any], used: Sequence[Any]) -> Iterator[Problem]:
    """The problems of a NamedSharding whose devices are not those of the call."""
    if len(own) == len(used) and own != list(used):
        what = "the devices in another order" if set(own) == set(used) else "other devices"
        yield Problem(f"the mesh of {leaf.label} has {what} than this call", leaf.source,
                      "a call has one device order, that of device= or of the first NamedSharding",
                      "use one mesh for all NamedShardings of a call, and no other devices in device=")  # fmt: skip


def _axes(leaf: Leaf, mesh_axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The axes of an entry's own mesh, or else those of the call's mesh."""
    if isinstance(leaf.entry, MeshLayout):
        return leaf.entry.axes
    return tuple(leaf.entry.mesh.shape.items()) if isinstance(leaf.entry, NamedSharding) else mesh_axes


def _spec(leaf: Leaf) -> Spec:
    """The mesh axes of each dimension, from an entry that names them."""
    if isinstance(leaf.entry, MeshLayout):
        return tuple(map(_names, leaf.entry.spec))
    raw = tuple(leaf.entry.spec if isinstance(leaf.entry, NamedSharding) else leaf.entry)
    return tuple(map(_names, (*raw, *[None] * (len(leaf.shape) - len(raw)))))


def _names(dim: Any) -> tuple[str, ...]:
    if dim is None:
        return ()
    if isinstance(dim, str):
        return (dim,)
    return tuple(dim) if isinstance(dim, tuple | list) else (repr(dim),)


def _called(leaf: Leaf) -> str:
    """A Layout as it could be called: its first axes that divide the dimensions, in order."""
    axes = [name for name, _ in leaf.entry.axes]
    dims = [*axes, *["None"] * len(leaf.shape)][: len(leaf.shape)]
    sizes = dict(leaf.entry.axes)
    return repr(leaf.entry(*(d if n % sizes.get(d, 1) == 0 else "None" for d, n in zip(dims, leaf.shape, strict=True))))
