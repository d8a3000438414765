"""What the cost model does not predict of a function: ops without rules, loops of unknown length, parts on other meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.notes import notes_of
from shardfn.frontend.paths import few
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.trace import Traced
from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Axes, Graph, mesh_sizes
from shardfn.ir.op_traits import HAS_OWN_RULE
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.planning.diagnostics.random_numbers import same_random_numbers
from shardfn.planning.diagnostics.rules import LEAST_BYTES
from shardfn.planning.plan import FIX
from shardfn.units import bytes_text


def of_program(traced: Traced, hardware: Hardware, inputs: Sequence[Leaf], axes: Axes) -> list[str]:
    """The diagnostics of a function that hold for all shardings."""
    graph, found = traced.graph, []
    if graph.unruled:
        found.append(
            f"no sharding rule for: {', '.join(graph.unruled)}; XLA decides there, unpredicted;{FIX}"
            "check it with explain(..., compiled=True)"
        )
    if graph.uncounted:
        trips = traced.seen.assumed_trips if traced.seen is not None else 1
        found.append(
            f"loops of unknown length, counted {f'{trips} times, as assumed_trips says' if trips > 1 else 'once'}: "
            + ", ".join(graph.uncounted)
            + (
                f";{FIX}give the loop a constant length, or say how often it may run, as in assumed_trips=100"
                if trips == 1
                else ""
            )
        )
    if traced.platform not in ("", hardware.platform):
        found.append(
            f"the function calls back into Python, which cannot be lowered for {hardware.platform} from here, and is lowered for "
            f"{traced.platform} instead: the cost of the call and ops that only {hardware.platform} uses are not predicted;{FIX}"
            "leave the call (jax.debug.print, jax.pure_callback) out to plan"
        )
    if hardware.count == 1 and any(isinstance(leaf.entry, tuple) and max(leaf.entry, default=1) > 1 for leaf in inputs):
        found.append(
            f'one device: strategies are checked, the function runs unsharded;{FIX}use more devices, or device="cpu:8" to plan'
        )
    own, *shapes = map(mesh_sizes, (axes, *traced.meshes))
    others = [one for one in shapes if math.prod(one) > 1 and one != own]
    if others:
        shapes = ", ".join("x".join(map(str, one)) for one in dict.fromkeys(others))
        found.append(
            f"parts of the function have a mesh of their own ({shapes}), and transfers between it and the rest are not predicted;"
            f"{FIX}use one mesh for the whole function"
        )
    held = sum(array.bytes for array in traced.closed_over)
    if held >= LEAST_BYTES and hardware.count > 1:
        names = few([f"`{array.name}` ({bytes_text(array.bytes)})" for array in traced.closed_over], 3)
        found.append(
            f"every device holds all of the arrays that the function closes over, {bytes_text(held)}: {names};{FIX}"
            'to shard these arrays, pass them as arguments, or write shard(f, closed_over="argument")'
        )
    found += notes_of(traced.jaxpr)
    if hardware.count > 1:
        found += same_random_numbers(traced.jaxpr)
    if traced.captured:
        found.append(
            f"{traced.captured} arrays of the surrounding transformation are captured and left to XLA;{FIX}pass them as arguments"
        )
    return found


def not_predicted(graph: Graph, partitioned: PartitionedProgram) -> list[str]:
    """Ops without a partitioning rule that are sharded along a dimension which they need unsharded, or with halo exchanges."""
    found: dict[str, None] = {}
    for _, op, at in pairs(graph, partitioned.graph):
        if op.rule is None or op.name in HAS_OWN_RULE:
            continue
        unsharded = op.rule.permuted | op.rule.replicated
        rows = (*zip(op.rule.operands, at.inputs), *zip(op.rule.results, at.outputs))  # noqa: B905
        if unsharded and any(
            axes and unsharded.intersection(factors)
            for dims, value in rows
            for factors, axes in zip(dims, partitioned.specs[value], strict=True)
        ):
            found.setdefault(f"{op.name} ({op.where})" if op.where else op.name)
    if not found:
        return []
    text = ", ".join(list(found)[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return [
        f"no partitioning rule for ops that are sharded along a dimension that they need unsharded: {text}; the bytes that XLA "
        f"sends there are not predicted;{FIX}check them with explain(..., compiled=True)"
    ]
