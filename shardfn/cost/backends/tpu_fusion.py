"""Fusion in XLA's TPU backend: matmuls, reductions and scatters fuse their operands, and a matmul fuses into its only
elementwise reader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardfn.cost.backends.scatter_fusion import ScatterFuser
from shardfn.ir.model import Op
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE

_READ_INSIDE = CONTRACTIONS | {"reduce"}
_WRITES_NARROW = ELEMENTWISE | CONTRACTIONS


class TpuFuser(ScatterFuser):
    """Fuses one graph as on a TPU."""

    def fusion_roots(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in` for an op with one result, whose `readers` are computed in the fusions of `roots`."""
        if op.name in CONTRACTIONS:
            return roots if len(roots) == 1 and self.can_finish(self.graph.ops[roots[0]]) else None
        return super().fusion_roots(op, readers, roots)

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache."""
        return self.graph.ops[i].name in _READ_INSIDE or super().can_run_with(i)

    def can_finish(self, op: Op) -> bool:
        """Whether a matmul can be fused into this op, which must be elementwise and have one result."""
        return op.name in ELEMENTWISE and len(op.outputs) == 1

    def narrowed(self, stored: Collection[int]) -> frozenset[int]:
        """Values that matmuls read, and nothing else but reductions, which run with the op that computes the value."""
        found = set()
        for i in self.alive:
            op = self.graph.ops[i]
            if op.name not in _WRITES_NARROW or op.outputs[0] not in stored or op.outputs[0] in self.must_store:
                continue
            if self.graph.values[op.outputs[0]].dtype == "f32":
                names = self.final_readers(op.outputs[0])
                if names & CONTRACTIONS and names <= CONTRACTIONS | {"reduce"}:
                    found.add(op.outputs[0])
        return frozenset(found) | self.narrow_stacks()

    def narrow_stacks(self) -> set[int]:
        """Arrays that a loop stacks for matmuls after it: the value before, in and after the loop."""
        makers = {v: self.graph.ops[i].name for i in self.alive for v in self.graph.ops[i].outputs}
        found: set[int] = set()
        for i in self.alive:
            for start, seen, back, result in self.graph.ops[i].carries:
                stacks = makers.get(back) == "dynamic_update_slice" and makers.get(start) == "broadcast_in_dim"
                if not stacks or self.graph.values[result].dtype != "f32" or result in self.must_store:
                    continue
                names = self.final_readers(result, ("dynamic_slice",))
                if names and names <= CONTRACTIONS:
                    found.update((start, seen, back, result))
        return found

    def final_readers(self, value: int, also: Collection[str] = ()) -> set[str]:
        """Names of the ops that read a value, also through views, transposes and ops of the kinds `also`."""
        names: set[str] = set()
        for r in self.readers.get(value, ()):
            op = self.graph.ops[r]
            passes = (self.partitioned.is_view(op) or op.name in ("transpose", *also)) and op.outputs[
                0
            ] not in self.must_store
            names |= self.final_readers(op.outputs[0], also) if passes else {op.name}
        return names
