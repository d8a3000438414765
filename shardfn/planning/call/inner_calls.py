"""A call of a sharded function inside another one: its entries become entries of the outer call."""

from __future__ import annotations

from typing import Any

import jax
from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.cost.devices.hardware import Hardware, resolve
from shardfn.errors import Problem, StrategyError, fail, raise_problems
from shardfn.frontend import defaults
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.inputs_outputs import input_leaves, output_leaves
from shardfn.frontend.memories import brought
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import AUTO, Leaf, has_open_dims
from shardfn.frontend.validation import check
from shardfn.planning.call.call_function import pure_function
from shardfn.planning.inside import mark, mark_named
from shardfn.planning.meshes import without_mesh


def call_inside(callee: Callee, options: Options, call: Call, outer: Hardware) -> Any:
    """The result of a call inside another one for the hardware `outer`, with its arguments and results marked.

    Raises:
      ShardError: what is wrong with its entries.
    """
    _refuse_other_devices(callee, options, outer)
    current, problems = defaults.current(), list[Problem]()
    inputs = input_leaves(callee, options, call, current, problems)
    flat, treedef = tree_util.tree_flatten(call.dynamic)
    flat = [_marked(x, leaf, outer, options, problems) for x, leaf in zip(flat, inputs, strict=True)]
    raise_problems(problems)
    result = pure_function(callee, call)(*call.replaced(treedef, flat))
    result, *changed = result if call.returns_changes else (result,)
    outputs = output_leaves(callee, options, result, current, outer.count, problems)
    flat, treedef = tree_util.tree_flatten(result)
    flat = [_marked(x, leaf, outer, options, problems, True) for x, leaf in zip(flat, outputs, strict=True)]
    raise_problems(problems)
    result = tree_util.tree_unflatten(treedef, flat)
    return (result, *changed) if changed else result


def _marked(
    x: Any, leaf: Leaf, outer: Hardware, options: Options, problems: list[Problem], is_result: bool = False
) -> Any:
    """An array with the entry of its leaf; `problems` grows by what is wrong with that."""
    strategy, entry = check(leaf, outer.count, problems), leaf.entry
    if entry is AUTO or outer.count == 1 or len(problems):
        return x
    mesh = options.device if isinstance(options.device, jax.sharding.Mesh) else outer.mesh
    if isinstance(entry, PartitionSpec):
        if mesh is None:
            problems.append(without_mesh(leaf))
            return x
        entry = NamedSharding(mesh, entry)
    if isinstance(entry, MeshLayout):
        entry = entry.sharding(outer.devices)
    if isinstance(entry, NamedSharding):
        x = brought(x, entry.memory_kind)
        return jax.lax.with_sharding_constraint(x, entry) if is_result else mark_named(x, entry)
    ways = tuple(entry) if has_open_dims(entry) else strategy
    if ways and any(n not in (AUTO, 1) for n in ways) and (problem := _in_a_shard_map(leaf)):
        problems.append(problem)
        return x
    return mark(x, ways, outer.count, is_result)


def _in_a_shard_map(leaf: Leaf) -> Problem | None:
    """What is wrong with counting shards in a `shard_map`; None outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return None
    left = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    return Problem(f"{leaf.label} is sharded by integers inside a shard_map", leaf.source,
                   f"shards along {', '.join(mesh.manual_axes)} are apart there, and integers do not say which axes they mean",
                   f"name the others, as in jax.P({left[0]!r}), and give the outer function the mesh: device=mesh")  # fmt: skip


def _refuse_other_devices(callee: Callee, options: Options, outer: Hardware) -> None:
    found = None if options.device is None else resolve(options.device)
    if found is not None and found.count != outer.count:
        fail(StrategyError, f"`{callee.name}` is sharded for {found.count} devices, inside a call for {outer.count}",
             where=f"device = {options.device!r}", why="a call and the functions inside share one mesh",
             fix="leave `device` out of the function inside, or give both the same devices")  # fmt: skip
