"""From an archive to an answer: the best candidate of the problem's objective, and how it was found."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.ir.model import mesh_sizes_text
from shardfn.search.engine import Archive
from shardfn.search.generators import BASELINES, TENSOR_BASELINES
from shardfn.search.labels import MeshSolution, next_strategies
from shardfn.search.moves import CHANGED
from shardfn.search.problem import Answer, runner_up


def answer_of(what: str, archive: Archive) -> Answer:
    """The answer for the best candidate of an archive."""
    problem = archive.problem
    best, *others = archive.ranked(problem.level)
    solution = archive.solution_of(best, problem.level)
    own = [one for one in archive.solutions if one.objective.level == problem.level]
    start, _, changed = best.name.partition(CHANGED)
    origin = best.origin or best.generator
    tried = _meshes_text(archive, own)
    begin = f"{what} at level {problem.level}, {len(archive)} candidates"
    if solution is not None:
        policy = f"{begin}, meshes tried: {tried}; the plan has the solver's shardings"
        reason = "the solver's choice for all ops together"
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
        runner_up=runner_up(best, others), constraints=best.constraints, bound_s=archive.bound_s(), others=tuple(others),
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
