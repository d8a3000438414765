"""Rehearse a few candidates and take the best by measured compute and modelled communication."""

from __future__ import annotations

from shardfn.compiled import candidates
from shardfn.errors import StrategyError
from shardfn.planning.answers import correct_answer, plan_fixed_answer, with_notes
from shardfn.planning.call import PosedCall
from shardfn.planning.plan import Plan
from shardfn.runtime.rehearsal.rehearse import rehearse
from shardfn.search.problem import Answer, Figures


def best_rehearsed(posed: PosedCall, answer: Answer, count: int) -> Plan:
    """The plan of the best of `count` rehearsed candidates, within the memory limit first.

    Args:
      posed: the question.
      answer: the search's answer to it.
      count: how many candidates are measured; `compiled.candidates.answers` chooses them.

    Raises:
      StrategyError: no candidate runs, or none keeps the memory limit.
      DeviceError: no such device is here, or one takes too long.
      NotAvailableError: the devices are no GPUs.
    """
    problem, limit = posed.problem, posed.problem.memory_limit
    entered = candidates.answers(posed, correct_answer(posed, answer), count)
    measured: list[tuple[Plan, candidates.CompiledCandidate]] = []
    refused: list[candidates.Refused] = []
    for name, one in entered:
        try:
            plan = rehearse(plan_fixed_answer(posed, one))
        except StrategyError as error:
            refused.append(candidates.refused(name, one, error))
            continue
        measured.append((plan, _judged(name, plan, problem.even_s)))
    if not measured:
        candidates.none_compiles(posed.call.name, refused)
    own = "" if any(made.name == entered[0][0] for _, made in measured[:1]) else entered[0][0]
    at, note = candidates.best([made for _, made in measured], limit, own, "rehearsed")
    plan, made = measured[at]
    if posed.call.search.memory_limit is not None:
        candidates.check(made, len(measured), limit)
    return with_notes(plan, note, *map(str, refused))


def _judged(name: str, plan: Plan, even_s: float) -> candidates.CompiledCandidate:
    """A rehearsed candidate with its figures: modelled communication, measured compute, the larger of the memories known."""
    found, cost = plan.rehearsal, plan.cost
    assert found is not None
    known = [size for size in (found.compiled_bytes, found.peak_bytes) if size is not None]
    figures = Figures(
        found.communication_s,
        found.measured_s,
        even_s,
        max(known, default=cost.memory.peak),
        plan.hardware.chip.memory_bytes,
    )
    return candidates.CompiledCandidate(name, plan.axes, plan.level, cost.bytes_sent, cost.matrix_flops, figures)
