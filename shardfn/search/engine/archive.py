"""The archive of a search: every candidate that it evaluated, for all objectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from shardfn.ir.model import Axes, mesh_sizes
from shardfn.search.engine.meshes import meshes
from shardfn.search.labels import (
    LEAST_SENT_BALANCED,
    LEAST_TIME,
    LabelSpace,
    MeshSolution,
    Objective,
    SolvedProposal,
    keeps_rules,
)
from shardfn.search.problem import (
    BALANCED,
    COMMUNICATION,
    FIXED_VISITS,
    LEVELS,
    TIME,
    VISIT,
    Proposal,
    Rank,
    SearchCandidate,
    SearchProblem,
    visits_of,
    work_of,
)


def visits(problem: SearchProblem) -> float:
    """The ops that the search of a problem may visit."""
    return visits_of(problem.budget, len(problem.graph.ops), len(meshes(problem)))


class Archive:
    """The evaluated candidates of one search, and the budget that evaluations and solver steps spend.

    The best of equals is the one with the fewest constraints, then the one that was evaluated first.
    """

    def __init__(self, problem: SearchProblem, known: Archive | None = None) -> None:
        """The archive of a problem; empty, or with what is `known` of the same problem within another memory limit."""
        self.problem = problem
        self._at = {level: problem.at(level) for level in LEVELS}
        self.budget = work_of(visits(problem), problem.seconds_left)
        self.evaluation_work = VISIT * (FIXED_VISITS + len(problem.graph.ops))
        """Work of evaluating one candidate, in the solver's units."""
        self.was_interrupted = known is not None and known.was_interrupted
        self.solutions: list[MeshSolution] = [] if known is None else known.solutions
        """What the solver found, for all objectives."""
        self.tried_by_blocks: tuple[Axes, ...] = () if known is None else known.tried_by_blocks
        """The meshes that were solved for the program with fewer equal blocks."""
        self.spaces: dict[Axes, LabelSpace] = {} if known is None else known.spaces
        """The choices on each mesh, which the objectives share."""
        self._candidates: dict[object, SearchCandidate] = {} if known is None else known._candidates
        self._facts: dict[object, _Facts] = {} if known is None else known._facts
        self._solved: dict[object, dict[Objective, MeshSolution]] = {} if known is None else known._solved
        """What the solver found, by shardings and objective."""
        self._orders: dict[tuple[int, int], tuple[object, ...]] = {}
        """`_order` by level and number of the candidate."""
        self._best: dict[tuple[int, tuple[int, ...]], SearchCandidate] = {}
        """The best candidate by level and mesh sizes."""
        self._least: dict[tuple[int, tuple[int, ...]], float] = {}
        """The least first figure of the level's aim by level and mesh sizes, also of candidates that exceed the memory limit."""
        self._best_of_all: dict[int, SearchCandidate] = {}
        """The best candidate by level."""
        self._evaluated: list[SearchCandidate] = list(self)
        self._compared: dict[int, int] = dict.fromkeys(LEVELS, 0)
        """By level how many of the candidates were compared."""

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Iterator[SearchCandidate]:
        """The candidates in the order of their evaluation."""
        return iter({candidate.key: candidate for candidate in self._candidates.values()}.values())

    def evaluate(self, proposal: Proposal, generator: str = "") -> SearchCandidate:
        """The evaluated candidate of a proposal. To evaluate it again costs nothing.

        Args:
          proposal: the choice.
          generator: the name of the generator that proposes it.
        """
        if isinstance(proposal, SolvedProposal):
            solution, known = proposal.solution, self._solved.setdefault(_shardings(proposal), {})
            if solution.objective not in known or solution.is_exact > known[solution.objective].is_exact:
                known[solution.objective] = solution
        if proposal.key not in self._candidates:
            self.budget.spend(self.evaluation_work)
            candidate = self.problem.candidate(proposal, generator)
            is_new = candidate.key not in self._facts
            if is_new:
                keeps = keeps_rules(self.problem.partitioned_of(candidate), self.problem.algorithm)
                self._facts[candidate.key] = _Facts(len(self._facts), keeps)
            self._candidates[proposal.key] = candidate  # with facts: Ctrl-C can come between any two lines
            if is_new:
                self._evaluated.append(candidate)
        return self._candidates[proposal.key]

    def of(self, proposal: Proposal) -> SearchCandidate:
        """The candidate of a proposal that was evaluated."""
        return self._candidates[proposal.key]

    def _compare(self, level: int) -> None:
        """Compare the candidates that were evaluated since at a level. Few searches ask for other levels than their own."""
        for candidate in self._evaluated[self._compared[level] :]:
            mesh = level, mesh_sizes(candidate.axes)
            self._least[mesh] = min(self._at[level].rank(candidate).aim[0], self._least.get(mesh, math.inf))
            known = self._best.get(mesh)
            if known is None or self._order(level, candidate) < self._order(level, known):
                self._best[mesh] = candidate
                first = self._best_of_all.get(level)
                if first is None or self._order(level, candidate) < self._order(level, first):
                    self._best_of_all[level] = candidate
        self._compared[level] = len(self._evaluated)

    def _order(self, level: int, candidate: SearchCandidate) -> tuple[object, ...]:
        facts = self._facts[candidate.key]
        known = self._orders.get((level, facts.number))
        if known is None:
            rank = self._at[level].rank(candidate)
            known = not facts.keeps_rules, rank, len(candidate.constraints), facts.number
            self._orders[level, facts.number] = known
        return known

    def ranked(self, level: int) -> list[SearchCandidate]:
        """All candidates, the best at a level first; those that break a rule of `set_algo_parameters` come last."""
        return sorted(self, key=lambda candidate: self._order(level, candidate))

    def best_of_each_mesh(self, level: int) -> list[SearchCandidate]:
        """The best candidate on each mesh at a level, the best of all first."""
        self._compare(level)
        best = (candidate for (of, _), candidate in self._best.items() if of == level)
        return sorted(best, key=lambda candidate: self._order(level, candidate))

    def least_aim(self, level: int, axes: Axes) -> float:
        """The least first figure of a level's aim among the candidates on a mesh, also of those beyond the memory limit;
        infinite where there is none.
        """
        self._compare(level)
        return self._least.get((level, mesh_sizes(axes)), math.inf)

    def best(self, level: int) -> SearchCandidate:
        """The best candidate at a level."""
        self._compare(level)
        return self._best_of_all[level]

    def best_rank(self) -> Rank | None:
        """The rank of the best candidate at the problem's level; None while the archive is empty."""
        self._compare(self.problem.level)
        best = self._best_of_all.get(self.problem.level)
        return None if best is None else self.problem.rank(best)

    def is_proved(self) -> bool:
        """Whether the best candidate is proved to cost at most the problem's tolerance more than the optimum of the cost model.

        Nothing costs less than nothing. Otherwise the model must hold: the candidate costs no less than the bound, up to the
        same tolerance. There is no bound of memory.
        """
        problem, bound = self.problem, self.bound_s()
        if not problem.tolerance or not problem.fits(best := self.best(problem.level)):
            return False
        aim = best.cost.time_s if problem.level == TIME else problem.rank(best).aim[0]
        return not aim or (bound is not None and abs(aim - bound) <= problem.tolerance * bound)

    def bound_s(self) -> float | None:
        """The least that the label model allows on the meshes that were solved: seconds of a call at level 2, at level 0 those of
        communication and of compute beyond a balanced share. None without a bound."""
        own = {TIME: LEAST_TIME, COMMUNICATION: LEAST_SENT_BALANCED}.get(self.problem.level)
        bounds = [one.bound for one in self.solutions if one.objective == own and one.is_exact]
        if not bounds:
            return None
        beyond = 0.0 if self.problem.level == TIME else BALANCED * self.problem.even_s
        return max(0.0, min(bounds) - self.problem.most_saved_s - beyond)

    def best_of(self, solution: MeshSolution, level: int) -> SearchCandidate | None:
        """The best candidate that comes from a solution; None where there is none."""
        return next(
            (each for each in self.ranked(level) if self._solutions_of(each).get(solution.objective) is solution), None
        )

    def solution_of(self, candidate: SearchCandidate, level: int) -> MeshSolution | None:
        """The solver's solution with the shardings of a candidate, whatever its constraints, for a level, or else for another;
        None where there is none."""
        every = self._solutions_of(candidate).values()
        return next((each for each in every if each.objective.level == level), next(iter(every), None))

    def _solutions_of(self, candidate: SearchCandidate) -> Mapping[Objective, MeshSolution]:
        return self._solved.get(_shardings(candidate), {})


def _shardings(proposal: Proposal) -> object:
    return proposal.axes, proposal.specs, tuple(sorted(proposal.result_specs.items()))


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What an archive knows of a candidate in addition to its cost."""

    number: int
    """Its place in the order of evaluation."""
    keeps_rules: bool
