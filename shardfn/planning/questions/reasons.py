"""Why an array is replicated, in one sentence about this array."""

from __future__ import annotations

import dataclasses
import math

from shardfn.ir.model import mesh_text
from shardfn.planning.plan import Decision, Figures, Plan
from shardfn.planning.questions.tied_replicas import reason_of
from shardfn.planning.questions.what_if import why
from shardfn.search.moves import array_specs
from shardfn.units import bytes_text, time_text

TRIED = 4
"""Other shardings of an array that are evaluated for its reason."""


def with_reason(plan: Plan, d: Decision) -> Decision:
    """The decision with a reason of its own, where the array is replicated.

    Args:
      plan: the plan. Of a pickled one the reasons are those that the search noted.
      d: one of its decisions.
    """
    if any(d.spec) or plan.hardware.count == 1:
        return d
    if d.source in ("you", "mode"):
        return dataclasses.replace(d, reason=reason_of(plan, d) or d.reason)
    if d.source not in ("searched", "propagated"):
        return d
    return dataclasses.replace(d, reason=f"replicated: {_why(plan, d)}")


def _why(plan: Plan, d: Decision) -> str:
    """The first that holds: one element, no dimension that divides, what propagation noted, the costs of another sharding."""
    if math.prod(d.shape) == 1:
        return "it has one element, so no dimension can be sharded"
    if next(array_specs(d.shape, plan.axes, d.spec), None) is None:
        return f"no dimension of {list(d.shape)} divides over an axis of the mesh {mesh_text(plan.axes)}"
    if d.source != "searched" or plan._answered is None:
        return d.reason.removeprefix("replicated: ") or "no dimension is tied to a sharded one"
    row = why(plan, d.path, TRIED).rows[0]
    return f"{row.strategy}, the best other sharding tried, {_difference(row.more)}"


def _difference(more: Figures) -> str:
    """What another sharding costs in words.

    >>> _difference(Figures(2e-6, 1024, -2048, 0.0)), _difference(Figures(0.0, 0, 0, 0.0))
    ('takes 2 µs more, sends 1 KiB more, holds 2 KiB less', 'costs the same')
    """
    rows = (
        ("takes", more.time_s, time_text),
        ("sends", more.bytes_sent, bytes_text),
        ("holds", more.memory, bytes_text),
    )
    texts = [f"{verb} {text(abs(value))} {'more' if value > 0 else 'less'}" for verb, value, text in rows if value]
    return ", ".join(texts) or "costs the same"
