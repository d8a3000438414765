"""The policy line and the reasons of an answer: how it was found, on which meshes, and its gap to the optimum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardfn.ir.model import Axes, mesh_sizes_text, mesh_text
from shardfn.search.mesh_solution import MeshSolution, estimate_holds, next_strategies
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem
from shardfn.search.refinement import FOLLOWS_PRODUCTS


def explained_answer(
    problem: SearchProblem, what: str, solutions: Sequence[MeshSolution], tried: str, is_cut_short: bool,
    best: SearchCandidate, solution: MeshSolution | None,
) -> Answer:  # fmt: skip
    """The answer for a candidate that comes from `solution`, or from a baseline where that is None."""
    if solution is None:
        gap, optimum = None, _optimum(problem, solutions)
        policy = f"{what}, meshes tried: {tried}{optimum}; as a program a baseline has the lower cost: {best.name}"
        reason = f"a baseline, cheaper than the plan of the solver: {best.name}"
    else:
        gap = (
            None if is_cut_short or not estimate_holds(problem, solution, best) else _gap(problem, solution, solutions)
        )
        where = "; meshes tried:" if problem.level == 0 else " on the meshes tried:"
        policy = f"{what}: {gap_text(best.axes, gap)} under the cost model, op by op{where} {tried}"
        policy += f"; {FOLLOWS_PRODUCTS}" if best.follows_products else ""
        reason = "the optimum of all ops together"
    reasons = tuple("" if given is not None else reason for given in problem.specs)
    others = () if solution is None else next_strategies(problem, solution)
    return Answer(best.axes, best.specs, reasons, policy, constraints=best.constraints, gap=gap,
                  result_specs=best.result_specs, runners_up=others)  # fmt: skip


def meshes_text(problem: SearchProblem, tried: Iterable[Axes], untried: Sequence[Axes]) -> str:
    """The meshes that were tried, and those that the limits left out."""
    meshes = ", ".join(dict.fromkeys(map(mesh_sizes_text, tried)))
    if untried:
        bound = f"{problem.seconds:g} s" if problem.seconds_left <= 0 else "the work that a search may do"
        return f"{meshes}; not within {bound}: {', '.join(map(mesh_sizes_text, untried))}"
    ended = f"; the time limit of {problem.seconds:g} s ended the search" if problem.seconds_left <= 0 else ""
    return meshes + ended


def gap_text(axes: Axes, gap: float | None) -> str:
    """The mesh of an answer and its gap to the optimum, in words."""
    mesh = f"mesh {mesh_text(axes)}"
    if gap is None:
        return f"{mesh}, no bound of the gap to the optimum"
    return f"{mesh}, {f'within {gap:.1%} of the optimum' if gap else 'proved optimal'}"


def _optimum(problem: SearchProblem, solutions: Sequence[MeshSolution]) -> str:
    """What is proved of the optimum of the sum over ops, where a baseline is the plan."""
    if not solutions or not solutions[0].is_exact or problem.level == 1 or solutions[0].solution.gap >= 1:
        return ""
    gap = solutions[0].solution.gap
    known = f"known within {gap:.1%}" if gap else "proved"
    return f"; the optimum of the sum over ops on the mesh {mesh_sizes_text(solutions[0].axes)} is {known}"


def _gap(problem: SearchProblem, solution: MeshSolution, solutions: Sequence[MeshSolution]) -> float | None:
    """The gap to the optimum on all meshes; at level 0, whose weights differ between meshes, on the answer's own."""
    if not solution.is_exact or problem.level == 1:
        return None
    if problem.level == 0:
        return solution.solution.gap
    bound = min(s.solution.cost if s.solution.proved else s.solution.bound for s in solutions)
    gap = 1 - bound / solution.solution.cost if solution.solution.cost > 0 else 0.0
    return gap if gap > 1e-6 else 0.0
