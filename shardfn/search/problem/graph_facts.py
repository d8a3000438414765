"""Facts of a graph that depend on no mesh: trip counts, readers, live ranges, loops, and which ops are equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from shardfn.cost.compute import kernel_runs, op_flops
from shardfn.cost.devices.chips import Chip
from shardfn.cost.memory.live_ranges import LiveBuffer
from shardfn.cost.memory.platforms import live_buffers
from shardfn.cost.platforms import backend_of, fuse
from shardfn.cost.schedule import Schedule, combine_collectives, schedule_ops
from shardfn.ir.model import Graph, Value, dtype_bits, trips_of
from shardfn.ir.op_traits import CONTRACTIONS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.combine_reductions import combined_matmul_counts
from shardfn.partition.loop_reductions import loop_accumulations
from shardfn.partition.platforms import collective_rules
from shardfn.search.problem.kernel_costs import KernelShare, kernel_shares

SLICED = "dynamic_slice"
"""The op that reads one iteration's slice of a stacked array."""


def array_bytes(value: Value) -> float:
    """Bytes of an unsharded array."""
    return float(math.prod(value.shape)) * dtype_bits(value.dtype) / 8


@dataclasses.dataclass(frozen=True)
class LoopCarries:
    """The values that loops carry.

    `results`: for each result of a loop, the value whose sharding it takes. `carries`: (from, to, trips) of each value that
    enters a loop, goes to the next iteration or leaves a branch.
    """

    carried: tuple[int, ...]
    results: Mapping[int, int]
    carries: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class GraphFacts:
    """Facts of a graph that depend on no mesh."""

    trips: tuple[int, ...]
    readers: Mapping[int, int]
    """How many ops read all of a value; readers of a slice reshard the slice."""
    read: Mapping[int, tuple[int, int]]
    """For each value, when its first and its last reader run."""
    kernels: tuple[KernelShare, ...]
    """The kernels of each op."""
    buffers: tuple[LiveBuffer, ...]
    """The buffers of temporaries, and of results that take no donated memory."""
    flops: float
    """Of one call, unsharded; of the ops in a `shard_map` those of all its devices."""
    compute_s: float
    """Seconds of compute of one call, unsharded; of the ops in a `shard_map` those of all its devices."""
    launch_s: float
    """Those of them that the launches of kernels take, which no device is spared."""
    op_flops: tuple[float, ...]
    """Of one run of each op, unsharded."""
    last: frozenset[int]
    """Ops, by index, on which no matmul depends: XLA merges the reductions of their sums."""
    bytes: tuple[float, ...]
    """Of each unsharded value."""
    kinds: tuple[int, ...]
    """A number for each op, equal for ops that cost the same on the same layouts."""
    loops: LoopCarries
    row_major: frozenset[int] = frozenset()
    """Values that a TPU stores row by row, each padded to whole lanes."""
    row_major_copies: frozenset[int] = frozenset()
    """Arguments of which a TPU keeps a copy stored row by row."""
    sums: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """For ops, by index, whose sums are reduced less often than they run, how often (`partition.loop_reductions`)."""
    gathers: Mapping[int, int] | None = None
    """For values that loops only read, how often they are gathered: in each iteration of each loop. None where XLA gathers
    once, before the loop (on CPU)."""
    together: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """For matmuls, by index, that are only added to others, how many: XLA reduces their partial sums as one
    (`partition.combine_reductions`)."""
    leaders: dict[int, int | None] = dataclasses.field(default_factory=dict, compare=False)
    """For ops, by index, the operand that each follows; `label_tables` fills it in once."""

    def even_s(self, devices: int) -> float:
        """Seconds of an even share of the compute: of all but the launches, which no device is spared."""
        return self.launch_s + (self.compute_s - self.launch_s) / devices


def unsharded_program(graph: Graph, platform: str) -> PartitionedProgram:
    """The program with every value unsharded."""
    return PartitionedProgram(graph, tuple(((),) * len(v.shape) for v in graph.values), {}, (), platform)


def facts_of(graph: Graph, chip: Chip, donated: frozenset[int] = frozenset()) -> GraphFacts:
    """The facts of a graph on a chip; `donated` are inputs whose memory results reuse. The ops run in the order of XLA's
    scheduler where it depends on no sharding; elsewhere in program order."""
    platform, rules, backend = chip.platform, collective_rules(chip.platform), backend_of(chip.platform)
    unsharded = unsharded_program(graph, platform)
    order = combine_collectives(unsharded)
    if backend.schedules_breadth_first:
        schedule = schedule_ops(order)
    else:
        schedule = Schedule(order.partitioned, order.groups, order.bodies, fuse(order.partitioned))
    turn = {id(op): n for n, op in enumerate(schedule.partitioned.graph.ops)}
    runs = tuple(turn[id(op)] for op in graph.ops)
    every = kernel_shares(schedule.partitioned, schedule.fusion, chip)
    kernels = tuple(every[n] for n in runs)
    readers: dict[int, int] = {}
    read: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(graph.ops):
        for value in set(op.inputs):
            readers[value] = readers.get(value, 0) + (op.name != SLICED)
            first, last = read.get(value, (runs[index], runs[index]))
            read[value] = min(first, runs[index]), max(last, runs[index])
    temporaries, results = live_buffers(schedule)
    given = [array_bytes(graph.values[v]) for v in donated]
    kept = []
    for buffer in results:
        if buffer.bytes in given:
            given.remove(buffer.bytes)
        else:
            kept.append(buffer)
    trips, last = tuple(trips_of(graph)), _last(graph)
    together = combined_matmul_counts(graph) if rules.combines_reductions else {}
    flops = tuple([op_flops(unsharded, op) for op in graph.ops])
    total = [each * op.trips * op.instances for each, op in zip(flops, graph.ops, strict=True)]
    row_major = backend.row_major_values(graph)
    return GraphFacts(
        trips,
        readers,
        read,
        kernels,
        (*temporaries, *kept),
        sum(total),
        sum(
            run.seconds * run.trips * schedule.partitioned.graph.ops[run.kernel[0]].instances
            for run in kernel_runs(schedule.partitioned, chip, schedule.fusion)
        ),
        chip.launch_s * sum(share.launches * op.trips for share, op in zip(kernels, graph.ops, strict=True)),
        flops,
        last,
        tuple(map(array_bytes, graph.values)),
        _kinds(graph, kernels, last, row_major, together),
        loop_carries(graph, trips),
        row_major,
        backend.row_major_copies(graph),
        _sums(graph) if rules.combines_reductions else {},
        None if rules.hoists_gathers else _gathers(graph, trips),
        together,
    )


def _sums(graph: Graph) -> dict[int, int]:
    return {graph.makers[a.value]: graph.ops[a.loop].trips for a in loop_accumulations(graph)}


def _gathers(graph: Graph, trips: Sequence[int]) -> dict[int, int]:
    rounds: dict[int, dict[object, int]] = {}
    for op in graph.ops:
        for v in op.inputs:
            if op.trips > trips[v]:
                rounds.setdefault(v, {})[op.form and op.form[1]] = op.trips
    return {v: sum(of_loop.values()) for v, of_loop in rounds.items()}


def _kinds(
    graph: Graph,
    kernels: Sequence[KernelShare],
    last: frozenset[int],
    row_major: frozenset[int],
    together: Mapping[int, int],
) -> tuple[int, ...]:
    values, numbers = graph.values, {}
    found = []
    for index, op in enumerate(graph.ops):
        every = (*op.inputs, *op.outputs)
        key = (op.name, id(op.rule), index in last, op.reduced, op.window_dims, op.precision, len(op.inputs),
               kernels[index], together.get(index),
               *((values[v].shape, values[v].dtype, v in row_major) for v in every))  # fmt: skip
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def _last(graph: Graph) -> frozenset[int]:
    leads: set[int] = {a for a, _ in graph.ties}  # a matmul of the next iteration may read it
    found = set()
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        if leads.isdisjoint(op.outputs):
            found.add(index)
        if op.name in CONTRACTIONS or not leads.isdisjoint(op.outputs):
            leads.update(op.inputs)
    return frozenset(found)


def loop_carries(graph: Graph, trips: Sequence[int]) -> LoopCarries:
    """The loops of a graph, by its ties."""
    made = {v for op in graph.ops for v in op.outputs} | set(graph.inputs)
    outputs = {v for op in graph.ops if op.name == "while" for v in op.outputs}
    carried: dict[int, int] = {}
    back: dict[int, int] = {}
    results: dict[int, int] = {}
    carries: list[tuple[int, int, int]] = []
    for a, b in graph.ties:
        if b not in made:  # into the loop
            carried[b] = a
            carries.append((a, b, trips[a]))
        elif a in carried and b not in outputs:  # into the next iteration
            back[b] = a
            carries.append((b, a, trips[a]))
        elif b in outputs:
            results[b] = back.get(a, a)
        else:  # out of a branch
            carries.append((a, b, trips[b]))
    return LoopCarries(tuple(carried), results, tuple(carries))
