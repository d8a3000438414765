"""What the cost model does not know of a program and its layouts: said in the plan, never silently zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.trace import Traced
from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Axes, Graph, PartitionedProgram
from shardfn.ir.op_traits import HAS_OWN_RULE


def of_program(traced: Traced, hardware: Hardware, inputs: Sequence[Leaf], axes: Axes) -> list[str]:
    """What there is to say of the function whatever the layouts."""
    graph, found = traced.graph, []
    if graph.unruled:
        found.append(f"no sharding rule for: {', '.join(graph.unruled)}; XLA decides there, its cost is not predicted")
    if graph.uncounted:
        found.append(f"loops of unknown length, counted once: {', '.join(graph.uncounted)}")
    if traced.platform not in ("", hardware.platform):
        found.append(
            f"it calls back into Python, which cannot be lowered for {hardware.platform} from here: lowered for "
            f"{traced.platform} instead; what the call costs, and where {hardware.platform} makes other ops, is not predicted"
        )
    if hardware.count == 1 and any(isinstance(leaf.entry, tuple) and max(leaf.entry, default=1) > 1 for leaf in inputs):
        found.append("one device: the strategies are checked, and the function runs unsharded")
    others = [grid for grid in traced.grids if math.prod(grid) > 1 and grid != tuple(size for _, size in axes)]
    if others:
        grids = ", ".join("x".join(map(str, grid)) for grid in dict.fromkeys(others))
        found.append(
            f"parts of the function lie on a grid of their own ({grids}); what is sent between them and the rest is not "
            "predicted"
        )
    if traced.captured:
        found.append(f"{traced.captured} arrays of the surrounding transformation are captured; they are left to XLA")
    return found


def not_predicted(graph: Graph, partitioned: PartitionedProgram) -> list[str]:
    """Ops without a rule of how XLA works on them (`graph.ways`) that are cut along a dim which they need whole, or at whose
    edges neighbours exchange."""
    found: dict[str, None] = {}
    for _, op, at in pairs(graph, partitioned.graph):
        if op.rule is None or op.name in HAS_OWN_RULE:
            continue
        whole = op.rule.permuted | op.rule.replicated
        rows = (*zip(op.rule.operands, at.inputs), *zip(op.rule.results, at.outputs))  # noqa: B905
        if whole and any(
            axes and whole.intersection(factors)
            for dims, value in rows
            for factors, axes in zip(dims, partitioned.specs[value], strict=True)
        ):
            found.setdefault(f"{op.name} ({op.where})" if op.where else op.name)
    if not found:
        return []
    text = ", ".join(list(found)[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return [
        f"cut along a dim that they need whole, or exchange at its edges: {text}; what XLA sends there is not predicted"
    ]
