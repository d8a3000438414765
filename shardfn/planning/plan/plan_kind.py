"""The textbook name of a plan: data parallel, ZeRO-1, FSDP, tensor, expert or ensemble parallel, a product of them, or `mixed`.

These are names of neural networks: of a function with a batch of examples and parameters. Of any other function the name says
which dimensions are sharded: `rows sharded 8 ways`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.ir.model import Graph
from shardfn.ir.partitioned import USER_WRITTEN, PartitionedProgram
from shardfn.ir.sources import looked_up, sources_of
from shardfn.planning.plan.decisions import Decision, DimensionGroup

MOST, HALF, FEW = 0.9, 0.5, 0.1
"""Shares of the bytes of parameters or optimizer state: what is sharded above `MOST` counts as all, below `FEW` as nothing."""

WEIGHT_DTYPES = ("float", "bfloat", "complex", "int8", "uint8", "int4", "uint4")
"""What parameters are made of; wider integers are indices."""

Sharded = tuple[int, frozenset[str]]
"""Bytes of an array, and the mesh axes over which it is sharded."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The facts about a plan that give it its name; `axes` is the mesh, as (name, size)."""

    axes: tuple[tuple[str, int], ...]
    batch: frozenset[str] = frozenset()
    """Mesh axes that shard the batch dimension."""
    inputs: frozenset[str] = frozenset()
    """Mesh axes that shard other dimensions of the arrays with a batch dimension."""
    parameters: tuple[Sharded, ...] = ()
    gathered: tuple[Sharded, ...] = ()
    """The parameters with the axes over which XLA gathers them."""
    optimizer_state: tuple[Sharded, ...] = ()
    experts: frozenset[str] = frozenset()
    """Mesh axes that shard a batch dimension of the matmuls with most parameters that they shard."""
    members: frozenset[str] = frozenset()
    """Those of `experts` over which nothing is combined: all results of the parameters have the dimension."""
    stacked: frozenset[str] = frozenset()
    """Mesh axes that shard the dimension along which a loop takes its layers."""
    results: frozenset[str] = frozenset()
    """Mesh axes that shard a result."""
    inside: frozenset[str] = frozenset()
    """Mesh axes that shard the rows, such as the batch, of most matmuls with a parameter."""
    used: frozenset[str] = frozenset()
    """Mesh axes that shard an array of the function, one inside or of a call."""
    parameter_paths: frozenset[str] = frozenset()
    """The paths of the parameters."""
    scattered: frozenset[str] = frozenset()
    """Mesh axes over which the user, or a training step, scatters sums: of gradients, where parameters are replicated."""
    dimensions: tuple[tuple[str, str], ...] | None = None
    """Of a function without parameters, the dimension that each mesh axis shards, of the largest array; None of others."""


def kind_of(layouts: Layouts) -> str:
    """The name of a plan.

    >>> kind_of(Layouts((("a", 2), ("b", 4)), frozenset("a"), parameters=((64, frozenset("b")),)))
    'tensor parallel over 4 × data parallel over 2'
    >>> kind_of(Layouts((("a", 2), ("b", 4)), dimensions=(("a", "columns"), ("b", "rows"))))
    'rows sharded 4 ways × columns sharded 2 ways'
    """
    sizes: dict[str, int] = {}
    for axis, size in layouts.axes:
        role = _role(layouts, axis)
        sizes[role] = sizes.get(role, 1) * size
    if math.prod(sizes.values()) == 1:
        return "one device"
    if list(sizes) == ["replicated"]:
        return f"replicated on {sizes['replicated']} devices"
    if layouts.dimensions is not None:
        known = [*DIMENSIONS, *sorted(sizes.keys() - {*DIMENSIONS, *_UNNAMED}), *_UNNAMED]
        ways = {
            role: f"{role} on {n} devices" if role in _UNNAMED else f"{role} sharded {n} ways"
            for role, n in sizes.items()
        }
        return " × ".join(ways[role] for role in known if role in ways)
    ordered = sorted(sizes, key=lambda role: TEXTBOOK.index(role) if role in TEXTBOOK else len(TEXTBOOK))
    parts = [f"{role} over {sizes[role]}" for role in ordered]
    if not set(sizes) <= set(TEXTBOOK):
        return f"mixed: {', '.join(parts)} devices"
    return f"{parts[0]} devices" if len(parts) == 1 else " × ".join(parts)


TEXTBOOK = (
    "FSDP",
    "ZeRO-1",
    "ZeRO-2",
    "expert parallel",
    "ensemble parallel",
    "tensor parallel",
    "data parallel",
    "replicated",
)


DIMENSIONS = ("rows", "columns")
"""The names of the dimensions of vectors and matrices; those of other arrays have numbers."""

SMALL = "replicated but for small arrays"
_UNNAMED = ("operations inside sharded", "replicated", SMALL)
"""The roles of mesh axes that shard no array of a call, or little of what the program computes."""


def _role(layouts: Layouts, axis: str) -> str:
    """What is sharded over one mesh axis, in the terms of a plan's name."""
    if layouts.dimensions is not None:
        return dict(layouts.dimensions).get(axis, _UNNAMED[axis not in layouts.used])
    parameters, state = _share(layouts.parameters, axis), _share(layouts.optimizer_state, axis)
    if axis in layouts.members:
        return "ensemble parallel"
    if axis in layouts.experts:
        return "expert parallel"
    if axis in layouts.batch:
        if parameters >= MOST and (state >= MOST or not layouts.optimizer_state):
            is_gathered = _share(layouts.gathered, axis) >= HALF  # else maybe the batch is
            return "FSDP" if is_gathered else "batch and weights sharded together"
        if parameters > FEW:
            return f"batch and {parameters:.0%} of the weights sharded"
        if state > FEW:
            if state >= MOST:
                return "ZeRO-2" if axis in layouts.scattered else "ZeRO-1"
            return f"batch and {state:.0%} of the optimizer state sharded"
        return "data parallel"
    if axis in layouts.stacked:
        return "layers of a loop sharded"
    if parameters >= HALF:
        is_gathered = axis in layouts.inside and _share(layouts.gathered, axis) >= HALF
        return "FSDP" if is_gathered else "tensor parallel"
    if parameters > FEW:
        return f"{parameters:.0%} of the weights sharded"
    if state > FEW:
        return "optimizer state alone sharded"
    if axis in layouts.inside:
        return "data parallel"
    if axis in layouts.inputs:
        return "inputs sharded along other dimensions than the batch"
    if axis in layouts.results:
        return "results alone sharded"
    return "operations inside sharded" if axis in layouts.used else "replicated"


def _share(arrays: Sequence[Sharded], axis: str) -> float:
    """The share of the bytes of some arrays that is sharded over an axis."""
    total = sum(size for size, _ in arrays)
    return sum(size for size, axes in arrays if axis in axes) / total if total else 0.0


# ---- the facts about a plan


def layouts_of(
    axes: tuple[tuple[str, int], ...],
    arguments: Sequence[Decision],
    results: Sequence[Decision],
    groups: Sequence[DimensionGroup],
    partitioned: PartitionedProgram,
) -> Layouts:
    """Sort the arguments of a function into arrays with a batch dimension, parameters and optimizer state.

    Parameters come back as results (or their gradients do) and feed a matmul or a lookup; optimizer state comes back too and
    feeds neither.

    Args:
      axes: the mesh.
      arguments: the decisions on the arguments.
      results: the decisions on the results.
      groups: the dimension groups of both.
      partitioned: the partitioned program, whose last inputs are the arguments.
    """
    graph = partitioned.graph
    returned = {(end, d.shape) for d in results for end in _ends(d.path)}
    mirrored = {d.path for d in arguments if (_without_argument(d.path), d.shape) in returned}
    sources = sources_of(graph, graph.arguments(len(arguments)))
    contracted = _contracted(graph, sources, arguments)
    looked = looked_up(graph, sources)
    tables = {d.path for i, d in enumerate(arguments) if (1 << i, d.shape, 0) in looked}
    batch = _batch_dimensions(arguments, results, groups, mirrored, contracted, tables, graph.trip_counts)
    with_batch = {path for path, _ in batch}
    weights = [d for d in arguments if d.path not in with_batch and d.shape and d.dtype.startswith(WEIGHT_DTYPES)]
    feeds = functools.reduce(
        operator.or_, (sources.get(v, 0) for op in graph.ops if op.name in READ_WEIGHTS for v in op.inputs), 0
    )
    bit = {d.path: 1 << i for i, d in enumerate(arguments)}
    state = [d for d in weights if d.path in mirrored and not bit[d.path] & feeds]
    parameters = [d for d in weights if d not in state]
    experts = _expert_axes(partitioned, sources, {bit[d.path]: _sharded(d) for d in parameters})
    reached = [sources.get(v, 0) for v in graph.outputs]
    gathers = [c for c in partitioned.communications if partitioned.gathered_shards(c) is not None]
    return Layouts(
        axes,
        frozenset(axis for d in arguments for i, dim in enumerate(d.spec) if (d.path, i) in batch for axis in dim),
        frozenset(axis for d in arguments if d.path in with_batch
                  for i, dim in enumerate(d.spec) if (d.path, i) not in batch for axis in dim),
        tuple(map(_sharded, parameters)),
        tuple(
            (_sharded(d)[0], frozenset(axis for c in gathers if sources.get(c.operand) == bit[d.path] for axis in c.axes))
            for d in parameters
        ),
        tuple(map(_sharded, state)),
        experts,
        frozenset(axis for axis in experts if _are_members(axis, parameters, results, groups, reached, bit)),
        frozenset(axis for d in parameters if len(d.shape) > 2 and d.shape[0] in graph.trip_counts for axis in d.spec[0]),
        frozenset(axis for d in results for dim in d.spec for axis in dim),
        _row_axes(partitioned, sources, functools.reduce(operator.or_, (bit[d.path] for d in parameters), 0)),
        partitioned.used_axes,
        frozenset(d.path for d in parameters),
        frozenset(axis for c in partitioned.communications if (c.kind, c.cause) == ("reduce-scatter", USER_WRITTEN)
                  for axis in c.axes),
        None if _has_weights(graph, sources, parameters, bit) else tuple(_dimensions(arguments, results, partitioned)),
    )  # fmt: skip


def _has_weights(
    graph: Graph, sources: Mapping[int, int], parameters: Sequence[Decision], bit: Mapping[str, int]
) -> bool:
    """Whether a matmul or a convolution reads a parameter of two dimensions or more, as those of neural networks do.

    The only argument of a function, such as the matrix of a factorisation, is no parameter.
    """
    multiplied = functools.reduce(
        operator.or_,
        (sources.get(v, 0) for op in graph.ops if op.name in ("dot_general", "convolution") for v in op.inputs),
        0,
    )
    return len(bit) > 1 and any(len(d.shape) > 1 and bit[d.path] & multiplied for d in parameters)


def _dimensions(
    arguments: Sequence[Decision], results: Sequence[Decision], partitioned: PartitionedProgram
) -> Iterator[tuple[str, str]]:
    """For each mesh axis the name of the dimension that it shards of the largest array; `SMALL` where it shards less than `FEW`
    of the elements that the program reads and computes."""
    found: dict[str, str] = {}
    for d in sorted((*arguments, *results), key=lambda d: -math.prod(d.shape)):
        for number, axes in enumerate(d.spec):
            for axis in axes:
                found.setdefault(axis, DIMENSIONS[number] if len(d.shape) < 3 else f"dimension {number}")
    computed, sharded = 0, collections.Counter[str]()
    for v in {*partitioned.graph.arguments(len(arguments)), *(v for op in partitioned.graph.ops for v in op.outputs)}:
        value = partitioned.graph.values[v]
        computed += value.elements
        sharded.update({axis.partition(":")[0]: value.elements for dim in partitioned.specs[v] for axis in dim})
    for axis, name in found.items():
        yield axis, name if sharded[axis] >= FEW * computed else SMALL


def _without_argument(path: str) -> str:
    """The path of an array within its argument; empty for an argument that is one array."""
    return path.partition("/")[2]


def _ends(path: str) -> list[str]:
    """The ends of a result's path: a result may be a tuple, a dict or a module's changed state, at any depth.

    >>> _ends("result/0/params/up"), _ends("state/optimizer/mu/up")
    (['0/params/up', 'params/up', 'up'], ['optimizer/mu/up', 'mu/up', 'up'])
    """
    parts = path.split("/")
    return ["/".join(parts[i:]) for i in range(1, len(parts))]


def _sharded(d: Decision) -> Sharded:
    axes = frozenset(axis for dim in d.spec for axis in dim)
    return d.local_bytes * math.prod(n // k for n, k in zip(d.shape, d.local_shape, strict=True) if k), axes


def _batch_dimensions(
    arguments: Sequence[Decision],
    results: Sequence[Decision],
    groups: Sequence[DimensionGroup],
    mirrored: Collection[str],
    contracted: Collection[str],
    tables: Collection[str],
    stacks: Collection[int],
) -> set[tuple[str, int]]:
    """The dimensions, as (path, number), of the groups that look most like a batch.

    A batch is dimension 0 of every argument that has it, but for those that a result of their path replaces: a cache may have
    it anywhere, and parameters that a training step returns make no batch alone. Of several groups those come first along
    which no loop iterates and nothing is looked up. Of these, those that no result has in another dimension. Of these, those of
    an argument whose shape no result has, and that a matmul reads along other dimensions. Of these, those that a result has too.

    `search.generators.styles.batch_groups` decides before there is a plan. It chooses one batch, where a plan may shard several.
    """
    own = {d.path: d.shape for d in arguments}
    shapes = {d.shape for d in results}
    ranked: dict[tuple[bool, bool, bool, bool], set[tuple[str, int]]] = {}
    for group in groups:
        members = [(path, int(number)) for path, _, number in (member.rpartition(".") for member in group.members)]
        mine = {(path, number) for path, number in members if path in own}
        kept = {(path, number) for path, number in mine if path not in mirrored}
        is_of_gradient = mine != kept and all(own[path] in shapes for path, _ in kept)
        if not kept or is_of_gradient or any(number for _, number in kept):
            continue
        is_no_batch = group.size in stacks or all(path in tables for path, _ in kept)
        is_like_weight = all(own[path] in shapes or path in contracted for path, _ in kept)
        is_elsewhere = any(number for path, number in members if path not in own)
        ranked.setdefault((is_no_batch, is_elsewhere, is_like_weight, len(mine) == len(members)), set()).update(mine)
    return ranked[min(ranked)] if ranked else set()


def _contracted(graph: Graph, sources: Mapping[int, int], arguments: Sequence[Decision]) -> set[str]:
    """The arguments, by path, of which every matmul that reads them contracts dimension 0."""
    path_of = {(1 << i, d.shape): d.path for i, d in enumerate(arguments) if d.shape}
    found, others = set[str](), set[str]()
    for op in graph.ops:
        if op.name == "dot_general" and op.rule is not None:
            for v, dims in zip(op.inputs, op.rule.operands, strict=True):
                if path := path_of.get((sources.get(v, 0), tuple(graph.values[v].shape))):
                    (found if op.rule.reduction.issuperset(dims[0]) else others).add(path)
    return found - others


READ_WEIGHTS = ("dot_general", "convolution", "gather")
"""Ops that read parameters but not optimizer state: matmuls, convolutions and lookups."""


def _expert_axes(
    partitioned: PartitionedProgram, sources: Mapping[int, int], parameters: Mapping[int, Sharded]
) -> frozenset[str]:
    """The mesh axes over which half of the parameters' bytes that they shard are a batch dimension of a matmul.

    The heads of an attention are one too, in one of its four matmuls with weights.
    """
    found: dict[str, set[int]] = {}
    for op in partitioned.graph.ops:
        if op.name == "dot_general" and op.rule is not None:
            in_both = [{factor for dim in dims for factor in dim} for dims in op.rule.operands]
            batch = set.intersection(*in_both) - op.rule.reduction
            for v, dims in zip(op.inputs, op.rule.operands, strict=True):
                if sources.get(v) in parameters:
                    for dim, axes in zip(dims, partitioned.specs[v], strict=True):
                        for axis in axes if batch & set(dim) else ():
                            found.setdefault(axis, set()).add(sources[v])

    def is_most(axis: str) -> bool:
        sharded = {source: size for source, (size, axes) in parameters.items() if axis in axes}
        return sum(sharded.get(source, 0) for source in found[axis]) >= HALF * sum(sharded.values())

    return frozenset(filter(is_most, found))


def _are_members(
    axis: str,
    parameters: Sequence[Decision],
    results: Sequence[Decision],
    groups: Sequence[DimensionGroup],
    reached: Sequence[int],
    bit: Mapping[str, int],
) -> bool:
    """Whether the parameters that an axis shards are those of an ensemble, whose members never meet but in scalars: each result
    computed from them has their dimension. A router combines what experts compute."""
    at = {f"{d.path}.{i}" for d in parameters for i, dim in enumerate(d.spec) if axis in dim}
    members = {member for group in groups if not at.isdisjoint(group.members) for member in group.members}
    sharded = functools.reduce(operator.or_, (bit[name.rpartition(".")[0]] for name in at), 0)
    return all(
        any(f"{d.path}.{i}" in members for i in range(len(d.shape)))
        for d, sources in zip(results, reached, strict=True)
        if d.shape and sources & sharded
    )


def _row_axes(partitioned: PartitionedProgram, sources: Mapping[int, int], parameters: int) -> frozenset[str]:
    """The mesh axes that shard the rows of matmuls with a parameter: dimensions of the other operand alone.

    Of an axis, these matmuls make at least half of the elements that all matmuls with a parameter make.
    """
    total, by_axis = 0, dict[str, int]()
    for op in partitioned.graph.ops:
        if op.name == "dot_general" and op.rule is not None:
            of_weights = [not sources.get(v, 0) & ~parameters for v in op.inputs]
            if sum(of_weights) != 1:
                continue
            at = of_weights.index(False)
            own, other = (
                {factor for dim in dims for factor in dim} for dims in (op.rule.operands[at], op.rule.operands[1 - at])
            )
            made = op.trips * math.prod(partitioned.graph.values[op.outputs[0]].shape)
            total += made
            rows = zip(op.rule.results[0], partitioned.specs[op.outputs[0]], strict=True)
            for axis in {axis for dim, axes in rows if set(dim) & (own - other) for axis in axes}:
                by_axis[axis] = by_axis.get(axis, 0) + made
    return frozenset(axis for axis, made in by_axis.items() if made >= HALF * total)
