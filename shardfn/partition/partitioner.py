"""XLA's SPMD partitioner, emulated: a sharded program in, the program with its collectives out.

Shardy shards every value. The partitioner then works op by op (`op_rules`) and reshards each operand to what the op
needs (`resharding`). Equal reshards of one value are one, and what a loop does not change is resharded before it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

from shardfn.ir.model import Graph, Op, ShardingRule, Spec, Value, WindowDim, axes_of, dtype_bits, trips_of
from shardfn.ir.op_traits import CONTRACTIONS, RESHARDING_OPS, TOKEN_OPS
from shardfn.ir.partitioned import Communication, Detour, PartitionedProgram
from shardfn.partition.collective_matmul import alone_in_matmuls, is_square_of_four
from shardfn.partition.combine_reductions import scatter_into_addend
from shardfn.partition.counting_indices import with_counted_rows
from shardfn.partition.dead_carries import without_dead_carries
from shardfn.partition.op_rules import rule_for
from shardfn.partition.partition_cache import PartitionCache, PartitionedMesh
from shardfn.partition.platforms import collective_rules
from shardfn.partition.rebuild import ProgramBuilder, before_loops, live_ops, loop_conditions
from shardfn.partition.resharding import (
    emitted_steps,
    gathered_between,
    resharding_steps,
    steps_without_alltoall,
)
from shardfn.partition.sharded_op import GatheredWindow, HaloExchange, OpPartitioning, Reshard, ShardedOp, replicated
from shardfn.partition.simplify import simplify
from shardfn.partition.tile_assignment import ReshardingStep


def insert_collectives(
    partitioned: PartitionedProgram,
    platform: str,
    torus: tuple[int, ...] = (),
    known: PartitionCache | None = None,
    alltoall: bool = True,
    collective_matmul_rows: float = 0.0,
) -> PartitionedProgram:
    """The program as XLA runs it on `platform`, with its collectives.

    Args:
      partitioned: the shardings of all values after propagation. Collectives that the user wrote in a `shard_map` stay.
        A program that was here before is returned as it is.
      platform: `cpu`, `cuda`, `rocm` or `tpu`. XLA on CPU emits an all-reduce and a slice instead of a reduce-scatter,
        and reduces `bf16` as `f32`. On TPU, a matmul operand is gathered as `bf16`, in which a matmul of default
        precision reads it.
      torus: dimensions of the TPU torus.
      known: what other shardings of the same function taught; this program adds to it.
      alltoall: whether XLA may reshard by all-to-all. Without, arrays are gathered and sliced (`Detour`).
      collective_matmul_rows: from how many rows per byte on it makes collective matmuls (`collective_matmul`); 0 for none.
    """
    if partitioned.platform:
        return partitioned
    graph = without_dead_carries(partitioned.graph)
    if graph is not partitioned.graph:
        partitioned = dataclasses.replace(partitioned, graph=graph)
    mesh = (known or PartitionCache()).of(partitioned, platform)
    return _Partitioner(partitioned, platform, torus, mesh, alltoall, collective_matmul_rows).partition()


class _Partitioner(ProgramBuilder):
    """Walks one program once; its lists fill on the way. Inside, mesh axes are split into prime factors."""

    def __init__(
        self,
        partitioned: PartitionedProgram,
        platform: str,
        torus: tuple[int, ...],
        mesh: PartitionedMesh,
        alltoall: bool,
        collective_matmul_rows: float,
    ):
        super().__init__(partitioned)
        self.platform, self.torus, self.rules = platform, torus, collective_rules(platform)
        self.mesh, self.sizes = mesh, mesh.sizes
        graph = partitioned.graph
        self.specs = list(map(mesh.in_parts, partitioned.specs))
        self.sent: list[Communication] = []
        self.alltoall, self.collective_matmul_rows = alltoall, collective_matmul_rows
        self.detours: list[Detour] = []
        self.operand = -1  # the operand that is resharded
        self.gathered_partials: set[int] = set()  # partial results, which are gathered together though only one is read
        self.on_one_device: dict[int, int] = {}  # results of host callbacks, by the value that all devices get
        self.resharded: dict[tuple[object, ...], int] = {}
        self.halo_parts: dict[object, int] = {}
        broadcasts = (op for op in graph.ops if op.name == "broadcast_in_dim")
        self.filled = {op.outputs[0] for op in broadcasts if not self.values[op.inputs[0]].shape}
        self.is_read = False  # whether the value that is resharded is an operand
        self.trips = trips_of(graph)

    def partition(self) -> PartitionedProgram:
        own = {c.result: c for c in self.given.communications}
        is_sharded = list(map(any, self.specs)).__getitem__
        graph = with_counted_rows(self.given.graph, self.platform)
        ops = [_rotation(graph, op) if op.name == "concatenate" else op for op in graph.ops]
        if self.rules.combines_reductions:
            ops = scatter_into_addend(ops, self.filled, graph.outputs)
        for op in _needed(graph, ops):
            if own:
                self.sent += [own[v] for v in op.outputs if v in own]
            if op.name in ("while", "case"):
                self.reshard_carries(op)
            elif op.name in _HOST_CALLBACKS and len(self.sizes) > 0:
                self.call_back(op)
            elif op.name in _NOT_RESHARDED or not (any(map(is_sharded, op.inputs)) or any(map(is_sharded, op.outputs))):
                self.ops.append(op)
            else:
                self.visit(op)
            if op.name == "reshard" and op.inputs[0] in self.on_one_device:
                self.on_one_device[op.outputs[0]] = self.on_one_device[op.inputs[0]]
        specs = tuple(map(self.mesh.joined, self.specs))
        graph = dataclasses.replace(graph, values=tuple(self.values), ops=tuple(before_loops(self.ops, self.trips)))
        needed = {v for op in _needed(graph, graph.ops) if op.name in RESHARDING_OPS for v in op.outputs}
        kept = needed | own.keys() | self.gathered_partials
        sent = tuple(
            dataclasses.replace(c, axes=self.mesh.join(c.axes))
            for c in alone_in_matmuls(graph, self.sent)
            if c.result in kept
        )
        found = simplify(
            PartitionedProgram(graph, specs, self.given.axes, sent, self.platform, detours=tuple(self.detours))
        )
        return self.rules.passes(found, self.torus)

    def reshard_carries(self, op: Op) -> None:
        """Reshard what enters a loop, comes back from its body or leaves a branch, to the shardings of the results."""
        first = 1 if op.name == "case" else 0  # what decides between the branches
        resharded = []
        for self.operand, v in enumerate(op.inputs[first:]):
            to = Reshard(self.specs[op.outputs[self.operand % len(op.outputs)]])
            resharded.append(self.reshard(v, to, op, self.trips[v]))
        self.operand = -1
        self.ops.append(dataclasses.replace(op, inputs=(*op.inputs[:first], *resharded)))

    def call_back(self, op: Op) -> None:
        """A host callback runs on one device: its operands are gathered, and its results all-reduced from there for all
        readers but other callbacks."""
        there = self.on_one_device
        every = (Reshard(replicated(self.values[v])) for v in op.inputs)
        inputs = tuple(
            there[v] if v in there else self.reshard(v, to, op) for v, to in zip(op.inputs, every, strict=True)
        )
        outputs = tuple(self.make(self.values[v], replicated(self.values[v]), op.trips) for v in op.outputs)
        self.ops.append(op.of(inputs, outputs))
        for made, v in zip(outputs, op.outputs, strict=True):
            there[v] = made
            is_wanted = self.specs[v] == self.specs[made]
            step = ReshardingStep("all-reduce", tuple(self.sizes), self.specs[made])
            everywhere = self.send(step, made, op, into=v if is_wanted else None)
            if not is_wanted:
                self.reshard(everywhere, Reshard(self.specs[v]), op, into=v)

    def visit(self, op: Op) -> None:
        found, is_local = self.partitioning_of(op)
        if not op.where:  # a reshard of a result has no line of its own
            makers = filter(None, map(self.given.graph.maker, op.inputs))
            op = dataclasses.replace(op, where=next((maker.where for maker in makers if maker.where), ""))
        if is_local:
            self.ops.append(op)
            return
        inputs = []
        self.is_read = True
        paths = found.operand_paths or ((),) * len(op.inputs)
        for self.operand, (v, spec, path) in enumerate(zip(op.inputs, found.operand_specs, paths, strict=True)):
            for reshard in path or (Reshard(spec),):
                v = self.reshard(v, reshard, op)
            inputs.append(v)
        arrived = [v for halo in found.halos for v in self.exchange_halo(inputs[halo.operand], halo, op)]
        self.is_read, self.operand = False, -1
        for window in found.gathered_windows:
            inputs[window.operand] = self.slice_window(inputs[window.operand], window, op)
        for i in found.reversed_operands:
            inputs[i] = self.send(ReshardingStep("collective-permute", (), self.specs[inputs[i]]), inputs[i], op)
        ready = not found.gathered_axes and not found.result_path
        outputs = tuple(
            v if ready and spec == self.specs[v] else self.make(self.values[v], spec, op.trips)
            for v, spec in zip(op.outputs, found.result_specs, strict=True)
        )
        self.ops.append(op.of((*inputs, *arrived), outputs))
        for made, v in zip(outputs, op.outputs, strict=True):
            if made == v:
                continue
            if found.gathered_axes:
                made = self.send(ReshardingStep("all-gather", found.gathered_axes, self.specs[made]), made, op)
                self.gathered_partials.add(self.sent[-1].result)
            made = self.follow_result_path(made, found.result_path, op)
            self.reshard(made, Reshard(self.specs[v]), op, into=v)

    def follow_result_path(self, made: int, result_path: Sequence[Reshard], op: Op) -> int:
        """Carry a result through all but the last sharding of its path, with the reductions on the way."""
        for i, reshard in enumerate(result_path):
            if reshard.reduced:
                after = (other.to for other in result_path[i:] if not other.reduced or other is reshard)
                want = next((to for to in after if to != self.specs[made]), reshard.to)
                made = self.reduce_partial_sums(
                    made, want, reshard, reshard is result_path[-1] or not result_path[i + 1].reduced, op
                )
            if reshard is not result_path[-1]:
                made = self.reshard(made, reshard, op)
        return made

    def partitioning_of(self, op: Op) -> tuple[OpPartitioning, bool]:
        """The partitioning of an op, and whether it needs no collective."""
        every, known = (*op.inputs, *op.outputs), self.mesh.partitionings
        specs, values = [self.specs[v] for v in every], [self.values[v] for v in every]
        key = op.name, op.combines, op.window_dims, op.convolution, id(op.rule), *map(id, specs), *map(id, values)
        found = known.get(key)
        if found is None:
            n, inside, outside = len(op.inputs), tuple(specs), tuple(values)
            if op.rule is None:  # XLA has no rule to shard it
                every_spec = tuple(map(replicated, values))
                made = OpPartitioning(every_spec[:n], every_spec[n:])
            else:
                sharded = ShardedOp(op, op.rule, outside[:n], outside[n:], inside[:n], inside[n:], self.sizes)
                made = rule_for(op.name, self.platform)(sharded)
            is_local = made == OpPartitioning(inside[:n], inside[n:])
            found = known[key] = made, is_local, (op.rule, inside, outside)
        return found[:2]

    def make(self, value: Value, spec: Spec, trips: int) -> int:
        """Add a value that is computed `trips` times in one call."""
        self.trips.append(trips)
        return self.new(value, spec)

    def reshard(self, value: int, how: Reshard, op: Op, trips: int | None = None, into: int | None = None) -> int:
        """Reshard a value for an op, once: a second request for the same sharding within the same groups gets the first result.

        A value that a loop does not change is resharded before it; where the backend leaves gathers in loops (`hoists_gathers`),
        an all-gather runs in each iteration.
        """
        before, first = self.specs[value], value
        if into is None and before == how.to:
            return value
        steps = resharding_steps if self.alltoall else steps_without_alltoall
        path = steps(before, how.to, self.sizes, how.group_axes) or (ReshardingStep("", (), how.to),)
        if value in self.filled:  # every device has what it needs
            path = (ReshardingStep("", (), how.to),)
        elif not self.alltoall and path != resharding_steps(before, how.to, self.sizes, how.group_axes):
            self.note_detour(value, how.to, op)
        trips = op.trips if trips is None else trips
        once = min(trips, self.trips[value])
        stays = once < trips and not self.rules.hoists_gathers and any(step.kind == "all-gather" for step in path)
        key = (how.to, how.group_axes, op.form and op.form[1] if stays else None)
        if into is None and (value, *key) in self.resharded:
            return self.resharded[value, *key]
        specs, shape = (before, *(step.after for step in path)), self.values[value].shape
        path = [
            part for now, step in zip(specs, path, strict=False) for part in emitted_steps(step, now, shape, self.sizes)
        ]
        for step in path:
            last = into if step is path[-1] else None
            once = trips if stays and step.kind == "all-gather" else once
            permutes = self.matmul_permutes(step, how) if step.kind == "all-gather" else 0
            value = self.send(step, value, op, once, last, permutes)
        self.resharded[first, *key] = value
        self.resharded.setdefault((value, before, *key[1:]), first)
        return value

    def note_detour(self, value: int, after: Spec, op: Op) -> None:
        graph, before = self.given.graph, self.specs[value]
        path = before, gathered_between(before, after), after
        made = maker.site if (maker := graph.maker(value)) else -1
        argument = graph.inputs.index(value) if value in graph.inputs else -1
        self.detours.append(Detour(tuple(map(self.mesh.joined, path)), op.site, self.operand, made, argument, op.where))

    def send(
        self,
        step: ReshardingStep,
        value: int,
        op: Op,
        trips: int | None = None,
        into: int | None = None,
        matmul_permutes: int = 0,
    ) -> int:
        """Emit the collective of a step for an op, or a slice if the step has none, from `value` to a new value or `into`."""
        kind, after = step.kind, step.after
        was = made = self.values[value]
        trips, where = op.trips if trips is None else trips, op.where
        travels, is_converted = self.sent_dtype(kind, was.dtype, op)
        if kind == "all-to-all":  # the shards are padded before the all-to-all
            shards = [self.shards(axes) for axes in after]
            shape = tuple(-(-n // p) * p for n, p in zip(was.shape, shards, strict=True))
            value = self.as_form(value, Value(shape, travels), op)
        elif kind:
            value = self.as_form(value, Value(was.shape, travels), op)
            if kind == "all-reduce" and self.specs[value] != after:  # each device writes its shard into zeros
                zeros = self.make(self.values[value], after, self.trips[value])
                self.ops.append(Op("pad", (value,), (zeros,), None, self.trips[value], op.where, form=_place(op)))
                value = zeros
            if travels != was.dtype and not is_converted:
                made = Value(was.shape, travels)
        result = self.make(made, after, trips) if into is None else into
        arrived = result
        if kind and is_converted:
            arrived = self.make(Value(was.shape, travels), after, trips)
        form = _place(op)
        self.ops.append(Op(kind.replace("-", "_") or "all_slice", (value,), (arrived,), None, trips, where, form=form))
        if kind:
            size = 2 if kind == "collective-permute" else self.shards(step.axes)
            self.sent.append(
                Communication(
                    kind, step.axes, size, value, arrived, trips, where, op.name, step.is_last_resort, matmul_permutes
                )
            )
        if arrived != result:
            self.ops.append(Op("convert", (arrived,), (result,), None, trips, where, form=form))
        return result

    def sent_dtype(self, kind: str, dtype: str, op: Op) -> tuple[str, bool]:
        """The dtype in which a collective for an op sends a value, and whether what arrives is converted back."""
        is_operand = self.is_read and op.name in CONTRACTIONS and not op.precision
        if is_operand and kind in ("all-gather", "collective-permute") and dtype in self.rules.operands_sent_as:
            return self.rules.operands_sent_as[dtype], False
        return self.rules.sent_as.get(dtype, dtype), dtype in self.rules.sent_as

    def as_form(self, value: int, form: Value, op: Op) -> int:
        """The value in another shape or dtype for an op, with the same sharding: itself, or converted, or padded."""
        was = self.values[value]
        if form == was:
            return value
        made = self.make(form, self.specs[value], self.trips[value])
        name = "convert" if form.shape == was.shape else "pad"
        self.ops.append(Op(name, (value,), (made,), None, self.trips[value], op.where, form=_place(op)))
        return made

    def shards(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def matmul_permutes(self, step: ReshardingStep, how: Reshard) -> int:
        """`Communication.matmul_permutes` of a step before or after a matmul."""
        if not 0 < self.collective_matmul_rows <= how.rows_per_byte:
            return 0
        is_square = is_square_of_four(step.axes, self.sizes, self.torus)
        return self.rules.matmul_permutes(step.kind, self.shards(step.axes), is_square)

    def reduce_partial_sums(self, partial: int, want: Spec, how: Reshard, last: bool, op: Op) -> int:
        """Reduce partial sums: reduce-scatter where only shards are needed and the platform has it, else all-reduce."""
        have, axes = self.specs[partial], how.reduced
        nested = all(w[: len(h)] == h for h, w in zip(have, want, strict=True))
        shards = {a for h, w in zip(have, want, strict=True) for a in w[len(h) :]}
        if last and nested and shards == set(axes):
            scatter = ReshardingStep("reduce-scatter", axes, want)
            permutes = self.matmul_permutes(scatter, how)
            order = self.transposed_dims.get(op.outputs[0], ())
            if permutes or self.makes_reduce_scatter(partial, want, order):
                return self.send(scatter, partial, op, matmul_permutes=permutes)
        return self.send(ReshardingStep("all-reduce", axes, have), partial, op)

    def makes_reduce_scatter(self, partial: int, want: Spec, dims_order: Sequence[int]) -> bool:
        """Whether the platform emits a reduce-scatter from the partial sum to `want`.

        `dims_order` is the dimension order of a transpose that is the only reader; empty without one.
        """
        value = self.values[partial]
        shard = [-(-n // self.shards(axes)) for n, axes in zip(value.shape, want, strict=True)]
        order = tuple(dims_order) or tuple(range(len(shard)))
        dims = [at for at, d in enumerate(order) if self.specs[partial][d] != want[d]]
        added = self.shards(axes_of(want)) // self.shards(axes_of(self.specs[partial]))
        spans_torus = added == math.prod(self.sizes.values())
        shape = tuple(shard[d] for d in order)
        return self.rules.scatters(shape, dims, dtype_bits(value.dtype), spans_torus, self.torus)

    @functools.cached_property
    def transposed_dims(self) -> dict[int, tuple[int, ...]]:
        """By value that only a transpose reads: the dimension order of that transpose."""
        count = collections.Counter(v for op in self.given.graph.ops for v in op.inputs)
        transposes = [
            op for op in self.given.graph.ops if op.name == "transpose" and op.rule and count[op.inputs[0]] == 1
        ]
        rules = {op.inputs[0]: op.rule for op in transposes if op.rule}
        return {v: tuple(map(rule.operands[0].index, rule.results[0])) for v, rule in rules.items()}

    def slice_window(self, value: int, window: GatheredWindow, op: Op) -> int:
        """The part of a gathered operand that each device reads."""
        shape, spec = list(self.values[value].shape), list(self.specs[value])
        shape[window.dim], spec[window.dim] = window.rows * self.shards(window.axes), window.axes
        part = self.make(Value(tuple(shape), self.values[value].dtype), tuple(spec), op.trips)
        self.ops.append(Op("pad", (value,), (part,), None, op.trips, op.where, form=_place(op)))
        return part

    def exchange_halo(self, value: int, halo: HaloExchange, op: Op) -> list[int]:
        """Emit a halo exchange along one sharded dimension; returns the values that arrive."""
        spec = self.specs[value]
        shards = [self.shards(axes) for axes in spec]
        local = [-(-n // p) for n, p in zip(self.values[value].shape, shards, strict=True)]
        for dim, size in halo.sizes:
            local[dim] = size
        own, found = local[halo.dim], []
        for fetch in halo.halo_permutes:
            local[halo.dim] = fetch.end - fetch.start
            shape = tuple(n * p for n, p in zip(local, shards, strict=True))
            key = value, halo.dim, fetch, halo.sizes
            part = self.halo_parts.get(key, value)
            if part == value and (local[halo.dim] != own or halo.sizes):
                part = self.halo_parts[key] = self.make(Value(shape, self.values[value].dtype), spec, op.trips)
                self.ops.append(Op("slice", (value,), (part,), None, op.trips, op.where, form=_place(op)))
            again = key, op.name, op.trips
            if not self.rules.sends_halo_rows_once or again not in self.halo_parts:
                self.halo_parts[again] = self.send(ReshardingStep("collective-permute", spec[halo.dim], spec), part, op)
            found.append(self.halo_parts[again])
        return found


def _place(op: Op) -> tuple[int, int] | None:
    """`Op.form` of an op that is inserted for another: the same loop or branch, and equal to no other op."""
    return op.form and (-1, op.form[1])


def _needed(graph: Graph, ops: Sequence[Op]) -> list[Op]:
    """The ops that the results depend on; XLA drops the others."""
    return live_ops(ops, {*graph.outputs, *loop_conditions(graph, ops)}, lambda op: not op.outputs)


def _rotation(graph: Graph, op: Op) -> Op:
    """A `concatenate` of two slices that make a rotation (`jnp.roll`) as one op, as XLA does; another one as it is."""
    end, start = (graph.maker(v, "slice") for v in op.inputs) if len(op.inputs) == 2 else (None, None)
    if end is None or start is None or end.inputs != start.inputs:
        return op
    shape, one, two = (graph.values[v].shape for v in (end.inputs[0], end.outputs[0], start.outputs[0]))
    dims = [d for d, n in enumerate(shape) if not one[d] == two[d] == n]
    if len(dims) != 1 or any(window.stride != 1 for window in (*end.window_dims, *start.window_dims)):
        return op
    (d,) = dims
    low = end.window_dims[d].low
    if start.window_dims[d].low != 0 or low != two[d] or one[d] + two[d] != shape[d]:
        return op
    window = WindowDim(0, d, d, low=low)
    return dataclasses.replace(op, name="rotate", inputs=end.inputs, rule=_rotation_rule(shape), window_dims=(window,))


@functools.lru_cache(1 << 10)
def _rotation_rule(shape: tuple[int, ...]) -> ShardingRule:
    every = tuple((d,) for d in range(len(shape)))
    return ShardingRule((every,), (every,), shape)


_HOST_CALLBACKS = frozenset(
    f"custom_call xla_{ffi}python_{platform}_callback" for ffi in ("", "ffi_") for platform in ("cpu", "gpu")
)
"""What JAX lowers callbacks into Python to; XLA gives them the sharding `{maximal device=0}`."""

_NOT_RESHARDED = TOKEN_OPS | {"iota", "shard_map"}
"""Ops whose operands are never resharded."""
