"""A plan in words: the headline of every report, and the text of `print(plan)`."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from shardfn.cost.devices.hardware import Hardware, used_here
from shardfn.cost.estimate import collective_s
from shardfn.cost.platforms import backend_of
from shardfn.frontend.paths import name_of_row
from shardfn.ir.model import mesh_text
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan.decisions import Decision, in_rows
from shardfn.planning.plan.plan import Plan
from shardfn.render.cells import shape_text, table, times
from shardfn.render.parts import Table, Text
from shardfn.render.text import terminal_width, to_text
from shardfn.search.problem import COMMUNICATION, OBJECTIVES, TIME
from shardfn.units import bytes_text, flops_text, time_text

MOST_ARRAYS = 10
"""Kinds of arrays in the text of a plan."""

FIX = " fix: "
"""In a diagnostic the words before what the user should do."""


def headline(plan: Plan) -> list[str]:
    """What kind of plan it is, whether it fits, how long a call takes and why, how it was chosen, and one next step."""
    cost = plan.cost
    lines = [
        f"{plan.function}: {plan.kind}",
        f"devices: {devices_text(plan.hardware)}, mesh {mesh_text(plan.axes)}",
        f"memory: {fit_text(plan)}",
        _time_line(plan),
        f"work: {flops_text(cost.flops)} and {bytes_text(cost.bytes_sent)} sent per device; compute "
        f"{time_text(cost.compute_s)}, communication {time_text(cost.communication_s)}",
        *_overlap_line(plan),
        *([f"rehearsed: {plan.rehearsal.line()}"] if plan.rehearsal is not None else []),
        f"objective: least {OBJECTIVES[plan.level]} (level {plan.level}); {plan.policy}",
    ]
    if plan.entries:
        lines.append(f"entries: {plan.entries}")
    if any(d.source == "searched" for d in plan.inputs):
        lines.append(f"optimality: {optimality(plan)}")
    steps = [text.rpartition(FIX)[2] for text in plan.diagnostics if FIX in text]
    return [*lines, *(f"next step: {step}" for step in steps[:1])]


def devices_text(hardware: Hardware) -> str:
    """The devices of a plan, and whether they are here."""
    many = f"{hardware.count} device{'s'[: hardware.count != 1]}"
    name = hardware.name or hardware.chip.name
    if hardware.is_here:
        return name if name.startswith(f"{hardware.count} x") else f"{name} ({many})"
    return f"{name} ({many}, {'a target' if used_here(hardware) else 'not here'})"


def fit_text(plan: Plan) -> str:
    """Whether a plan fits its memory limit by the estimate, and with how much to spare; and whether it exceeds the device."""
    peak, device = plan.cost.memory.peak, plan.hardware.chip.memory_bytes
    limit = device if plan.memory_limit is None else plan.memory_limit
    name = plan.hardware.chip.name if plan.memory_limit is None else "memory limit"
    used = f"{bytes_text(peak)} per device at the peak (estimate), {name} {bytes_text(limit)}"
    if peak > limit:
        return f"does not fit, {bytes_text(peak - limit)} too much: {used}"
    if peak > device:
        return f"fits the limit but not the device, {bytes_text(peak - device)} too much for {plan.hardware.chip.name}: {used}"
    return f"fits with {bytes_text(limit - peak)} to spare: {used}"


def _time_line(plan: Plan) -> str:
    """How long a call takes; where an op has no checked rule, at least how long, and which op that is."""
    cost, ops = plan.cost, plan.cost.unmodelled_ops
    if not cost.is_lower_bound:
        return f"time: {time_text(cost.time_s)} per call (modelled); {_largest_part(plan)}"
    first, others = file_line(ops[0]).replace(" (", " at ").rstrip(")"), len(ops) - 1
    verb = "is" if not others else f"and {others} other op{'s'[: others != 1]} are"
    return (
        f"time: at least {time_text(cost.time_s)} per call (modelled); {first} {verb} not modelled on this device; "
        f"{_largest_part(plan)}"
    )


def _overlap_line(plan: Plan) -> list[str]:
    """How long a call takes if collectives overlap with compute; nothing where XLA overlaps none of them."""
    if not any(c.kind in backend_of(plan.hardware.platform).asynchronous for c in plan.collectives):
        return []
    times = plan.overlap
    return [
        f"overlap: {time_text(times.expected_s)} if XLA overlaps the kinds of collectives that it can with compute, "
        f"{time_text(times.full_s)} if it overlapped all of them (modelled)"
    ]


def _largest_part(plan: Plan) -> str:
    """Compute, or the line whose collectives take longest."""
    parts: dict[tuple[str, str], float] = collections.defaultdict(float)
    for c in plan.collectives:
        parts[c.kind, c.where] += collective_s(c, plan.hardware, plan.axes)
    key = max(parts, key=parts.__getitem__, default=None)
    if key is None or parts[key] <= plan.cost.compute_s:
        return f"largest part: compute, {time_text(plan.cost.compute_s)}"
    where = f" at {file_line(key[1])}" if key[1] else ""
    return f"largest part: {key[0]}{where}, {time_text(parts[key])}"


LOOSE = 0.5
"""A bound this part below a plan's cost says nothing of the plan."""


def optimality(plan: Plan) -> str:
    """What the search says of the headline's figures: the best of its candidates, and what the cost model summed over ops allows.

    That sum bounds no partitioned program, in which XLA merges collectives, so only a cost of nothing is proved optimal.
    """
    if plan.gap == 0 and plan.level == COMMUNICATION and not plan.cost.communication_s:
        return "proved optimal: nothing is sent, and compute takes at most 1.1 times an even share"
    best = "best of the candidates" if len(plan.candidates) > 1 else "the only candidate"
    if plan.gap is None or plan.gap > LOOSE:
        return best
    if plan.gap < 5e-5:
        limit = "a better one"
    elif plan.level == TIME:
        limit = f"one better than {time_text(plan.cost.time_s * (1 - plan.gap))}"
    else:
        limit = f"one more than {max(plan.gap, 0.001):.1%} better"
    return f"{best}; summed over ops, the cost model does not allow {limit} on the meshes tried"


def summary(plan: Plan) -> str:
    """A plan in less than 30 lines: arrays that differ only in the number of a layer are one row."""
    lines = [*headline(plan)]
    if plan.constraints:
        lines.append(f"constraints: {len(plan.constraints)} ops inside get sharding constraints")
    tables = [_arrays("arguments", plan.inputs, MOST_ARRAYS), _arrays("results", plan.outputs, 4)]
    if plan.diagnostics:
        many = f"{len(plan.diagnostics)} diagnostics, the first" if len(plan.diagnostics) > 1 else "1 diagnostic"
        lines.append(f"{many}: {next(iter(plan.diagnostics))}")
    end = "report: shardfn.explain(plan)"
    return to_text([Text("", tuple(lines)), *(t for t in tables if t.rows), Text("", (end,))], terminal_width())


def _arrays(title: str, decisions: Sequence[Decision], most: int) -> Table:
    """The largest arrays in the order of the call, equal ones as one row."""
    groups = in_rows(decisions, with_reasons=False)
    largest = sorted(range(len(groups)), key=lambda i: -math.prod(groups[i][0].shape))
    rows = [
        (name_of_row([d.path for d in same]), times(len(same)), f"{same[0].dtype}{shape_text(same[0].shape)}",
         str(same[0].strategy), same[0].source)
        for same in (groups[i] for i in sorted(largest[:most]))
    ]  # fmt: skip
    note = f'the largest of {len(decisions)}; all: shardfn.explain(plan, detail="full")' if len(groups) > most else ""
    return table("", (title, "count", "shape", "strategy", "chosen by"), rows, note)
