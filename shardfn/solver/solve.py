"""Solve a labelling problem, with the proof of optimality or the gap.

The problem is contracted, then minimised exactly by elimination where its tables stay small. Otherwise rounds close the gap:
a rising lower bound, labels excluded by it, and neighbourhoods of the best labelling solved exactly. Branch and bound closes
the rest where the problem is small enough. Random choices come from a fixed seed, so that counted work stops at the same step
on every machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardfn.solver.branch_and_bound import branch, minimum
from shardfn.solver.budget import SECOND, Budget
from shardfn.solver.content import Store
from shardfn.solver.contract import Core
from shardfn.solver.dominance import reduced
from shardfn.solver.eliminate import eliminate
from shardfn.solver.labelling import Array, Labelling, peak_of, total_cost
from shardfn.solver.lagrange import Ascent
from shardfn.solver.local_search import FEW, Local, fitted
from shardfn.solver.narrow import Stuck, narrow
from shardfn.solver.peak import Peak, fitting_labels, least_peak

ENTRIES, TOTAL = 2e6, 1e8  # of the largest table and of all tables of an exact solution at the start
RAISES = (0.02, 0.05, 0.15)  # relative price increases where a labelling does not fit
HALVINGS = 4  # of the last increase
STEEP = 0.05  # relative rise of the bound per round above which suggested labellings are poor
RISING = 2e-3  # relative rise per round above which only the bound is worth the time
STILL = 1e-6  # relative rise per round below which the bound has converged
PEAK, PEAK_SHARE = 2 * SECOND, 0.05  # work for the least peak of an infeasible problem; a share of the budget if more
DESPERATE = 4  # rounds without a feasible labelling, before one is sought at any cost
LATE = 0.3  # share of the budget with the same effect
SEEK = 0.2  # share of the remaining budget for that search
SMALL = 60_000  # labels x neighbours of a problem that is branched as soon as the bound hardly rises


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to try without a time limit: `rounds` of `steps` passes and `neighbourhoods`, then `parts` of branch and bound.

    A relative gap of `close` suffices. A large problem stops after `patience` rounds without gain; one of more than `most`
    labels x neighbours is not branched. Where no labelling fits, `least_peak` asks for the least peak.
    """

    rounds: int = 1000
    steps: int = 20
    neighbourhoods: int = 12
    parts: int = 2000
    patience: int = 20
    most: int = SMALL
    close: float = 0.0
    least_peak: bool = True


@dataclasses.dataclass(frozen=True)
class Solution:
    """A label per node, its cost, and a lower bound of every cost within the limit.

    `proved`: no labelling is cheaper, or, where not `feasible`, none exists. An unproved infeasible solution exceeds the
    limit and means only that none was found; `least_peak` is then the least peak found, with a lower bound.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    proved: bool
    feasible: bool
    least_peak: Peak | None = None

    @property
    def gap(self) -> float:
        """The gap to the bound, relative to the cost, at most 1; 1 for a solution that exceeds the limit."""
        if not self.feasible and not self.proved:
            return 1.0
        return 0.0 if self.proved else min(1.0, max(0.0, (self.cost - self.bound) / max(abs(self.cost), 1e-300)))


def solve(problem: Labelling, budget: Budget | None = None, effort: Effort | None = None) -> Solution:
    """The best labelling found within a budget, and its gap.

    Args:
      problem: nodes, labels, tables and the limit.
      budget: work and seconds; unlimited by default.
      effort: how much to try without a time limit.

    Returns:
      The solution: labels, cost, lower bound, and whether it is proved and feasible.

    >>> from shardfn.solver.labelling import labelling
    >>> found = solve(labelling([[1, 5], [4, 2]], tables=[((0, 1), [0, 9, 9, 0])]))
    >>> found.choice, found.cost, found.proved
    ((0, 0), 5.0, True)
    """
    return _Run(problem, budget or Budget(), effort or Effort()).run()


class _Run:
    def __init__(self, problem: Labelling, budget: Budget, effort: Effort):
        self.problem, self.budget, self.effort = problem, budget, effort
        self.store = Store()
        self.pause = 1
        self.visits = self.effort.neighbourhoods
        self.sought = False
        self.wait = self.turn = 1  # rounds until prices are halved again, and the round

    def run(self) -> Solution:
        left = reduced(self.problem, self.store, self.budget)
        self.integral = _integral(self.problem, self.store)
        if left is None:
            return self.answer((0,) * len(self.problem.costs), math.inf, True)
        core, nodes, costs, tables, memory = left.core, left.nodes, left.costs, left.tables, left.memory
        if (memory.limit < 0).any():
            return self.answer(self.whole(core, nodes, [0] * len(nodes)), math.inf, True)
        stuck = None
        if not len(memory.limit) or not nodes:
            found = eliminate(costs, tables, ENTRIES, TOTAL, store=self.store, budget=self.budget)
            if found is None:
                try:
                    found = narrow(Ascent(costs, tables, memory, self.budget))
                except Stuck as stop:
                    stuck = stop.best.labels
            if found is not None:
                return self.answer(self.whole(core, nodes, found), math.inf, True)
        local = Local(costs, tables, memory, self.budget)
        if stuck is not None:
            local.offer(stuck)
        bound, last = self.search(Ascent(costs, tables, memory, self.budget), local, core.constant)
        choice = self.whole(core, nodes, last if local.best is None else local.best)
        proved = bound >= local.cost - self.least_gain(local.cost + core.constant)
        return self.answer(choice, bound + core.constant, proved)

    def whole(self, core: Core, nodes: Sequence[int], labels: Sequence[int] | Array) -> tuple[int, ...]:
        full = core.full(dict(zip(nodes, labels, strict=True)))
        return tuple(full[: len(self.problem.costs)].tolist())

    def answer(self, choice: tuple[int, ...], bound: float, proved: bool) -> Solution:
        cost = total_cost(self.problem, choice)
        feasible = math.isfinite(cost) and peak_of(self.problem, choice) <= self.problem.limit
        known = bound
        bound = math.inf if proved and not feasible else cost if proved else min(bound, cost)
        least = None
        if not feasible and math.isfinite(self.problem.limit) and self.effort.least_peak:
            least = least_peak(self.problem, self.last_part())
            if (
                least is not None and least.peak <= self.problem.limit
            ):  # the search for the least peak found one that fits
                cost, choice, feasible, proved = total_cost(self.problem, least.choice), least.choice, True, False
                bound, least = min(known, cost), None
            elif least is not None:
                if proved:
                    least = dataclasses.replace(least, bound=max(least.bound, self.problem.limit))
                elif least.bound > self.problem.limit * (1 + 1e-9):
                    bound, proved = math.inf, True
                if math.isinf(cost):
                    cost, choice = total_cost(self.problem, least.choice), least.choice
        return Solution(choice, cost, bound, proved, feasible, least)

    def last_part(self) -> Budget:
        """The budget for the least peak, whatever is left."""
        work, seconds = PEAK_SHARE * self.budget.work, PEAK_SHARE * self.budget.seconds
        return Budget(max(PEAK, work), max(PEAK / SECOND, seconds), self.budget)

    def least_gain(self, cost: float) -> float:
        """The least gain that is no rounding error. Costs that are whole numbers differ by at least 1."""
        if not math.isfinite(cost):
            return 0.0
        return 0.999 if self.integral else 1e-9 * max(abs(cost), 1e-9)

    def margin(self, cost: float) -> float:
        """The least gain that is worth a search."""
        return max(self.least_gain(cost), self.effort.close * abs(cost)) if math.isfinite(cost) else 0.0

    def search(self, ascent: Ascent, local: Local, constant: float) -> tuple[float, Array]:
        """The bound, with the best labelling in `local`; and the last labelling, should none fit."""
        last = np.zeros(len(local.costs), np.int64)
        labels = len(ascent.base)

        def goal() -> float:
            return local.cost - self.margin(local.cost + constant)

        small = _size(ascent) <= SMALL
        before, idle = -math.inf, 0
        for number in range(self.effort.rounds):
            for _ in range(self.effort.steps):
                last = ascent.full(ascent.step(local.cost))
                local.offer(last)
                if local.best is None and not self.sought and self.late():
                    break
                if self.over() or self.done(ascent.bound, local, constant):
                    break
            rise = (ascent.bound - before) / max(abs(ascent.bound), 1e-300)
            before, best = ascent.bound, local.cost
            if rise < STEEP or number >= 3:
                self.improve_best(ascent, local, last, number, rise < RISING)
            upper = goal()
            if not self.over() and not ascent.bound >= upper:
                ascent.fix(upper)
                if not ascent.fits():
                    return goal(), last
            if local.best is None and not self.sought and (number >= DESPERATE or self.late()):
                self.sought = True
                local.fit(last, ascent.best, 12)
                self.seek(local)
            if self.over() or self.done(ascent.bound, local, constant):
                return min(ascent.bound, goal()), last
            now = int(ascent.open().sum())
            if now < 0.8 * labels:
                labels = now
                ascent = ascent.compact()
                if not len(ascent.nodes):
                    local.offer(ascent.full(np.zeros(0, np.int64)))
                if not len(ascent.nodes) or not ascent.possible():
                    return goal(), last
            if number % 4 == 0 and self.solved(ascent, local, upper, 2e6 if number < 1 else 2e7):
                return goal(), last
            idle = idle + 1 if rise < (RISING if small else STILL) and not local.cost < best else 0
            if idle > (0 if small else self.effort.patience) and local.best is not None:
                break
        if _size(ascent) > self.effort.most:
            return min(ascent.bound, goal()), last
        bound = branch(ascent, local, goal, self.effort.parts)
        return max(bound, ascent.bound) if local.best is None else bound, last

    def improve_best(self, ascent: Ascent, local: Local, last: Array, number: int, is_slow: bool) -> None:
        """Improve the best labelling: from the last suggested one and by local search; more of it where the bound is slow."""
        more = is_slow or number % 4 == 3
        raised, closer = more or number % 2 == 0, is_slow and number >= self.turn
        before = local.cost
        found = fitted(ascent, local, RAISES[number // 2 % len(RAISES)], HALVINGS if closer else 0) if raised else None
        if found is not None:
            local.offer(local.descend(found))
        if closer:
            self.wait = 1 if local.cost < before else min(2 * self.wait, 8)
            self.turn = number + self.wait
        if local.best is None:
            local.fit(last, ascent.best, 12)
        if not self.over() and more and number % self.pause == 0 and len(local.costs) < FEW:
            before = local.cost
            local.again(last, ascent.best, 0 if number < 3 else 2 * self.effort.neighbourhoods)
            self.pause = 1 if local.cost < before else min(self.pause + 1, 4)
        if number >= 3 and more:  # a small problem is often done before
            saved = local.improve(ascent.best, self.visits)
            self.visits = min(self.visits * 2, 4 * self.effort.neighbourhoods) if saved > 1e-4 else (
                max(self.visits // 2, self.effort.neighbourhoods // 3))  # fmt: skip

    def seek(self, local: Local) -> None:
        """A labelling within the limit at any cost, and better ones near it."""
        budget = self.budget.part(SEEK)
        found = fitting_labels(local.costs, local.tables, local.memory, budget)
        if found is not None:
            local.offer(local.descend(found))

    def solved(self, ascent: Ascent, local: Local, upper: float, total: float) -> bool:
        """Whether elimination solves what is left, memory aside."""
        found = minimum(ascent, 2e5, total)
        if found is None:
            return False
        if local.offer(found):
            return True
        return local.cost_of(found) >= upper

    def done(self, bound: float, local: Local, constant: float) -> bool:
        return bound >= local.cost - self.margin(local.cost + constant)

    def over(self) -> bool:
        return self.budget.is_over

    def late(self) -> bool:
        """Whether a good part of the budget is used."""
        budget = self.budget
        return budget.spent > LATE * budget.work or (
            budget.seconds < math.inf and budget.seconds_left < (1 - LATE) * budget.seconds)  # fmt: skip


def _size(ascent: Ascent) -> int:
    """Labels x neighbours."""
    return sum(len(own) * len(near) for own, near in zip(ascent.labels, ascent.tables, strict=True))


def _integral(problem: Labelling, store: Store) -> bool:
    """Whether every cost is a whole number and sums of them are exact."""
    values = [store.of(value) for value in (*problem.costs, *(table.cost for table in problem.tables))]
    largest = {id(value): _largest_whole(value) for value in {id(value): value for value in values}.values()}
    return sum(largest[id(value)] for value in values) < 2**52


def _largest_whole(values: Array) -> float:
    """The largest absolute finite value; infinite where one is not whole."""
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max(initial=0.0)) if (finite == np.rint(finite)).all() else math.inf
