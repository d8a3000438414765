"""The sections of a report, each a function from a plan to parts; `SECTIONS` at the end of the file is their order."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shardfn.compiled.comparison import Comparison, Tally
from shardfn.cost.devices.hardware import used_here
from shardfn.cost.estimate import collective_s, communications_with_bytes
from shardfn.frontend.paths import alike, few, layer, starred
from shardfn.ir.model import Collective, Spec
from shardfn.planning.attribution import causes
from shardfn.planning.plan import LEVELS, Decision, DimensionGroup, Plan, op_strategies, proof
from shardfn.planning.what_if import figure_texts
from shardfn.render.parts import Drawing, Part, Placed, Text
from shardfn.report.tables import MOST_ROWS, file_line, shape_text, spec_text, table, times, unit_of
from shardfn.units import number_text as figure

MOST_REASONS = 6
MOST_DEVICES = 64
MOST_DRAWN = 16


# ---- facts that follow from a plan


def grid_text(plan: Plan) -> str:
    """The grid in a few words."""
    return " x ".join(f"{name}={size}" for name, size in plan.axes) or "of one device"


def strides(plan: Plan) -> list[tuple[str, int, int]]:
    """Each axis with its size and the step between the device indices that it walks."""
    sizes = [size for _, size in plan.axes]
    return [(name, size, math.prod(sizes[i + 1 :])) for i, (name, size) in enumerate(plan.axes)]


def owners(plan: Plan) -> list[list[str]]:
    """For each collective the cuts that it is due to, the largest arrays first: those of arguments that the layouts lead to
    it (`causes`); where nothing does, those over its axes, of the arguments or else of the results."""
    sent = [c for c, _ in communications_with_bytes(plan.partitioned)]
    is_own = len(sent) == len(plan.collectives)
    found = causes(plan.partitioned, len(plan.inputs), sent) if is_own else [()] * len(plan.collectives)
    return [_owners(plan, c, pairs) for c, pairs in zip(plan.collectives, found, strict=True)]


def _owners(plan: Plan, c: Collective, pairs: Sequence[tuple[int, int]]) -> list[str]:
    axes = {axis.partition(":")[0] for axis in c.axes}

    def over(cuts: Iterable[tuple[Decision, int]]) -> list[str]:
        ranked = sorted(cuts, key=lambda cut: -math.prod(cut[0].shape))
        return [f"{d.path} dim {i} over {','.join(a for a in d.spec[i] if not axes or a in axes)}" for d, i in ranked]

    def every(decisions: Sequence[Decision]) -> list[tuple[Decision, int]]:
        return [(d, i) for d in decisions for i, dim in enumerate(d.spec) if axes & set(dim)]

    return over((plan.inputs[i], dim) for i, dim in pairs) or over(every(plan.inputs)) or over(every(plan.outputs))


def seconds(plan: Plan, c: Collective) -> float:
    """Modelled seconds of all runs of a collective in one call."""
    return collective_s(c, plan.hardware, plan.axes)


# ---- sections


def _headline(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    hardware, cost = plan.hardware, plan.cost
    at = f"on {hardware.name}"
    if not hardware.is_here:
        at = f"planned for {hardware.name} ({'a target' if used_here(hardware) else 'not here'})"
    lines = [f"{plan.function}: {at}, {hardware.count} device{'s'[: hardware.count != 1]}, grid {grid_text(plan)}",
             f"policy: {plan.policy}; level {plan.level}, {LEVELS[plan.level]}"]  # fmt: skip
    if any(d.source == "searched" for d in plan.inputs):
        lines.append(f"proof under the cost model: {proof(plan.gap, plan.level)}")
    if plan.runner_up and not any(d.runner_up for d in plan.inputs):
        lines.append(f"runner-up: {plan.runner_up}")
    unit, size = unit_of([cost.memory.peak])
    lines += [
        f"per device and call: {cost.flops:,.0f} FLOPs, {cost.bytes_sent:,} B sent, "
        f"memory {figure(cost.memory.peak / size)} {unit} estimated",
        f"modelled time: {figure(cost.compute_s * 1e6)} µs compute + {figure(cost.communication_s * 1e6)} µs "
        f"communication ({hardware.chip.name}: {hardware.chip.source})",
    ]
    yield Text("", tuple(lines))
    diagnostics = [
        *plan.diagnostics,
        *([f"{_UNPRICED}: {', '.join(cost.unmodelled_ops)}"] if cost.unmodelled_ops else []),
        *arrivals,
    ]
    if diagnostics:
        yield Text("Findings", tuple(diagnostics))


_UNPRICED = "no cost rule, charged for the bytes that they move"


def _candidates(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    if plan.candidates:
        columns, rows = ("time", "sent", "memory"), [figure_texts(c.figures) for c in plan.candidates]
        names = [(c.name, "x".join(str(size) for _, size in c.axes) or "1") for c in plan.candidates]
        cells = [
            (*name, *row, f"{c.figures.flops:,.0f}") for name, row, c in zip(names, rows, plan.candidates, strict=True)
        ]
        yield table("Plans that were priced", ("plan", "grid", *columns, "FLOPs"), cells, most=12)


def _grid(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    rows = []
    used = {axis.partition(":")[0] for spec in plan.partitioned.specs for dim in spec for axis in dim}
    for name, size, stride in strides(plan):
        walk = ", ".join(str(i * stride) for i in range(min(size, 4))) + (", …" if size > 4 else "")
        carried = [c.name for c in plan.dimension_groups if name in c.axes]
        rows.append(
            (
                name,
                str(size),
                str(stride),
                walk,
                few(carried, 3) or ("what is inside" if name in used else "nothing: it repeats"),
            )
        )
    note = f"device at each place of the grid: {few(list(map(str, plan.order)), 16)}" if plan.order else ""
    if rows:
        yield table("Grid", ("axis", "size", "stride", "devices it walks", "cuts dim class"), rows, note)


def _arrays(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    for title, decisions in (("Arguments", plan.inputs), ("Results", plan.outputs)):
        unit, size = unit_of([d.local_bytes for d in decisions])
        groups = alike(decisions, lambda d: dataclasses.replace(d, path=layer(d.path), reason=layer(d.reason)))
        if len(groups) > MOST_ROWS:  # the cut ones stay
            groups.sort(key=lambda same: not any(same[0].spec))
        counts = collections.Counter(_reason(same[0]) for same in groups)
        stated = {text for text, count in counts.items() if count > MOST_REASONS}  # said once, below the table
        rows = [
            (starred([d.path for d in same]), times(len(same)), f"{d.dtype}{shape_text(d.shape)}", str(d.strategy),
             spec_text(d.spec), shape_text(d.local_shape) if any(d.spec) else "whole", figure(d.local_bytes / size),
             d.source if _reason(d) in stated or not d.reason else f"{d.source}: {starred([d.reason for d in same])}")
            for same in groups for d in same[:1]
        ]  # fmt: skip
        note = "; ".join(f"{source}, where nothing follows: {reason}" for source, reason in sorted(stated) if reason)
        if rows:
            columns = ("array", "count", "shape", "cuts", "spec", "piece", f"{unit}/device", "chosen")
            yield table(title, columns, rows, note)


def _runners_up(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    told = [d for d in plan.inputs if d.runner_up]
    untold = sum(d.source == "searched" and any(n > 1 for n in d.shape) for d in plan.inputs) - len(told)
    groups = alike(told, lambda d: (layer(d.path), d.strategy, d.runner_up))
    rows = [
        (starred([d.path for d in same]), times(len(same)), str(d.strategy), d.runner_up)
        for same in groups
        for d in same[:1]
    ]
    if rows:
        note = (
            "by the flow, all else as planned, as Plan.why has it, unless it says: by the search's estimate, op by op; "
            "what a cut of yours does: Plan.what_if"
        )
        note += f"; {untold} arrays more, the smaller ones: Plan.why" if untold > 0 else ""
        yield table("Runners-up", ("array", "count", "planned", "next best cut, and what it costs more"), rows, note)


def _reason(d: Decision) -> tuple[str, str]:
    """Who chose a layout and why, the other arrays' names left out."""
    return d.source, re.sub(r"`[^`]*`", "`…`", d.reason)


def _classes(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    def key(c: DimensionGroup) -> Any:
        return layer(c.name), c.size, c.axes, tuple(map(layer, c.members))

    rows = []
    for same in alike(sorted(plan.dimension_groups, key=lambda c: not c.axes), key):
        c = same[0]
        members = [starred(each) for each in zip(*(s.members[1:] for s in same), strict=True)]
        name = starred([s.name for s in same])
        rows.append((name, times(len(same)), str(c.size), ",".join(c.axes) or "-", few(members, 3)))
    if rows:
        yield table("Dim classes", ("class", "count", "size", "cut over", "tied with"), rows, most=20)


_SHOWN_OPS = re.compile(
    r"dot_general|convolution|reduce|reduce_window|select_and_scatter|gather|scatter|dynamic_gather|sort|top_k|fft|rng\w*"
    r"|cholesky|triangular_solve|batch_norm\w+|custom_call .*|shard_map"
)


def _ops(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    every = op_strategies(plan)
    shown = collections.Counter(o for o in every if _SHOWN_OPS.fullmatch(o.op))
    rows = [
        (o.op, times(count), ", ".join(map(str, o.inputs)), ", ".join(map(str, o.outputs)), times(o.trips),
         file_line(o.where))
        for o, count in shown.items()
    ]  # fmt: skip
    hidden = len(every) - sum(shown.values())
    note = f'{hidden} more op{"s"[: hidden != 1]} (elementwise, or moving data): .to_dict()["ops"]' if hidden else ""
    if rows:
        yield table("Op strategies", ("op", "count", "in", "out", "runs", "line"), rows, note, most=20)


def _collectives(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    counts = collections.Counter(plan.collectives)
    due: dict[Collective, list[str]] = {}
    for c, names in zip(plan.collectives, owners(plan), strict=True):
        due[c] = list(dict.fromkeys([*due.get(c, []), *names]))
    groups = sorted(counts.items(), key=lambda g: (-seconds(plan, g[0]) * g[1], -g[0].total_bytes * g[1]))
    unit, size = unit_of([c.total_bytes * count for c, count in groups])
    rows = [
        (c.kind, times(count), ",".join(c.axes) or "-", str(c.group_size), f"{c.dtype}{shape_text(c.shape)}",
         times(c.trips), figure(c.total_bytes * count / size), figure(seconds(plan, c) * count * 1e6),
         file_line(c.where), ": ".join(filter(None, (_CAUSES.get(c.cause, c.cause), few(due[c], 2)))))
        for c, count in groups
    ]  # fmt: skip
    columns = ("collective", "count", "over", "group", "operand", "runs", f"{unit} sent", "µs", "line", "because of")
    if rows:
        yield table(
            "Collectives, per device and call",
            columns,
            rows,
            "the critical ones first; bytes by ring algorithms; µs are modelled",
        )
    else:
        yield Text("Collectives", ("none predicted",))


_CAUSES = {"return": "layout of a result or of a loop's carry"}


def _held(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    shown = collections.Counter((c.kind, c.where, c.operands, c.results) for c in plan.constraints)
    rows = [
        (kind, times(count), ", ".join(map(_open, operands)), ", ".join(map(_open, results)), file_line(where))
        for (kind, where, operands, results), count in shown.items()
    ]
    note = f"propagation alone would lay {'them' if len(plan.constraints) > 1 else 'it'} out otherwise"
    if rows:
        yield table("Held inside", ("op", "count", "in", "out", "line"), rows, note, most=20)


def _open(spec: Spec | None) -> str:
    return "left open" if spec is None else spec_text(spec)


def _memory(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    memory, whole = plan.cost.memory, plan.hardware.chip.memory_bytes
    unit, size = unit_of([memory.peak])
    sizes = (("arguments", memory.arguments), ("results", memory.results), ("temporaries, estimated", memory.temporaries),
             ("all at once, estimated", memory.peak))  # fmt: skip
    rows = [(what, figure(n / size), "<0.1%" if 0 < n < whole / 1000 else f"{n / whole:.1%}") for what, n in sizes]
    note = f"one {plan.hardware.chip.name} has {figure(whole / 2**30)} GiB"
    if plan.memory_limit is not None:
        given, bytes_ = unit_of([plan.memory_limit])
        note += f"; the limit given is {figure(plan.memory_limit / bytes_)} {given}"
    if memory.peak > whole:
        note += f": it may not fit, {memory.peak / whole:.1f} times that by the estimate"
    yield table("Memory per device", ("what", unit, "share"), rows, note)


def _compiled(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    if compared is None:
        return
    kinds = compared.kinds
    if len(kinds) > 1:
        totals = (Tally(*map(sum, zip(*map(dataclasses.astuple, side), strict=True)))
                  for side in ([p for _, p, _ in kinds], [c for _, _, c in kinds]))  # fmt: skip
        kinds = (*kinds, ("all", *totals))
    unit, size = unit_of([tally.bytes_sent for _, *both in kinds for tally in both])
    loops = any(tally.runs != tally.count for _, *both in kinds for tally in both)
    rows = [
        (kind, str(p.count), str(c.count), *(map(str, (p.runs, c.runs)) if loops else ("", "")),
         figure(p.bytes_sent / size), figure(c.bytes_sent / size),
         f"{c.bytes_sent / p.bytes_sent:.2f}" if p.bytes_sent else "-")
        for kind, p, c in kinds
    ]  # fmt: skip
    sides = ("predicted", "compiled")
    columns = ("collective", *sides, *(f"runs {s}" for s in sides), *(f"{unit} {s}" for s in sides), "ratio")
    if rows:
        yield table("Compiled: collectives, per device and call", columns, rows)
    pairs = [
        *((f"{_TOGETHER.get(what, what)}, B", pair) for what, pair in compared.memory),
        ("matrix FLOPs", compared.matrix_flops),
    ]
    rows = [
        (what, *("-" if v is None else f"{v:,.0f}" for v in (p.predicted, p.compiled)),
         "-" if p.ratio is None else f"{p.ratio:.2f}") for what, p in pairs
    ]  # fmt: skip
    yield table("Compiled: memory and work of one device", ("what", "predicted", "compiled", "ratio"), rows)
    yield Text("Why they differ", compared.why or ("they agree",))


_TOGETHER = {"together": "all at once", "xla_peak": "XLA's own peak"}


def _drawing(plan: Plan, arrivals: Sequence[str], compared: Comparison | None) -> Iterable[Part]:
    if plan.hardware.count == 1:
        return
    sizes = tuple(size for _, size in plan.axes)
    shown = list(sizes)
    while math.prod(shown) > MOST_DEVICES:
        largest = shown.index(max(shown))
        shown[largest] = -(-shown[largest] // 2)
    places = np.array(list(np.ndindex(*shown)))
    numbers = np.asarray(np.ravel_multi_index(tuple(places.T), sizes)).tolist()
    arrays: dict[tuple[Any, ...], list[Decision]] = {}
    for d in (*plan.inputs, *plan.outputs):
        if any(d.spec):
            arrays.setdefault((d.shape, d.spec), []).append(d)
    drawn = tuple(
        Placed(f"{few([d.path for d in same], 3)}  {shape_text(shape)}", shape, _pieces(plan, same[0], places))
        for (shape, _), same in itertools.islice(arrays.items(), MOST_DRAWN)
    )
    notes = (
        [f"{math.prod(shown)} of {plan.hardware.count} devices are shown"] if len(places) < plan.hardware.count else []
    )
    notes += [f"{len(arrays) - MOST_DRAWN} more layouts are not drawn"] if len(arrays) > MOST_DRAWN else []
    whole = [d.path for d in (*plan.inputs, *plan.outputs) if not any(d.spec)]
    notes += [f"whole on every device: {few(whole, 8)}"] if whole else []
    devices = tuple(plan.order[i] if plan.order else i for i in numbers)
    axes = tuple(zip((name for name, _ in plan.axes), shown, strict=True))
    yield Drawing("Which device holds what", axes, devices, drawn, "; ".join(notes))


def _pieces(plan: Plan, d: Decision, places: np.ndarray) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The (start, stop) of every dim at each place of the grid."""
    position = {name: places[:, i] for i, (name, _) in enumerate(plan.axes)}
    sizes = dict(plan.axes)
    starts = []
    for dim, piece in zip(d.spec, d.local_shape, strict=True):
        index = np.zeros(len(places), int)
        for axis in dim:  # major to minor
            index = index * sizes[axis] + position[axis]
        starts.append((index * piece).tolist())
    return tuple(
        tuple((s[k], s[k] + n) for s, n in zip(starts, d.local_shape, strict=True)) for k in range(len(places))
    )


Section = Callable[[Plan, Sequence[str], Comparison | None], Iterable[Part]]
SECTIONS: tuple[Section, ...] = (
    _headline, _grid, _drawing, _arrays, _runners_up, _classes, _candidates, _ops, _held, _collectives, _memory, _compiled,
)  # fmt: skip
