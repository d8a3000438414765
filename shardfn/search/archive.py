"""The archive of a search: every candidate that it evaluated, for all objectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from shardfn.ir.model import Axes
from shardfn.search.budget import FIXED_VISITS, VISIT, visits_of, work_of
from shardfn.search.filters import keeps_rules
from shardfn.search.label_tables import LabelSpace
from shardfn.search.mesh_solution import MeshSolution, SolvedProposal
from shardfn.search.meshes import meshes
from shardfn.search.objectives import LEVELS, Rank
from shardfn.search.problem import Proposal, SearchCandidate, SearchProblem


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
        self.spaces: dict[Axes, LabelSpace] = {} if known is None else known.spaces
        """The choices on each mesh, which the objectives share."""
        self._made: dict[object, SearchCandidate] = {} if known is None else known._made
        self._facts: dict[object, _Facts] = {} if known is None else known._facts
        self._solved: dict[object, MeshSolution] = {} if known is None else known._solved
        self._best: dict[tuple[int, tuple[int, ...]], SearchCandidate] = {}
        """By level and the sizes of a mesh."""
        self._least: dict[tuple[int, tuple[int, ...]], float] = {}
        """The least first figure of the level's aim, of candidates that fit and of others."""
        self._first: dict[int, SearchCandidate] = {}
        """By level."""
        for made in self._made.values():
            self._keep_best(made)

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Iterator[SearchCandidate]:
        """The candidates in the order of their evaluation."""
        return iter({made.key: made for made in self._made.values()}.values())

    def evaluate(self, proposal: Proposal, generator: str = "") -> SearchCandidate:
        """The evaluated candidate of a proposal. To evaluate it again costs nothing.

        Args:
          proposal: the choice.
          generator: the name of the generator that proposes it.
        """
        if isinstance(proposal, SolvedProposal):
            known = self._solved.get(_shardings(proposal))
            if known is None or proposal.solution.is_exact > known.is_exact:
                self._solved[_shardings(proposal)] = proposal.solution
        if proposal.key not in self._made:
            self.budget.spend(self.evaluation_work)
            made = self.problem.candidate(proposal, generator)
            is_new = made.key not in self._facts
            if is_new:
                keeps = keeps_rules(self.problem.partitioned_of(made), self.problem.algorithm)
                self._facts[made.key] = _Facts(len(self._facts), keeps)
            self._made[proposal.key] = made  # with facts: Ctrl-C can come between any two lines
            if is_new:
                self._keep_best(made)
        return self._made[proposal.key]

    def of(self, proposal: Proposal) -> SearchCandidate:
        """The candidate of a proposal that was evaluated."""
        return self._made[proposal.key]

    def _keep_best(self, made: SearchCandidate) -> None:
        for level in LEVELS:
            mesh = level, _sizes(made.axes)
            self._least[mesh] = min(self._at[level].rank(made).aim[0], self._least.get(mesh, math.inf))
            known = self._best.get(mesh)
            if known is None or self._order(level, made) < self._order(level, known):
                self._best[mesh] = made
                first = self._first.get(level)
                if first is None or self._order(level, made) < self._order(level, first):
                    self._first[level] = made

    def _order(self, level: int, made: SearchCandidate) -> tuple[object, ...]:
        facts = self._facts[made.key]
        return not facts.keeps_rules, self._at[level].rank(made), len(made.constraints), facts.number

    def ranked(self, level: int) -> list[SearchCandidate]:
        """All candidates, the best at a level first; those that break a rule of `set_algo_parameters` come last."""
        return sorted(self, key=lambda made: self._order(level, made))

    def best_of_each_mesh(self, level: int) -> list[SearchCandidate]:
        """The best candidate on each mesh at a level, the best of all first."""
        best = (made for (of, _), made in self._best.items() if of == level)
        return sorted(best, key=lambda made: self._order(level, made))

    def least_aim(self, level: int, axes: Axes) -> float:
        """The least first figure of a level's aim among the candidates on a mesh, also of those beyond the memory limit;
        infinite where there is none.
        """
        return self._least.get((level, _sizes(axes)), math.inf)

    def best(self, level: int) -> SearchCandidate:
        """The best candidate at a level."""
        return self._first[level]

    def best_ranks(self) -> list[Rank]:
        """The rank of the best candidate at each level; none while the archive is empty."""
        return [self._at[level].rank(made) for level, made in self._first.items()]

    def best_of(self, solution: MeshSolution, level: int) -> SearchCandidate | None:
        """The best candidate that comes from a solution; None where there is none."""
        return next((made for made in self.ranked(level) if self.solution_of(made) is solution), None)

    def solution_of(self, made: SearchCandidate) -> MeshSolution | None:
        """The solver's solution with the shardings of a candidate, whatever its constraints; None where there is none."""
        return self._solved.get(_shardings(made))


def _sizes(axes: Axes) -> tuple[int, ...]:
    return tuple(size for _, size in axes)


def _shardings(made: Proposal) -> object:
    return made.axes, made.specs, tuple(sorted(made.result_specs.items()))


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What an archive knows of a candidate beside its cost."""

    number: int
    """Its place in the order of evaluation."""
    keeps_rules: bool
