"""Fusion in XLA's GPU backend."""

from __future__ import annotations

from shardfn.cost.backends.scatter_fusion import ScatterFuser
from shardfn.cost.fusion_walk import READERS
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

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache. A reduction over any dims computes an operand that is made of fewer bytes, and the
        gradient of a pooling its padded array."""
        op = self.graph.ops[i]
        if op.name == "select_and_scatter":
            return True
        if op.name == "reduce" and op.inputs[0] in self.sources:
            size = self.partitioned.local_bytes
            if sum(map(size, self.sources[op.inputs[0]])) < size(op.inputs[0]):
                return True
        return super().can_run_with(i)


_TREE = ("slice", "pad")
