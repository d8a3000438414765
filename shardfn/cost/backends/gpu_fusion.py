"""Fusion in XLA's GPU backend."""

from shardfn.cost.backends.scatter_fusion import ScatterFuser


class GpuFuser(ScatterFuser):
    """Fuses one graph as on a GPU."""

    duplicates_into_scatters = False

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache. A reduction over any dims computes an operand that is made of fewer bytes."""
        op = self.graph.ops[i]
        if op.name == "reduce" and op.inputs[0] in self.sources:
            size = self.partitioned.local_bytes
            if sum(map(size, self.sources[op.inputs[0]])) < size(op.inputs[0]):
                return True
        return super().can_run_with(i)
