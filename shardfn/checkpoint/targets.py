"""The target of a restore (a plan, a layout file, devices, a mesh or shardings) as one sharding for each array."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardfn import layoutfile
from shardfn.checkpoint.contents import StoredArray, StoredMesh
from shardfn.errors import CheckpointError, Problem, a, fail, raise_problems
from shardfn.frontend.meshes import mesh_on, partition_spec
from shardfn.frontend.paths import escaped, join, literal, normal, ruled, without_value
from shardfn.ir.model import axes_of, mesh_text
from shardfn.layoutfile.toml import rule_dims
from shardfn.planning.layout_rules import UNSHARDED, LayoutFile, LayoutRule, mesh_axes
from shardfn.planning.plan import Plan

TARGETS = "a plan, a layout file or its name, a mesh, a device or a list of them, a sharding or a tree of shardings"
PLATFORMS = ("cpu", "gpu", "tpu", "cuda", "rocm")


def target_shardings(entries: Sequence[StoredArray], target: Any) -> dict[str, Sharding]:
    """The sharding of each array, by its path.

    Args:
      entries: the arrays, under the paths that `target` uses.
      target: as in `restore`, or the sharding of each array by its path.

    Raises:
      ShardError: shardings that do not fit, all at once.
    """
    found = _shardings([entry.without_key_data for entry in entries], target)
    found = {path: on_devices(sharding) for path, sharding in found.items()}
    problems = [
        Problem(f"`{entry.path}` cannot have its target sharding", where=f"{entry.text}, {found[entry.path]}",
                why="the axes of a dimension must divide it, and a sharding has at most the rank of its array",
                fix="give it a sharding whose axes divide its dimensions")
        for entry in entries if not _fits(entry, found[entry.path])
    ]  # fmt: skip
    raise_problems(problems, CheckpointError)
    return found


def on_devices(sharding: Sharding) -> Sharding:
    """The sharding on devices, where it is of an `AbstractMesh`, as `jax.eval_shape` gives of arrays on an Explicit mesh.

    They are those of the mesh of `jax.set_mesh`, if it has the same axes, else all devices in their order.

    Raises:
      CheckpointError: there are more devices here, or fewer.
    """
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    wanted, mesh, devices = sharding.mesh, jax.sharding.get_mesh(), jax.devices()
    if mesh.shape_tuple != wanted.shape_tuple:
        if wanted.size != len(devices):
            fail(CheckpointError, f"the mesh of the target has no devices: {mesh_text(wanted.shape_tuple)}",
                 where=f"target = {sharding!r:.80}", why=f"it is an AbstractMesh of {wanted.size}, and here are {len(devices)}",
                 fix="restore within `with jax.set_mesh(mesh):`, or give a Mesh with the same axis names as target")  # fmt: skip
        mesh = Mesh(np.asarray(devices).reshape(wanted.axis_sizes), wanted.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=wanted.axis_types)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _fits(entry: StoredArray, sharding: Sharding) -> bool:
    try:
        sharding.shard_shape(entry.shape)
    except (ValueError, TypeError, IndexError):
        return False
    return True


def _shardings(entries: Sequence[StoredArray], target: Any) -> dict[str, Sharding]:
    if isinstance(target, str) and target.lower() in PLATFORMS:
        target = _device(target)
    if isinstance(target, jax.Device):
        target = SingleDeviceSharding(target)
    if is_device_list(target):
        if len(set(target)) < len(target):
            fail(CheckpointError, "the target has a device twice", where=f"target = {target!r:.80}",
                 why="a list of devices holds the replicas of each array", fix="give each device once")  # fmt: skip
        target = NamedSharding(mesh_on(target, [("all", len(target))]), PartitionSpec())
    if isinstance(target, Sharding):
        return {entry.path: target for entry in entries}
    if isinstance(target, Mesh):
        return _on_mesh(entries, target)
    if isinstance(target, Plan):
        return _planned(entries, target)
    if isinstance(target, str | os.PathLike | LayoutFile):
        return layout_targets(entries, layoutfile.read_layout(target), None)
    leaves = tree_util.tree_flatten_with_path(target, is_leaf=lambda x: isinstance(x, Sharding))[0]
    if leaves and all(isinstance(leaf, Sharding) for _, leaf in leaves):
        return _by_path(entries, {join("", key): leaf for key, leaf in leaves})
    if isinstance(target, list | tuple | Mapping) and not target:
        fail(CheckpointError, f"the target is empty: {a(target)}", where=f"target = {target!r}",
             why="it has no device and no sharding", fix="give at least one, or remove the target")  # fmt: skip
    fail(CheckpointError, f"a checkpoint cannot be restored into {a(target)}", where=f"target = {target!r:.80}",
         why=f"a target is {TARGETS}", fix='write for instance "layout.toml", jax.devices()[0] or a Mesh')  # fmt: skip


def is_device_list(value: Any) -> bool:
    """Whether it is a list of at least one device."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(d, jax.Device) for d in value)


def _device(platform: str) -> Any:
    try:
        return jax.local_devices(backend=platform.lower())[0]
    except RuntimeError as error:
        fail(CheckpointError, f"there is no {platform} here", where=f"target = {platform!r}", why=str(error),
             fix=f"the devices here are {jax.default_backend()}")  # fmt: skip


def stored_shardings(entries: Sequence[StoredArray], layout: LayoutFile | None) -> dict[str, Sharding]:
    """The shardings that arrays were saved with, on as many devices.

    Args:
      entries: the arrays, under the paths that they are stored with.
      layout: the layout file beside them, if it says more than their shardings. It counts where its mesh fits the devices; an
        array without a rule keeps its sharding, and is replicated where none is known.
    """
    if layout is None or not _mesh_fits(layout, len(jax.devices())):
        return _recorded(entries)
    layout = _with_ends(entries, layout, {})
    ruled_paths = {entries[i].path for i in _ruled(entries, layout)}
    placed = [entry for entry in entries if entry.path in ruled_paths or not entry.mesh.axes]
    layout = dataclasses.replace(layout, others=layout.others or UNSHARDED)
    found = layout_targets(placed, layout, None)
    return _recorded([entry for entry in entries if entry.path not in found]) | found


def _mesh_fits(layout: LayoutFile, devices: int) -> bool:
    problems: list[Problem] = []
    mesh_axes(layout, devices, problems)
    return not problems


def _recorded(entries: Sequence[StoredArray]) -> dict[str, Sharding]:
    """The shardings that Orbax noted of arrays, on as many devices."""
    pool = jax.devices()
    meshes = {}
    for mesh in {entry.mesh for entry in entries}:
        if mesh.devices > 1 and mesh.devices != len(pool):
            fail(CheckpointError, f"the checkpoint was saved on {mesh.devices} devices, and here are {len(pool)}",
                 why="without a target, arrays keep their stored shardings",
                 fix="give a target: a layout, jax.devices()[0], or a Mesh with the same axis names")  # fmt: skip
        if mesh.devices > 1:
            meshes[mesh] = mesh_on([pool[i] for i in mesh.order or range(mesh.devices)], mesh.axes)
    one = SingleDeviceSharding(jax.local_devices()[0])
    return {
        entry.path: NamedSharding(meshes[entry.mesh], partition_spec(entry.spec)) if entry.mesh in meshes else one
        for entry in entries
    }


def _on_mesh(entries: Sequence[StoredArray], mesh: Mesh) -> dict[str, Sharding]:
    """The stored mesh axes, as far as the mesh has axes of these names."""
    used = {axis for entry in entries for axis in axes_of(entry.spec)}
    if used and not used & set(mesh.shape):
        fail(CheckpointError, "the mesh has none of the axes that the checkpoint was sharded over", where=f"target = {mesh}",
             why=f"it was sharded over {', '.join(sorted(used))}; the mesh has {', '.join(mesh.shape)}",
             fix="use the same axis names, or give a layout")  # fmt: skip
    specs = {e.path: [[axis for axis in dim if axis in mesh.shape] for dim in e.spec] for e in entries}
    return {path: NamedSharding(mesh, partition_spec(spec)) for path, spec in specs.items()}


def _by_path(entries: Sequence[StoredArray], given: Mapping[str, Sharding]) -> dict[str, Sharding]:
    found, problems = {}, []
    for entry in entries:
        parts = entry.path.split("/")
        prefixes = ("/".join(parts[:n]) for n in range(len(parts), -1, -1))
        path = next((p for p in prefixes if p in given), None)
        if path is None:
            problems.append(Problem(f"the tree has no sharding for `{entry.path}`", where=entry.text,
                                    fix="add one for it, or for a container of it"))  # fmt: skip
        else:
            found[entry.path] = given[path]
    raise_problems(problems, CheckpointError)
    return found


def _planned(entries: Sequence[StoredArray], plan: Plan) -> dict[str, Sharding]:
    """The shardings of a plan's arguments."""
    layout = layoutfile.read_layout(plan)
    if plan.hardware.devices is None:
        plan = plan.with_devices(jax.devices())
    return layout_targets(entries, layout, plan)


def _ruled(entries: Sequence[StoredArray], layout: LayoutFile) -> Mapping[int, int]:
    """The rule of each array that has one, by their positions."""
    paths = [normal(entry.path) for entry in entries]
    return ruled([rule.glob for rule in layout.arguments], paths, lambda one, two: True).rules


def _with_ends(entries: Sequence[StoredArray], layout: LayoutFile, shapes: Mapping[str, tuple[int, ...]]) -> LayoutFile:
    """The layout with rules for arrays that have none and whose path ends as that of a rule, without the name of its argument.

    A function's `p/up` is `params/up` in a state, and `opt/mu/up` its moment. Where rules of one end differ, none counts.

    Args:
      entries: the arrays.
      layout: the layout file.
      shapes: the shapes of the arguments by path, where they are known.
    """
    if layout.others is not None:
        return layout
    ends: dict[str, list[tuple[tuple[int, ...] | None, LayoutRule]]] = {}
    for rule in layout.arguments:
        path = literal(rule.glob)
        if path and (end := path.partition("/")[2]) and rule.sharding is not None and not rule.rows:
            ends.setdefault(end, []).append((shapes.get(path), rule))
    have, more = _ruled(entries, layout), []
    for i, path in enumerate(without_value([normal(entry.path) for entry in entries])):
        entry, parts = entries[i], path.split("/")
        fits = (
            [rule for shape, rule in ends.get("/".join(parts[n:]), ())
             if shape == entry.shape or (shape is None and len(rule.sharding or ()) == len(entry.shape))]
            for n in range(len(parts))
        )  # fmt: skip
        nearest = next(filter(None, fits), []) if i not in have else []
        if nearest and all(rule.sharding == nearest[0].sharding for rule in nearest):
            more.append(dataclasses.replace(nearest[0], glob=escaped(entry.path)))
    return dataclasses.replace(layout, arguments=(*layout.arguments, *more))


def stored_layout(entries: Sequence[StoredArray]) -> LayoutFile | None:
    """The layout file of the stored shardings; None where they are over several meshes."""
    meshes = {entry.mesh for entry in entries if any(entry.spec)}
    if len(meshes) > 1:
        return None
    mesh = next(iter(meshes), StoredMesh(()))
    rules = tuple(_rule(entry.path, entry.without_key_data.spec) for entry in entries)
    return LayoutFile(mesh=mesh.axes, order=mesh.order, arguments=rules, name="layout.toml")


def _rule(path: str, spec: Sequence[Sequence[str]]) -> LayoutRule:
    return LayoutRule(escaped(path), rule_dims(spec))


def layout_targets(
    entries: Sequence[StoredArray], layout: LayoutFile, plan: Plan | None, devices: Any = None
) -> dict[str, Any]:
    """The shardings that a layout file gives; `devices` may be a device count, for devices that are not here."""
    loose = tuple(dataclasses.replace(rule, optional=True) for rule in layout.arguments)
    layout = dataclasses.replace(layout, arguments=loose)  # a checkpoint need not hold every array of the layout
    layout = _with_ends(entries, layout, {normal(d.path): d.shape for d in plan.inputs} if plan else {})
    if devices is None:
        devices = jax.devices() if plan is None or plan.hardware.devices is None else plan.hardware.devices
    tree = {entry.path: jax.ShapeDtypeStruct(entry.shape, entry.numpy_dtype) for entry in entries if entry.shape}
    found = _under_a_root(layout, tree, devices)
    mesh = plan.mesh if plan is not None else None
    if isinstance(mesh, Mesh):
        found = {
            p: NamedSharding(mesh, s.spec) if dict(s.mesh.shape) == dict(mesh.shape) else s for p, s in found.items()
        }
    some = next((sharding.mesh for sharding in found.values()), None)
    if some is None and not isinstance(devices, int):
        some = mesh_on(devices, [("all", len(devices))])
    if some is not None:  # scalars are replicated
        found |= {entry.path: NamedSharding(some, PartitionSpec()) for entry in entries if not entry.shape}
    return found


def _under_a_root(layout: LayoutFile, tree: Mapping[str, Any], devices: Any) -> dict[str, Any]:
    """The shardings. The rules may name arrays as `params/w` where the state is `params` itself, with the path `w`."""
    roots = dict.fromkeys(rule.glob.partition("/")[0] for rule in layout.arguments if "/" in rule.glob)
    errors = []
    for root in ("", *[root for root in roots if not set("*?[") & set(root)][:8]):
        try:
            return layoutfile.layout_shardings(layout, tree, devices, root=root)
        except layoutfile.LayoutFileError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(error.problems))  # of the root that the arrays are under
