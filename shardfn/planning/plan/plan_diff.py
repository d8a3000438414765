"""What differs between two plans of one function."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.paths import alike, few, listed
from shardfn.ir.model import mesh_sizes, mesh_text
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan.decisions import Change, Changes
from shardfn.planning.plan.plan import Plan
from shardfn.planning.plan.summary import optimality
from shardfn.units import bytes_text, flops_text, time_text


def diff(first: Plan, second: Plan) -> Changes:
    """What differs between two plans of one function: mesh, kind, level, shardings, constraints, costs, optimality.

    Arrays of one shape with the same difference are one change. So are arrays that keep their strategy on another mesh.

    Raises:
      StrategyError: the plans are of functions with other arguments.
      StrategyTypeError: one of them is no plan.
    """
    for plan in (first, second):
        if not isinstance(plan, Plan):
            fail(StrategyTypeError, f"`diff` takes two plans, not {a(plan)}", where=f"diff(..., {plan!r:.60})",
                 why="it says what differs between two plans of one function",
                 fix="pass what shardfn.plan(...) or plan.what_if(...) gives")  # fmt: skip
    if [d.path for d in first.inputs] != [d.path for d in second.inputs]:
        fail(StrategyError, f"`{first.function}` and `{second.function}` have other arguments",
             fix="compare two plans of one function")  # fmt: skip
    changes = []

    def row(what: str, a: Any, b: Any) -> None:
        if a != b:
            changes.append(Change(what, str(a), str(b)))

    row("mesh", mesh_text(first.axes), mesh_text(second.axes))
    row("kind", first.kind, second.kind)
    row("level", first.level, second.level)
    changes += _sharded_differently(first, second)
    if first.constraints != second.constraints:
        changes.append(
            Change("ops with sharding constraints", _constrained(first, second), _constrained(second, first))
        )
    row("modelled time", time_text(first.cost.time_s), time_text(second.cost.time_s))
    row("sent per device", bytes_text(first.cost.bytes_sent), bytes_text(second.cost.bytes_sent))
    row("peak memory per device", bytes_text(first.cost.memory.peak), bytes_text(second.cost.memory.peak))
    row("FLOPs per device", flops_text(first.cost.flops), flops_text(second.cost.flops))
    row("collectives", len(first.collectives), len(second.collectives))
    row("optimality", optimality(first), optimality(second))
    return Changes(changes)


def _sharded_differently(first: Plan, second: Plan) -> Iterator[Change]:
    """The arrays that are sharded differently."""
    sides = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=False)
    differ = [(one, two) for one, two in sides if (one.strategy, one.spec) != (two.strategy, two.spec)]
    moved = [one.path for one, two in differ if one.strategy == two.strategy and first.axes != second.axes]
    rows = [
        (one.path, one.shape, f"{one.strategy} {one.partition_spec}", f"{two.strategy} {two.partition_spec}")
        for one, two in differ
        if one.strategy != two.strategy or first.axes == second.axes
    ]
    for same in alike(rows, lambda row: row[1:], least=2):
        paths = tuple(path for path, *_ in same)
        yield Change(few(paths, 2, 2), *same[0][2:], paths)
    if moved:
        yield Change(
            few(moved, 2, 2), "sharded over the first mesh", _on_the_second(first, second, moved), tuple(moved)
        )


def _on_the_second(first: Plan, second: Plan, moved: Collection[str]) -> str:
    """How arrays that keep their strategy are sharded on another mesh."""
    renamed = {one: two for (one, _), (two, _) in zip(first.axes, second.axes, strict=False)}
    is_renamed = mesh_sizes(first.axes) == mesh_sizes(second.axes)
    for one, two in zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=False):
        is_renamed = is_renamed and (
            one.path not in moved or tuple(tuple(renamed[axis] for axis in dim) for dim in one.spec) == two.spec
        )
    return "same strategy; only the mesh axes' names differ" if is_renamed else "same strategy, over other mesh axes"


MOST_KINDS, MOST_PLACES = 3, 2
"""Of ops that only one of two plans constrains: how many kinds are named, and lines of each."""


def _constrained(plan: Plan, other: Plan) -> str:
    """How many ops have constraints, which of them have none in the other plan, and how many have others there."""
    theirs = {(c.kind, c.number): c for c in other.constraints}
    alone: dict[str, list[str]] = {}
    for c in plan.constraints:
        if (c.kind, c.number) not in theirs:
            alone.setdefault(c.kind, []).append(file_line(c.where))
    parts = []
    kinds = sorted(alone.items(), key=lambda item: -len(item[1]))
    for kind, lines in kinds[:MOST_KINDS]:
        known = list(dict.fromkeys(filter(None, lines)))
        parts.append(f"{len(lines)} {kind} ({listed(known, MOST_PLACES) if known else 'no line known'})")
    rest = sum(len(lines) for _, lines in kinds[MOST_KINDS:])
    parts += [f"{rest} of other kinds"] if rest else []
    changed = sum(c != theirs.get((c.kind, c.number), c) for c in plan.constraints)
    return (
        str(len(plan.constraints))
        + (f"; only here: {', '.join(parts)}" if parts else "")
        + (f"; {changed} sharded differently" if changed else "")
    )
