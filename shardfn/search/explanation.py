"""From an archive to an answer: the best candidate of the problem's objective, how it was found, and its gap to the optimum."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.ir.model import Axes, mesh_sizes_text, mesh_text
from shardfn.search.engine import Archive
from shardfn.search.generators import BASELINES, TENSOR_BASELINES
from shardfn.search.labels import MeshSolution, estimate_holds, next_strategies
from shardfn.search.moves import CHANGED
from shardfn.search.problem import MEMORY, TIME, Answer, SearchCandidate, runner_up


def answer_of(what: str, archive: Archive) -> Answer:
    """The answer for the best candidate of an archive.

    Args:
      what: the name of the search.
      archive: its evaluated candidates.
    """
    problem = archive.problem
    best, *others = archive.ranked(problem.level)
    solution = archive.solution_of(best, problem.level)
    own = [one for one in archive.solutions if one.objective.level == problem.level]
    start, _, changed = best.name.partition(CHANGED)
    origin = best.origin or best.generator
    tried = _meshes_text(archive, own)
    begin = f"{what} at level {problem.level}, {len(archive)} candidates"
    gap = None if solution is None else _gap(archive, best, solution, own)
    if solution is not None:
        policy = f"{begin}: {_gap_text(best.axes, gap)} under the cost model, op by op, on the meshes tried: {tried}"
        reason = "the optimum of all ops together"
    elif changed:
        policy = f"{begin}, meshes tried: {tried}; {start}{CHANGED}{changed}"
        reason = "better than what the solver and the baselines found"
    elif origin in (BASELINES, TENSOR_BASELINES):
        policy = f"{begin}, meshes tried: {tried}; the plan is a baseline, the cheapest as a program: {start}"
        reason = f"a baseline, cheaper than the plan of the solver: {start}"
    else:
        policy = (
            f"{begin}, meshes tried: {tried}; the plan is a candidate of {origin!r}, the cheapest as a program: {start}"
        )
        reason = f"a candidate of {origin!r}: {start}"
    half = (
        f"the search was interrupted, and the plan is the best of the {len(archive)} candidates until then; fix: to search on, "
        "shard(f, ...).clear_cache(), and plan again"
    )
    return Answer(
        best.axes, best.specs, tuple("" if given is not None else reason for given in problem.specs), policy,
        runner_up=runner_up(best, others), constraints=best.constraints, gap=gap, others=tuple(others),
        runners_up=() if solution is None else next_strategies(problem, solution), result_specs=best.result_specs,
        diagnostics=(half,) if archive.was_interrupted else (),
    )  # fmt: skip


def _meshes_text(archive: Archive, solutions: Sequence[MeshSolution]) -> str:
    """The meshes that were solved for the objective, and what ended the search before its generators."""
    every = (*archive.tried_by_blocks, *(one.axes for one in solutions))
    meshes = ", ".join(dict.fromkeys(map(mesh_sizes_text, every))) or "none"
    if archive.was_interrupted:
        return f"{meshes}; interrupted"
    if archive.problem.seconds_left <= 0:
        return f"{meshes}; the time limit of {archive.problem.seconds:g} s ended the search"
    return meshes


def _gap_text(axes: Axes, gap: float | None) -> str:
    """The mesh of an answer and its gap to the optimum, in words."""
    mesh = f"mesh {mesh_text(axes)}"
    if gap is None:
        return f"{mesh}, no bound of the gap to the optimum"
    return f"{mesh}, {f'within {gap:.1%} of the optimum' if gap else 'proved optimal'}"


def _gap(
    archive: Archive, best: SearchCandidate, solution: MeshSolution, solutions: Sequence[MeshSolution]
) -> float | None:
    """The part of a candidate's cost that may lie above the optimum of the label model on all meshes that were solved.

    None where the solution is for another objective or not exact, where its estimate does not hold, and for time where an op
    has no checked rule.
    """
    problem = archive.problem
    if solution.objective.level != problem.level or not solution.is_exact or problem.level == MEMORY:
        return None
    if problem.level == TIME and best.cost.is_lower_bound:
        return None
    if not estimate_holds(problem, solution, best):
        return None
    bound = min(one.bound for one in solutions if one.objective == solution.objective)
    cost = solution.solution.cost
    gap = 1 - bound / cost if cost > 0 else 0.0
    return gap if gap > 1e-6 else 0.0
