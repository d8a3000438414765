"""Passes of libtpu that change a partitioned program's collectives: reduce-scatters, repeated all-gathers, and all-gathers
over all chips.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from shardfn.ir.model import Graph, Op, dtype_bits
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.rebuild import ProgramBuilder, resolved_chains
from shardfn.partition.tpu_padding import LANES, SUBLANES, row_major_tiled_bytes, tiled_dims


def makes_reduce_scatter(
    shard: tuple[int, ...], dim: int, bits: int, spans_torus: bool, torus: tuple[int, ...]
) -> bool:
    """Whether libtpu emits a reduce-scatter for a sharded sum; otherwise it emits an all-reduce and a slice.

    A shard must consist of whole tiles: 8 rows along the sublanes, 128 elements of 32 bits along the lanes. Vectors
    never qualify, nor do reductions over all of some tori (`never_scatters_over`). Seen in libtpu 0.0.42.

    Args:
      shard: shape on one device.
      dim: the sharded dimension.
      bits: bits of one element.
      spans_torus: whether the reduction spans all devices of the torus.
      torus: its dimensions.

    >>> makes_reduce_scatter((32, 256), 0, 32, True, (2, 4)), makes_reduce_scatter((32, 256), 0, 32, True, (4, 4))
    (True, False)
    """
    if len(shard) < 2 or (spans_torus and never_scatters_over(torus)):
        return False
    row, column = tiled_dims(shard, bits)
    return shard[dim] % {row: SUBLANES, column: LANES * max(1, 32 // bits)}.get(dim, 1) == 0


def never_scatters_over(torus: Sequence[int]) -> bool:
    """Whether reductions over all devices of a torus are never scattered: two of its dimensions are equal, and it is not
    2 × 2.

    >>> never_scatters_over((4, 4)), never_scatters_over((2, 4)), never_scatters_over((2, 2)), never_scatters_over((2, 2, 2))
    (True, False, False, True)
    >>> never_scatters_over((4, 8, 8)), never_scatters_over((2, 4, 8))
    (True, False)
    """
    dims = [n for n in torus if n > 1]
    return len({*dims}) < len(dims) and dims != [2, 2]


FEWEST_CHIPS_FOR_REDUCED_GATHERS = 64
"""Chips from which on libtpu all-reduces in the place of an all-gather over all of them (libtpu 0.0.42)."""

MAX_REDUCED_GATHER_BYTES = 16 * 2**20
"""Bytes of the gathered array up to which it does so on a torus of two dimensions (libtpu 0.0.42)."""


def max_reduced_gather_bytes(torus: Sequence[int]) -> float:
    """Bytes of the gathered array up to which libtpu all-reduces in the place of an all-gather over all chips of a torus.

    Each device writes its shard into zeros. On three dimensions libtpu always does so, which sends twice the bytes. The
    bytes are those of `row_major_tiled_bytes`. Seen in libtpu 0.0.42 on v4, v5e, v5p and v6e.

    >>> [max_reduced_gather_bytes(torus) for torus in ((4, 8), (8, 8), (2, 4, 4), (4, 4, 4))]
    [0, 16777216, 0, inf]
    """
    if math.prod(torus) < FEWEST_CHIPS_FOR_REDUCED_GATHERS:
        return 0
    return math.inf if sum(n > 1 for n in torus) > 2 else MAX_REDUCED_GATHER_BYTES


def all_reduce_gathers(partitioned: PartitionedProgram, torus: Sequence[int]) -> PartitionedProgram:
    """Replace all-gathers over all chips of a torus by all-reduces, where libtpu does (`max_reduced_gather_bytes`)."""
    most, chips = max_reduced_gather_bytes(torus), math.prod(torus)
    builder = ProgramBuilder(partitioned)
    sent = {c.result: c for c in partitioned.communications}
    for op in partitioned.graph.ops:
        c = sent.get(op.outputs[0]) if op.name == "all_gather" and most else None
        if c and not c.matmul_permutes and c.group_size == chips and _gathered_bytes(partitioned, c.result) <= most:
            zeros = builder.like(c.result)
            builder.ops.append(dataclasses.replace(op, name="pad", outputs=(zeros,)))
            op = dataclasses.replace(op, name="all_reduce", inputs=(zeros,))
            sent[c.result] = dataclasses.replace(c, kind="all-reduce", operand=zeros)
        builder.ops.append(op)
    return builder.built(sent) if len(builder.ops) > len(partitioned.graph.ops) else partitioned


def _gathered_bytes(partitioned: PartitionedProgram, value: int) -> int:
    return row_major_tiled_bytes(partitioned.local_shape(value), dtype_bits(partitioned.graph.values[value].dtype))


MAX_CSE_DISTANCE = 100
"""Steps between two uses up to which one all-gather serves both: the distance of libtpu's schedule-aware CSE (libtpu
0.0.42).
"""


def repeat_distant_gathers(partitioned: PartitionedProgram) -> PartitionedProgram:
    """Repeat an all-gather for each use that comes more than `MAX_CSE_DISTANCE` steps after the first.

    XLA's partitioner gathers for every use, and libtpu merges the gathers that are close. A sharded weight is thus
    gathered once in the forward pass and once in the backward pass.
    """
    graph = partitioned.graph
    sent = {c.result: c for c in partitioned.communications}
    gathers = {
        op.outputs[0]: op
        for op in graph.ops
        if op.name == "all_gather" and (c := sent.get(op.outputs[0])) and not c.matmul_permutes
    }
    uses: dict[int, list[int]] = {v: [] for v in gathers}
    for i, op in enumerate(graph.ops):
        for v in dict.fromkeys(op.inputs):
            if v in uses:
                uses[v].append(i)
    source = resolved_chains({op.outputs[0]: op.inputs[0] for op in graph.ops if op.name in _SAME})
    groups: dict[
        tuple[int, int], list[tuple[int, int]]
    ] = {}  # of a value and a region: its uses there, and the gathers
    regions = _regions(graph)
    for v, op in gathers.items():
        root = source.get(op.inputs[0], op.inputs[0])
        for i in uses[v]:
            if sent[v].trips == graph.ops[i].trips:
                groups.setdefault((root, regions[i]), []).append((i, v))
    several = [sorted(group) for group in groups.values() if len(group) > 1]
    if not several:
        return partitioned
    heights = _heights(partitioned, regions)
    builder = ProgramBuilder(partitioned)
    values, specs = builder.values, builder.specs
    reads: dict[tuple[int, int], int] = {}  # of a use and what it reads: what it reads instead
    before: dict[int, list[Op]] = {}  # of a use the gathers for it alone
    for group in several:
        first, _ = group[0]
        kept: dict[object, int] = {}
        for i, v in group:
            c = sent[v]
            if heights[first] <= heights[i] + 1 + MAX_CSE_DISTANCE:
                reads[i, v] = kept.setdefault((values[v], specs[c.operand], specs[v], c.axes), v)
            elif v not in kept.values():
                kept[i, v] = v
            else:
                reads[i, v] = again = builder.like(v)
                before.setdefault(i, []).append(gathers[v].of(gathers[v].inputs, (again,)))
                sent[again] = dataclasses.replace(c, result=again)
    for i, op in enumerate(graph.ops):
        builder.ops += (*before.get(i, ()), op.of(tuple([reads.get((i, v), v) for v in op.inputs])))
    return builder.built(sent)


_SAME = frozenset({"convert", "transpose"})
"""Ops before a gather that XLA does after it."""


def _heights(partitioned: PartitionedProgram, regions: Sequence[int]) -> list[int]:
    """Distance of each op from the end, as XLA counts: one more than any reader, plus one for each reader that does
    not raise it.

    In a loop or branch the distance is to its end; from outside it is one step. Views are no step.
    """
    graph, outputs = partitioned.graph, set(partitioned.graph.outputs)
    loop: dict[int, int] = {}  # of a region the op that it is the body of
    met: set[int] = set()  # regions: the walk comes back to the one around a loop
    readers: dict[int, list[int]] = {}
    heights = [0] * len(graph.ops)
    last = -1
    for i in reversed(range(len(graph.ops))):
        op, region = graph.ops[i], regions[i]
        if last >= 0 and region not in met and region != regions[last]:
            loop[region] = last
        met.add(region)
        if op.name in ("while", "case"):
            last = i
        height = 0
        for v in op.outputs:
            height += v in outputs
            for reader in reversed(readers.get(v, ())):
                while regions[reader] != region and regions[reader] in loop:
                    reader = loop[regions[reader]]
                height = max(height, heights[reader]) + 1
        heights[i] = height
        if _is_view(partitioned, op):
            readers.setdefault(op.inputs[0], []).extend(readers.get(op.outputs[0], ()))
        else:
            for v in dict.fromkeys(op.inputs):
                readers.setdefault(v, []).append(i)
    return heights


def _is_view(partitioned: PartitionedProgram, op: Op) -> bool:
    """Whether the op is gone by then: a reshape, or a reduce of unit dimensions, a slice of everything, or a
    narrowing.
    """
    if op.name == "all_slice":
        return partitioned.specs[op.inputs[0]] == partitioned.specs[op.outputs[0]]
    if op.name == "convert":
        return op.form is None
    if op.name not in ("reshape", "reduce") or len(op.outputs) != 1:
        return False
    before, after = (partitioned.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
    return [n for n in before if n > 1] == [n for n in after if n > 1]


def _regions(graph: Graph) -> list[int]:
    """The loop or branch of each op; an inserted op belongs to that of a neighbour which runs as often."""
    found = [op.form[1] if op.form else None for op in graph.ops]
    for turn in (range(len(found) - 1, -1, -1), range(len(found))):
        near: dict[int, int] = {}
        for i in turn:
            region = found[i]
            if region is None:
                found[i] = near.get(graph.ops[i].trips)
            else:
                near[graph.ops[i].trips] = region
    return [0 if region is None else region for region in found]
