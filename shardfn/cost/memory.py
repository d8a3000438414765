"""Memory of one device: arguments and results exactly, temporaries estimated from live ranges."""

from __future__ import annotations

import dataclasses

from shardfn.graph.model import Flow


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. `temporaries` is the peak of what is alive between ops if nothing is fused."""

    arguments: int
    results: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Everything at once: arguments, results and the temporaries' peak."""
        return self.arguments + self.results + self.temporaries


def memory(flow: Flow) -> Memory:
    """Memory of one call on one device.

    A value is alive from the op that makes it to the last that reads it. What XLA fuses never takes memory, so the
    compiled program usually needs less; what it pads or copies is not counted.
    """
    graph = flow.graph
    last: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        for value in (*op.inputs, *op.outputs):
            last[value] = i
    held = set(graph.inputs) | set(graph.outputs)
    sizes: dict[int, int] = {}
    alive = peak = 0
    dying: dict[int, list[int]] = {}
    for value, i in last.items():
        dying.setdefault(i, []).append(value)
    for i, op in enumerate(graph.ops):
        for value in op.outputs:
            # A loop's results take the place of what it carries.
            if value not in held and value not in sizes and op.name not in ("while", "broadcast_in_dim"):
                sizes[value] = flow.local_bytes(value)
                alive += sizes[value]
        peak = max(peak, alive)
        for value in dying.get(i, ()):
            alive -= sizes.pop(value, 0)
    return Memory(sum(flow.local_bytes(v) for v in graph.inputs), sum(flow.local_bytes(v) for v in graph.outputs), peak)
