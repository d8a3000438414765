"""How XLA's GPU backend assigns buffers: work buffers of library calls."""

from __future__ import annotations

from shardfn.cost.backends.gpu_library import GPU_LIBRARY
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges


class GpuLiveRanges(LiveRanges):
    """The common rules, and the work buffers of sorts, ragged matmuls and 3D convolutions."""

    def add_own_buffers(self, i: int) -> None:
        """Add what a library call needs beside its operands and results."""
        op = self.graph.ops[i]
        rule = GPU_LIBRARY.get(op.name)
        call = rule(self.partitioned, op, 1.0) if rule else None
        if call and call.work_bytes:
            self.copies.append(LiveBuffer((), 2 * i, self.last_tick(i), int(call.work_bytes)))
