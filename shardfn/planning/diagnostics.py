"""Where a layout costs far more than it need, with the line and a cut that avoids it: warnings of a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.estimate import estimate_cost
from shardfn.ir.model import Communication, PartitionedProgram, Spec
from shardfn.planning.decisions import Decision
from shardfn.planning.plan import Plan
from shardfn.planning.posed_call import AnsweredCall
from shardfn.search.mesh_solution import mesh_text
from shardfn.search.one_array_changes import array_specs
from shardfn.search.problem import Algorithm, objective
from shardfn.search.resharding_costs import Axes, strategy_of
from shardfn.units import bytes_text

DEAR_BYTES = 1 << 20
"""Bytes that one device sends in one call, below which nothing is said of a collective."""
FLOWS, OPS = 6, 12_000
"""Flows, and ops of them together, that are worked out to find a cut that avoids something."""

Rule = Callable[[Plan, AnsweredCall], Iterator[str]]


def advice(plan: Plan, study: AnsweredCall) -> list[str]:
    """What XLA would do that costs far more than it need, each with its line and a cut that avoids it."""
    return [] if plan.hardware.count == 1 else [text for rule in RULES for text in rule(plan, study)]


# ---- layouts that cost far more than they need: a rule each; `RULES` at the end of the file lists them


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Equal collectives at one line, and what one device sends for them in one call."""

    communications: tuple[Communication, ...]
    bytes: int

    @property
    def one(self) -> Communication:
        return self.communications[0]


def in_loops(plan: Plan, study: AnsweredCall) -> Iterator[str]:
    """Arrays that are gathered or laid out anew in every round of a loop, and make up much of what is sent."""
    for sent in _alike_sent(plan.partitioned, lambda c: c.trips > 1 and c.kind in ("all-gather", "all-to-all"))[:2]:
        c = sent.one
        same = is_constant(plan.partitioned, c.operand, c.trips)
        if same and plan.hardware.platform == "cpu":  # there XLA moves it out of the loop
            continue
        if sent.bytes < DEAR_BYTES or sent.bytes < plan.cost.bytes_sent / (20 if same else 4):
            continue
        yield (
            f"{c.kind} of {plan.partitioned.graph.values[c.result]} in each of {c.trips} rounds of a loop{_at(c.where)}"
            f"{', the same array each time' if same else ''}: {_share(sent.bytes, plan)}; "
            f"{'made before the loop, it is sent once; ' if same else ''}"
            + avoided(
                plan,
                study,
                c,
                lambda partitioned, c=c: not any(_is_like(c, o) and o.trips > 1 for o in partitioned.communications),
            )
        )


def rematerialised(plan: Plan, study: AnsweredCall) -> Iterator[str]:
    """Arrays that XLA gathers because it knows no way from one layout to another, and cuts again at once, however small."""
    partitioned = plan.partitioned
    detours = _detours(partitioned)
    for sent in _alike_sent(partitioned, detours.__contains__)[:2]:
        c = sent.one
        if sent.bytes < plan.cost.bytes_sent / 10:
            continue
        before, after = partitioned.shards(c.operand), partitioned.shards(detours[c])
        whole = "whole " if not any(partitioned.specs[c.result]) else ""
        yield (
            f"{partitioned.graph.values[c.result]} is gathered {whole}on every device{_at(c.where)} for {c.cause} and "
            f"cut again, from {before} to {after}, between which XLA knows no other way (full rematerialisation): "
            f"{_share(sent.bytes, plan)}; "
            + avoided(plan, study, c, lambda partitioned, c=c: not any(_is_like(c, o) for o in _detours(partitioned)))
        )


def held_whole(plan: Plan, study: AnsweredCall) -> Iterator[str]:
    """Arguments that every device holds whole though they can be cut, and that fill much of its memory."""
    whole, limit = [d for d in plan.inputs if not any(d.spec)], study.problem.memory_limit
    if sum(d.local_bytes for d in whole) < limit / 4:
        return
    whole = [d for d in whole if finer(d, plan.axes) is not None]
    held = sum(d.local_bytes for d in whole)
    if not whole or held < limit / 4 or plan.cost.memory.peak > limit:  # `too_large` speaks of that
        return
    d = max(whole, key=lambda d: d.local_bytes)
    cuts = strategy_of(finer(d, plan.axes) or (), plan.axes)
    several = f"{len(whole)} arguments lie" if len(whole) > 1 else f"`{d.path}` lies"
    largest = f", the largest `{d.path}` with {bytes_text(d.local_bytes)}" if len(whole) > 1 else ""
    yield (
        f"{several} whole on every device, {bytes_text(held)} or {held / limit:.0%} of its memory{largest}; "
        f"cut `{d.path}` {cuts}, and it takes {bytes_text(d.local_bytes / math.prod(cuts))} there"
    )


def too_large(plan: Plan, study: AnsweredCall) -> Iterator[str]:
    """A plan that is estimated not to fit."""
    memory, limit = plan.cost.memory, study.problem.memory_limit
    if memory.peak <= limit:
        return
    holders = [(d.local_bytes, f"`{d.path}` {d.strategy}") for d in plan.inputs]
    holders = sorted([*holders, (memory.temporaries, "temporaries")], key=lambda h: -h[0])[:3]
    most = ", ".join(f"{name} {bytes_text(size)}" for size, name in holders if size)
    freed = [(d.local_bytes - _whole_bytes(d) / math.prod(strategy_of(spec, plan.axes)), d, spec)
             for d in plan.inputs if (spec := finer(d, plan.axes)) is not None]  # fmt: skip
    over = memory.peak - limit
    text = (
        f"it may not fit: {bytes_text(memory.peak)} per device at the peak by the estimate, {bytes_text(over)} over the limit; "
        f"most of it {most}"
    )
    if freed:
        most_freed, d, spec = max(freed, key=lambda f: f[0])
        text += (
            f"; cut `{d.path}` {strategy_of(spec, plan.axes)} instead of {d.strategy} to free {bytes_text(most_freed)}"
        )
    else:
        text += "; no argument can be cut further on this grid: use more devices, or smaller arrays"
    if plan.level != 1 and any(d.source == "searched" for d in plan.inputs):
        text += "; level=1 looks for the least memory"
    yield text


def idle(plan: Plan, study: AnsweredCall) -> Iterator[str]:
    """Devices that do what others do as well, where spreading the work would save a good part of the time."""
    cost, devices, whole = plan.cost, plan.hardware.count, study.problem.facts.flops
    alike = min(float(devices), cost.flops * devices / whole) if whole else 1.0
    searched = any(d.source == "searched" for d in plan.inputs)
    if not searched or alike < 2 or cost.compute_s * (1 - 1 / alike) < WORTH * cost.time_s:
        return
    text = (
        f"each of {devices} devices does {_percent(alike / devices)} of the FLOPs, where an even spread leaves "
        f"{_percent(1 / devices)}: about {alike:.0f} devices do the same work"
    )
    fewer = [c for c in plan.candidates if c.figures.flops <= cost.flops / 1.5]
    if fewer:
        c = min(fewer, key=lambda c: (c.figures.flops, c.figures.time_s))
        yield (
            f"{text}; `{c.name}` on the grid {mesh_text(c.axes)} leaves each "
            f"{_percent(max(1 / devices, c.figures.flops / whole))}, with {c.figures.time_s * 1e6:,.1f} us modelled instead of "
            f"{cost.time_s * 1e6:,.1f}"
        )
        return
    yield (
        f"{text}; what was found to spread them further is worse at level {plan.level}: a larger batch gives each its own, or "
        "fewer devices do as well"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


WORTH = 0.2
"""Of the modelled time: what must be saved by spreading the work before anything is said of devices that do the same."""


def avoided(plan: Plan, study: AnsweredCall, c: Communication, is_gone: Callable[[PartitionedProgram], bool]) -> str:
    """The best cut of one argument with which a collective is gone and less is sent, by its flow; or that none was found."""
    axes = {a.partition(":")[0] for a in c.axes}
    sources = [d for d in (origin(plan, c.operand),) if d is not None]
    cut = sorted((d for d in plan.inputs if any(axes & set(dim) for dim in d.spec)), key=lambda d: -math.prod(d.shape))
    few = list(dict.fromkeys([*sources, *cut]))[:2]
    most = min(FLOWS, OPS // max(1, len(plan.partitioned.graph.ops))) if study.problem.seconds_left > 0 else 0
    tries = [
        (d, spec)
        for d in few
        for spec in sorted(array_specs(d.shape, plan.axes, d.spec), key=lambda s: _distance(s, d.spec))
    ]
    found = []
    for d, spec in tries[:most]:
        partitioned = study.partitioned_with(plan, (d.path,), spec)
        if is_gone(partitioned):
            paid = estimate_cost(partitioned, plan.hardware, study.problem.donated)
            if paid.bytes_sent < plan.cost.bytes_sent:
                found.append((objective(paid, study.problem), len(found), d, spec, paid))
    if not found:
        names = " or ".join(f"`{d.path}`" for d in few)
        tried = f"no other cut of {names}" if len(tries) <= most else f"none of {most} other cuts tried of {names}"
        return f"{tried} avoids it and sends less" if tries and most else "`Plan.why` tells what other cuts cost"
    _, _, d, spec, paid = min(found, key=lambda f: f[:2])
    return (
        f"cut `{d.path}` {strategy_of(spec, plan.axes)} instead of {d.strategy} to avoid it: {bytes_text(paid.bytes_sent)} sent "
        f"instead of {bytes_text(plan.cost.bytes_sent)}, {bytes_text(paid.memory.peak)} at the peak instead of "
        f"{bytes_text(plan.cost.memory.peak)}"
    )


def origin(plan: Plan, value: int) -> Decision | None:
    """The argument that a value is a piece or another form of, if it is one's alone."""
    partitioned, seen = plan.partitioned, set()
    made = {v: op for op in partitioned.graph.ops for v in op.outputs}
    at = {v: i for i, v in enumerate(partitioned.graph.arguments(len(plan.inputs)))}
    while value not in at:
        sources = (
            [v for v in made[value].inputs if math.prod(partitioned.graph.values[v].shape) > 1] if value in made else []
        )
        if len(sources) != 1 or value in seen:
            return None
        seen.add(value)
        value = sources[0]
    return plan.inputs[at[value]]


def is_constant(partitioned: PartitionedProgram, value: int, trips: int) -> bool:
    """Whether a value in a loop that runs `trips` times is the same in every round: made of what is made outside."""
    made = {v: op for op in partitioned.graph.ops for v in op.outputs}
    inputs = set(partitioned.graph.inputs)
    stack, seen = [value], set()
    while stack:
        v = stack.pop()
        if v in seen or v in inputs:
            continue
        seen.add(v)
        op = made.get(v)
        if op is None or op.name in _CHANGING:  # what a loop carries
            return False
        if op.trips >= trips:
            stack += op.inputs
    return True


_CHANGING = frozenset({"rng_bit_generator", "rng", "custom_call"})


def finer(d: Decision, axes: Axes) -> Spec | None:
    """The layout of an array in the most pieces, if that is more than now; ties go to what leaves its cuts as they are."""
    pieces = math.prod(d.strategy)
    more = [s for s in array_specs(d.shape, axes, d.spec) if math.prod(strategy_of(s, axes)) > pieces]
    return min(more, key=lambda s: (-math.prod(strategy_of(s, axes)), *_distance(s, d.spec)), default=None)


def _distance(spec: Spec, now: Spec) -> tuple[int, int, Spec]:
    """How many dims are cut otherwise, and how many are cut."""
    return sum(set(a) != set(b) for a, b in zip(spec, now, strict=True)), sum(map(bool, spec)), spec


def _alike_sent(partitioned: PartitionedProgram, wanted: Callable[[Communication], bool]) -> list[_Sent]:
    """The collectives that are wanted, equal ones of a line together, those that send most first."""
    groups: dict[tuple[object, ...], list[Communication]] = {}
    for c in partitioned.communications:
        if c.group_size > 1 and wanted(c):
            groups.setdefault((c.kind, c.where, partitioned.graph.values[c.result], c.trips), []).append(c)
    found = [
        _Sent(
            tuple(same),
            sum(bytes_sent(c.kind, c.group_size, partitioned.local_bytes(c.operand)) * c.trips for c in same),
        )
        for same in groups.values()
    ]
    return sorted(found, key=lambda sent: -sent.bytes)


def not_fully_used(plan: Plan, algorithm: Algorithm) -> str:
    """The warning where `fully_use_devices` is on and a mesh axis shards nothing; else the empty string."""
    used = {axis.split(":")[0] for spec in plan.partitioned.specs for dim in spec for axis in dim}
    unused = {name: size for name, size in plan.axes if name not in used}
    if not algorithm.fully_use_devices or not unused:
        return ""
    needed = plan.hardware.count // math.prod(unused.values())
    return (
        f"fully_use_devices is on, but {needed} of {plan.hardware.count} devices would do: nothing is sharded over "
        f"{', '.join(f'axis {name} of {size}' for name, size in unused.items())}; your own entries are kept, and a "
        "dimension that does not divide stays unsharded"
    )


def _detours(partitioned: PartitionedProgram) -> dict[Communication, int]:
    """The gathers that XLA does as a last resort ("involuntary full rematerialization"), each with what is cut of it."""
    gathers = {c.result: c for c in partitioned.communications if c.is_last_resort}
    found: dict[Communication, int] = {}
    for op in partitioned.graph.ops if gathers else ():
        for v in op.inputs:
            if v in gathers and op.name == "all_slice":
                found.setdefault(gathers[v], op.outputs[0])
    return found


def _is_like(c: Communication, other: Communication) -> bool:
    return (c.kind, c.where) == (other.kind, other.where)


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _share(size: int, plan: Plan) -> str:
    return f"{bytes_text(size)} or {size / plan.cost.bytes_sent:.0%} of what a device sends"


def _whole_bytes(d: Decision) -> int:
    return d.local_bytes * math.prod(d.strategy)


RULES: tuple[Rule, ...] = (too_large, in_loops, rematerialised, held_whole, idle)
