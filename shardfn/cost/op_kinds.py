"""What XLA does with an op by its kind, on any platform: what is cheap to compute again, what is dear, what takes no work at all,
what is made element by element, and what reads or writes only a part."""

from __future__ import annotations

from shardfn.ir.model import Op, PartitionedProgram

CHEAP = frozenset(
    {"abs", "add", "add_parts", "and", "bitcast_convert", "broadcast_in_dim", "ceil", "clamp", "compare", "complex",
     "concatenate", "convert", "copy", "dynamic_slice", "floor", "gather", "imag", "iota", "is_finite", "maximum",
     "minimum", "multiply", "negate", "not", "or", "pad", "real", "reverse", "rotate", "round_nearest_even",
     "round_nearest_afz", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice",
     "square", "subtract", "transpose", "xor", "dynamic_update_slice"}
)  # fmt: skip
"""Ops that are rather computed once for each reader than stored. `add_parts` is no op of JAX: `cost.gpu` puts it in where the
parts of a product are added up."""

COSTLY = frozenset(
    {"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "cosine", "divide", "erf", "erfc",
     "exponential", "exponential_minus_one", "lgamma", "log", "log_plus_one", "logistic", "popcnt", "power", "remainder",
     "rsqrt", "sine", "sinh", "sqrt", "tan", "tanh", "erf_inv", "digamma", "mhlo.erf", "mhlo.tan"}
)  # fmt: skip
"""Ops that are computed once: fused only into a single reader that reads each element once."""

VIEWS = frozenset(
    {"reshape", "bitcast", "swapped", "sharding_constraint", "optimization_barrier", "propagation_barrier"}
)
"""Ops whose result lies where their operand does. `cost.cpu` puts in two: products read a matrix though an operand has more
dims (`bitcast`), or the other way round (`swapped`), which takes no op of its own."""

CUTS = frozenset({"all_slice", "reshard"})
"""Ops whose result does so where they cut nothing; else they are as cheap as a slice."""

ELEMENTWISE = (CHEAP | COSTLY) - {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "reverse", "rotate",
    "slice", "transpose",
}  # fmt: skip
"""Ops each element of whose result is made of those at the same place."""

TAKES = frozenset({"gather", "dynamic_slice", "slice"})
"""Ops that read of operand 0 only what they take."""

UPDATES = {"dynamic_update_slice": 1, "scatter": -1}
"""Ops that change a part of operand 0 in place, and which operand is as large as that part."""


def is_view(partitioned: PartitionedProgram, op: Op) -> bool:
    """Whether an op's result lies where its operand does."""
    if op.name in CUTS:
        return partitioned.local_bytes(op.outputs[0]) == partitioned.local_bytes(op.inputs[0])
    return op.name in VIEWS and len(op.outputs) == 1
