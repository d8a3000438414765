"""How XLA's GPU backend assigns buffers: work buffers of library calls, and values of loops that are made apart."""

from __future__ import annotations

import itertools

from shardfn.cost.backends.gpu_library import GPU_LIBRARY
from shardfn.cost.backends.loop_copies import loop_copies
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges


class GpuLiveRanges(LiveRanges):
    """The common rules, and the work buffers of sorts, ragged matmuls and 3D convolutions."""

    def add_own_buffers(self, i: int) -> None:
        """Add what a library call needs beside its operands and results."""
        op = self.graph.ops[i]
        rule = GPU_LIBRARY.get(op.name) if op.name != "reduce" else None
        call = rule(self.partitioned, op, 1.0) if rule else None
        if call and call.work_bytes:
            self.copies.append(LiveBuffer((), 2 * i, self.last_tick(i), int(call.work_bytes)))

    def copied_carries(self) -> dict[int, int]:
        """Nothing is copied at the start of a body; a value that is copied at its end is made apart from the present one."""
        for seen, back, _ in itertools.chain.from_iterable(loop_copies(self.partitioned, self.fusion).values()):
            if back in self.start:
                self.end[seen] = max(self.end.get(seen, 0), self.start[back] + 2)
        return {}
