"""Replicated entries, such as those of biases, with a dimension that is tied to a sharded one of another array.

Sharded alike they need no resharding. Each such sharding is a partitioned program more: a report evaluates it, planning does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from shardfn.cost.estimate import estimate_cost
from shardfn.frontend.paths import alike, escaped, layer, mirrored
from shardfn.ir.model import Spec
from shardfn.ir.specs import strategy_of
from shardfn.planning.plan import FIX, Decision, Figures, Plan, answered_call
from shardfn.planning.questions.what_if import glob_of, moved_with
from shardfn.units import bytes_text, time_text

OPS = 4_000
"""Ops of all partitioned programs together that are evaluated for one report: a part of a second."""
MOST = 2
"""Diagnostics of one plan, those that save most time."""


@dataclasses.dataclass(frozen=True)
class Tie:
    """The sharding of a replicated array that follows another array."""

    spec: Spec
    dim: int
    """The first dimension that it shards."""
    path: str
    """The other array, whose dimension `of` is sharded."""
    of: int

    def text(self, ways: int) -> str:
        """The tie in words; `ways` is the number of shards."""
        return f"dim {self.dim} is tied to dim {self.of} of `{self.path}`, sharded {ways} ways"


def ties(plan: Plan) -> dict[str, Tie]:
    """The tie of each replicated argument with an entry of the user or a mode, but for moments, which follow a parameter."""
    copies = mirrored([(d.path, d.shape) for d in plan.inputs])
    every = {d.path: d for d in plan.inputs}
    sharded: dict[str, tuple[str, int]] = {}  # the first sharded dimension of each group, by the names of its members
    for group in plan.dimension_groups if plan.hardware.count > 1 else ():
        members = [(path, int(dim)) for path, _, dim in (name.rpartition(".") for name in group.members)]
        own = [(p, i) for p, i in members if p in every and copies.get(p, p) == p and every[p].spec[i]]
        if own:
            sharded |= dict.fromkeys(group.members, own[0])
    found: dict[str, Tie] = {}
    for d in every.values():
        if any(d.spec) or d.source not in ("you", "mode") or copies.get(d.path, d.path) != d.path:
            continue
        spec: list[tuple[str, ...]] = [()] * len(d.shape)
        used = set[str]()
        for i, size in enumerate(d.shape):
            path, of = sharded.get(f"{d.path}.{i}", ("", 0))
            axes = every[path].spec[of] if path else ()
            if axes and not used & set(axes) and size % _ways(plan, axes) == 0:
                spec[i], used = axes, used | set(axes)
                found.setdefault(d.path, Tie((), i, path, of))
        if d.path in found:
            found[d.path] = dataclasses.replace(found[d.path], spec=tuple(spec))
    return found


def with_tied_replicas(plan: Plan) -> Plan:
    """The plan with a diagnostic for the replicated entries that cost more than those that follow another array."""
    found = () if plan._answered is None else tuple(_diagnostics(plan))
    return dataclasses.replace(plan, diagnostics=(*plan.diagnostics, *found)) if found else plan


def reason_of(plan: Plan, d: Decision) -> str:
    """Why an entry replicates an array, and the entry that shards it like the one that it is tied to; empty without a tie."""
    tie = ties(plan).get(d.path)
    if tie is None:
        return ""
    strategy = strategy_of(tie.spec, plan.axes)
    ways = strategy[tie.dim]
    return f"{d.reason}; {tie.text(ways)}: parameter_plan={{{escaped(d.path)!r}: {strategy}}} shards it alike"


def _diagnostics(plan: Plan) -> Iterator[str]:
    answered, tied = answered_call(plan), ties(plan)
    given = [d for d in plan.inputs if d.path in tied]
    groups = alike(given, lambda d: (layer(d.path), d.shape, tied[d.path].spec), least=2)
    rows: list[tuple[float, Figures, Sequence[Decision]]] = []
    for same in groups[: OPS // (1 + len(plan.partitioned.graph.ops))]:
        partitioned = answered.partitioned_with(moved_with(plan, [d.path for d in same]), tied[same[0].path].spec)
        more = Figures.of(estimate_cost(partitioned, plan.hardware, answered.problem.donated)) - Figures.of(plan.cost)
        if more.time_s < 0 and more.bytes_sent < 0 and more.memory <= 0:
            rows.append((more.time_s, more, same))
    for _, more, same in sorted(rows, key=lambda row: row[0])[:MOST]:
        d, tie = same[0], tied[same[0].path]
        strategy = strategy_of(tie.spec, plan.axes)
        path = glob_of(same, [d.path for d in (*plan.inputs, *plan.outputs)])
        like = f" and {len(same) - 1} like it" if same[1:] else ""
        key = path if same[1:] and path != d.path else escaped(d.path)
        yield (
            f"`{d.path}`{like} {d.strategy}: {tie.text(strategy[tie.dim])}; sharded alike, the plan takes "
            f"{time_text(-more.time_s)} less and sends {bytes_text(-more.bytes_sent)} less (modelled);"
            f"{FIX}parameter_plan={{{key!r}: {strategy}}}"
        )


def _ways(plan: Plan, axes: Sequence[str]) -> int:
    """The number of shards along some mesh axes."""
    return strategy_of((tuple(axes),), plan.axes)[0]
