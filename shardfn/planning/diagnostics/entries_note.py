"""The headline's line `entries`: where ops inside a function do not follow the entries, or what a search would save."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from shardfn.cost.estimate import Cost
from shardfn.ir.model import Axes
from shardfn.planning.plan import Layouts, kind_of
from shardfn.search.generators import STYLES, batch_groups, default_policy, sharding_propagation
from shardfn.search.problem import Answer, SearchProblem, objective
from shardfn.units import bytes_text, flops_text

FOLLOWED = 'search_mode="sharding_propagation"'
"""The option that follows the entries as they are written."""

NO_CHEAPER = "no cheaper"


def entries_note(
    problem: SearchProblem, answer: Answer, cost: Cost, layouts_of_answer: Callable[[Answer], Layouts], style: str = ""
) -> str:
    """The headline's line on the user's entries; empty where there is nothing to say.

    Args:
      problem: the question.
      answer: its answer.
      cost: that of the answer.
      layouts_of_answer: the facts about an answer that give it its name.
      style: the style that the user asked for; empty for none.
    """
    if not any(dim for spec in problem.specs if spec for dim in spec):
        return ""
    if None not in problem.specs and not problem.is_open:
        return _saved_by_a_search(problem, answer, cost)
    if answer.source != "searched":
        return ""
    if style:
        return _beside_a_style(problem, answer, cost, layouts_of_answer, style)
    followed = sharding_propagation.spread(problem)
    with_search, without = layouts_of_answer(answer), layouts_of_answer(followed)
    if answer.axes != followed.axes or kind_of(with_search) == kind_of(without):
        return ""
    figures = _compared(cost, problem.evaluate_answer(sharding_propagation.search(problem)), problem.level)
    what = _difference(with_search, without)
    inside = f"inside, {what}, with {figures} than if the ops followed the entries too"
    return f"followed for arguments and results; {inside}, as {FOLLOWED} makes them do"


def shared_axes_note(problem: SearchProblem, axes: Axes, devices: int) -> str:
    """Where entries of two dimension groups share a part of the mesh, as no mesh has room for both; empty where there are none.

    Args:
      problem: the question, whose entries are integers.
      axes: the mesh of its answer.
      devices: how many there are.
    """
    sizes, held = dict(axes), dict[int, tuple[str, tuple[str, ...]]]()
    for name, groups, spec in zip(problem.names, problem.groups, problem.specs, strict=True):
        for dim, (group, over) in enumerate(zip(groups, spec or (), strict=False)):
            if over:
                held.setdefault(group, (f"dimension {dim} of `{name}`", tuple(over)))
    for (one, first), (other, second) in itertools.combinations(held.values(), 2):
        shared, ways = set(first) & set(second), [math.prod(map(sizes.__getitem__, over)) for over in (first, second)]
        if shared and set(first) != set(second) and devices % math.prod(ways):
            axis = ", ".join(sorted(shared))
            room = f"side by side, {ways[0]} x {ways[1]} shards need a multiple of {math.prod(ways)} devices"
            return f"{one} and {other} share the mesh axis {axis}: {room}"
    return ""


def _beside_a_style(
    problem: SearchProblem, answer: Answer, cost: Cost, layouts_of_answer: Callable[[Answer], Layouts], style: str
) -> str:
    """Where entries and style work against each other: another kind of plan, a higher cost, or a resharding of the batch."""
    made = layouts_of_answer(answer)
    kind = kind_of(made)
    if made.dimensions is None and not all(part in kind for part in STYLES[style].kind):
        return f"they make the plan `{kind}`, though style={style!r} was asked: leave some out"
    if None not in problem.specs:
        followed = default_policy.search(problem)
        other = problem.evaluate_answer(followed)
        figures = _compared(cost, other, problem.level)
        if objective(cost, problem) > objective(other, problem) and figures != NO_CHEAPER:
            alone = f"than the entries alone ({kind_of(layouts_of_answer(followed))})"
            return f"every array has one, and style={style!r} costs {figures} {alone}: leave one out"
    batch = set(batch_groups(problem)) if STYLES[style].has_batch else set[int]()
    without = [
        f"`{name}`"
        for name, groups, spec in zip(problem.names, problem.groups, problem.specs, strict=True)
        if batch & set(groups)
        and any(spec or ())
        and not any(dim for group, dim in zip(groups, spec or (), strict=True) if group in batch)
    ]
    if not without:
        return ""
    it, shards = ("it", "shards") if len(without) == 1 else ("them", "shard")
    return f"{', '.join(without)} {shards} no batch, and {style!r} reshards {it} inside; leave {it} open (AUTO) to save that"


def _saved_by_a_search(problem: SearchProblem, answer: Answer, cost: Cost) -> str:
    """What searching the ops inside would certainly save: the work that devices along an unused mesh axis repeat."""
    alike = problem.partitioned_of(answer).repeats
    if alike == 1 or not cost.flops:
        return ""
    return (
        f"every array has one, so nothing was searched; groups of {alike} devices repeat the same work, {flops_text(cost.flops)} "
        f'per device instead of {flops_text(cost.flops / alike)}: level="time" searches the operations inside'
    )


def _difference(one: Layouts, other: Layouts) -> str:
    """How the matmuls of one layout are sharded otherwise than those of another."""
    sizes = dict(one.axes)
    ways = (
        [f"the batch is sharded {math.prod(sizes[axis] for axis in one.inside)} ways"]
        if one.inside - other.inside
        else []
    )
    gathered = {axis for _, axes in one.gathered for axis in axes} - {
        axis for _, axes in other.gathered for axis in axes
    }
    if gathered & one.inside:
        ways.append("weights are gathered (FSDP)")
    return " and ".join(ways) or f"the plan is `{kind_of(one)}` instead of `{kind_of(other)}`"


def _compared(one: Cost, other: Cost, level: int) -> str:
    """The figures of one cost against another, that of the objective first."""
    sent = "bytes sent", one.bytes_sent, other.bytes_sent
    peak = "memory", one.memory.peak, other.memory.peak
    time = "time", one.time_s, other.time_s
    texts = [_percent(*row) for row in {0: (sent, time), 1: (peak, time), 2: (time,)}[level]]
    texts += [_percent("work", one.flops, other.flops)]
    return ", ".join(text for text in texts if text) or NO_CHEAPER


def _percent(what: str, one: float, other: float) -> str:
    """
    >>> _percent("time", 3.0, 4.0), _percent("time", 6.0, 4.0), _percent("time", 4.0, 4.001)
    ('25% less time', '50% more time', '')
    """
    if not other:
        return f"{bytes_text(one)} more" if one and what == "bytes sent" else ""
    change = one / other - 1
    text = f"{abs(change):.0%}"
    words = ("fewer", "more") if what == "bytes sent" else ("less", "more")
    return f"{text} {words[change > 0]} {what}" if text != "0%" else ""
