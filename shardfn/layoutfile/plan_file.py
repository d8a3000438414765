"""A plan as a layout file: its decisions as rules, their sources as data and comments, its cost as comments."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.frontend.paths import alike, escaped, layer, met, normal, ruled, starred
from shardfn.ir.source_lines import file_name
from shardfn.layoutfile.toml import rule_dims, to_toml
from shardfn.planning.layout_rules import DecisionSource, LayoutFile, LayoutRule
from shardfn.planning.plan import Decision

MIN_FOLDED = 3
"""Equally sharded arrays of so many layers, whose paths differ only in the layer number, share a rule."""


def layout_of_plan(plan: Any) -> LayoutFile:
    """The decisions of a `Plan`: mesh, shardings, sharding constraints, level, device, and their sources."""
    axes = plan.axes or ((("a", plan.hardware.count),) if plan.hardware.count > 1 else ())
    return LayoutFile(
        mesh=axes,
        arguments=rules_of(plan.inputs, plan.inputs),
        results=rules_of(plan.outputs, plan.outputs),
        activations=plan.activations,
        constraints=plan.constraints,
        order=plan.order,
        about=f"{plan.function} on {plan.hardware.name}, as planned at level {plan.level}",
        function=plan.function,
        fingerprint=plan.fingerprint,
        device=plan.hardware.name,
        level=plan.level,
        style=plan.style,
        sources=sources_of((*plan.inputs, *plan.outputs)),
        rehearsal=plan.rehearsal,
        name=f"the plan of {plan.function}",
    )


def plan_to_toml(plan: Any, layout: LayoutFile | None = None) -> str:
    """The TOML text of a plan; `layout` is the part of it to write, all of it if None."""
    cost, size = plan.cost, sum(d.local_bytes * math.prod(d.strategy) for d in plan.inputs)
    head = (
        f"# Estimated per call and device: {cost.time_s * 1e6:,.0f} µs, {cost.bytes_sent:,} B sent, peak memory "
        f"{cost.memory.peak:,} B.\n# The arguments have {size:,} B in all.\n# {' '.join(plan.policy.split())}\n"
    )
    layout, same_rule = layout or layout_of_plan(plan), dict[tuple[str, str], list[Decision]]()
    for section, decisions in (("arguments", plan.inputs), ("results", plan.outputs)):
        rules = getattr(layout, section)
        met_by = ruled([r.glob for r in rules], [normal(d.path) for d in decisions], lambda one, two: True).rules
        for same in alike(sorted(met_by), met_by.__getitem__, least=1):
            same_rule[section, rules[met_by[same[0]]].glob] = [decisions[i] for i in same]
    reasons = collections.Counter(
        _nameless(starred([_reason(d) for d in same])) for same in same_rule.values() if _is_alike(same)
    )
    return head + to_toml(layout, {place: _note(same, reasons) for place, same in same_rule.items()})


def estimated_peak(text: str) -> int | None:
    """The peak memory of a device, in bytes, that the comments of a plan's TOML text name; None if they name none.

    >>> estimated_peak("# Estimated per call and device: 7 µs, 96 B sent, peak memory 1,024 B.")
    1024
    """
    found = re.search(r"^# Estimated per call and device: .*, peak memory ([\d,]+) B\.$", text, re.M)
    return int(found[1].replace(",", "")) if found else None


def estimated_arguments(text: str) -> int | None:
    """The size of all arguments of a plan, in bytes, each counted once, that the comments of its TOML text name.

    >>> estimated_arguments("# The arguments have 10,240 B in all.")
    10240
    """
    found = re.search(r"^# The arguments have ([\d,]+) B in all\.$", text, re.M)
    return int(found[1].replace(",", "")) if found else None


def rules_of(decisions: Sequence[Decision], every: Sequence[Decision]) -> tuple[LayoutRule, ...]:
    """A rule for each array. Equally sharded arrays of all layers share one, if every other array that its glob matches has
    a rule of its own, which takes precedence."""
    paths, mine = [normal(d.path) for d in every], {d.path for d in decisions}
    numbered = [i for i, d in enumerate(every) if d.path in mine]
    globs: dict[int, str] = {}
    alone: set[int] = set()
    groups = alike(numbered, lambda i: (layer(every[i].path), every[i].spec), MIN_FOLDED)
    for same in sorted((g for g in groups if len(g) >= MIN_FOLDED), key=lambda same: (-len(same), same)):
        glob = starred([escaped(every[i].path) for i in same])
        others = set(met(glob, paths)[0]).difference(same)
        if not alone.intersection(same) and others <= set(numbered) - globs.keys():
            globs |= dict.fromkeys(same, glob)
            alone |= others
    found = {globs.get(i, escaped(every[i].path)): rule_dims(every[i].spec) for i in numbered}
    return tuple(LayoutRule(glob, dims) for glob, dims in found.items())


def sources_of(decisions: Sequence[Decision]) -> tuple[DecisionSource, ...]:
    """Who decided what, folded over equal layers, and over reasons that differ only in the array that they name."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for same in alike(decisions, lambda d: (d.source, layer(d.reason), layer(d.path)), MIN_FOLDED):
        why, of = starred([_reason(d) for d in same]), starred([escaped(d.path) for d in same])
        found.setdefault((same[0].source, _nameless(why)), {}).setdefault(why, []).append(of)
    return tuple(
        DecisionSource(by, next(iter(whys)) if len(whys) == 1 else why, tuple(itertools.chain(*whys.values())))
        for (by, why), whys in found.items()
    )


def _reason(d: Decision) -> str:
    """Why an array is sharded as it is; of another layout file's rule without the directories of that file."""
    file, colon, glob = d.reason.rpartition(": ") if d.source == "file" else ("", "", d.reason)
    return f"{file_name(file)}{colon}{glob}"


def _nameless(reason: str) -> str:
    """A reason without the array that it names."""
    return re.sub(r"`[^`]*`", "`…`", reason)


def _is_alike(same: Sequence[Decision]) -> bool:
    return len({(d.dtype, d.shape, d.source, layer(d.reason)) for d in same}) == 1


def _note(same: Sequence[Decision], reasons: Mapping[str, int]) -> str:
    """The comment of a rule: what its arrays have in common. A reason of several rules is in [[sources]] alone."""
    if not _is_alike(same):
        return f"{len(same)} arrays"
    d, many, reason = same[0], f"{len(same)} x " if len(same) > 1 else "", starred([_reason(d) for d in same])
    alone = f": {reason}" if reason and reasons[_nameless(reason)] == 1 else ""
    return f"{many}{d.dtype}{list(d.shape)} {d.strategy}; {d.source}{alone}"
