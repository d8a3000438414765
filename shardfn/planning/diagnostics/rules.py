"""Diagnostics: where a plan costs more than necessary, with the line of the cause and a sharding that avoids it."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from shardfn.cost.collectives import communication_bytes
from shardfn.cost.estimate import estimate_cost
from shardfn.frontend.paths import escaped
from shardfn.ir.model import Axes, Graph, Op, Spec, axis_name, mesh_sizes_text
from shardfn.ir.partitioned import USER_WRITTEN, Communication, PartitionedProgram
from shardfn.ir.rewrite import equation_line, equations
from shardfn.ir.source_lines import file_line
from shardfn.ir.specs import strategy_of
from shardfn.partition.platforms import collective_rules
from shardfn.planning.call import AnsweredCall
from shardfn.planning.diagnostics.batch_over_weights import batch_over_weights
from shardfn.planning.diagnostics.expert_einsums import expert_einsums
from shardfn.planning.diagnostics.field_lookups import field_lookups
from shardfn.planning.diagnostics.fused_projections import FusedProjection, fused_projections
from shardfn.planning.diagnostics.masked_experts import masked_experts
from shardfn.planning.diagnostics.whole_operands import TRANSFORM_SHARDS, whole_operands
from shardfn.planning.plan import FIX, Decision, Plan
from shardfn.search.moves import array_specs
from shardfn.search.problem import Algorithm, array_bytes, objective
from shardfn.units import bytes_text, time_text

LEAST_BYTES = 1 << 20
"""A collective for which a device sends fewer bytes in one call is not reported."""
TRIALS, OPS = 6, 12_000
"""Partitioned programs, and ops of them together, that are evaluated to find a sharding that avoids something."""

Rule = Callable[[Plan, AnsweredCall], Iterator[str]]


def advice(plan: Plan, answered: AnsweredCall) -> list[str]:
    """The diagnostics of a plan, each with its line and what the user should do."""
    rules = (masked_experts,) if plan.hardware.count == 1 else RULES  # the others are about what devices share
    return [text for rule in rules for text in rule(plan, answered)]


# ---- one rule for each kind of diagnostic; `RULES` at the end of the file lists them


def in_loops(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Arrays that are gathered or resharded in every iteration of a loop, for a large share of the bytes sent."""
    gathered = plan.partitioned.gathered_shards

    def is_wanted(c: Communication) -> bool:
        return c.trips > 1 and (c.kind == "all-to-all" or gathered(c) is not None)

    for c, sent in _alike_sent(plan.partitioned, is_wanted)[:2]:
        same = is_constant(plan.partitioned, c.operand, c.trips)
        if same and collective_rules(plan.hardware.platform).hoists_gathers:
            continue
        if sent < LEAST_BYTES or sent < plan.cost.bytes_sent / (20 if same else 4):
            continue
        if "fsdp" in plan.style and (d := origin(plan, c.operand)) and d.path in plan.layouts.parameter_paths:
            continue  # the style gathers its parameters
        what = f"{_kind(plan.partitioned, c)} of {plan.partitioned.graph.values[c.result]}"

        def is_gone(partitioned: PartitionedProgram, c: Communication = c) -> bool:
            return not any(_is_like(c, o) and o.trips > 1 for o in partitioned.communications)

        if fix := avoided(plan, answered, c, is_gone):
            yield (
                f"{what} in each of {c.trips} iterations of a loop{_at(c.where)}"
                f"{', the same array each time' if same else ''}: {_share(sent, plan)}; {fix}"
            )


def rematerialised(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Arrays that XLA gathers and slices at once, because it has no other resharding between their shardings."""
    partitioned = plan.partitioned
    gathers = _last_resort_gathers(partitioned)
    for c, sent in _alike_sent(partitioned, gathers.__contains__)[:2]:
        if sent < plan.cost.bytes_sent / 10:
            continue
        shards = partitioned.gathered_shards(c)
        before, after = (partitioned.shards(v) for v in (c.operand if shards is None else shards, gathers[c]))
        gathered = "replicated" if not any(partitioned.specs[c.result]) else "gathered"

        def is_gone(partitioned: PartitionedProgram, c: Communication = c) -> bool:
            return not any(_is_like(c, o) for o in _last_resort_gathers(partitioned))

        if fix := avoided(plan, answered, c, is_gone):
            yield (
                f"XLA has no direct resharding of {partitioned.graph.values[c.result]} from {before} to {after} for {c.cause}"
                f"{_at(c.where)}: the array is {gathered} and sliced again (full rematerialisation), {_share(sent, plan)}; {fix}"
            )


def replicated(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Replicated arguments that could be sharded and that fill a large share of the memory."""
    found, limit = [d for d in plan.inputs if not any(d.spec)], answered.problem.memory_limit
    if sum(d.local_bytes for d in found) < limit / 4:
        return
    found = [d for d in found if finer(d, plan.axes) is not None]
    copied = sum(d.local_bytes for d in found)
    if not found or copied < limit / 4 or plan.cost.memory.peak > limit:  # then `too_large` reports it
        return
    d = max(found, key=lambda d: d.local_bytes)
    strategy = strategy_of(finer(d, plan.axes) or (), plan.axes)
    what = f"{len(found)} arguments are" if len(found) > 1 else f"`{d.path}` is"
    largest = f", the largest is `{d.path}` with {bytes_text(d.local_bytes)}" if len(found) > 1 else ""
    yield (
        f"{what} replicated on every device, taking {bytes_text(copied)}, {copied / limit:.0%} of its memory{largest};{FIX}"
        f"{set_text(d, strategy)}, so that it takes {bytes_text(d.local_bytes / math.prod(strategy))} per device"
    )


def too_large(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """A plan whose estimated peak exceeds the memory limit."""
    memory, limit = plan.cost.memory, answered.problem.memory_limit
    if memory.peak <= limit:
        return
    holders = [(d.local_bytes, f"`{d.path}` {d.strategy}") for d in plan.inputs]
    holders = sorted([*holders, (memory.temporaries, "temporaries")], key=lambda h: -h[0])[:3]
    most = ", ".join(f"{name} {bytes_text(size)}" for size, name in holders if size)
    freed = [(d.local_bytes - _global_bytes(d) / math.prod(strategy_of(spec, plan.axes)), d, spec)
             for d in plan.inputs if (spec := finer(d, plan.axes)) is not None]  # fmt: skip
    text = (
        f"it may not fit: {bytes_text(memory.peak)} per device at the peak (estimate), {bytes_text(memory.peak - limit)} over "
        f"the limit; largest: {most};{FIX}"
    )
    if freed:
        most_freed, d, spec = max(freed, key=lambda f: f[0])
        text += f"{set_text(d, strategy_of(spec, plan.axes))}, which frees {bytes_text(most_freed)} per device"
    else:
        text += "use more devices or smaller arrays, as this mesh allows no argument more shards"
    if plan.level != 1 and any(d.source == "searched" for d in plan.inputs):
        text += "; or search with level=1, for least memory"
    yield text


def idle(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Devices that repeat the work of others, where sharding the work would save a large part of the time."""
    cost, devices = plan.cost, plan.hardware.count
    searched = any(d.source == "searched" for d in plan.inputs)
    if not searched or cost.compute_s * (1 - 1 / devices) < WORTH * cost.time_s:  # at most all devices repeat all work
        return
    total = answered.problem.facts.flops  # evaluates the unsharded program
    excess = min(float(devices), cost.flops * devices / total) if total else 1.0
    if excess < 2 or cost.compute_s * (1 - 1 / excess) < WORTH * cost.time_s:
        return
    alike = plan.partitioned.repeats
    repeated = f"groups of {alike} devices repeat the same work" if alike > 1 else "devices repeat a part of their work"
    text = (
        f"each of {devices} devices computes {_percent(excess / devices)} of the FLOPs instead of {_percent(1 / devices)}: "
        f"{repeated}"
    )
    remedy = _remedy(plan, answered)
    fewer = [c for c in plan.candidates if c.figures.flops <= cost.flops / 1.5]
    if fewer:
        c = min(fewer, key=lambda c: (c.figures.flops, c.figures.time_s))
        yield (
            f"{text}; the candidate `{c.name}` on the mesh {mesh_sizes_text(c.axes)} leaves each device "
            f"{_percent(max(1 / devices, c.figures.flops / total))}, in {time_text(c.figures.time_s)} instead of "
            f"{time_text(cost.time_s)} (modelled);{FIX}"
            + (f'level="time", for the fastest plan; or {remedy}' if c.figures.time_s < cost.time_s else remedy)
        )
        return
    if plan.style:
        yield f"{text}; no other candidate of style {plan.style!r} shards the work more;{FIX}use another style, or none"
        return
    worse = f"every candidate that shards the work more is worse at level {plan.level}"
    yield f"{text}; {worse};{FIX}{remedy}"


def _remedy(plan: Plan, answered: AnsweredCall) -> str:
    """What can be done where devices repeat work."""
    facts, graph = answered.problem.facts, answered.problem.graph
    transforms = collections.defaultdict[str, float](float)
    for op, flops in zip(graph.ops, facts.op_flops, strict=True):
        transforms[op.where] += flops * op.trips if op.name == "fft" else 0.0
    if sum(transforms.values()) > facts.flops / 2:
        largest = max(transforms, key=transforms.__getitem__)
        return f"XLA transforms arrays in full{_at(file_line(largest))}: {TRANSFORM_SHARDS}"
    devices = plan.hardware.count
    for d in plan.inputs:
        shards = math.prod(d.strategy)
        if d.source == "you" and 1 < shards < devices and any(size % devices == 0 for size in d.shape):
            return f"give `{d.path}` {devices} shards, where your entry gives {shards}, or use fewer devices"
    largest = max(plan.inputs, key=_global_bytes, default=None)
    if largest and max(largest.shape, default=0) >= devices and all(size % devices for size in largest.shape):
        size = max(largest.shape)
        fewer = max(n for n in range(1, devices) if any(size % n == 0 for size in largest.shape))
        instead = f", or use {fewer} devices" if fewer > 1 else ""
        padded = f"from {size} to {-(-size // devices) * devices}"
        return f"pad `{largest.path}`, of which {devices} divides no dimension, {padded}{instead}"
    return "use fewer devices, or a larger batch" if plan.layouts.dimensions is None else "use fewer devices"


def ragged_experts(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Matmuls of rows with their experts' matrices (`ragged_dot`) for which a device sends more than all their rows."""
    traced, partitioned = answered.posed.call.traced, plan.partitioned
    dots: dict[str, list[Any]] = {}
    for _, eqn, is_reached in equations(traced.jaxpr):
        if is_reached and eqn.primitive.name.startswith("ragged_dot"):
            dots.setdefault(equation_line(eqn), []).append(eqn)
    for line, found in dots.items():
        there = _inserted_at(partitioned, [line])
        sent = _total_sent(partitioned, there)
        arrays = [(eqn.invars[0].aval.shape[0], v.aval) for eqn in found for v in (*eqn.invars, *eqn.outvars)]
        rows = sum(
            aval.size * aval.dtype.itemsize for count, aval in arrays if aval.ndim > 1 and aval.shape[0] == count
        )
        devices = plan.hardware.count
        rows = rows * max([1, *(c.trips for c in there)]) * (devices - 1) // devices**2
        if sent >= LEAST_BYTES and sent > rows:
            yield (
                f"ragged_dot at {line}: {_share(sent, plan)}; all rows that it reads and makes are {bytes_text(rows)} per device;"
                f"{FIX}send the rows to their experts and back by all-to-all (`shardfn.experts.dispatch`, `combine`)"
            )


def einsum_experts(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Mixtures of experts in einsums for which a device sends more than the experts' rows."""
    found, partitioned, devices = (
        expert_einsums(answered.posed.call.traced.graph),
        plan.partitioned,
        plan.hardware.count,
    )
    lines = _lines(found.ops)
    sent = _total_sent(partitioned, _inserted_at(partitioned, lines))
    values = answered.posed.call.traced.graph.values
    rows = sum(int(array_bytes(values[v])) * trips for v, trips in found.moved.items()) * (devices - 1) // devices**2
    if sent >= LEAST_BYTES and sent > rows:
        yield (
            f"einsums of a mixture of experts at {', '.join(lines)}: {_share(sent, plan)}; the experts' rows, there and back, "
            f"are {bytes_text(rows)} per device;{FIX}shard the experts, and send the rows by all-to-all "
            "(`shardfn.experts.dispatch`, `combine`)"
        )


def lookups_of_fields(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Lookups of fields that send rows, or the gradient of their table. Split by fields, the table needs neither."""
    traced, partitioned = answered.posed.call.traced, plan.partitioned
    for line, found in itertools.groupby(field_lookups(traced.graph), lambda each: file_line(each.op.where)):
        first, *_ = found
        sent = _total_sent(partitioned, _inserted_at(partitioned, [line]))
        if first.table >= traced.captured and sent >= LEAST_BYTES:
            d = plan.inputs[first.table - traced.captured]
            yield (
                f"lookup of {first.fields} fields in `{d.path}` {list(d.shape)} at {line}: {_share(sent, plan)};{FIX}where "
                "each field has rows of its own, shard rows and ids by fields, so that lookup and gradient send none of that: "
                "`shardfn.embedding.lookup`; `compare` there has the time of both splits, and the memory of the padding"
            )


def splits_of_projections(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """Fused projections, such as of queries, keys and values, whose shards do not end where their parts do."""
    traced, partitioned, parameters = answered.posed.call.traced, plan.partitioned, plan.layouts.parameter_paths
    every: dict[
        object, list[tuple[FusedProjection, Decision]]
    ] = {}  # the layers of one model are split at the same lines
    for found in fused_projections(traced.graph) if plan.cost.bytes_sent >= LEAST_BYTES else ():
        d = plan.inputs[found.weight - traced.captured] if found.weight >= traced.captured else None
        if d is not None and d.path in parameters and d.spec[found.dim]:
            every.setdefault((_lines(found.ops), found.dim, found.sizes, d.shape, d.spec), []).append((found, d))
    for same in every.values():
        (found, d), lines = same[0], _lines(same[0][0].ops)
        axes = set(d.spec[found.dim])
        there = [c for c in _inserted_at(partitioned, lines) if axes & set(map(axis_name, c.axes))]
        sent = _total_sent(partitioned, there)
        if sent < LEAST_BYTES or sent < plan.cost.bytes_sent / 4:
            continue
        count, size = len(found.sizes), found.sizes[0]
        name = (
            f"`{d.path}` and {len(same) - 1} like it, {list(d.shape)}, are"
            if same[1:]
            else f"`{d.path}` {list(d.shape)} is"
        )
        yield (
            f"{name} a fused projection of {count} parts, sharded {d.strategy[found.dim]} ways across them: splitting its "
            f"results{_at(lines[-1])} takes {_share(sent, plan)};{FIX}give each part a weight of its own"
            f"{_own_dimension(d, found) if size * count == d.shape[found.dim] else ''}"
        )


def _own_dimension(d: Decision, found: FusedProjection) -> str:
    """The remedy for equal parts: the shape of the weight where they have a dimension of their own, and its sharding."""

    def parted(of: tuple[int, ...], *own: int) -> tuple[int, ...]:
        return (*of[: found.dim], *own, *of[found.dim + 1 :])

    shape = parted(d.shape, len(found.sizes), found.sizes[0])
    return (
        f", or give the parts a dimension that is not sharded: {list(shape)} sharded "
        f"{parted(d.strategy, 1, d.strategy[found.dim])}"
    )


def _lines(ops: Iterable[Op]) -> tuple[str, ...]:
    return tuple(sorted({file_line(op.where) for op in ops if op.where}))


def _inserted_at(partitioned: PartitionedProgram, lines: Collection[str]) -> list[Communication]:
    """The communications at some source lines that the user did not write."""
    here = [c for c in partitioned.communications if c.cause != USER_WRITTEN]
    return [c for c in here if (line := file_line(c.where)) and line in lines]


def _total_sent(partitioned: PartitionedProgram, communications: Iterable[Communication]) -> int:
    """The bytes that one device sends for some communications in one call."""
    return sum(communication_bytes(partitioned, c) * c.trips for c in communications)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


WORTH = 0.2
"""The share of the modelled time that sharding the work must save for `idle` to report it."""


def avoided(plan: Plan, answered: AnsweredCall, c: Communication, is_gone: Callable[[PartitionedProgram], bool]) -> str:
    """The fix: the best sharding of one argument that removes a collective, sends less and keeps the memory limit as far as the
    plan does; empty where no sharding of an argument does. Where not all were tried, it says so.
    """
    axes = {axis_name(a) for a in c.axes}
    sources = [d for d in (origin(plan, c.operand),) if d is not None]
    sharded = sorted(
        (d for d in plan.inputs if any(axes & set(dim) for dim in d.spec)), key=lambda d: -math.prod(d.shape)
    )
    arrays = list(dict.fromkeys([*sources, *sharded]))[:2]
    most = min(TRIALS, OPS // max(1, len(plan.partitioned.graph.ops))) if answered.problem.seconds_left > 0 else 0
    tries = [
        (d, spec)
        for d in arrays
        for spec in sorted(array_specs(d.shape, plan.axes, d.spec), key=lambda s: _distance(s, d.spec))
    ]
    found, limit = [], answered.problem.memory_limit
    for d, spec in tries[:most]:
        partitioned = answered.partitioned_with((d.path,), spec)
        if is_gone(partitioned):
            cost = estimate_cost(partitioned, plan.hardware, answered.problem.donated)
            if cost.bytes_sent < plan.cost.bytes_sent and cost.memory.peak <= max(limit, plan.cost.memory.peak):
                found.append((objective(cost, answered.problem), len(found), d, spec, cost))
    if not found and tries and len(tries) <= most:
        return ""
    if not found:
        names = " or ".join(f"`{d.path}`" for d in arrays)
        found_none = (
            f"none of {most} other shardings tried of {names} avoids it and sends less;" if tries and most else ""
        )
        fix = (
            f"compare other shardings with plan.why({arrays[0].path!r})"
            if arrays
            else "tag the array and constrain it in a layout file"
        )
        return f"{found_none}{FIX if found_none else FIX.lstrip()}{fix}"
    _, _, d, spec, cost = min(found, key=lambda f: f[:2])
    return (
        f"{FIX.lstrip()}{set_text(d, strategy_of(spec, plan.axes))}, which avoids it: {bytes_text(cost.bytes_sent)} sent instead "
        f"of {bytes_text(plan.cost.bytes_sent)}, peak {bytes_text(cost.memory.peak)} instead of "
        f"{bytes_text(plan.cost.memory.peak)}"
    )


def set_text(d: Decision, strategy: tuple[int, ...]) -> str:
    """The option that shards one array differently, as the user types it."""
    return f"parameter_plan={{{escaped(d.path)!r}: {strategy}}} (now {d.strategy})"


def origin(plan: Plan, value: int, graph: Graph | None = None) -> Decision | None:
    """The argument of which a value is a shard, a slice or an elementwise function, if it depends on one alone.

    Args:
      plan: the plan.
      value: the value.
      graph: that of the value; the plan's partitioned program if None.
    """
    graph, seen = graph or plan.partitioned.graph, set()
    at = {v: i for i, v in enumerate(graph.arguments(len(plan.inputs)))}
    while value not in at:
        maker = graph.maker(value)
        sources = [v for v in maker.inputs if math.prod(graph.values[v].shape) > 1] if maker else []
        if len(sources) != 1 or value in seen:
            return None
        seen.add(value)
        value = sources[0]
    return plan.inputs[at[value]]


def is_constant(partitioned: PartitionedProgram, value: int, trips: int) -> bool:
    """Whether a value in a loop that runs `trips` times is the same in every iteration: computed from values outside."""
    inputs = set(partitioned.graph.inputs)
    stack, seen = [value], set()
    while stack:
        v = stack.pop()
        if v in seen or v in inputs:
            continue
        seen.add(v)
        op = partitioned.graph.maker(v)
        if op is None or op.name in _CHANGING:  # a loop carry
            return False
        if op.trips >= trips:
            stack += op.inputs
    return True


_CHANGING = frozenset({"rng_bit_generator", "rng", "custom_call"})


def finer(d: Decision, axes: Axes) -> Spec | None:
    """The sharding with the most shards, if that is more than now; among equal ones, the most similar to the present one."""
    now = math.prod(d.strategy)
    more = [s for s in array_specs(d.shape, axes, d.spec) if math.prod(strategy_of(s, axes)) > now]
    return min(more, key=lambda s: (-math.prod(strategy_of(s, axes)), *_distance(s, d.spec)), default=None)


def _distance(spec: Spec, now: Spec) -> tuple[int, int, Spec]:
    """How many dimensions are sharded differently, and how many are sharded."""
    return sum(set(a) != set(b) for a, b in zip(spec, now, strict=True)), sum(map(bool, spec)), spec


def _alike_sent(
    partitioned: PartitionedProgram, wanted: Callable[[Communication], bool]
) -> list[tuple[Communication, int]]:
    """The wanted collectives with the bytes that one device sends for them in one call, the largest first. Equal ones at one
    line are one."""
    found: dict[tuple[object, ...], tuple[Communication, int]] = {}
    for c in partitioned.communications:
        if c.group_size > 1 and wanted(c):
            key = c.kind, c.where, partitioned.graph.values[c.result], c.trips
            first, sent = found.get(key, (c, 0))
            found[key] = first, sent + communication_bytes(partitioned, c) * c.trips
    return sorted(found.values(), key=lambda row: -row[1])


def not_fully_used(plan: Plan, algorithm: Algorithm) -> str:
    """The warning where `fully_use_devices` is on and a mesh axis shards nothing; else the empty string."""
    unused = {name: size for name, size in plan.axes if size > 1 and name not in plan.partitioned.used_axes}
    if not algorithm.fully_use_devices or not unused:
        return ""
    needed = plan.hardware.count // plan.partitioned.repeats
    return (
        f"fully_use_devices is on, but {needed} of {plan.hardware.count} devices would do: nothing is sharded over "
        f"{', '.join(f'axis {name} of {size}' for name, size in unused.items())}; your entries are kept, and a dimension "
        f"that does not divide stays unsharded;{FIX}use {needed} devices, or give entries that use all {plan.hardware.count}"
    )


def _last_resort_gathers(partitioned: PartitionedProgram) -> dict[Communication, int]:
    """The gathers that XLA does as a last resort ("involuntary full rematerialization"), each with its slice."""
    gathers = {c.result: c for c in partitioned.communications if c.is_last_resort}
    found: dict[Communication, int] = {}
    for op in partitioned.graph.ops if gathers else ():
        for v in op.inputs:
            if v in gathers and op.name == "all_slice":
                found.setdefault(gathers[v], op.outputs[0])
    return found


def _kind(partitioned: PartitionedProgram, c: Communication) -> str:
    is_by_sum = c.kind == "all-reduce" and partitioned.gathered_shards(c) is not None
    if c.matmul_permutes:
        return f"collective matmul ({c.kind})"
    return "all-gather (as an all-reduce)" if is_by_sum else c.kind


def _is_like(c: Communication, other: Communication) -> bool:
    return (c.kind, c.where) == (other.kind, other.where)


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _share(size: int, plan: Plan) -> str:
    return f"{bytes_text(size)}, {size / plan.cost.bytes_sent:.0%} of the bytes a device sends"


def _global_bytes(d: Decision) -> int:
    return d.local_bytes * math.prod(d.strategy)


RULES: tuple[Rule, ...] = (
    too_large,
    in_loops,
    rematerialised,
    ragged_experts,
    masked_experts,
    einsum_experts,
    lookups_of_fields,
    splits_of_projections,
    batch_over_weights,
    whole_operands,
    replicated,
    idle,
)
