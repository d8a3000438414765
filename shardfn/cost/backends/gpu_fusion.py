"""Fusion in XLA's GPU backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from shardfn.cost.backends.scatter_fusion import ScatterFuser
from shardfn.cost.fusion_walk import READERS
from shardfn.ir.model import Op
from shardfn.ir.op_traits import VIEWS
from shardfn.ir.partitioned import PartitionedProgram

DEPTH = 2
"""Levels of a tree of strided slices and pads, as of an associative scan, that XLA computes again in one kernel (JAX 0.11.2)."""


class GpuFuser(ScatterFuser):
    """Fuses one graph as on a GPU."""

    duplicates_into_scatters = False

    def __init__(self, partitioned: PartitionedProgram):
        super().__init__(partitioned)
        self.must_store |= self.tree_levels()

    def tree_levels(self) -> frozenset[int]:
        """Values in a tree of strided slices and interior pads that are stored: those that are computed through `DEPTH` levels of
        it, and that a further level reads."""
        ops, found = self.graph.ops, set[int]()
        moved = [i for i in self.alive if ops[i].name in _TREE]
        strided = {i for i in moved if any(w.stride > 1 or w.spacing > 1 for w in ops[i].window_dims)}
        depth: dict[int, int] = {}
        for i in sorted(self.alive) if strided else ():
            op = ops[i]
            if len(op.outputs) != 1 or op.name not in READERS | VIEWS:
                continue
            (v,) = op.outputs
            depth[v] = max((depth.get(operand, 0) for operand in op.inputs), default=0) + (i in strided)
            if depth[v] >= DEPTH and not strided.isdisjoint(self.readers.get(v, ())):
                found.add(v)
                depth[v] = 0
        return frozenset(found)

    @functools.cached_property
    def folded(self) -> frozenset[int]:
        """Transposes of matrices that matmuls alone read: XLA lets these read the matrix in its other order."""
        ops = self.graph.ops
        found = (i for i in self.alive if ops[i].name == "transpose" and ops[i].outputs[0] not in self.must_store)
        return frozenset(i for i in found if self.is_folded(ops[i]))

    def is_folded(self, op: Op) -> bool:
        """Whether a transpose swaps the last two dims, which no matmul that reads them has as a batch, and nothing else reads."""
        (value,), rule = op.outputs, op.rule
        readers = [self.graph.ops[r] for r in self.readers.get(value, ())]
        if rule is None or not readers or any(r.name != "dot_general" or r.rule is None for r in readers):
            return False
        order = tuple(map(rule.operands[0].index, rule.results[0]))
        rank = len(order)
        if rank < 2 or order != (*range(rank - 2), rank - 1, rank - 2):
            return False
        roles = (r.rule.matmul_roles(side) for r in readers for side in (0, 1) if r.rule and r.inputs[side] == value)
        return all(0 not in of[-2:] for of in roles)

    def fusion_roots(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in` for an op with one result, whose `readers` are computed in the fusions of `roots`."""
        if op.name == "transpose" and self.graph.makers[op.outputs[0]] in self.folded:
            return roots
        return super().fusion_roots(op, readers, roots)

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache. A reduction computes its operand, whatever the dims, and the gradient of a pooling its
        padded array."""
        op = self.graph.ops[i]
        if op.name == "select_and_scatter":
            return True
        if op.name == "reduce":
            return True
        if i in self.folded:  # as the matmuls do
            return False
        return super().can_run_with(i)


_TREE = ("slice", "pad")
