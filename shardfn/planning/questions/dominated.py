"""Entries of the user that another sharding of the same array beats in time and bytes sent, at no more memory.

Each other sharding is a partitioned program more, so a report looks for them, and planning does not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from shardfn.cost.collectives import communication_bytes
from shardfn.frontend.paths import alike, escaped, layer
from shardfn.ir.partitioned import USER_WRITTEN
from shardfn.planning.plan import FIX, Alternatives, Decision, Plan
from shardfn.planning.questions.attribution import attribute
from shardfn.planning.questions.what_if import MOST, glob_of, why
from shardfn.units import bytes_text, time_text

OPS = 4_000
"""Ops of all partitioned programs together that are evaluated for one report: a part of a second."""

SHARE = 0.1
"""Of a large program, entries are looked at whose collectives send at least this part of the bytes, as many as that can be."""

WORTH = 0.05
"""The part of the time that another sharding must save: estimates of two shardings of one program differ by less by chance."""


def with_dominated_entries(plan: Plan) -> Plan:
    """The plan with a diagnostic for each entry that another one dominates."""
    found = tuple(_dominated(plan)) if plan._answered is not None and plan.cost.bytes_sent else ()
    return dataclasses.replace(plan, diagnostics=(*plan.diagnostics, *found)) if found else plan


def _dominated(plan: Plan) -> Iterator[str]:
    programs = OPS // (1 + len(plan.partitioned.graph.ops))
    groups = _suspects(plan, programs)
    for same in groups:
        path = glob_of(same, [d.path for d in (*plan.inputs, *plan.outputs)])
        yield from _better(plan, path, same, why(plan, path, min(MOST, programs // len(groups))))


def _suspects(plan: Plan, programs: int) -> list[list[Decision]]:
    """The user's entries, those of all layers together, that cause at least `SHARE` of the bytes sent, most bytes first; all of
    them where so many programs suffice, as what one entry causes may be cured by another.
    """
    partitioned = plan.partitioned
    sent = [c for c in partitioned.communications if c.group_size > 1 and c.cause != USER_WRITTEN]
    caused = collections.Counter[int]()
    for c, dims in zip(sent, attribute(partitioned, len(plan.inputs), sent), strict=True):
        for i in {i for i, _ in dims}:
            caused[i] += communication_bytes(partitioned, c) * c.trips
    given = [i for i, d in enumerate(plan.inputs) if d.source == "you"]
    groups = alike(given, lambda i: (layer(plan.inputs[i].path), plan.inputs[i].shape, plan.inputs[i].spec), least=2)
    ranked = sorted(((sum(caused[i] for i in same), same) for same in groups), key=lambda row: -row[0])
    if len(ranked) * MOST > programs:
        ranked = [row for row in ranked if row[0] >= max(1, SHARE * plan.cost.bytes_sent)][:programs]
    return [[plan.inputs[i] for i in same] for _, same in ranked]


def _better(plan: Plan, path: str, same: Sequence[Decision], others: Alternatives) -> Iterator[str]:
    """The diagnostic for the best of the shardings that dominate the entries of some arrays."""
    key = path if len(others.paths) > 1 else escaped(path)
    for row in others.rows:
        more, figures = row.more, row.figures
        if more.time_s <= -WORTH * plan.cost.time_s and more.bytes_sent < 0 and more.memory <= 0:
            yield (
                f"`{path}`: {row.strategy} is better than your entry {same[0].strategy}: {time_text(figures.time_s)} instead of "
                f"{time_text(plan.cost.time_s)}, {bytes_text(figures.bytes_sent)} sent instead of "
                f"{bytes_text(plan.cost.bytes_sent)}, peak {bytes_text(figures.memory)} instead of "
                f"{bytes_text(plan.cost.memory.peak)} (modelled);{FIX}parameter_plan={{{key!r}: {row.strategy}}}; "
                f"plan.why({path!r}) compares more"
            )
            return
