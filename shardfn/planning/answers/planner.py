"""From a posed call to a plan: search, finish, and work around XLA bugs that the plan would meet."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from shardfn.cost.estimate import Cost
from shardfn.ir.correspondence import matches
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import equations
from shardfn.movement import Shards, shares_halos
from shardfn.planning.answers.finish import compiled_program, file_constraints, finish
from shardfn.planning.call import (
    AnsweredCall,
    PosedCall,
    TracedCall,
    memoized,
    pose_again,
    pose_shifted,
    with_fewer_blocks,
)
from shardfn.planning.diagnostics import windows_fix
from shardfn.planning.meshes import PlanMesh, device_mesh
from shardfn.planning.plan import FIX, Plan, changed, later
from shardfn.planning.workarounds import (
    WrongOp,
    movements_of_equation,
    moves_shards,
    refuse_reshardings,
    workaround_note,
    wrong_ops,
)
from shardfn.search.problem import (
    COMMUNICATION,
    Answer,
    OpConstraints,
    SearchCandidate,
    objective,
    refuse_implausible_limit,
    refuse_limit,
)
from shardfn.session import without_collection

AVOIDS_BUG = "a plan that avoids an XLA bug"
"""The reason of a plan that is chosen because it avoids XLA bugs."""

COMPILES = "the best plan that XLA compiles"
"""The reason of a plan that is chosen because XLA does not compile a better one."""


def search(posed: PosedCall) -> Answer:
    """The answer of the search that the user asked for.

    Raises:
      StrategyError: the memory limit is so small that its unit must be a slip.
    """
    bounds = posed.call.search
    if bounds.memory_limit is not None and bounds.is_limit_strict:
        refuse_implausible_limit(posed.problem)
    fewer = functools.partial(with_fewer_blocks, posed)
    return posed.chosen_search(dataclasses.replace(posed.problem, with_fewer_blocks=fewer))


def plan_without_workarounds(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of an answer.

    Raises:
      StrategyError: it exceeds the user's memory limit.
    """
    return finish(posed, _settled(posed, answer))


def _settled(posed: PosedCall, answer: Answer) -> Answer:
    """The answer that a plan is made from, `with_given_constraints`.

    Raises:
      StrategyError: it exceeds the user's memory limit.
    """
    answer, bounds = with_given_constraints(posed, answer), posed.call.search
    if bounds.memory_limit is not None and bounds.is_limit_strict:
        refuse_limit(posed.problem, answer)
    return answer


def with_given_constraints(posed: PosedCall, answer: Answer) -> Answer:
    """The answer with the op constraints of the user: those that entries inside need, and those of the layout file."""
    inside = posed.problem.as_given(answer.axes, answer.specs, answer.constraints, answer.result_specs)
    constraints, _ = file_constraints(posed, answer.axes)
    return dataclasses.replace(answer, constraints={**inside, **constraints})


@without_collection()
def plan_search_answer(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of the search's answer. Where XLA would get an op wrong, that op is replicated and the call planned again.

    The best candidate without such an op takes its place where that costs less, or alone keeps the memory limit.
    """
    posed, answer = _with_shared_halos(*_in_its_form(posed, answer))
    if not (wrong := _wrong_ops(posed, compiled_program(posed, _settled(posed, answer)))):
        return plan_without_workarounds(posed, answer)
    other = with_workarounds(posed, answer, wrong)
    best = _best_correct(other, _unconstrained(answer), search(other))
    candidate = correct_candidate(posed, answer)
    if candidate and (
        not is_correct(other, best)
        or objective(candidate.cost, posed.problem) < objective(_cost(other, best), posed.problem)
    ):
        return plan_fixed_answer(posed, _as_correct(answer, candidate))
    return _with_all_workarounds(posed, other, best, wrong)


@without_collection()
def plan_fixed_answer(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of an answer that is settled, as `plan_search_answer` without a search."""
    kept = memoized(posed.problem.partition)  # a finished plan's call keeps no partitioned programs
    posed = dataclasses.replace(posed, problem=dataclasses.replace(posed.problem, partition=kept))
    posed, answer = _with_shared_halos(*_in_its_form(posed, answer))
    return _with_all_workarounds(posed, posed, answer)


def _in_its_form(posed: PosedCall, answer: Answer) -> tuple[PosedCall, Answer]:
    """The call as the user wrote it, if with its shardings nothing moves along sharded dimensions, else with `movement`'s shifts;
    and the answer for it."""
    if posed.call.function.unshifted is not None:
        shifted = pose_shifted(posed) if _moves_shards(posed, answer) else posed
        return shifted, _answer_of(posed, shifted, answer)
    if not _is_shifted(posed.call) or _moves_shards(posed, answer):
        return posed, answer
    written = _without_shifts(posed)
    same = _answer_of(posed, written, answer)
    return (posed, answer) if _moves_shards(written, same) else (written, same)


def _answer_of(posed: PosedCall, other: PosedCall, answer: Answer) -> Answer:
    """The answer for another form of the call, whose ops have other numbers: constraints go with their ops.

    Candidates keep the costs of the form that they were searched in. The bound is lowered by the compute that it has more of:
    sharding makes no op of a form cost more, so that no candidate saves more in the other one.
    """
    if other.problem.graph is posed.problem.graph:
        return answer
    ops = dict(matches(posed.problem.graph, other.problem.graph))

    def moved(constraints: OpConstraints) -> OpConstraints:
        return {ops[i]: constraint for i, constraint in constraints.items() if i in ops}

    others = tuple(dataclasses.replace(one, constraints=moved(one.constraints)) for one in answer.others)
    bound_s = answer.bound_s
    if bound_s is not None:
        bound_s -= max(0.0, posed.problem.facts.compute_s - other.problem.facts.compute_s)
        bound_s = bound_s if bound_s > 0 else None
    return dataclasses.replace(answer, constraints=moved(answer.constraints), others=others, bound_s=bound_s)


def _is_shifted(call: TracedCall) -> bool:
    """Whether a call is one of `movement`'s shifts, and could be one without: functions inside have numbers of its ops."""
    function = call.function
    return function.shifted is not None and not function.is_as_written and not function.inner


def _without_shifts(posed: PosedCall) -> PosedCall:
    """The call of the program as the user wrote it."""
    function = dataclasses.replace(posed.call.function, is_as_written=True, wrong=(), halo_shards={})
    return pose_again(posed, posed.call.of(function))


def _moves_shards(posed: PosedCall, answer: Answer) -> bool:
    """Whether an answer moves rows along sharded dimensions."""
    partitioned = posed.problem.partitioned_of(answer)
    return bool(_rotated(partitioned)) or moves_shards(partitioned)


def _with_shared_halos(posed: PosedCall, answer: Answer) -> tuple[PosedCall, Answer]:
    """The call, and an answer of it: where this costs less, with one halo for rotations of arrays that come from one array.

    At level 0 communication alone counts: the ops on elements are the same.
    """
    function = posed.call.function
    shards = _rotated(posed.problem.partitioned_of(with_given_constraints(posed, answer)))
    if not shards or (function.inner and not function.shifted):  # the shardings inside have numbers of its ops
        return posed, answer
    before = posed.call.traced if function.shifted else function.with_shared_halos({}).as_jaxpr()
    if not shares_halos(before.jaxpr, shards):
        return posed, answer
    other = pose_again(posed, posed.call.of(function.with_shared_halos(shards)))
    found = (posed, answer), (other, _unconstrained(answer))

    def key(one: tuple[PosedCall, Answer]) -> tuple[object, ...]:
        cost = _cost(*one)
        rank = objective(cost, one[0].problem)
        return (rank.over, cost.communication_s) if posed.problem.level == COMMUNICATION else rank

    return min(found, key=key)


def _cost(posed: PosedCall, answer: Answer) -> Cost:
    return posed.problem.evaluate_answer(with_given_constraints(posed, answer))


def _rotated(partitioned: PartitionedProgram) -> Shards:
    """The number of shards of the dimensions along which several arrays are rotated."""
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for op in partitioned.graph.ops:
        if op.name == "rotate":
            (window,), value = op.window_dims, op.outputs[0]
            place = partitioned.graph.values[value].shape, window.dim
            found.setdefault(place, []).append(partitioned.shards(value)[window.dim])
    return {place: math.lcm(*counts) for place, counts in found.items() if len(counts) > 1 and max(counts) > 1}


def _with_all_workarounds(posed: PosedCall, other: PosedCall, answer: Answer, wrong: tuple[WrongOp, ...] = ()) -> Plan:
    """The plan of an answer, when no op is left that XLA would get wrong: a workaround changes the shardings around it.

    Args:
      posed: the call without workarounds.
      other: the call with the workarounds of `wrong`.
      answer: an answer of it.
      wrong: ops with workarounds.
    """
    while True:
        found = _wrong_ops(posed, compiled_program(other, _settled(other, answer)), wrong)
        if not (more := tuple(w for w in found if w not in wrong)):
            break
        wrong = (*wrong, *more)
        other, answer = with_workarounds(posed, answer, wrong), _unconstrained(answer)
    refuse_reshardings(found)
    plan = plan_without_workarounds(other, answer)
    gathers = any(plan.partitioned.gathered_shards(c) is not None for c in plan.partitioned.communications)
    # Rows of a constant, such as the zeros of a gradient's pad, are on every device.
    note = workaround_note([one for one in wrong if one.kind != "window" and (gathers or one.kind != "movement")])
    windows = workaround_note(of_windows := [one for one in wrong if one.kind == "window"])
    if windows:
        lines, unguarded = {one.where for one in of_windows}, AnsweredCall(posed, _unconstrained(answer))
        windows += f";{FIX}{windows_fix(plan, lines, unguarded, compiled_program(posed, unguarded.answer))}"
    return with_notes(plan, *filter(None, (windows, note)))


def alternatives(answered: AnsweredCall) -> Iterator[tuple[str, PosedCall, Answer]]:
    """The other candidates that the search evaluated and that keep the user's memory limit, best first: the name, the call and
    the answer. At the end the answer itself without constraints, and that of the program as the user wrote it, without shifts."""
    posed, answer, problem = answered.posed, answered.answer, answered.problem
    bare = dataclasses.replace(answer, constraints={}, result_specs={})
    own = problem.as_candidate("the same shardings without constraints", bare)
    found = list(answer.others)
    if posed.call.function.wrong or posed.call.function.halo_shards:  # their ops may have other numbers
        found = [dataclasses.replace(c, constraints={}) for c in found]
    is_limited = posed.call.search.memory_limit is not None and posed.call.search.is_limit_strict
    seen = [_choice(answer)]
    for candidate in (*found, own):
        if _choice(candidate) not in seen and (problem.fits(candidate) or not is_limited):
            seen.append(_choice(candidate))
            yield candidate.name, posed, chosen(answer, candidate, COMPILES)
    if _is_shifted(posed.call):
        yield "the same shardings, rows gathered instead of shifted", _without_shifts(posed), bare


def with_workarounds(posed: PosedCall, answer: Answer, wrong: tuple[WrongOp, ...]) -> PosedCall:
    """The call posed again, with the ops replicated that XLA would get wrong in the plan of an answer."""
    function = dataclasses.replace(posed.call.function, wrong=wrong)
    ambient = posed.call.ambient_mesh
    if ambient is not None and ambient.is_binding:
        mesh: Mesh | AbstractMesh = ambient.auto
    else:
        mesh = device_mesh(posed.call.hardware, answer.axes, posed.order)
    return pose_again(posed, posed.call.of(function, PlanMesh.of(mesh)))


def without_workarounds(call: TracedCall) -> TracedCall:
    """The call as it was before its plan needed workarounds, no shifts or shared halos: another plan may need others."""
    function = call.function
    if not function.wrong and not function.is_as_written and not function.halo_shards:
        return call
    return call.of(dataclasses.replace(function, wrong=(), is_as_written=False, halo_shards={}))


def chosen(answer: Answer, candidate: SearchCandidate, why: str) -> Answer:
    """The answer with a candidate in the place of what the search chose."""
    if _choice(candidate) == _choice(answer):
        return answer
    text = f"{why}: {candidate.name}"
    return dataclasses.replace(
        answer, axes=candidate.axes, specs=candidate.specs, constraints=candidate.constraints,
        result_specs=candidate.result_specs,
        reasons=tuple(text if reason else "" for reason in answer.reasons), runners_up=(), runner_up="", policy=text,
    )  # fmt: skip


def _choice(one: Answer | SearchCandidate) -> tuple[object, ...]:
    """What a search decides: the mesh, the shardings of arguments and results, and the constraints."""
    return one.axes, one.specs, one.constraints, one.result_specs


def is_correct(posed: PosedCall, candidate: SearchCandidate | Answer) -> bool:
    """Whether XLA computes all ops of a candidate or an answer correctly."""
    return not _wrong_ops(posed, posed.problem.partitioned_of(candidate), posed.call.function.wrong)


def _wrong_ops(
    posed: PosedCall, partitioned: PartitionedProgram, known: tuple[WrongOp, ...] = ()
) -> tuple[WrongOp, ...]:
    """`wrong_ops`, of movement only what the traced function has: JAX lowers other ops to slices and pads too."""
    found = wrong_ops(partitioned, known)
    if not any(w.movement for w in found):
        return found
    own = {movement for _, eqn, _ in equations(posed.call.traced.jaxpr) for movement in movements_of_equation(eqn)}
    return tuple(w for w in found if w.movement is None or w.movement in own)


def correct_answer(posed: PosedCall, answer: Answer) -> Answer:
    """The answer, or the best other candidate, if there is any, where XLA would get an op of it wrong."""
    other = None if is_correct(posed, answer) else correct_candidate(posed, answer)
    return _as_correct(answer, other) if other else answer


def correct_candidate(posed: PosedCall, answer: Answer) -> SearchCandidate | None:
    """The best of the other candidates in which XLA computes all ops correctly."""
    return next((c for c in answer.others if is_correct(posed, c)), None)


def _as_correct(answer: Answer, candidate: SearchCandidate) -> Answer:
    correct = chosen(answer, candidate, AVOIDS_BUG)
    if correct is answer:
        return answer
    return dataclasses.replace(correct, policy=f"{answer.policy}; replaced by {correct.policy}")


def _best_correct(posed: PosedCall, *answers: Answer) -> Answer:
    """Of the first answer's shardings and the second's, the better one without ops that XLA gets wrong."""
    (first, found), problem = answers, posed.problem
    other = correct_answer(posed, found)
    if _choice(other) == _choice(first):  # nothing was open
        return first
    right = [one for one in (first, other) if is_correct(posed, one)]
    return min(right or [first], key=lambda one: objective(problem.evaluate_answer(one), problem))


def _unconstrained(answer: Answer) -> Answer:
    """The answer for the program with workarounds, without constraints and costs: that program's ops have other numbers."""
    others = tuple(c for c in answer.others if not c.constraints)
    return dataclasses.replace(answer, constraints={}, others=others, runner_up="")


def with_notes(plan: Plan, *notes: str) -> Plan:
    """The plan with more diagnostics."""
    return changed(plan, diagnostics=later(lambda: (*plan.diagnostics, *notes))) if notes else plan
