"""Fourier transforms and library calls that every device computes in full, though their arrays are sharded."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.ir.op_traits import LIBRARY
from shardfn.ir.source_lines import file_line
from shardfn.planning.call import AnsweredCall
from shardfn.planning.plan import FIX, Plan

TRANSFORM_SHARDS = (
    "transform the unsharded dimensions of each shard in a `jax.shard_map`, and reshard between two transforms; or shard "
    "another dimension"
)


def whole_operands(plan: Plan, _: AnsweredCall) -> Iterator[str]:
    """Ops whose sharded operands XLA gathers whole, where the user chose the shardings (`idle` has the others)."""
    if any(d.source == "searched" for d in plan.inputs):
        return
    found: dict[str, dict[str, None]] = {}
    for c in plan.partitioned.communications:
        library = c.cause.removeprefix("custom_call ")
        is_library = library != c.cause or c.cause in LIBRARY
        if c.kind == "all-gather" and is_library and not any(plan.partitioned.specs[c.result]):
            found.setdefault(library, {})[file_line(c.where)] = None
    for library, lines in found.items():
        at = f" at {', '.join(filter(None, lines))}" if any(lines) else ""
        remedy = (
            TRANSFORM_SHARDS if library == "fft" else "shard a batch dimension instead, or leave the array unsharded"
        )
        yield (f"XLA gathers the operands of `{library}`{at}, and each device computes all of it;{FIX}{remedy}")
