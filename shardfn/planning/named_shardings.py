"""Layouts the user drew: Layouts, PartitionSpecs and NamedShardings brought onto one device grid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.errors import LayoutError, Problem
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.validation import check_cuts
from shardfn.ir.model import Spec
from shardfn.mindspore.layout import Layout
from shardfn.planning.mesh_inference import Placement


def is_drawn(leaf: Leaf) -> bool:
    """Whether the leaf's entry names axes, rather than counting pieces."""
    return isinstance(leaf.entry, Layout | PartitionSpec | NamedSharding)


def place_drawn(
    leaves: Sequence[Leaf],
    cuts: Sequence[tuple[int, ...] | None],
    devices: int,
    mesh: Mesh | None,
    problems: list[Problem],
    used: Sequence[Any] | None = None,
) -> Placement:
    """Put every leaf on the grid that the drawn ones share.

    Args:
      leaves: all arrays of the call; at least one has an entry that `is_drawn`.
      cuts: for each leaf that is given by integers its cuts (`None` entries: dim 0 over all devices); else None.
      devices: the device count.
      mesh: the mesh that PartitionSpecs speak of, where the user gave one as `device`.
      problems: receives axes that do not exist or stand twice, grids that do not fit each other or the devices,
        and integers mixed with drawn layouts.
      used: the devices in the order of their ranks; None for a target that is not here.
    """
    first = next(leaf for leaf in leaves if is_drawn(leaf))
    grid = _grid(leaves, mesh)
    specs: list[Spec | None] = []
    before = len(problems)
    for leaf, leaf_cuts in zip(leaves, cuts, strict=True):
        if is_drawn(leaf):
            specs.append(_drawn(leaf, leaves, grid, devices, problems, used))
        elif leaf_cuts is None:
            specs.append(None)
        elif max(leaf_cuts, default=1) == 1:
            specs.append(((),) * len(leaf_cuts))
        elif leaf.entry is None:
            specs.append((tuple(name for name, _ in grid), *((),) * (len(leaf_cuts) - 1)))
        else:
            specs.append(None)
            problems.append(
                Problem(
                    f"{leaf.label} is cut by integers and {first.label} by named axes",
                    where=f"{leaf.source}; {first.source}",
                    why="integers leave the choice of axes open, and the named ones are already chosen",
                    fix=f"write integers for all, {_all_as_cuts(leaves, grid)}, or Layouts for all",
                    is_type=True,
                )
            )
    if len(problems) > before or devices == 1:
        return Placement((), tuple(None if s is None else ((),) * len(s) for s in specs))
    order = next((tuple(leaf.entry.rank_list) for leaf in leaves if isinstance(leaf.entry, Layout)), None)
    return Placement(grid, tuple(specs), None if order == tuple(range(devices)) else order)


def mesh_of(entries: Iterable[Any]) -> Mesh | None:
    """The mesh of the first NamedSharding among the entries, if there is one."""
    for entry in entries:
        if isinstance(entry, NamedSharding) and isinstance(entry.mesh, Mesh):
            return entry.mesh
    return None


def _elsewhere(leaf: Leaf, used: Sequence[Any] | None) -> Problem | None:
    """What a NamedSharding asks for that the call's devices do not give."""
    mesh, kind = leaf.entry.mesh, leaf.entry.memory_kind
    if used is None or not isinstance(mesh, Mesh):
        return None
    own = list(mesh.devices.flat)
    if len(own) == len(used) and own != list(used):
        what = "the devices in another order" if set(own) == set(used) else "other devices"
        return Problem(
            f"the mesh of {leaf.label} has {what} than this call",
            where=leaf.source,
            why="one call runs on one order of the devices, that of device= or of the first NamedSharding",
            fix="use one mesh for all NamedShardings of a call, and no other devices in device=",
        )
    if kind is not None and kind != own[0].default_memory().kind:
        return Problem(
            f"{leaf.label} is wanted in memory of kind {kind!r}",
            where=leaf.source,
            why="only the memory that a device works from is laid out here",
            fix=f"leave memory_kind out, or write {own[0].default_memory().kind!r}",
        )
    return None


def _grid(leaves: Sequence[Leaf], mesh: Mesh | None) -> tuple[tuple[str, int], ...]:
    """The axes of the first Layout or mesh; of several different ones the common refinement is not sought."""
    for leaf in leaves:
        if isinstance(leaf.entry, Layout | NamedSharding):
            return _axes(leaf, ())
    return tuple(mesh.shape.items()) if mesh is not None else ()


def _drawn(
    leaf: Leaf,
    leaves: Sequence[Leaf],
    grid: tuple[tuple[str, int], ...],
    devices: int,
    problems: list[Problem],
    used: Sequence[Any] | None,
) -> Spec | None:
    problem = next(_refusals(leaf, leaves, grid, devices, used), None)
    if problem is not None:
        problems.append(problem)
        return None
    spec, sizes = _spec(leaf), dict(_axes(leaf, grid))
    shards = tuple(math.prod(sizes[a] for a in dim) for dim in spec)
    return None if check_cuts(leaf, shards, devices, problems) is None else spec


def _refusals(
    leaf: Leaf, leaves: Sequence[Leaf], grid: tuple[tuple[str, int], ...], devices: int, used: Sequence[Any] | None
) -> Iterator[Problem]:
    """What is wrong with an entry, each asked only where nothing before it is."""
    entry, own = leaf.entry, _axes(leaf, grid)
    if isinstance(entry, Layout):
        try:
            entry.spec  # noqa: B018
        except LayoutError:
            yield Problem(
                f"the Layout of {leaf.label} is not called with axes",
                where=leaf.source,
                why="the device matrix alone does not say which axis cuts which dimension",
                fix=f'call it with an axis name, or "None", for each dimension: {leaf.where} = {_called(leaf)}',
            )
        first = next(other.entry for other in leaves if isinstance(other.entry, Layout))
        if list(entry.rank_list) != list(first.rank_list):
            yield Problem(
                f"{leaf.label} has another rank_list than the Layouts before it",
                where=leaf.source,
                why="one call runs on one order of the devices",
                fix="use one rank_list for all Layouts of a call: build one Layout and call it for each array",
            )
    elif isinstance(entry, NamedSharding):
        if (problem := _elsewhere(leaf, used)) is not None:
            yield problem
    elif not grid:
        yield Problem(
            f"{leaf.label} has a PartitionSpec, but there is no mesh",
            where=leaf.source,
            why="a PartitionSpec names the axes of a mesh",
            fix="pass the mesh as device=, or write a NamedSharding, a Layout or integers there",
        )
    if own != grid:
        yield Problem(
            f"{leaf.label} lies on another device grid than the rest",
            where=leaf.source,
            why=f"{_text(own)} is not {_text(grid)}",
            fix="use one device matrix with the same axis names for all arrays of a call, or integers",
        )
    size = math.prod(n for _, n in own)
    if size != devices and devices != 1:
        yield Problem(
            f"the grid of {leaf.label} has {size} devices, but there are {devices}",
            where=leaf.source,
            why=f"the product of {_text(own)} must be the device count",
            fix=f"choose sizes with a product of {devices}"
            + (f", or use {size} of the devices: device=jax.devices()[:{size}]" if size < devices else ""),
        )
    axes, known = [a for dim in _spec(leaf) for a in dim], [name for name, _ in own]
    for name in axes:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            yield Problem(
                f"{leaf.label} is cut over `{name}`, which is no axis of the grid",
                where=leaf.source,
                why=f"the axes are {', '.join(known)}",
                fix=f"did you mean {close[0]!r}?" if close else "use one of these axes, or None to leave it whole",
            )
    if len(set(axes)) < len(axes):
        twice = next(a for a in axes if axes.count(a) > 1)
        yield Problem(
            f"two dimensions of {leaf.label} want the axis `{twice}`",
            where=leaf.source,
            why="an axis can cut one dimension of an array",
            fix="give each dimension an axis of its own, or leave one whole",
        )


def _axes(leaf: Leaf, grid: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The axes that an entry brings along, or those of the grid."""
    if isinstance(leaf.entry, Layout):
        return leaf.entry.axes
    return tuple(leaf.entry.mesh.shape.items()) if isinstance(leaf.entry, NamedSharding) else grid


def _spec(leaf: Leaf) -> Spec:
    """The names of the axes that cut each dim, of an entry that has them."""
    if isinstance(leaf.entry, Layout):
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
    """A Layout as it could be called: its first axes that divide, in order."""
    axes = [name for name, _ in leaf.entry.axes]
    dims = [*axes, *["None"] * len(leaf.shape)][: len(leaf.shape)]
    sizes = dict(leaf.entry.axes)
    return repr(leaf.entry(*(d if n % sizes.get(d, 1) == 0 else "None" for d, n in zip(dims, leaf.shape, strict=True))))


def _text(axes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes) or "no grid"


def _all_as_cuts(leaves: Sequence[Leaf], grid: tuple[tuple[str, int], ...], most: int = 4) -> str:
    cuts = {leaf.where: _as_cuts(leaf, grid) for leaf in leaves if is_drawn(leaf)}
    return ", ".join(f"{where} = {row}" for where, row in list(cuts.items())[:most]) + (
        " …" if len(cuts) > most else ""
    )


def _as_cuts(leaf: Leaf, grid: tuple[tuple[str, int], ...]) -> Any:
    entry, sizes = leaf.entry, dict(grid)
    try:
        raw = entry.spec if isinstance(entry, Layout | NamedSharding) else entry
    except LayoutError:  # it is not called yet
        raw = ()
    padded = [*raw, *[None] * len(leaf.shape)][: len(leaf.shape)]
    return tuple(math.prod(sizes.get(a, 1) for a in _names(dim)) for dim in padded)
