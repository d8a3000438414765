"""From a call whose entries are placed to its search problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shardfn.errors import Problem, StrategyError, fail, raise_problems
from shardfn.frontend.strategy import AUTO
from shardfn.ir.dimension_groups import DimensionGroups, dimension_groups
from shardfn.ir.model import Axes, Graph, Spec, mesh_text
from shardfn.partition.counting_indices import with_counted_rows
from shardfn.partition.loop_invariants import with_hoisted_trips
from shardfn.partition.xla_bugs import aborts_if_constrained
from shardfn.planning.call.posed_call import PosedCall, TracedCall
from shardfn.planning.call.propagation import Propagation, memoized, padded
from shardfn.planning.inside import (
    InnerEntry,
    OnMesh,
    anchors,
    match_file_constraints,
    on_mesh_of_function,
    operands_as_read,
    place_inner,
)
from shardfn.planning.layout_rules import mesh_axes
from shardfn.planning.meshes import Placement, names_axes
from shardfn.search.problem import Memo, OpConstraints, OpenResult, SearchProblem, array_bytes


def pose_again(posed: PosedCall, call: TracedCall) -> PosedCall:
    """A posed call with its function in another form: its entries stay on the same mesh axes, so an answer's shardings hold."""
    return pose_placed(call, posed.placed, dimension_groups(call.traced.graph), [])


def pose_placed(call: TracedCall, placed: Placement, groups: DimensionGroups, problems: list[Problem]) -> PosedCall:
    """The search problem of a call whose entries are placed."""
    mesh = _on_mesh(call, placed, problems)
    raise_problems(problems)
    call = _with_ambient(call, mesh.axes)
    entries, results = mesh.specs[: len(call.inputs)], mesh.specs[len(call.inputs) :]
    call = dataclasses.replace(call, function=dataclasses.replace(call.function, inner=mesh.inner))
    anchored = anchors(call.traced.jaxpr, call.traced.graph)

    def constraints(axes: Axes) -> OpConstraints:
        return file_constraints(call, anchored, axes)[0]

    propagation = Propagation(
        call.traced, call.hardware, results, call.same_as, mesh.inner, call.search.alltoall, constraints
    )
    problem = _problem(call, groups, mesh.axes, entries, propagation, anchored)
    return PosedCall(call, problem, placed, entries, mesh.order, groups, propagation, anchored)


def file_constraints(call: TracedCall, anchored: Mapping[int, int], axes: Axes) -> tuple[OpConstraints, Sequence[str]]:
    """The op constraints of the layout file on a mesh, and a note on each that matches no op of the program. A plan with shared
    halos has none."""
    if call.layout is None or call.hardware.count == 1 or call.function.halo_shards:
        return {}, ()
    return match_file_constraints(call.layout, anchored, call.traced.graph, axes, call.function.has_shifts)


def inner_values(call: TracedCall) -> dict[int, int]:
    """The value in the graph of each inner entry, by number; the first where a loop is unrolled."""
    return {number: value for value, number in reversed([*call.traced.graph.inner.items()])}


def is_inferred(entry: InnerEntry, values: Mapping[int, int]) -> bool:
    """Whether an entry inside is integers for a value of the program, from which mesh axes are inferred."""
    return entry.is_strategy and entry.number in values


def _on_mesh(call: TracedCall, placed: Placement, problems: list[Problem]) -> OnMesh:
    """The mesh axes that the user, the entries or the layout file asks for, () if none does, and all shardings on them."""
    leaves, values = (*call.inputs, *call.outputs), inner_values(call)
    is_given = call.hardware.mesh is not None or any(map(names_axes, leaves))
    axes: Axes = placed.axes if is_given or any(dim for spec in placed.specs if spec for dim in spec) else ()
    count = call.hardware.count
    if call.layout is not None and count > 1 and not axes:
        axes = mesh_axes(call.layout, count, [])
    meshes = () if call.ambient_mesh is not None and call.ambient_mesh.is_binding else call.traced.meshes
    inferred = [e.number for e in call.inner if is_inferred(e, values)]
    inner = {n: spec for n, spec in zip(inferred, placed.specs[len(leaves) :], strict=True) if spec is not None}
    given = OnMesh(axes, tuple(placed.specs[: len(leaves)]), {}, placed.order)
    if not is_given and call.layout is None:
        given, inner = on_mesh_of_function(given, inner, meshes, count)
    return place_inner(call.inner, inner, given, meshes, count, problems)


def _with_ambient(call: TracedCall, axes: Axes) -> TracedCall:
    """The call with the mesh around it only if its plan is on that mesh.

    Raises:
      StrategyError: the entries name axes of another mesh, and no other can be used.
    """
    ambient = call.ambient_mesh
    if ambient is None or call.hardware.count == 1 or axes == ambient.axes:
        return call
    if ambient.is_binding:
        fail(StrategyError, f"the entries of `{call.name}` are on another mesh than the call", where=mesh_text(axes),
             why=f"the mesh around the call, or of its arguments' types, has Explicit or Manual axes: {mesh_text(ambient.axes)}",
             fix="name the axes of that mesh, or give integers")  # fmt: skip
    return dataclasses.replace(call, function=dataclasses.replace(call.function, ambient=None))


def _problem(
    call: TracedCall, groups: DimensionGroups, axes: Axes, entries: tuple[Spec | None, ...], propagation: Propagation,
    anchored: Collection[int],
) -> SearchProblem:  # fmt: skip
    traced, hardware, bounds = call.traced, call.hardware, call.search
    graph = with_hoisted_trips(traced.graph, hardware.platform, lambda v: int(array_bytes(traced.graph.values[v])))
    graph = with_counted_rows(graph, hardware.platform)
    outputs = list(zip(traced.outputs, call.outputs, propagation.given, strict=True))
    inner = {value: propagation.inner[number] for value, number in graph.inner.items()}
    of_calls = {entry.number for entry in call.inner if entry.is_operand}
    marked = {value: spec for value, spec in inner.items() if graph.inner[value] in of_calls}
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
        budget=bounds.budget,
        tolerance=bounds.tolerance,
        seconds=bounds.time_limit_s,
        inner=inner,
        operands=operands_as_read(graph, marked, dict(axes)),
        memo=Memo(value_groups=groups.of),
    )  # fmt: skip


def _constrainable(anchored: Collection[int], graph: Graph) -> frozenset[int]:
    """The ops, by index, that may get a constraint."""
    return frozenset(i for i in anchored if not aborts_if_constrained(graph.ops[i]))


def _group_bytes(graph: Graph, groups: DimensionGroups) -> dict[int, int]:
    """For each dimension group the bytes of all values that have a dimension in it."""
    found: dict[int, int] = {}
    for value, of in zip(graph.values, groups.of, strict=True):
        for group in set(of):
            found[group] = found.get(group, 0) + int(array_bytes(value))
    return found
