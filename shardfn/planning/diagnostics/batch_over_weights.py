"""Weights that the user shards as for tensor parallelism, and a batch that the mode shards over their mesh axes too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardfn.frontend.paths import few
from shardfn.planning.call import AnsweredCall
from shardfn.planning.plan import BY_DATA_PARALLEL, FIX, Decision, Plan


def batch_over_weights(plan: Plan, answered: AnsweredCall) -> Iterator[str]:
    """The `in_strategy` of a batch that has no entry, beside weights that meet in a dimension which both shard.

    Such weights, `up` (1, 4) and `down` (4, 1), are tensor parallel where the batch is not sharded over their axes.
    """
    batch = [d for d in plan.inputs if d.source == "mode" and d.reason.endswith(BY_DATA_PARALLEL)]
    over = {axis for d in batch for dim in d.spec for axis in dim}
    weights, axes = _meeting(plan, over)
    if not axes:
        return
    sizes = dict(plan.axes)
    ways = math.prod(sizes[axis] for axis in over - axes)
    entries = {d.path: _with(d, ways) for d in batch}
    fix = f"in_strategy with {', '.join(f'{entry} for `{path}`' for path, entry in entries.items())}"
    if all(re.fullmatch(r"batch/\d+", path) for path in entries):
        fix = f"in_strategy={tuple(entries.values())}"
    mode = batch[0].reason.removesuffix(BY_DATA_PARALLEL)
    yield (
        f"{mode} shards the batch over all {math.prod(sizes[axis] for axis in over)} devices, also over "
        f"{', '.join(sorted(axes))}, which {'shards' if len(axes) == 1 else 'shard'} {few(weights, 2)}: weights or batch are "
        f"gathered for the matmuls, and the plan is not tensor parallel;{FIX}for tensor parallelism, {fix}"
    )


def _meeting(plan: Plan, over: set[str]) -> tuple[list[str], set[str]]:
    """The weights with entries of the user's that shard one dimension, each another one of its own, over some of these axes; and
    those axes."""
    given = {d.path: d for d in plan.inputs if re.fullmatch(r"parameter_plan\[.*\]", d.reason) and any(d.spec)}
    weights, axes = dict[str, None](), set[str]()
    for group in plan.dimension_groups if given and over else ():
        members = [
            (path, int(dim)) for path, _, dim in (name.rpartition(".") for name in group.members) if path in given
        ]
        found = [(path, dim) for path, dim in members if over & set(given[path].spec[dim])]
        if len({dim for _, dim in found}) > 1 and len({path for path, _ in found}) > 1:
            weights |= dict.fromkeys(f"`{path}`" for path, _ in found)
            axes |= {axis for path, dim in found for axis in given[path].spec[dim]} & over
    return list(weights), axes


def _with(d: Decision, ways: int) -> tuple[int, ...]:
    """The entry of an array of the batch with so many shards, where it is sharded."""
    return (ways, *d.strategy[1:]) if any(d.spec) else d.strategy
