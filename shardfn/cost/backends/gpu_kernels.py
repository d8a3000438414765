"""Which fusions XLA's GPU backend runs as one kernel: those that iterate over one array's elements and share what they read."""

from __future__ import annotations

from shardfn.cost.fusion_walk import FusionPlan
from shardfn.ir.model import Op
from shardfn.ir.op_traits import ELEMENTWISE
from shardfn.ir.partitioned import PartitionedProgram

_Domain = tuple[int, ...]
"""The shape that a kernel iterates over, on one device."""


def gpu_kernels(partitioned: PartitionedProgram, fusion: FusionPlan) -> list[tuple[int, ...]]:
    """The ops of each kernel, where those with what is fused into them are one kernel (multi-output fusion).

    Elementwise ops, and reductions of one operand, join a kernel that iterates over the same shape and reads, or makes, an
    array of that shape that they read too, unless they need what is computed from its results elsewhere. The reductions of a
    kernel are all over the same dims. An optimizer's update of a parameter and of its moments is one kernel.
    """
    ops, loop_of = partitioned.graph.ops, partitioned.graph.loop_of
    made: dict[int, int] = {}  # the kernel that makes a value
    users: dict[tuple[int, _Domain, int], list[int]] = {}  # kernels that read or make it, of one loop
    depth: list[int] = []  # kernels that have to run before, one after the other: what needs a kernel is deeper than it
    over: list[tuple[int, ...]] = []  # the dims that a kernel reduces
    found: list[list[int]] = []
    for i, op in enumerate(ops):
        if fusion.inside[i] is None:
            continue
        domain, reduced = _domain(partitioned, op), tuple(d for _, d in op.reduced)
        shared = [v for v in fusion.reads[i] if domain and partitioned.local_shape(v) == domain]
        needs = {made[v] for v in fusion.reads[i] if v in made}
        whole = {made[v] for v in fusion.reads[i] if v in made and v not in shared}  # before its first element
        joined = next(
            (
                kernel
                for v in shared
                for kernel in users.get((v, domain, loop_of[i]), ())
                if kernel not in whole
                and reduced in ((), over[kernel] or reduced)
                and all(k == kernel or depth[k] < depth[kernel] for k in needs)
            ),
            None,
        )
        if joined is None:
            joined = len(found)
            found.append([])
            over.append(())
            depth.append(1 + max((depth[k] for k in needs), default=-1))
        found[joined].append(i)
        over[joined] = over[joined] or reduced
        made.update(dict.fromkeys(op.outputs, joined))
        if domain:
            own = [v for v in op.outputs if partitioned.local_shape(v) == domain]
            for v in (*shared, *own):
                at = users.setdefault((v, domain, loop_of[i]), [])
                if joined not in at:
                    at.append(joined)
    return [tuple(kernel) for kernel in found]


def _domain(partitioned: PartitionedProgram, op: Op) -> _Domain:
    """() for an op that runs alone."""
    if op.name in ELEMENTWISE and op.outputs:
        return partitioned.local_shape(op.outputs[0])
    if op.name == "reduce" and len(op.outputs) == 1:
        return partitioned.local_shape(op.inputs[0])
    return ()
