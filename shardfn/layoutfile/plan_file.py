"""A plan as a layout file: what it decides as rules, who decided as comments and as data, what it costs as comments."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardfn.errors import StrategyTypeError, a, fail
from shardfn.frontend.paths import alike, escaped, layer, met, normal, ruled, starred
from shardfn.frontend.strategy import short
from shardfn.ir.model import Spec
from shardfn.layoutfile.files import write
from shardfn.layoutfile.mindspore_json import json_text, trained
from shardfn.layoutfile.toml import text_of
from shardfn.planning.decisions import Decision
from shardfn.planning.layout_rules import Dim, LayoutFile, Rule, Source

ALIKE = 3
"""So many arrays that differ in the number of a layer alone, and are cut alike, have one rule."""

_T = TypeVar("_T")
_K = TypeVar("_K")


def layout_of(plan: Any) -> LayoutFile:
    """What a `Plan` decides: grid, layouts of arguments and results, what is held inside, level, device, and why."""
    axes = plan.axes or ((("a", plan.hardware.count),) if plan.hardware.count > 1 else ())
    return LayoutFile(
        grid=axes,
        arguments=_rules(plan.inputs, plan.inputs),
        results=_rules(plan.outputs, plan.outputs),
        activations=plan.activations,
        inside=plan.constraints,
        order=plan.order,
        about=f"{plan.function} on {plan.hardware.name}, as planned at level {plan.level}",
        function=plan.function,
        device=plan.hardware.name,
        level=plan.level,
        sources=_sources((*plan.inputs, *plan.outputs)),
        name=f"the plan of {plan.function}",
    )


def text_of_plan(plan: Any, layout: LayoutFile | None = None) -> str:
    """The text of the layout file of a plan, or of a part of it."""
    cost = plan.cost
    head = (
        f"# Modelled: {cost.time_s * 1e6:,.0f} us a call, {cost.bytes_sent:,} B sent and {cost.memory.peak:,} B at the peak "
        f"on each device.\n# {' '.join(plan.policy.split())}\n"
    )
    layout, notes = layout or layout_of(plan), {}
    for section, decisions in (("arguments", plan.inputs), ("results", plan.outputs)):
        rules = getattr(layout, section)
        met_by = ruled([r.glob for r in rules], [normal(d.path) for d in decisions], lambda one, two: True).rules
        for rule, same in _grouped(decisions, lambda i, of=met_by: of.get(i)).items():
            if rule is not None:
                notes[section, rules[rule].glob] = _note(same)
    return head + text_of(layout, notes)


def save(plan: Any, path: str | os.PathLike[str], ops: Sequence[Any] = (), only_trained: bool = False) -> None:
    """Write a plan to a file: a layout file, or MindSpore's strategy JSON where the name ends in `.json`.

    Args:
      ops: the plan's `OpStrategy`s, which the JSON holds.
      only_trained: leave out all but what seem to be trainable parameters (`strategyfile.trained`).
    """
    if not isinstance(path, str | os.PathLike):
        fail(StrategyTypeError, f"a plan is saved to a path, not to {a(path)}", where=f"path = {short(path)}",
             why="it is written as one file", fix='write it as plan.save("layout.toml")')  # fmt: skip
    kept = trained(plan.inputs) if only_trained else list(plan.inputs)
    if pathlib.Path(path).suffix == ".json":
        write(None, path, json_text(kept, plan.axes, ops))
        return
    layout = layout_of(plan)
    if only_trained:
        layout = dataclasses.replace(layout, arguments=_rules(kept, plan.inputs), results=(), inside=(), activations=(),
                                     sources=_sources(kept))  # fmt: skip
    write(None, path, text_of_plan(plan, layout))


def _rules(decisions: Sequence[Decision], every: Sequence[Decision]) -> tuple[Rule, ...]:
    """A rule for each array; one for those of all layers that are cut alike, where its glob meets no other of `every` array
    but such as have a rule of their own, which goes before it."""
    paths, mine = [normal(d.path) for d in every], {d.path for d in decisions}
    numbered = [i for i, d in enumerate(every) if d.path in mine]
    globs: dict[int, str] = {}
    alone: set[int] = set()
    groups = _grouped(numbered, lambda at: (layer(every[numbered[at]].path), every[numbered[at]].spec))
    for same in sorted((g for g in groups.values() if len(g) >= ALIKE), key=lambda same: (-len(same), same)):
        glob = starred([escaped(every[i].path) for i in same])
        others = set(met(glob, paths)[0]).difference(same)
        if not alone.intersection(same) and others <= set(numbered) - globs.keys():
            globs |= dict.fromkeys(same, glob)
            alone |= others
    found = {globs.get(i, escaped(every[i].path)): dims_of(every[i].spec) for i in numbered}
    return tuple(Rule(glob, dims) for glob, dims in found.items())


def _grouped(items: Sequence[_T], key: Callable[[int], _K]) -> dict[_K, list[_T]]:
    """Items of one key together; the key is of a position."""
    groups: dict[_K, list[_T]] = {}
    for at, item in enumerate(items):
        groups.setdefault(key(at), []).append(item)
    return groups


def dims_of(spec: Spec) -> tuple[Dim, ...]:
    """A layout as a rule has it."""
    return tuple(1 if not dim else dim[0] if len(dim) == 1 else dim for dim in spec)


def _sources(decisions: Sequence[Decision]) -> tuple[Source, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for same in alike(decisions, lambda d: (d.source, layer(d.reason), layer(d.path)), ALIKE):
        texts = starred([d.reason for d in same]), starred([escaped(d.path) for d in same])
        found.setdefault((same[0].source, texts[0]), []).append(texts[1])
    return tuple(Source(by, why, tuple(of)) for (by, why), of in found.items())


def _note(same: Sequence[Decision]) -> str:
    """What stands beside a rule: of each array what they have in common."""
    d, many = same[0], f"{len(same)} x " if len(same) > 1 else ""
    if len({(d.dtype, d.shape, d.source, layer(d.reason)) for d in same}) > 1:
        return f"{len(same)} arrays"
    reason = starred([d.reason for d in same])
    return f"{many}{d.dtype}{list(d.shape)} {d.strategy}; {d.source}" + (f": {reason}" if reason else "")
