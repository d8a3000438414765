"""A call to a search problem. Every user error of a call is raised here, all of them together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from jax import tree_util

from shardfn.cost.devices.hardware import Hardware, resolve
from shardfn.errors import ContextError, DeviceError, Problem, StrategyError, fail, raise_problems
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.inputs_outputs import changed_leaves, input_leaves, output_leaves, replacements
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import AUTO, UNKNOWN, Leaf, without_mesh
from shardfn.frontend.trace import Traced
from shardfn.frontend.validation import check, check_all
from shardfn.ir.dimension_groups import DimensionGroups, dimension_groups
from shardfn.ir.model import Axes, Graph, Spec
from shardfn.partition.loop_invariants import with_hoisted_trips
from shardfn.planning.call_function import CallFunction, pure_function
from shardfn.planning.layout_rules import LayoutFile, mesh_axes, with_layout
from shardfn.planning.mesh_inference import Placement, expresses, finest, place, split_axes
from shardfn.planning.named_shardings import mesh_of, names_axes, place_named
from shardfn.planning.op_constraints import anchors
from shardfn.planning.posed_call import PosedCall, TracedCall
from shardfn.planning.propagation import Propagation, memoized, padded
from shardfn.planning.tags import match_tags
from shardfn.planning.workarounds import windows_clash
from shardfn.search.graph_facts import array_bytes
from shardfn.search.problem import Memo, OpenResult, SearchProblem


def pose(callee: Callee, options: Options, call: Call, defaults: Defaults, layout: LayoutFile | None) -> PosedCall:
    """Trace and place a call: the search problem, and what `finish` needs beside it.

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
    hardware = _hardware(options, inputs, defaults, problems)
    if layout is not None:
        inputs = with_layout(layout, inputs, hardware.count, problems, given=call.names)
    if any(leaf.dtype == UNKNOWN for leaf in inputs):  # it cannot be traced
        check_all(inputs, hardware.count, problems)
        raise_problems(problems)
    donated = call.positions(options.donate_argnums, options.donate_argnames)
    shapes = call.of_shapes()
    frozen = callee.frozen(shapes)
    function = CallFunction(pure_function(frozen, shapes), frozen, shapes, donated)
    function, traced = _traced(function, hardware, layout, problems)
    result, changed = traced.results if call.returns_changes else (traced.results, {})
    returned = output_leaves(callee, options, result, defaults, hardware.count, problems)
    outputs = [*returned, *changed_leaves(changed)]
    if layout is not None:
        outputs = with_layout(layout, outputs, hardware.count, problems, "results")
    position = {leaf.path: i for i, leaf in enumerate(inputs)}
    same_as = replacements(result, call.dynamic)
    same_as |= {len(returned) + i: position[path] for i, path in enumerate(sorted(changed))}
    bounds = options.for_search(defaults, layout.level if layout is not None else None)
    traced_call = TracedCall(callee.name, bounds, hardware, layout, function, traced, tuple(inputs), tuple(outputs), same_as,
                      call.leaves_of(donated), options.compiler_options)  # fmt: skip
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
    axes, specs = _on_mesh(call, placed)
    entries, results = specs[: len(call.inputs)], specs[len(call.inputs) :]
    propagation = Propagation(call.traced, call.hardware, results, call.same_as)
    anchored = anchors(call.traced.jaxpr, call.traced.graph)
    problem = _problem(call, groups, axes, entries, propagation, anchored)
    return PosedCall(call, problem, entries, placed.order, groups, propagation, anchored)


def _hardware(options: Options, inputs: Sequence[Leaf], defaults: Defaults, problems: Sequence[Problem]) -> Hardware:
    """The devices to plan for: those of `device`, of a mesh in a strategy, of the defaults, or all.

    Raises:
      ContextError: the context asks for something that `shard` cannot do.
      DeviceError: there are no such devices; with it `problems`, and what is wrong on any device.
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
        found = resolve(device, count=defaults.devices_asked, default=defaults.platform)
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


def _traced(
    function: CallFunction, hardware: Hardware, layout: LayoutFile | None, problems: list[Problem]
) -> tuple[CallFunction, Traced]:
    """The function with the constraints that it needs whatever the plan is, and its trace.

    Raises:
      StrategyError: it calls back into Python in order, which JAX can do on one device only.
    """
    traced = function.traced(hardware.platform)
    if hardware.count > 1 and any(type(effect).__name__.startswith("Ordered") for effect in traced.jaxpr.effects):
        fail(StrategyError, f"`{function.callee.name}` calls back into Python in order", where="ordered=True",
             why=f"JAX keeps the order of callbacks on one device only, and this call has {hardware.count}",
             fix="leave out ordered=True, as in jax.debug.print(...), or plan for one device: "
                 "device=jax.devices()[:1]")  # fmt: skip
    if hardware.count > 1 and windows_clash(traced.graph):
        function = dataclasses.replace(function, separates_windows=True)
        traced = function.traced(hardware.platform)
    if layout is not None and layout.activations:
        axes = mesh_axes(layout, hardware.count, [])
        tags = match_tags(layout, traced.jaxpr, axes, hardware.count, problems)
        if tags and hardware.count > 1 and not problems:
            function = dataclasses.replace(function, tags=tags, tag_axes=axes)
            traced = function.traced(hardware.platform)
    return function, traced


def _placed(call: TracedCall, groups: DimensionGroups, problems: list[Problem]) -> Placement:
    """Check all entries, of inputs and outputs alike, and put them on one mesh."""
    leaves, count = (*call.inputs, *call.outputs), call.hardware.count
    before = len(problems)
    strategies = [check(leaf, count, problems) for leaf in leaves]
    if any(map(names_axes, leaves)):
        return place_named(leaves, strategies, count, call.hardware.mesh, problems, call.hardware.devices)
    if len(problems) > before:
        return Placement((), (None,) * len(leaves))
    values = (*call.traced.inputs, *call.traced.outputs)
    tied = [groups.of[v][: len(leaf.shape)] for v, leaf in zip(values, leaves, strict=True)]
    sizes = [math.prod(v.shape) for v in call.traced.graph.values]
    return place(leaves, strategies, tied, count, problems, groups.of, sizes)


def _on_mesh(call: TracedCall, placed: Placement) -> tuple[Axes, tuple[Spec | None, ...]]:
    """The mesh axes that the entries or the layout file ask for, () if none does, and the entries' shardings on them."""
    named = any(map(names_axes, (*call.inputs, *call.outputs)))
    axes: Axes = placed.axes if named or any(dim for spec in placed.specs if spec for dim in spec) else ()
    count = call.hardware.count
    if call.layout is not None and count > 1 and not axes:
        axes = mesh_axes(call.layout, count, [])
    own = axes or (("a", count),)
    if all(math.prod(other) != count or expresses(own, other) for other in call.traced.mesh_shapes):
        return axes, tuple(placed.specs)
    # An inner `shard` has a mesh of its own: Shardy propagates across only if both are one.
    axes, parts = finest(own)
    return axes, tuple(None if spec is None else split_axes(spec, parts) for spec in placed.specs)


def _problem(
    call: TracedCall, groups: DimensionGroups, axes: Axes, entries: tuple[Spec | None, ...], propagation: Propagation,
    anchored: Collection[int],
) -> SearchProblem:  # fmt: skip
    traced, hardware, bounds = call.traced, call.hardware, call.search
    graph = with_hoisted_trips(traced.graph, hardware.platform, lambda v: int(array_bytes(traced.graph.values[v])))
    outputs = list(zip(traced.outputs, call.outputs, propagation.given, strict=True))
    return SearchProblem(
        names=tuple(leaf.path for leaf in call.inputs),
        shapes=tuple(leaf.shape for leaf in call.inputs),
        groups=tuple(groups.of[v][: len(leaf.shape)] for v, leaf in zip(traced.inputs, call.inputs, strict=True)),
        group_bytes=_group_bytes(graph, groups),
        axes=axes,
        specs=entries if hardware.count > 1 else tuple(((),) * len(leaf.shape) for leaf in call.inputs),
        hardware=hardware,
        level=bounds.level,
        partition=memoized(propagation),
        graph=graph,
        inputs=traced.inputs,
        results={v: padded(spec, graph, v) or () for v, _, spec in outputs if spec is not None},
        same_as={v: traced.inputs[call.same_as[i]] for i, (v, _, spec) in enumerate(outputs)
                 if spec is None and i in call.same_as},
        donated=frozenset(traced.inputs[i] for i in call.donated),
        can_constrain=_constrainable(anchored, graph),
        memory_limit=hardware.chip.memory_bytes if bounds.memory_limit is None else bounds.memory_limit,
        algorithm=bounds.algorithm,
        search_ops=bounds.search_ops,
        open_results={} if hardware.count == 1 else {
            i: OpenResult(leaf.path, v, leaf.shape, i - len(outputs))
            for i, (v, leaf, spec) in enumerate(outputs)
            if spec is None and i not in call.same_as and leaf.shape},
        results_requested=any(leaf.entry is AUTO and leaf.where for leaf in call.outputs),
        seconds=bounds.time_limit_s,
        memo=Memo(value_groups=groups.of),
    )  # fmt: skip


def _constrainable(anchored: Collection[int], graph: Graph) -> frozenset[int]:
    """The ops, by index, that may get a constraint. XLA may abort on a constrained grouped convolution."""
    return frozenset(i for i in anchored if (made := graph.ops[i].convolution) is None or not made.grouped)


def _group_bytes(graph: Graph, groups: DimensionGroups) -> dict[int, int]:
    """For each dimension group the bytes of all values that have a dimension in it."""
    found: dict[int, int] = {}
    for value, of in zip(graph.values, groups.of, strict=True):
        for group in set(of):
            found[group] = found.get(group, 0) + int(array_bytes(value))
    return found
