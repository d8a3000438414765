"""A report as plain data, and the facts that text and data both state: strides, modelled times, causes of collectives.

`docs/reference/reports.md` describes the keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from shardfn.compiled.comparison import Comparison
from shardfn.compiled.executable import Compiled
from shardfn.cost.estimate import collective_s
from shardfn.ir.model import axis_name
from shardfn.ir.partitioned import Collective
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan import Decision, Plan, op_strategies
from shardfn.planning.questions import Cause, causes

SCHEMA = 2
"""Version of `Report.to_dict`; it grows when a key goes away or changes its meaning, not when a key is added."""


def plan_data(plan: Plan, transfers: Sequence[str], due: Sequence[Attribution]) -> dict[str, Any]:
    """Everything that a report says of a plan, and everything that its text leaves out. `due` is from `attributions`."""
    hardware, cost, limit = plan.hardware, plan.cost, plan.memory_limit
    return {
        "schema": SCHEMA,
        "function": plan.function,
        "kind": plan.kind,
        "hardware": {"name": hardware.name, "platform": hardware.platform, "devices": hardware.count,
                     "is_here": hardware.is_here, "chip": dataclasses.asdict(hardware.chip)},
        "level": plan.level,
        "policy": plan.policy,
        "style": plan.style,
        "entries": plan.entries,
        "mesh": [{"axis": name, "size": size, "stride": stride} for name, size, stride in strides(plan)],
        "device_order": plan.order,
        "arguments": [_array(d) for d in plan.inputs],
        "results": [_array(d) for d in plan.outputs],
        "closed_over": [dataclasses.asdict(array) for array in plan.closed_over],
        "dimension_groups": [dataclasses.asdict(g) for g in plan.dimension_groups],
        "ops": [{"op": o.op, "in_strategy": o.inputs, "out_strategy": o.outputs, "runs": o.trips, "where": o.where}
                for o in op_strategies(plan)],
        "collectives": [
            {**_collective(c), "time_s": seconds(plan, c),
             "cause": {"op": c.cause, "purpose": c.purpose, "shardings": shardings, "constraints": held}}
            for c, (shardings, held) in sorted(zip(plan.collectives, due, strict=True),
                                       key=lambda pair: -seconds(plan, pair[0]))
        ],
        "cost": {"flops": cost.flops, "bytes_sent": cost.bytes_sent, "compute_s": cost.compute_s,
                 "communication_s": cost.communication_s, "time_s": cost.time_s, "unmodelled_ops": cost.unmodelled_ops,
                 "overlap": dataclasses.asdict(plan.overlap)},
        "optimality_gap": plan.gap,
        "runner_up": plan.runner_up,
        "constraints": [dataclasses.asdict(c) for c in plan.constraints],
        "candidates": [{"name": c.name, "mesh": c.axes, "cost": dataclasses.asdict(c.figures)} for c in plan.candidates],
        "memory": {**dataclasses.asdict(cost.memory), "peak": cost.memory.peak, "device": hardware.chip.memory_bytes,
                   "limit": hardware.chip.memory_bytes if limit is None else limit},
        "diagnostics": plan.diagnostics,
        "transfers": list(transfers),
        "compiled": None,
        "run": None,
        "rehearsal": _rehearsal(plan),
    }  # fmt: skip


def compiled_data(found: Compiled, compared: Comparison) -> dict[str, Any]:
    """The compiled program beside the prediction."""
    return {
        # Of a compiled collective the groups are known, but neither the mesh axes nor the cause.
        "collectives": [{k: v for k, v in _collective(c).items() if k != "axes"} for c in found.collectives],
        "kinds": {kind: {"predicted": dataclasses.asdict(p), "compiled": dataclasses.asdict(c)}
                  for kind, p, c in compared.kinds},
        "memory": {what: dataclasses.asdict(pair) for what, pair in compared.memory},
        "matmul_flops": dataclasses.asdict(compared.matrix_flops),
        "diagnostics": found.diagnostics,
        "differences": compared.why,
    }  # fmt: skip


def _rehearsal(plan: Plan) -> dict[str, Any] | None:
    found = plan.rehearsal
    if found is None:
        return None
    return {**dataclasses.asdict(found), "measured_s": found.measured_s, "none_s": found.none_s, "full_s": found.full_s}


def _array(d: Decision) -> dict[str, Any]:
    return {
        "path": d.path, "shape": d.shape, "dtype": d.dtype, "strategy": d.strategy, "spec": d.spec,
        "shard_shape": d.local_shape, "shard_bytes": d.local_bytes, "chosen_by": d.source, "reason": d.reason,
        "runner_up": d.runner_up,
    }  # fmt: skip


def _collective(c: Collective) -> dict[str, Any]:
    return {
        "kind": c.kind, "axes": c.axes, "group_size": c.group_size, "shape": c.shape, "dtype": c.dtype,
        "bytes_sent": c.bytes_sent, "runs": c.trips, "total_bytes": c.total_bytes, "where": c.where,
        "in_matmul": c.in_matmul,
    }  # fmt: skip


# ---- facts


UNMODELLED = "no checked rule for the time of these ops on this device, so the modelled time is a lower bound"


def strides(plan: Plan) -> list[tuple[str, int, int]]:
    """Each mesh axis with its size and the step between consecutive devices along it."""
    sizes = [size for _, size in plan.axes]
    return [(name, size, math.prod(sizes[i + 1 :])) for i, (name, size) in enumerate(plan.axes)]


def seconds(plan: Plan, c: Collective) -> float:
    """Modelled seconds of all runs of a collective in one call."""
    return collective_s(c, plan.hardware, plan.axes)


Attribution = tuple[list[str], list[str]]
"""Shardings and constraints that cause a collective, as text."""


def attributions(plan: Plan) -> list[Attribution]:
    """For each collective the shardings that cause it, those of the largest arrays first, and the plan's constraints that do.

    Without all of these shardings the collective is gone, and so it is without these constraints
    (`planning.questions.tested_attribution`).
    """
    return [_of_one(c, found) for c, found in zip(plan.collectives, causes(plan), strict=True)]


def _of_one(c: Collective, found: Cause) -> Attribution:
    axes = {axis_name(axis) for axis in c.axes}
    ranked = sorted(found.shardings, key=lambda pair: -math.prod(pair[0].shape))
    shardings = [
        f"{d.path} dim {i} over {','.join([a for a in d.spec[i] if a in axes] or d.spec[i])}" for d, i in ranked
    ]
    return shardings, [
        f"constraint on {one.kind}" + (f" at {file_line(one.where)}" if one.where else "") for one in found.constraints
    ]
