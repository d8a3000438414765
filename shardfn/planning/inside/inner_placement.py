"""Inner entries, and what a function brings along with a mesh of its own, on the mesh of a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import DeviceError, Problem, fail
from shardfn.ir.model import Axes, InnerSpec, Spec, mesh_sizes, mesh_text
from shardfn.ir.rewrite import equation_line, equations
from shardfn.planning.inside.inner_entries import InnerEntry
from shardfn.planning.meshes import expresses, finest, split_axes


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Mesh axes, the shardings of all leaves on them, those of the inner entries by number, and the device order."""

    axes: Axes
    specs: tuple[Spec | None, ...]
    inner: Mapping[int, InnerSpec]
    order: tuple[int, ...] | None


def on_mesh_of_function(
    given: OnMesh, placed: Mapping[int, Spec], meshes: Sequence[Axes], count: int
) -> tuple[OnMesh, Mapping[int, Spec]]:
    """Shardings of integers, and those of inner entries, on the one mesh of all devices that the function brings along.

    They stay as they are where it brings none, or several, or one that does not express them. Shardy propagates shardings
    only within one mesh.
    """
    mesh = _only_mesh_of_all(meshes, count)
    if not given.axes or not expresses(mesh, [size for _, size in given.axes]):
        return given, placed
    specs = tuple(None if spec is None else on_axes(spec, given.axes, mesh) for spec in given.specs)
    inner = {number: on_axes(spec, given.axes, mesh) for number, spec in placed.items()}
    return OnMesh(mesh, specs, {}, given.order), inner


def place_inner(
    entries: Sequence[InnerEntry],
    placed: Mapping[int, Spec],
    given: OnMesh,
    meshes: Sequence[Axes],
    count: int,
    problems: list[Problem],
) -> OnMesh:
    """The mesh of a call with its inner entries on it. Its axes are split where an inner mesh needs finer ones.

    Args:
      entries: the inner entries.
      placed: the shardings of their strategies, which were placed together with those of the leaves, by number.
      given: the mesh of the leaves, with no axes if they ask for none.
      meshes: the other meshes that the function itself brings along. If nothing else asks for axes and it brings one of all
        devices, as a `shard_map` does, that is the mesh.
      count: the device count.
      problems: receives entries that do not fit the mesh.
    """
    fixed = [e for e in entries if not e.is_strategy and any(e.leaf.entry.spec)]
    axes, order = given.axes, given.order
    if not axes and fixed:
        axes, order = fixed[0].leaf.entry.axes, _order(fixed[0], count)
    if not axes and count > 1:
        axes = _only_mesh_of_all(meshes, count)
    own = axes or (("a", count),)
    every = [*map(mesh_sizes, (*meshes, *(e.leaf.entry.axes for e in fixed)))]
    specs, inner = list(given.specs), dict(placed)
    if not all(math.prod(sizes) != count or expresses(own, sizes) for sizes in every):
        axes, parts = finest(own)
        specs = [None if spec is None else split_axes(spec, parts) for spec in specs]
        inner = {number: split_axes(spec, parts) for number, spec in inner.items()}
    for e in fixed:
        if not expresses(axes, [n for _, n in e.leaf.entry.axes]) or _order(e, count) != order:
            problems.append(_unfitted(e, own, count))
        else:
            inner[e.number] = on_axes(e.leaf.entry.spec, e.leaf.entry.axes, axes)
    return OnMesh(axes, tuple(specs), {e.number: e.opened(inner.get(e.number, ((),) * len(e.leaf.shape))) for e in entries},
                  order)  # fmt: skip


def _only_mesh_of_all(meshes: Sequence[Axes], count: int) -> Axes:
    """The mesh of all devices among `meshes`; () if there is none, or several different ones."""
    found = {mesh for mesh in meshes if math.prod(size for _, size in mesh) == count}
    return next(iter(found)) if len(found) == 1 else ()


def _order(entry: InnerEntry, count: int) -> tuple[int, ...] | None:
    ranks = tuple(entry.leaf.entry.rank_list)
    return None if ranks == tuple(range(count)) else ranks


def on_axes(spec: Spec, own: Axes, axes: Axes) -> Spec:
    """A spec over axes of another mesh that `axes` expresses (`mesh_inference.expresses`).

    >>> on_axes((("model",), ()), (("data", 2), ("model", 4)), (("a", 2), ("b", 2), ("c", 2)))
    (('b', 'c'), ())
    """

    def starts(axes: Axes) -> Iterator[tuple[str, int, int]]:
        for i, (name, size) in enumerate(axes):
            yield name, size, math.prod(n for _, n in axes[i + 1 :])

    parts = {
        name: tuple(other for other, n, at in starts(axes) if n > 1 and stride <= at < stride * size)
        for name, size, stride in starts(own)
    }
    return split_axes(spec, parts)


def _unfitted(entry: InnerEntry, axes: Axes, count: int) -> Problem:
    return Problem(f"{entry.leaf.label} does not fit the mesh of the call", entry.leaf.source,
                   f"the mesh is {mesh_text(axes)}, in the order of the call's {count} devices",
                   "use one mesh, or strategies of integers, for the call and for the values inside")  # fmt: skip


def refuse_other_devices(jaxpr: Any, hardware: Hardware, name: str) -> None:
    """Refuse a function with a `shard_map` on other devices than its call, or on those in another order.

    Raises:
      DeviceError: there is one.
    """
    for _, eqn, _ in equations(jaxpr):
        mesh = eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
        if not isinstance(mesh, Mesh) or hardware.devices is None or list(mesh.devices.flat) == list(hardware.devices):
            continue
        is_order = set(mesh.devices.flat) == set(hardware.devices)
        what = "orders the devices otherwise than" if is_order else "is on other devices than"
        line = equation_line(eqn)
        fail(DeviceError, f"a shard_map in `{name}` {what} the call", where=f"the shard_map{line and f' at {line}'}",
             why=f"its mesh {mesh_text(mesh.shape.items())} has the devices {[d.id for d in mesh.devices.flat]}, the call has "
                 f"{[d.id for d in hardware.devices]}",
             fix="give the call that mesh: device=mesh")  # fmt: skip
