"""What is said of an answer: how it was found, on which grids, and how far it may be from the optimum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardfn.search.mesh_solution import MeshSolution, estimate_holds, mesh_text, runners_up
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem
from shardfn.search.refinement import LINE
from shardfn.search.resharding_costs import Axes


def explained_answer(
    problem: SearchProblem, what: str, found: Sequence[MeshSolution], tried: str, is_cut_short: bool, best: SearchCandidate,
    at: MeshSolution | None,
) -> Answer:  # fmt: skip
    """What was taken, with its reasons: made of `at`, or a plain layout where that is None."""
    if at is None:
        policy = (
            f"{what}, grids tried: {tried}{_optimum(problem, found)}; a plain layout has the better flow: {best.name}"
        )
        reason, gap = f"plain layout, better by its flow than the optimum of the cost model: {best.name}", None
    else:
        gap = _gap(problem, at, found) if not is_cut_short and estimate_holds(problem, at, best) else None
        where = "; grids tried:" if problem.level == 0 else " on the grids tried:"
        policy = f"{what}: {gap_text(best.axes, gap)} under the cost model, op by op{where} {tried}"
        policy += f"; {LINE}" if best.follows_products else ""
        reason = "the optimum of all ops together"
    reasons = tuple("" if given is not None else reason for given in problem.specs)
    return Answer(best.axes, best.specs, reasons, policy, constraints=best.constraints, gap=gap, result_specs=best.result_specs,
                  runners_up=() if at is None else runners_up(problem, at))  # fmt: skip


def meshes_text(problem: SearchProblem, looked: Iterable[Axes], untried: Sequence[Axes]) -> str:
    """The grids that were looked at, and what there was no time for."""
    tried = ", ".join(dict.fromkeys(map(mesh_text, looked)))
    if untried:
        bound = f"{problem.seconds:g} s" if problem.seconds_left <= 0 else "the work that a search may do"
        return f"{tried}; not in {bound}: {', '.join(map(mesh_text, untried))}"
    return f"{tried}; {problem.seconds:g} s were over before all was tried" if problem.seconds_left <= 0 else tried


def gap_text(axes: Axes, gap: float | None) -> str:
    """The grid, and what is known of how far the answer is from the optimum, in the words of a policy."""
    grid = " x ".join(f"{name}={size}" for name, size in axes)
    if gap is None:
        return f"grid {grid}, no bound of how far from the optimum"
    return f"grid {grid}, {f'within {gap:.1%} of the optimum' if gap else 'proved'}"


def _optimum(problem: SearchProblem, found: Sequence[MeshSolution]) -> str:
    """What is known of the model's best, on its own grid, where something else is taken."""
    if not found or not found[0].is_exact or problem.level == 1 or found[0].solution.gap >= 1:
        return ""
    gap, grid = found[0].solution.gap, mesh_text(found[0].axes)
    return f"; the optimum of the cost model on the grid {grid} is {f'known within {gap:.1%}' if gap else 'proved'}"


def _gap(problem: SearchProblem, at: MeshSolution, found: Sequence[MeshSolution]) -> float | None:
    """How far what was chosen may be from the optimum of all grids; at level 0, where costs are weighed on each grid by
    itself, of its own."""
    if not at.is_exact or problem.level == 1:
        return None
    if problem.level == 0:
        return at.solution.gap
    bound = min(f.solution.cost if f.solution.proved else f.solution.bound for f in found)
    gap = 1 - bound / at.solution.cost if at.solution.cost > 0 else 0.0
    return gap if gap > 1e-6 else 0.0
