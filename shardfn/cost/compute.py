"""Floating-point work of one device, from local shapes."""

from __future__ import annotations

import math

from shardfn.graph.model import Flow, Op

_FREE = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "slice", "concatenate", "dynamic_slice", "dynamic_update_slice", "pad",
     "iota", "convert", "bitcast_convert", "copy", "reverse", "gather", "while", "case", "shard_map", "sharding_constraint",
     "optimization_barrier", "all_gather", "all_slice", "all_to_all", "collective_permute", "reshard"}
)  # fmt: skip
"""Ops that move data and compute nothing."""


def op_flops(flow: Flow, op: Op) -> float:
    """FLOPs of one op on one device, once: 2 for a multiply-add of a dot or convolution, 1 for an element else.

    Loops are not counted here: multiply by `op.trips`.
    """
    if op.name in _FREE or not op.outputs:
        return 0.0
    out = max(math.prod(flow.local_shape(o)) for o in op.outputs)
    depth = math.prod(flow.local_shape(op.inputs[i])[d] for i, d in op.reduced)
    return float(out * depth * (2 if op.name in ("dot_general", "convolution") else 1))


def flops(flow: Flow) -> float:
    """FLOPs of one device in one call, loops multiplied."""
    return sum(op_flops(flow, op) * op.trips for op in flow.graph.ops)
