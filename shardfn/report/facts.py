"""Facts that follow from a plan: strides of the mesh, modelled times, and the shardings that cause each collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardfn.cost.estimate import collective_s, communications_with_bytes
from shardfn.ir.model import Collective
from shardfn.planning.attribution import attribute
from shardfn.planning.plan import Decision, Plan

UNMODELLED = "no cost rule, so the estimate counts only the bytes that these ops move"


def strides(plan: Plan) -> list[tuple[str, int, int]]:
    """Each mesh axis with its size and the step between consecutive devices along it."""
    sizes = [size for _, size in plan.axes]
    return [(name, size, math.prod(sizes[i + 1 :])) for i, (name, size) in enumerate(plan.axes)]


def seconds(plan: Plan, c: Collective) -> float:
    """Modelled seconds of all runs of a collective in one call."""
    return collective_s(c, plan.hardware, plan.axes)


def attributions(plan: Plan) -> list[list[str]]:
    """For each collective the shardings that cause it, those of the largest arrays first.

    They are the shardings of arguments that propagate to it (`causes`). Where none does, they are the shardings over its mesh
    axes: of arguments, else of results.
    """
    sent = [c for c, _ in communications_with_bytes(plan.partitioned)]
    is_own = len(sent) == len(plan.collectives)
    found = attribute(plan.partitioned, len(plan.inputs), sent) if is_own else [()] * len(plan.collectives)
    return [_of_one(plan, c, pairs) for c, pairs in zip(plan.collectives, found, strict=True)]


def _of_one(plan: Plan, c: Collective, pairs: Sequence[tuple[int, int]]) -> list[str]:
    axes = {axis.partition(":")[0] for axis in c.axes}

    def over(dims: Iterable[tuple[Decision, int]]) -> list[str]:
        ranked = sorted(dims, key=lambda pair: -math.prod(pair[0].shape))
        return [f"{d.path} dim {i} over {','.join(a for a in d.spec[i] if not axes or a in axes)}" for d, i in ranked]

    def every(decisions: Sequence[Decision]) -> list[tuple[Decision, int]]:
        return [(d, i) for d in decisions for i, dim in enumerate(d.spec) if axes & set(dim)]

    return over((plan.inputs[i], dim) for i, dim in pairs) or over(every(plan.inputs)) or over(every(plan.outputs))
