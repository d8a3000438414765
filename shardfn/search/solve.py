"""Solve a labelling problem: one road for a graph of ops and for the published instances, with the proof or the gap.

The problem is contracted, then minimised exactly by elimination where its tables stay small. Otherwise rounds of a
rising lower bound, labels put out by it, and neighbourhoods of the best labelling solved exactly close the gap; what is
left of it is closed, where the problem is small enough, by branching. Nothing is random: the same problem takes the
same steps, and a time limit only stops them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

from shardfn.search.branch import branch, minimum
from shardfn.search.contract import Core, contract
from shardfn.search.eliminate import eliminate
from shardfn.search.labelling import Labelling, cost_of, peak_of
from shardfn.search.lagrange import Ascent
from shardfn.search.local import Local
from shardfn.search.memory import memory_of

ENTRIES, TOTAL = 2e6, 1e8  # of the tables of an exact solution at the start
SMALL = 60_000  # labels x neighbours, up to which branching is tried


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is tried when no time limit stops it: rounds of `steps` passes and `neighbourhoods`, then `parts`."""

    rounds: int = 40
    steps: int = 12
    neighbourhoods: int = 12
    parts: int = 2000


@dataclasses.dataclass(frozen=True)
class Solution:
    """A label per node, its cost, and a lower bound of every cost within the limit.

    `proved`: no labelling is cheaper (or, where not `feasible`, none exists). An unproved infeasible one goes over the
    limit, and means only that none was found.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    proved: bool
    feasible: bool
    seconds: float

    @property
    def gap(self) -> float:
        """How much of the cost may be too much, 0 to 1."""
        return 0.0 if self.proved else max(0.0, (self.cost - self.bound) / max(abs(self.cost), 1e-300))


def solve(problem: Labelling, seconds: float = math.inf, effort: Effort | None = None,
          watch: Callable[[float, float], None] | None = None) -> Solution:  # fmt: skip
    """The best labelling found in `seconds`, and how good it can be; `watch` is told (bound, cost) as they move.

    >>> from shardfn.search.labelling import labelling
    >>> found = solve(labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])]))
    >>> found.choice, found.cost, found.proved
    ((0, 0), 5.0, True)
    """
    return _Run(problem, seconds, effort or Effort(), watch).run()


class _Run:
    def __init__(self, problem: Labelling, seconds: float, effort: Effort,
                 watch: Callable[[float, float], None] | None):  # fmt: skip
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.problem, self.effort, self.watch = problem, effort, watch
        self.integral = _integral(problem)
        self.pause = 1
        self.visits = self.effort.neighbourhoods

    def run(self) -> Solution:
        core = contract(self.problem)
        if not core.possible:
            return self.answer((0,) * len(self.problem.costs), math.inf, True)
        nodes = sorted(core.costs)
        place = {v: at for at, v in enumerate(nodes)}
        costs = [core.costs[v] for v in nodes]
        tables = [{place[w]: table for w, table in core.tables[v].items()} for v in nodes]
        memory = memory_of(self.problem, core, nodes)
        local = Local(costs, tables, memory)
        if (memory.limit < 0).any():
            return self.answer(self.whole(core, nodes, [0] * len(nodes)), math.inf, True)
        if not len(memory.limit) or not nodes:
            found = eliminate(costs, tables, ENTRIES, TOTAL)
            if found is not None:
                return self.answer(self.whole(core, nodes, found), math.inf, True)
        bound, last = self.search(Ascent(costs, tables, memory), local, core.constant)
        choice = self.whole(core, nodes, last if local.best is None else local.best)
        proved = bound >= local.cost - self.margin(local.cost + core.constant)
        return self.answer(choice, bound + core.constant, proved)

    def whole(self, core: Core, nodes: list[int], labels: list[int]) -> tuple[int, ...]:
        full = core.full(dict(zip(nodes, labels, strict=True)))
        return tuple(full[: len(self.problem.costs)].tolist())

    def answer(self, choice: tuple[int, ...], bound: float, proved: bool) -> Solution:
        cost = cost_of(self.problem, choice)
        feasible = math.isfinite(cost) and peak_of(self.problem, choice) <= self.problem.limit
        bound = math.inf if proved and not feasible else cost if proved else min(bound, cost)
        return Solution(choice, cost, bound, proved, feasible, time.monotonic() - self.begin)

    def margin(self, cost: float) -> float:
        """A gain below this is none: whole numbers differ by 1, others by more than rounding."""
        if not math.isfinite(cost):
            return 0.0
        return 0.999 if self.integral else 1e-9 * max(abs(cost), 1e-9)

    def search(self, ascent: Ascent, local: Local, constant: float) -> tuple[float, list[int]]:
        """The bound, with the best labelling in `local`; and the last labelling, should none fit."""
        last = [0] * len(local.costs)
        labels = sum(len(own) for own in ascent.base)
        for number in range(self.effort.rounds):
            for _ in range(self.effort.steps):
                last = ascent.full(ascent.step(local.cost))
                local.offer(last)
                if self.over() or self.done(ascent.bound, local, constant):
                    break
            self.polish(ascent, local, last, number)
            upper = local.cost - self.margin(local.cost + constant)
            if not self.over() and not ascent.bound >= upper:
                ascent.fix(upper)
                if not ascent.fits():
                    return local.cost, last
            if self.watch:
                self.watch(ascent.bound + constant, local.cost + constant)
            if self.over() or self.done(ascent.bound, local, constant):
                return ascent.bound, last
            now = sum(len(kept) for kept in ascent.left())
            if now < 0.8 * labels:
                labels = now
                ascent = ascent.compact()
                if not ascent.nodes:
                    local.offer(ascent.full([]))
                    return local.cost, last
            if self.solved(ascent, local, upper, 2e6 if number < 1 else 2e7):
                return local.cost, last
            if ascent.size < 1e-4:
                break
        if sum(len(own) * len(near) for own, near in zip(ascent.base, ascent.tables, strict=True)) > SMALL:
            return ascent.bound, last
        watch = self.watch
        tell = None if watch is None else lambda bound, cost: watch(bound + constant, cost + constant)
        bound = branch(ascent, local, self.margin(local.cost + constant), self.effort.parts, self.deadline, tell)
        return max(bound, ascent.bound) if local.best is None else bound, last

    def polish(self, ascent: Ascent, local: Local, last: list[int], number: int) -> None:
        """Better labellings: from the last one suggested, and around the best; more of what has just helped."""
        if local.best is None:
            local.fit(last, ascent.best, 12, deadline=self.deadline)
        if not self.over() and number % self.pause == 0:
            before = local.cost
            local.again(last, ascent.best, 0 if number < 3 else 2 * self.effort.neighbourhoods, self.deadline)
            self.pause = 1 if local.cost < before else min(self.pause + 1, 4)
        if number >= 3:  # a small problem is often done before
            saved = local.improve(ascent.best, self.visits, self.deadline)
            self.visits = min(self.visits * 2, 4 * self.effort.neighbourhoods) if saved > 1e-4 else (
                max(self.visits // 2, self.effort.neighbourhoods // 3))  # fmt: skip

    def solved(self, ascent: Ascent, local: Local, upper: float, total: float) -> bool:
        """Whether elimination now settles what is left, memory aside."""
        found = minimum(ascent, 2e5, total)
        if found is None:
            return False
        if local.offer(found):
            return True
        return local.cost_of(found) >= upper

    def done(self, bound: float, local: Local, constant: float) -> bool:
        return bound >= local.cost - self.margin(local.cost + constant)

    def over(self) -> bool:
        return time.monotonic() > self.deadline


def _integral(problem: Labelling) -> bool:
    """Whether every cost is a whole number, and sums of them are exact."""
    values = [*problem.costs, *(table.cost for table in problem.tables)]
    finite = [value[np.isfinite(value)] for value in values]
    total = sum(float(np.abs(value).max(initial=0.0)) for value in finite)
    return total < 2**52 and all((value == np.rint(value)).all() for value in finite)
