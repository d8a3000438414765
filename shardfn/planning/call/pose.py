"""A call to a search problem. Every user error of a call is raised here, all of them together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util

from shardfn.cost.devices.hardware import Hardware, resolve
from shardfn.errors import ContextError, DeviceError, Problem, StrategyError, fail, raise_problems, warn
from shardfn.frontend.ambient_mesh import AmbientMesh
from shardfn.frontend.annotations import with_annotations
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.inputs_outputs import changed_leaves, input_leaves, output_leaves, replacements, with_types
from shardfn.frontend.memories import with_entries
from shardfn.frontend.meshes import abstract_mesh
from shardfn.frontend.options import Options
from shardfn.frontend.outer_call import OuterCall, inside
from shardfn.frontend.strategy import AUTO, UNKNOWN, Leaf, has_open_dims, without_mesh
from shardfn.frontend.trace import Traced
from shardfn.frontend.validation import check, check_all
from shardfn.ir.dimension_groups import DimensionGroups, dimension_groups
from shardfn.ir.model import Axes, mesh_text
from shardfn.planning.call.call_function import CallFunction, pure_function
from shardfn.planning.call.forms import pose_shifted, traced_shifts, with_windows_apart, with_written
from shardfn.planning.call.posed_call import PosedCall, TracedCall
from shardfn.planning.call.problem_of_call import inner_values, is_inferred, pose_placed
from shardfn.planning.inside import (
    InnerEntry,
    inner_entries,
    match_tags,
    operands_of_calls,
    refuse_other_devices,
    resolve_read_inside,
)
from shardfn.planning.layout_rules import LayoutFile, as_it_holds, change_since, mesh_axes, with_layout
from shardfn.planning.meshes import Placement, mesh_of, names_axes, place, place_named
from shardfn.search.problem import objective

MOST_ORDERS = 6
"""Orders of mesh axes that are evaluated: all of three axes."""


def pose(callee: Callee, options: Options, call: Call, defaults: Defaults, layout: LayoutFile | None) -> PosedCall:
    """Trace and place a call: the search problem, and what else `finish` needs.

    Args:
      callee: what is called.
      options: the options of `shard`.
      call: its arguments.
      defaults: the settings in force.
      layout: the layout file of the options or the defaults.

    Raises:
      ShardError: all that is wrong with the call.
    """
    problems: list[Problem] = []
    inputs = input_leaves(callee, options, call, defaults, problems)
    hardware = _hardware(options, inputs, call.ambient, defaults, problems)
    ambient = call.ambient if call.ambient is not None and _is_on(call.ambient, hardware) else None
    if layout is not None:
        layout = as_it_holds(layout, callee.name, inputs)
        inputs = with_layout(layout, inputs, hardware.count, problems, given=call.names)
    if ambient is not None:
        inputs = with_types(inputs, call.types)
    if hardware.mesh is not None:
        inputs = with_annotations(inputs, callee, call)
    if any(leaf.dtype == UNKNOWN for leaf in inputs):  # it cannot be traced
        check_all(inputs, hardware.count, problems)
        raise_problems(problems)
    donated = call.positions(options.donate_argnums, options.donate_argnames)
    kinds = with_entries(inputs, call.memories or (None,) * len(inputs))
    shapes = dataclasses.replace(call, memories=kinds if any(kinds) else ()).of_shapes()
    frozen = callee.frozen(shapes)
    outer = OuterCall(hardware, takes_entries=ambient is None or not ambient.is_binding)
    pure = inside(pure_function(frozen, shapes), outer)
    function = CallFunction(pure, outer, frozen, shapes, donated, ambient=ambient, assumed_trips=options.assumed_trips)
    bounds = options.for_search(defaults, layout and layout.level, layout.style if layout else "")
    is_open = bounds.search_ops or any(leaf.entry is AUTO or has_open_dims(leaf.entry) for leaf in inputs)
    function, traced, inner = _traced(function, hardware, layout, problems, is_open)
    inputs = resolve_read_inside(inputs, traced.graph, traced.inputs, inner)
    result, changed = traced.results if call.returns_changes else (traced.results, {})
    returned = output_leaves(callee, options, result, defaults, hardware.count, problems)
    outputs = [*returned, *changed_leaves(changed)]
    if layout is not None:
        outputs = with_layout(layout, outputs, hardware.count, problems, "results")
    position = {leaf.path: i for i, leaf in enumerate(inputs)}
    same_as = replacements(result, call.dynamic)
    same_as |= {len(returned) + i: position[path] for i, path in enumerate(sorted(changed))}
    if layout is not None and (note := change_since(layout, callee.name, inputs, function.jaxpr)):
        warn(note)
    traced_call = TracedCall(callee.name, bounds, hardware, layout, function, traced, tuple(inputs), tuple(outputs), same_as,
                      call.leaves_of(donated), options.compiler_options, inner)  # fmt: skip
    return place_call(traced_call, problems)


def place_call(call: TracedCall, problems: list[Problem]) -> PosedCall:
    """Check all entries of a traced call, put them on one mesh, and pose the search problem.

    Args:
      call: the call.
      problems: what is wrong with it so far; it grows.

    Raises:
      ShardError: `problems`.
    """
    if call.hardware.mesh is None:
        call = dataclasses.replace(call, inputs=without_mesh(call.inputs), outputs=without_mesh(call.outputs))
    groups = dimension_groups(call.traced.graph)
    placed = _placed(call, groups, problems)
    raise_problems(problems)
    posed = _in_best_order(pose_placed(call, placed, groups, problems), groups)
    return with_written(pose_shifted(posed)) if posed.problem.is_open else posed


def _in_best_order(posed: PosedCall, groups: DimensionGroups) -> PosedCall:
    """A call whose shardings are all given by integers, with its mesh axes in the order that costs least.

    The order says which axis has neighbouring devices. It matters where some devices are nearer than others, and where the user
    named no axes. A search tries orders itself.
    """
    call, problem, axes = posed.call, posed.problem, posed.placed.axes
    has_neighbours = len(call.hardware.topology) > 1 or 0 < call.hardware.chip.node < call.hardware.count
    is_named = call.hardware.mesh is not None or any(map(names_axes, (*call.inputs, *call.outputs)))
    if not has_neighbours or is_named or call.layout is not None or call.inner or call.ambient_mesh is not None:
        return posed
    if len(axes) < 2 or problem.axes != axes or problem.is_open or None in problem.specs:
        return posed

    def costs(order: Axes) -> Any:
        return objective(problem.evaluate(order, given, {}), problem)

    given = tuple(spec for spec in problem.specs if spec is not None)
    best = min(itertools.islice(itertools.permutations(axes), MOST_ORDERS), key=costs)
    return posed if best == axes else pose_placed(call, _renamed(posed.placed, best), groups, [])


def _renamed(placed: Placement, order: Axes) -> Placement:
    """The placement with its axes in another order, under the same names in that order."""
    new = {name: first for (name, _), (first, _) in zip(order, placed.axes, strict=True)}
    specs = (spec and tuple(tuple(new[axis] for axis in dim) for dim in spec) for spec in placed.specs)
    return dataclasses.replace(placed, axes=tuple((new[name], size) for name, size in order), specs=tuple(specs))


def _hardware(
    options: Options, inputs: Sequence[Leaf], ambient: AmbientMesh | None, defaults: Defaults,
    problems: Sequence[Problem],
) -> Hardware:  # fmt: skip
    """The devices to plan for: those of `device`, of a mesh in a strategy, of the mesh around the call, of the defaults, or all.

    Raises:
      ContextError: the context asks for something that `shard` cannot do.
      DeviceError: there are no such devices, or the call cannot use them where it stands; with it `problems`, and what is
        wrong on any device.
    """
    if defaults.parallel_mode in ("data_parallel", "hybrid_parallel"):
        fail(ContextError, f"`shard` has no meaning under parallel_mode={defaults.parallel_mode!r}",
             where=f"parallel_mode = {defaults.parallel_mode!r}", why="that mode shards no operator",
             fix='set_auto_parallel_context(parallel_mode="semi_auto_parallel"), or leave parallel_mode unset')  # fmt: skip
    if defaults.stages > 1 and defaults.search_mode == "dynamic_programming":
        fail(ContextError, "a pipeline does not go with the search dynamic_programming",
             where="pipeline_stages > 1, search_mode = 'dynamic_programming'", why="as in MindSpore",
             fix="use another search_mode, or reset_auto_parallel_context()")  # fmt: skip
    device = options.device
    if device is None:
        device = mesh_of([*(leaf.entry for leaf in inputs), *tree_util.tree_leaves(options.out_strategy)])
    try:
        found = None if device is not None or ambient is None else _around(ambient, defaults)
        if found is None:
            found = resolve(device, count=defaults.devices_asked, default=defaults.platform)
        if ambient is not None and ambient.is_binding and found.is_here and not _is_on(ambient, found):
            found = _on_binding(ambient, found, defaults)
    except DeviceError as error:
        known = list(problems)
        check_all(inputs, 1, known)
        raise_problems([*error.problems, *known] if known else ())
        raise
    if found.count % defaults.stages:
        fail(ContextError, f"{found.count} devices cannot be divided into {defaults.stages} pipeline stages",
             where=f"pipeline_stages = {defaults.stages}", why=f"{found.count} is not divisible by {defaults.stages}",
             fix="set pipeline_stages to a divisor, or reset_auto_parallel_context()")  # fmt: skip
    defaults.check_rank(found.count)
    return found


def _around(ambient: AmbientMesh, defaults: Defaults) -> Hardware | None:
    """The devices of the mesh around a call; None where there are other devices to use.

    In a traced function the mesh has no devices: then as many of JAX's own stand for them.
    """
    axes, count = ambient.axes, math.prod(size for _, size in ambient.axes)
    if not ambient.is_binding and defaults.devices_asked not in (None, count):
        return None
    if ambient.concrete is not None and not ambient.abstract.manual_axes:
        return resolve(ambient.concrete)
    devices = jax.devices()
    found = resolve(devices[:count])
    if len(devices) < count:
        found = found.chip.pod(str(count))
    return dataclasses.replace(found, mesh=abstract_mesh(axes))


def _is_on(ambient: AmbientMesh, hardware: Hardware) -> bool:
    """Whether a call for some devices uses the mesh around it."""
    return hardware.is_here and hardware.mesh is not None and tuple(hardware.mesh.shape.items()) == ambient.axes


def _on_binding(ambient: AmbientMesh, asked: Hardware, defaults: Defaults) -> Hardware:
    """The devices of a mesh with Explicit or Manual axes, for a call that asks for the same devices without a mesh.

    Raises:
      DeviceError: it asks for others, or for another mesh.
    """
    found = _around(ambient, defaults)
    assert found is not None
    if asked.mesh is None and asked.count == found.count:
        return found
    kinds = " and ".join(["Explicit"] * bool(ambient.explicit) + ["Manual"] * bool(ambient.abstract.manual_axes))
    mesh = "" if asked.mesh is None else f" on the mesh {mesh_text(asked.mesh.shape.items())}"
    fail(DeviceError, f"the call asks for {asked.count} devices{mesh}, inside a mesh with {kinds} axes",
         where=f"the mesh around the call, or of its arguments' types: {mesh_text(ambient.axes)}",
         why="JAX uses one mesh for values whose types have Explicit or Manual axes",
         fix="name no other devices and no other mesh, and the call uses that one; or call it outside, with arrays of an "
             "Auto mesh")  # fmt: skip


def _traced(
    function: CallFunction, hardware: Hardware, layout: LayoutFile | None, problems: list[Problem], is_open: bool
) -> tuple[CallFunction, Traced, tuple[InnerEntry, ...]]:
    """The function with the constraints that it needs whatever the plan is, its trace, and its inner entries.

    Raises:
      StrategyError: it calls back into Python in order, which JAX can do on one device only.
      DeviceError: a `shard_map` in it is on other devices.
    """
    traced, lowered = function.as_jaxpr(), None  # each change of the function is traced, and the last one is lowered
    function = dataclasses.replace(function, jaxpr=traced.jaxpr).replaying(traced)
    refuse_other_devices(traced.jaxpr, hardware, function.callee.name)
    if hardware.count > 1 and any(type(effect).__name__.startswith("Ordered") for effect in traced.jaxpr.effects):
        fail(StrategyError, f"`{function.callee.name}` calls back into Python in order", where="ordered=True",
             why=f"JAX keeps the order of callbacks on one device only, and this call has {hardware.count}",
             fix="leave out ordered=True, as in jax.debug.print(...), or plan for one device: "
                 "device=jax.devices()[:1]")  # fmt: skip
    is_binding = function.ambient is not None and function.ambient.is_binding
    has_tags = layout is not None and bool(layout.activations)
    may_wait = hardware.count > 1 and not is_open and not has_tags  # what is inside has numbers of one form
    if may_wait and (is_binding or not inner_entries(traced.jaxpr, hardware)):
        function = dataclasses.replace(function, unshifted=traced)
        function, traced, lowered = with_windows_apart(function, traced, hardware)
    elif hardware.count > 1:
        if (shifted := function.with_shifts(traced)).shifted is not None:
            function, traced = traced_shifts(shifted)
        function, traced, lowered = with_windows_apart(function, traced, hardware)
    if layout is not None and layout.activations:
        axes = mesh_axes(layout, hardware.count, [])
        tags = match_tags(layout, traced.jaxpr, axes, hardware.count, problems)
        if tags and hardware.count > 1 and not problems:
            function = dataclasses.replace(function, tags=tags, tag_axes=axes)
            traced, lowered = function.as_jaxpr(), None
    has_none = hardware.count == 1 or is_binding or function.unshifted is not None
    inner = () if has_none else inner_entries(traced.jaxpr, hardware)
    if inner:
        function = dataclasses.replace(function, inner={entry.number: None for entry in inner})
        traced, lowered = function.as_jaxpr(), None
    return function, lowered or function.lowered(traced, hardware.platform), inner


def _placed(call: TracedCall, groups: DimensionGroups, problems: list[Problem]) -> Placement:
    """Check all entries, of inputs and outputs alike, and put them on one mesh with the strategies inside.

    The specs are those of the inputs and outputs, then those of the inner strategies; the latter are left out where
    entries name the axes.
    """
    leaves, count = (*call.inputs, *call.outputs), call.hardware.count
    before = len(problems)
    strategies = [check(leaf, count, problems) for leaf in leaves]
    values, marked = (*call.traced.inputs, *call.traced.outputs), inner_values(call)
    tied = [groups.placed(v)[: len(leaf.shape)] for v, leaf in zip(values, leaves, strict=True)]
    inner = [(e.leaf, e.leaf.entry, groups.placed(marked[e.number])) for e in call.inner if is_inferred(e, marked)]
    leaves = (*leaves, *(leaf for leaf, _, _ in inner))
    strategies += [strategy for _, strategy, _ in inner]
    tied += [own for _, _, own in inner]
    met = [groups.placed(v) for v in range(len(groups.of))]
    sizes = [math.prod(v.shape) for v in call.traced.graph.values]
    mesh, used, tag_axes = call.hardware.mesh, call.hardware.devices, _tag_axes(call)
    if mesh is not None or tag_axes or any(map(names_axes, leaves)):
        instead = _without_mesh(call) if mesh is not None else ""
        mesh = mesh if mesh is not None or not tag_axes else abstract_mesh(tag_axes)
        placed = place_named(leaves, strategies, count, mesh, problems, used, tied, met, sizes, instead)
        if tag_axes and placed.axes and placed.axes != tag_axes:
            problems.append(_other_mesh(call, tag_axes, placed.axes))
        return placed
    if len(problems) > before:
        return Placement((), (None,) * len(leaves))
    calls = operands_of_calls([e for e in call.inner if is_inferred(e, marked)], len(values))
    return place(leaves, strategies, tied, count, problems, met, sizes, calls)


def _tag_axes(call: TracedCall) -> Axes:
    """The mesh axes that a layout file's rules for activations name, () without such rules."""
    return call.function.tag_axes if any(rule.has_axes for rule in call.function.tags.values()) else ()


def _other_mesh(call: TracedCall, tag_axes: Axes, axes: Axes) -> Problem:
    name, rule = next((name, rule) for name, rule in call.function.tags.items() if rule.has_axes)
    file = call.layout.name if call.layout is not None else ""
    return Problem(f"the activation `{name}` is on another mesh than the arrays", rule.where(file, "activations"),
                   f"{mesh_text(tag_axes)} is not {mesh_text(axes)}",
                   "write the axes of the call in [mesh], with their sizes, or pass integers and no mesh of yours")  # fmt: skip


def _without_mesh(call: TracedCall) -> str:
    """How to let the plan choose its mesh, as the end of an error; "" where the mesh around the call is the only one."""
    ambient, count, here = call.ambient_mesh, call.hardware.count, len(jax.devices())
    if ambient is not None and ambient.is_binding:
        return ""
    devices = "jax.devices()" if count == here else f"jax.devices()[:{count}]"
    return f"; or pass devices without a mesh, and the plan chooses one: device={devices}"
