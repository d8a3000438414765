"""A plan as a layout file: what it decides as rules, who decided as comments and as data, what it costs as comments."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from shardfn.decisions import Decision
from shardfn.graph.model import Spec
from shardfn.layoutfile import write
from shardfn.layoutrules import Dim, LayoutFile, Rule, Source
from shardfn.layouttext import text_of
from shardfn.paths import escaped
from shardfn.strategyfile import json_text, trained


def layout_of(plan: Any) -> LayoutFile:
    """What a `Plan` decides: grid, layouts of arguments and results, what is held inside, level, device, and why."""
    axes = plan.axes or ((("a", plan.hardware.count),) if plan.hardware.count > 1 else ())
    return LayoutFile(
        grid=axes,
        arguments=tuple(_rule(d) for d in plan.inputs),
        results=tuple(_rule(d) for d in plan.outputs),
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
    price = plan.price
    head = (
        f"# Modelled: {price.time_s * 1e6:,.0f} us a call, {price.bytes_sent:,} B sent and {price.memory.peak:,} B at the peak "
        f"on each device.\n# {' '.join(plan.policy.split())}\n"
    )
    notes = {("arguments", escaped(d.path)): _note(d) for d in plan.inputs}
    notes |= {("results", escaped(d.path)): _note(d) for d in plan.outputs}
    return head + text_of(layout or layout_of(plan), notes)


def save(plan: Any, path: str | os.PathLike[str], ops: Sequence[Any] = (), only_trained: bool = False) -> None:
    """Write a plan to a file: a layout file, or MindSpore's strategy JSON where the name ends in `.json`.

    Args:
      ops: the plan's `OpStrategy`s, which the JSON holds.
      only_trained: leave out all but what seem to be trainable parameters (`strategyfile.trained`).
    """
    kept = trained(plan.inputs) if only_trained else list(plan.inputs)
    if pathlib.Path(path).suffix == ".json":
        write(None, path, json_text(kept, plan.axes, ops))
        return
    layout = layout_of(plan)
    if only_trained:
        layout = dataclasses.replace(layout, arguments=tuple(map(_rule, kept)), results=(), inside=(), activations=(),
                                     sources=_sources(kept))  # fmt: skip
    write(None, path, text_of_plan(plan, layout))


def _rule(d: Decision) -> Rule:
    return Rule(escaped(d.path), dims_of(d.spec))


def dims_of(spec: Spec) -> tuple[Dim, ...]:
    """A layout as a rule has it."""
    return tuple(1 if not dim else dim[0] if len(dim) == 1 else dim for dim in spec)


def _sources(decisions: Sequence[Decision]) -> tuple[Source, ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for d in decisions:
        found.setdefault((d.source, d.reason), []).append(d.path)
    return tuple(Source(by, why, tuple(of)) for (by, why), of in found.items())


def _note(d: Decision) -> str:
    return f"{d.dtype}{list(d.shape)} {d.cuts}; {d.source}" + (f": {d.reason}" if d.reason else "")
