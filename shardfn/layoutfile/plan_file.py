"""A plan as a layout file: its decisions as rules, their sources as data and comments, its cost as comments."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardfn.errors import StrategyTypeError, a, fail
from shardfn.frontend.paths import alike, escaped, layer, met, normal, ruled, starred
from shardfn.frontend.strategy import short
from shardfn.layoutfile.files import write_layout
from shardfn.layoutfile.mindspore_json import json_text, trained
from shardfn.layoutfile.toml import rule_dims, to_toml
from shardfn.planning.decisions import Decision
from shardfn.planning.layout_rules import DecisionSource, LayoutFile, LayoutRule

MIN_FOLDED = 3
"""Equally sharded arrays of so many layers, whose paths differ only in the layer number, share a rule."""

_T = TypeVar("_T")
_K = TypeVar("_K")


def layout_of_plan(plan: Any) -> LayoutFile:
    """The decisions of a `Plan`: mesh, shardings, sharding constraints, level, device, and their sources."""
    axes = plan.axes or ((("a", plan.hardware.count),) if plan.hardware.count > 1 else ())
    return LayoutFile(
        mesh=axes,
        arguments=_rules(plan.inputs, plan.inputs),
        results=_rules(plan.outputs, plan.outputs),
        activations=plan.activations,
        constraints=plan.constraints,
        order=plan.order,
        about=f"{plan.function} on {plan.hardware.name}, as planned at level {plan.level}",
        function=plan.function,
        device=plan.hardware.name,
        level=plan.level,
        sources=_sources((*plan.inputs, *plan.outputs)),
        name=f"the plan of {plan.function}",
    )


def plan_to_toml(plan: Any, layout: LayoutFile | None = None) -> str:
    """The TOML text of a plan; `layout` is the part of it to write, all of it if None."""
    cost = plan.cost
    head = (
        f"# Estimated per call and device: {cost.time_s * 1e6:,.0f} µs, {cost.bytes_sent:,} B sent, peak memory "
        f"{cost.memory.peak:,} B.\n# {' '.join(plan.policy.split())}\n"
    )
    layout, notes = layout or layout_of_plan(plan), {}
    for section, decisions in (("arguments", plan.inputs), ("results", plan.outputs)):
        rules = getattr(layout, section)
        met_by = ruled([r.glob for r in rules], [normal(d.path) for d in decisions], lambda one, two: True).rules
        for rule, same in _grouped(decisions, lambda i, of=met_by: of.get(i)).items():
            if rule is not None:
                notes[section, rules[rule].glob] = _note(same)
    return head + to_toml(layout, notes)


def save_plan(plan: Any, path: str | os.PathLike[str], ops: Sequence[Any] = (), only_trained: bool = False) -> None:
    """Write a plan to a file: a layout file, or MindSpore's strategy JSON where the name ends in `.json`.

    Args:
      plan: the plan.
      path: the file.
      ops: the plan's `OpStrategy`s, for the JSON.
      only_trained: write only what look like trainable parameters (`mindspore_json.trained`).

    Raises:
      StrategyTypeError: `path` is not a path.
      LayoutFileError: the file cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        fail(StrategyTypeError, f"a plan is saved to a path, not to {a(path)}", where=f"path = {short(path)}",
             why="it is written as one file", fix='write it as plan.save("layout.toml")')  # fmt: skip
    kept = trained(plan.inputs) if only_trained else list(plan.inputs)
    if pathlib.Path(path).suffix == ".json":
        write_layout(None, path, json_text(kept, plan.axes, ops))
        return
    layout = layout_of_plan(plan)
    if only_trained:
        layout = dataclasses.replace(layout, arguments=_rules(kept, plan.inputs), results=(), constraints=(), activations=(),
                                     sources=_sources(kept))  # fmt: skip
    write_layout(None, path, plan_to_toml(plan, layout))


def _rules(decisions: Sequence[Decision], every: Sequence[Decision]) -> tuple[LayoutRule, ...]:
    """A rule for each array. Equally sharded arrays of all layers share one, if every other array that its glob matches has
    a rule of its own, which takes precedence."""
    paths, mine = [normal(d.path) for d in every], {d.path for d in decisions}
    numbered = [i for i, d in enumerate(every) if d.path in mine]
    globs: dict[int, str] = {}
    alone: set[int] = set()
    groups = _grouped(numbered, lambda at: (layer(every[numbered[at]].path), every[numbered[at]].spec))
    for same in sorted((g for g in groups.values() if len(g) >= MIN_FOLDED), key=lambda same: (-len(same), same)):
        glob = starred([escaped(every[i].path) for i in same])
        others = set(met(glob, paths)[0]).difference(same)
        if not alone.intersection(same) and others <= set(numbered) - globs.keys():
            globs |= dict.fromkeys(same, glob)
            alone |= others
    found = {globs.get(i, escaped(every[i].path)): rule_dims(every[i].spec) for i in numbered}
    return tuple(LayoutRule(glob, dims) for glob, dims in found.items())


def _grouped(items: Sequence[_T], key: Callable[[int], _K]) -> dict[_K, list[_T]]:
    """Items grouped by the key of their position."""
    groups: dict[_K, list[_T]] = {}
    for at, item in enumerate(items):
        groups.setdefault(key(at), []).append(item)
    return groups


def _sources(decisions: Sequence[Decision]) -> tuple[DecisionSource, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for same in alike(decisions, lambda d: (d.source, layer(d.reason), layer(d.path)), MIN_FOLDED):
        texts = starred([d.reason for d in same]), starred([escaped(d.path) for d in same])
        found.setdefault((same[0].source, texts[0]), []).append(texts[1])
    return tuple(DecisionSource(by, why, tuple(of)) for (by, why), of in found.items())


def _note(same: Sequence[Decision]) -> str:
    """The comment of a rule: what its arrays have in common."""
    d, many = same[0], f"{len(same)} x " if len(same) > 1 else ""
    if len({(d.dtype, d.shape, d.source, layer(d.reason)) for d in same}) > 1:
        return f"{len(same)} arrays"
    reason = starred([d.reason for d in same])
    return f"{many}{d.dtype}{list(d.shape)} {d.strategy}; {d.source}" + (f": {reason}" if reason else "")
