"""What one op costs under each label of its node: seconds of compute, and the collectives of its partial sums and halos.

Costs are those of one run on one device. The resharding that brings operands into the layouts in which the op reads them is
not among them: `label_tables` charges it between nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from shardfn.cost.compute import rate
from shardfn.cost.platforms import backend_of
from shardfn.ir.model import Graph, Op, ShardingRule, dtype_bits
from shardfn.ir.op_traits import CONTRACTIONS, PARTIAL_READS, UPDATES
from shardfn.search.labels.halo_costs import halo_cost
from shardfn.search.labels.mesh_model import MeshModel, shard_count
from shardfn.search.labels.partial_sum_costs import PartialSums
from shardfn.search.problem import GraphFacts
from shardfn.solver.labelling import Array


@dataclasses.dataclass(frozen=True)
class OpLayouts:
    """An op under each label of its node: arrays [labels, axes], in which -1 is none."""

    work: Array
    """The factor of the op's rule that each axis shards for the work."""
    out: Array
    """The factor that it shards of the result."""
    operands: tuple[Array, ...]
    """For each operand the dimension that it shards, as the op reads it."""
    results: tuple[Array, ...]
    """For each result the dimension that it shards."""


class OpCosts:
    """The costs of the ops of a graph on a mesh."""

    def __init__(self, graph: Graph, mesh: MeshModel, facts: GraphFacts):
        self.graph, self.mesh, self.facts = graph, mesh, facts
        self.sent_parts = _sent_parts(graph, mesh.rules.operands_sent_as)
        self.counts: dict[int, Array] = {}

    def shards(self, layouts: Array) -> Array:
        """`shard_count`, computed once for each array; the array must live as long as this object."""
        found = self.counts.get(id(layouts))
        if found is None:
            found = self.counts[id(layouts)] = shard_count(layouts, self.mesh.sizes)
        return found

    def padding(self, value: int, layouts: Array) -> Array:
        """The growth of an array that is stored row by row, each row padded, for each layout."""
        shape = self.graph.values[value].shape
        if not shape:
            return np.ones(len(layouts))
        columns = shape[-1] / np.where(layouts == len(shape) - 1, self.mesh.sizes, 1).prod(axis=1)
        return backend_of(self.mesh.chip.platform).row_growth(columns, self.facts.bytes[value] / self.shards(layouts))

    def stored_bytes(self, value: int, layouts: Array) -> Array:
        """Bytes of a value in the memory of one device, for each layout."""
        size = self.facts.bytes[value] / self.shards(layouts)
        return size * self.padding(value, layouts) if value in self.facts.row_major else size

    def sent_part(self, value: int) -> float:
        """The part of a value's bytes that gathers and halo exchanges send: half where a matmul's operand is sent as `bf16`."""
        return self.sent_parts.get(value, 1.0)

    def of(self, index: int, rule: ShardingRule, layouts: OpLayouts, is_last: bool) -> Array:
        """Seconds of compute, bytes sent and their seconds of the op `index`: [3, labels].

        `is_last`: whether no matmul waits for it, so that XLA merges the reductions of its sums.
        """
        op = self.graph.ops[index]
        flops = self.facts.op_flops[index] / self.shards(layouts.work)
        kernels, chip = self.facts.kernels[index], self.mesh.chip
        computing_s = kernels.computes * flops / rate(self.graph, op, chip)
        moving_s = self._moved_bytes(index, layouts) / chip.memory_bytes_s
        compute_s = np.maximum(computing_s, moving_s) if op.name in CONTRACTIONS else computing_s + moving_s
        return np.array(
            [compute_s + kernels.launches * chip.launch_s, *self._communication(index, rule, layouts, is_last)]
        )

    def _moved_bytes(self, index: int, layouts: OpLayouts) -> Array:
        """The bytes that an op reads and writes, as far as they count in the kernels it is computed in."""
        op, kernels = self.graph.ops[index], self.facts.kernels[index]
        moved = np.zeros(len(layouts.work))
        for position, (value, layout) in enumerate(zip(op.inputs, layouts.operands, strict=True)):
            if kernels.reads[position]:
                size = self.stored_bytes(value, layout)
                if position == 0 and op.name in PARTIAL_READS:
                    size = np.minimum(size, self.stored_bytes(op.outputs[0], layouts.results[0]))
                elif position == 0 and op.name in UPDATES:
                    size = np.zeros(len(moved))
                moved = moved + kernels.reads[position] * size
        if kernels.is_written and op.name in UPDATES and op.inputs:  # in place: only the update is read and written
            at = UPDATES[op.name]
            moved = moved + 2 * self.stored_bytes(op.inputs[at], layouts.operands[at])
        elif kernels.is_written:
            moved = moved + sum(self.stored_bytes(v, of) for v, of in zip(op.outputs, layouts.results, strict=True))
        return moved

    def _communication(self, index: int, rule: ShardingRule, layouts: OpLayouts, is_last: bool) -> tuple[Array, Array]:
        """Bytes sent and seconds to reduce partial sums and to exchange halos."""
        op, mesh, full = self.graph.ops[index], self.mesh, self.facts.bytes
        work, out = layouts.work, layouts.out
        is_sum = np.isin(work, list(rule.reduction))
        is_scattered = is_sum & (out >= 0)
        partial = [np.where(is_scattered, -1, result) for result in layouts.results]
        sent, sent_s = np.zeros(len(work)), np.zeros(len(work))
        if is_sum.any():
            sums = PartialSums(work, out, is_sum, _reduction_order(op, rule), op.name == "dot_general", is_last)
            for value, before, after in zip(op.outputs, partial, layouts.results, strict=True):
                result = self.graph.values[value]
                scatters = mesh.scatters_to(result.shape, dtype_bits(result.dtype), after, is_scattered)
                parts = sums.cost(full[value] / shard_count(before, mesh.sizes), scatters, mesh)
                sent, sent_s = sent + parts[0], sent_s + parts[1]
            together = self.facts.together.get(index, 1)
            sent, sent_s = sent / together, sent_s / together
        if op.window_dims:
            operands = zip(op.inputs, layouts.operands, strict=True)
            local = [self.sent_part(v) * full[v] / self.shards(layout) for v, layout in operands]
            parts = halo_cost(op, self.graph, layouts.operands, partial, local, mesh)
            sent, sent_s = sent + parts[0], sent_s + parts[1]
        return sent, sent_s


def _reduction_order(op: Op, rule: ShardingRule) -> list[int]:
    """The factors that an op sums over, in the order in which the partitioner reduces them."""
    found = [f for dim in rule.operands[op.name == "scatter"] for f in dim if f in rule.reduction]
    return found if op.name == "convolution" else found[::-1]


def _sent_parts(graph: Graph, sent_as: Mapping[str, str]) -> dict[int, float]:
    """By value that matmuls of default precision read: bits of the dtype in which it is sent to them over those of its own."""
    read = {v for op in graph.ops if sent_as and op.name in CONTRACTIONS and not op.precision for v in op.inputs}
    dtypes = {v: dtype for v in read if (dtype := graph.values[v].dtype) in sent_as}
    return {v: dtype_bits(sent_as[dtype]) / dtype_bits(dtype) for v, dtype in dtypes.items()}
