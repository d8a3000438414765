"""Fusion into scatters, which compute their indices and updates themselves on GPUs and TPUs."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.cost.fusion_walk import Fuser
from shardfn.ir.model import Op


class ScatterFuser(Fuser):
    """Fuses one graph, also into scatters. An op that makes or reads the array that the scatter writes over stays outside.

    Seen in programs compiled by JAX 0.10.2 for H100 and by libtpu 0.0.42.
    """

    duplicates_into_scatters = True
    """Whether an op with other readers too is also computed inside a scatter. Ops that read nothing large always are."""

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache."""
        return self.graph.ops[i].name == "scatter" or super().can_run_with(i)

    def fusion_roots(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in` for an op with one result, whose `readers` are computed in the fusions of `roots`."""
        written = [self.written_over(root) for root in roots if self.graph.ops[root].name == "scatter"]
        if written and not self.partitioned.is_view(op):
            is_shared = (
                not self.duplicates_into_scatters and len(roots) > 1 and bool(self.sources.get(op.outputs[0], True))
            )
            if is_shared or any(not over.isdisjoint((*op.inputs, *op.outputs)) for over in written):
                return None
        return super().fusion_roots(op, readers, roots)

    def written_over(self, scatter: int) -> frozenset[int]:
        """The array that a scatter writes over, and what it is a view of."""
        found = [self.graph.ops[scatter].inputs[0]]
        while (at := self.graph.makers.get(found[-1], -1)) >= 0 and self.partitioned.is_view(self.graph.ops[at]):
            found.append(self.graph.ops[at].inputs[0])
        return frozenset(found)
