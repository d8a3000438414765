"""Fourier transforms that every device computes in full, though their arrays are sharded."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.ir.source_lines import file_line
from shardfn.planning.call import AnsweredCall
from shardfn.planning.plan import FIX, Plan

REMEDY = (
    "transform the unsharded dimensions of each shard in a `jax.shard_map`, and reshard between two transforms; or shard "
    "another dimension"
)


def full_transforms(plan: Plan, _: AnsweredCall) -> Iterator[str]:
    """Fourier transforms whose sharded operands XLA gathers, where the user chose the shardings (`idle` has the others)."""
    gathered = [c for c in plan.partitioned.communications if (c.kind, c.cause) == ("all-gather", "fft")]
    if gathered and not any(d.source == "searched" for d in plan.inputs):
        lines = ", ".join(dict.fromkeys(file_line(c.where) for c in gathered if c.where))
        yield (
            f"XLA gathers the arrays of the Fourier transforms{f' at {lines}' if lines else ''}, and each device transforms "
            f"all of them;{FIX}{REMEDY}"
        )
