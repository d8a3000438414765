"""From a posed call to a plan: search, finish, and work around XLA bugs that the plan would meet."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from shardfn.cost.collectives import communication_bytes
from shardfn.cost.estimate import Cost
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import equations
from shardfn.movement import shares_halos
from shardfn.planning.answers.finish import as_compiled, finish
from shardfn.planning.call import (
    AnsweredCall,
    PosedCall,
    TracedCall,
    as_written,
    in_other_form,
    is_shifted,
    memoized,
    moves,
    pose_again,
    pose_shifted,
    rotated,
    with_fewer_blocks,
)
from shardfn.planning.diagnostics import windows_fix
from shardfn.planning.meshes import PlanMesh, device_mesh
from shardfn.planning.plan import FIX, Plan, changed, later
from shardfn.planning.workarounds import (
    WrongOp,
    in_program,
    movements_of_equation,
    refuse_reshardings,
    workaround_note,
    wrong_ops,
)
from shardfn.search.problem import (
    COMMUNICATION,
    Answer,
    Rank,
    SearchCandidate,
    is_no_worse,
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
    answer, bounds = with_given_constraints(posed, answer), posed.call.search
    if bounds.memory_limit is not None and bounds.is_limit_strict:
        refuse_limit(posed.problem, answer)
    return finish(posed, answer)


def with_given_constraints(posed: PosedCall, answer: Answer) -> Answer:
    """The answer with the op constraints of the user: those that entries inside need, and those of the layout file."""
    inside = posed.problem.as_given(answer.axes, answer.specs, answer.constraints, answer.result_specs)
    return dataclasses.replace(answer, constraints={**inside, **posed.propagation.given_constraints(answer.axes)})


@without_collection()
def plan_search_answer(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of the search's answer. Where XLA would get an op wrong, that op is replicated, and where this costs more than the
    tolerance of the search, the call is planned again.

    The best candidate without such an op takes its place where that costs less, or alone keeps the memory limit. What is found is
    planned with the workarounds that it needs itself, so that a layout file gives the same plan again.
    """
    first = _guarded(posed, answer)
    if not first.wrong or not posed.problem.is_open or first.is_as_cheap_unguarded():
        return _plan_guarded(first)
    call, own = first.unguarded.posed, first.unguarded.answer
    other = with_workarounds(call, own, first.wrong)
    best = _best_correct(other, in_other_form(call, other, own), search(other))
    found = [first, _guarded(posed, in_other_form(other, posed, best))]
    if candidate := correct_candidate(call, own):
        found.append(_guarded(posed, in_other_form(call, posed, _as_correct(own, candidate))))
    return _plan_guarded(min(found, key=_Guarded.rank))


@without_collection()
def plan_fixed_answer(posed: PosedCall, answer: Answer) -> Plan:
    """The plan of an answer that is settled, as `plan_search_answer` without a search."""
    kept = memoized(posed.problem.partition)  # a finished plan's call keeps no partitioned programs
    posed = dataclasses.replace(posed, problem=dataclasses.replace(posed.problem, partition=kept))
    return _plan_guarded(_guarded(posed, answer))


def cost_of_plan(posed: PosedCall, answer: Answer) -> Cost:
    """What the plan of an answer costs: as it is compiled, with the layout file's constraints and with workarounds."""
    return _guarded(posed, answer).cost


def _in_its_form(posed: PosedCall, answer: Answer) -> tuple[PosedCall, Answer]:
    """The call as the user wrote it, if with its shardings nothing moves along sharded dimensions, else with `movement`'s shifts;
    and the answer for it."""
    layout = posed.call.layout
    if posed.call.function.unshifted is not None:
        given = with_given_constraints(posed, answer)
        is_of_shifts = layout is not None and any(constraint.shifts for constraint in layout.constraints)
        if not is_of_shifts and not moves(posed.problem.partitioned_of(given)):
            return posed, given
        shifted = pose_shifted(posed)
        posed, answer = shifted, in_other_form(posed, shifted, given)
        if not is_of_shifts:
            return posed, answer
    if not is_shifted(posed.call):
        return posed, answer
    written, same = _as_written(posed, answer)
    return (posed, answer) if moves(written.problem.partitioned_of(same)) else (written, same)


def _as_written(posed: PosedCall, answer: Answer) -> tuple[PosedCall, Answer]:
    """A call of shifts as the user wrote it, and the answer for it."""
    written = as_written(posed)
    same = in_other_form(posed, written, with_given_constraints(posed, answer))
    return written, with_given_constraints(written, same)


def _are_halos(posed: PosedCall, shifted: PartitionedProgram) -> bool:
    """Whether the shifts of a call send, each once, no more than gathering its arguments would; or its layout file has them."""
    layout = posed.call.layout
    if not is_shifted(posed.call) or (layout is not None and any(one.shifts for one in layout.constraints)):
        return True
    gathered = sum(shifted.local_bytes(v) * (math.prod(shifted.shards(v)) - 1) for v in shifted.graph.inputs)
    sent = (communication_bytes(shifted, c) for c in shifted.communications if c.kind == "collective-permute")
    return sum(sent) <= gathered


def _with_shared_halos(posed: PosedCall, answer: Answer) -> tuple[PosedCall, Answer] | None:
    """The call, and an answer of it, with one halo for rotations of arrays that come from one array; None if there are none."""
    function = posed.call.function
    shards = rotated(posed.problem.partitioned_of(with_given_constraints(posed, answer)))
    if not shards or (function.inner and not function.shifted):  # the shardings inside have numbers of its ops
        return None
    before = posed.call.traced if function.shifted else function.with_shared_halos({}).as_jaxpr()
    if not shares_halos(before.jaxpr, shards):
        return None
    return pose_again(posed, posed.call.of(function.with_shared_halos(shards))), _unconstrained(answer)


@dataclasses.dataclass(frozen=True, eq=False)
class _Guarded:
    """An answer of a call with workarounds for all ops that XLA would get wrong: a workaround changes the shardings around it.

    Attributes:
      unguarded: the call without them, and what is asked of it.
      posed: the call with them.
      answer: the answer of it.
      wrong: the ops.
      left: what XLA would still get wrong: reshardings, and ops that are known to be wrong.
    """

    unguarded: AnsweredCall
    posed: PosedCall
    answer: Answer
    wrong: tuple[WrongOp, ...]
    left: tuple[WrongOp, ...]

    @functools.cached_property
    def cost(self) -> Cost:
        """`Plan.cost`."""
        return self.posed.problem.evaluate_answer(_compiled(self.posed, self.answer))

    def rank(self) -> tuple[bool, Rank]:
        """How good it is; less is better."""
        return any(w.kind == "reshard" for w in self.left), objective(self.cost, self.posed.problem)

    def is_as_cheap_unguarded(self) -> bool:
        """Whether it costs as much as without the workarounds, within the tolerance: no other plan is better by more."""
        posed, answer = self.unguarded.posed, self.unguarded.answer
        (is_refused, own), free = (
            self.rank(),
            objective(posed.problem.evaluate_answer(_compiled(posed, answer)), posed.problem),
        )
        one, other = (rank._replace(ties=()) for rank in (own, free))
        return not is_refused and is_no_worse(one, other, posed.problem.tolerance)


def _guarded(posed: PosedCall, answer: Answer) -> _Guarded:
    """An answer of a call in the form in which it is compiled: with shared halos where this costs less, and without shifts where
    they are no halos and cost more.

    At level 0 communication alone decides that: the ops on elements are the same.
    """

    def key(one: _Guarded) -> tuple[object, ...]:  # nothing is judged in a first call before somebody asks
        is_refused, rank = one.rank()
        return is_refused, *((rank.over, one.cost.communication_s) if posed.problem.level == COMMUNICATION else rank)

    found = _with_all_workarounds(*_in_its_form(posed, answer))
    shifted = found.unguarded.posed, found.unguarded.answer
    if shared := _with_shared_halos(*shifted):
        found = min(found, _with_all_workarounds(*shared), key=key)
    if not _are_halos(found.posed, _compiled_program(found.posed, found.answer)):
        found = min(found, _with_all_workarounds(*_as_written(*shifted)), key=key)
    return found


def _with_all_workarounds(posed: PosedCall, answer: Answer) -> _Guarded:
    """An answer of a call as it is, with all workarounds."""
    unguarded, other, wrong = AnsweredCall(posed, answer), posed, tuple[WrongOp, ...]()
    while not set(left := _wrong_ops(posed, _compiled_program(other, answer), wrong)) <= set(wrong):
        wrong = tuple(dict.fromkeys((*wrong, *left)))
        other = with_workarounds(posed, answer, wrong)
        answer = in_other_form(posed, other, unguarded.answer)
    return _Guarded(unguarded, other, answer, wrong, left)


def _compiled(posed: PosedCall, answer: Answer) -> Answer:
    """`as_compiled`, with the constraints of the user."""
    return as_compiled(posed, with_given_constraints(posed, answer))


def _compiled_program(posed: PosedCall, answer: Answer) -> PartitionedProgram:
    """The partitioned program of the answer's plan, `Plan.partitioned`."""
    return posed.problem.partitioned_of(_compiled(posed, answer))


def _plan_guarded(found: _Guarded) -> Plan:
    """The plan of an answer with all workarounds, with a note on them.

    Raises:
      StrategyError: it exceeds the user's memory limit, or a resharding is left that ends the process.
    """
    wrong = found.wrong
    refuse_reshardings(found.left)
    plan = plan_without_workarounds(found.posed, found.answer)
    gathers = any(plan.partitioned.gathered_shards(c) is not None for c in plan.partitioned.communications)
    # Rows of a constant, such as the zeros of a gradient's pad, are on every device.
    note = workaround_note([one for one in wrong if one.kind != "window" and (gathers or one.kind != "movement")])
    windows = workaround_note(of_windows := [one for one in wrong if one.kind == "window"])
    if windows:
        lines, unguarded = {one.where for one in of_windows}, found.unguarded
        program = _compiled_program(unguarded.posed, unguarded.answer)
        windows += f";{FIX}{windows_fix(plan, lines, unguarded, program)}"
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
    if is_shifted(posed.call):
        yield "the same shardings, rows gathered instead of shifted", as_written(posed), bare


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
    """The call as it was before its plan needed workarounds, no shifts or shared halos, and before the search fixed the open
    dimensions of entries: another plan may need others."""
    function = call.function
    if any(leaf.completes for leaf in (*call.inputs, *call.outputs)):
        inputs, outputs = (tuple(leaf.completes or leaf for leaf in leaves) for leaves in (call.inputs, call.outputs))
        call = dataclasses.replace(call, inputs=inputs, outputs=outputs)
    if not function.wrong and not function.is_as_written and not function.halo_shards:
        return call
    other = call.of(dataclasses.replace(function, wrong=(), is_as_written=False, halo_shards={}))
    is_plain = function.is_as_written and not function.wrong
    return dataclasses.replace(other, written=(function, call.traced)) if is_plain else other


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
    """`wrong_ops`, as the traced function has them."""
    found = wrong_ops(partitioned, known, posed.call.function.has_residuals)
    if not any(w.movement for w in found):
        return found
    own = {movement for _, eqn, _ in equations(posed.call.traced.jaxpr) for movement in movements_of_equation(eqn)}
    return tuple(one for w in found for one in in_program(w, own))


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
