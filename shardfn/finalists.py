"""The best few plans, compiled: the one wins that XLA made best, whatever was predicted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from shardfn.comparison import matrix_flops
from shardfn.compiled import Compiled
from shardfn.cost.price import collective_s
from shardfn.plan import Plan
from shardfn.search import plain
from shardfn.search.problem import SPREAD, Answer, Candidate, Problem, objective


def answers(problem: Problem, answer: Answer, levels: Sequence[Answer], count: int) -> tuple[tuple[str, Answer], ...]:
    """The answers to compile, by name, `count` in all: the search's own first, those of the other levels, then in turn the
    best of what else was priced, of the plain layouts on one axis, and of those on two. The flow does not always tell
    which of them XLA likes."""

    def candidate(name: str, one: Answer) -> Candidate:
        return Candidate(name, one.axes, one.specs, one.pins, problem.price(one.axes, one.specs, one.pins))

    first = [candidate("the search's", answer), *(candidate("another level's", one) for one in levels)]
    single = plain.candidates(problem, pairs=False)
    double = tuple(c for c in plain.candidates(problem) if c not in single)
    others = tuple(sorted(answer.others, key=lambda c: objective(c.price, problem)))
    found: dict[object, Candidate] = {}
    for turn in (first, *itertools.zip_longest(single, others, double)):
        for c in filter(None, turn):
            found.setdefault((c.axes, c.specs, tuple(sorted(c.pins.items()))), c)
    return tuple((c.name, _answer(answer, c)) for c in list(found.values())[:count])


def _answer(answer: Answer, c: Candidate) -> Answer:
    if (c.axes, c.specs, c.pins) == (answer.axes, answer.specs, answer.pins):
        return answer
    reasons = tuple("" if not reason else f"the best compiled: {c.name}" for reason in answer.reasons)
    policy = f"best as compiled of the finalists: {c.name}"
    return dataclasses.replace(
        answer, axes=c.axes, specs=c.specs, pins=c.pins, reasons=reasons, runners_up=(), policy=policy, gap=None
    )


@dataclasses.dataclass(frozen=True)
class Finalist:
    """A plan and what one device does in one call of what XLA made of it."""

    name: str
    plan: Plan
    bytes_sent: int
    peak: int
    flops: float
    time_s: float

    def rank(self, limit: float, least: float) -> tuple[float, ...]:
        """What the plan's level makes least, within the memory limit first; `least` are the fewest FLOPs of any finalist."""
        over = max(0.0, self.peak - limit)
        return (over, *{
            0: (round(max(0.0, self.flops / (SPREAD * least) - 1), 2) if least else 0.0, self.bytes_sent, self.time_s),
            1: (self.peak, self.time_s),
            2: (self.time_s, self.peak),
        }[self.plan.level])  # fmt: skip


def judged(name: str, plan: Plan, made: Compiled) -> Finalist:
    """What was compiled, by the cost model's rates: bytes over the links, and work as predicted, scaled by the FLOPs."""
    hardware = plan.hardware
    sent_s = sum(collective_s(c, hardware, plan.axes) for c in made.collectives)
    flops = made.flops or plan.price.flops
    predicted = matrix_flops(plan)
    share = made.flops / predicted if made.flops and predicted else 1.0
    sizes = (made.argument_bytes, made.output_bytes, made.temp_bytes)
    peak = sum(s or 0 for s in sizes) - (made.alias_bytes or 0) if None not in sizes else plan.price.memory.peak
    if hardware.platform != "cpu":  # TPUs report a peak that counts what overlaps
        peak = max(peak, made.peak_bytes or 0)
    return Finalist(
        name, plan, sum(c.total_bytes for c in made.collectives), peak, flops, sent_s + share * plan.price.compute_s
    )


def best(finalists: Sequence[Finalist], limit: float) -> tuple[int, str]:
    """Which one is best as compiled at its plan's level, and a finding that says how all of them came out."""
    least = min(f.flops for f in finalists)
    winner = min(range(len(finalists)), key=lambda i: (finalists[i].rank(limit, least), i))
    lines = [
        f"{f.name}, grid {'x'.join(str(s) for _, s in f.plan.axes) or '1'}: {f.bytes_sent:,} B sent, {f.peak:,} B peak, "
        f"{f.flops:,.0f} FLOPs of products, {f.time_s * 1e6:,.1f} us"
        for f in finalists
    ]
    end = "the search alone picked it too" if not winner else f"the search alone would have picked {finalists[0].name}"
    return winner, (
        f"compiled {len(finalists)} plans, per device: {'; '.join(lines)}. Best: {finalists[winner].name}; {end}"
    )
