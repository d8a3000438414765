"""Fusion in XLA's GPU backend."""

from shardfn.cost.backends.scatter_fusion import ScatterFuser


class GpuFuser(ScatterFuser):
    """Fuses one graph as on a GPU."""

    duplicates_into_scatters = False

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache. A reduction over any dims computes an operand that is made of smaller arrays alone."""
        op = self.graph.ops[i]
        is_made = op.name == "reduce" and op.inputs[0] in self.sources and not self.sources[op.inputs[0]]
        return is_made or super().can_run_with(i)
