"""Compile a few candidates and take the best by what XLA made of them, whatever was predicted."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from shardfn.compiled.executable import Compiled
from shardfn.cost.compute import matrix_flops
from shardfn.cost.estimate import collective_s
from shardfn.errors import Problem, ShardError, StrategyError, fail
from shardfn.frontend.jax_errors import JaxError
from shardfn.frontend.option_checks import MOST_COMPILED
from shardfn.ir.model import Axes, mesh_sizes_text
from shardfn.ir.source_lines import user_line
from shardfn.planning.answers import chosen, distinct_names, is_correct
from shardfn.planning.call import PosedCall
from shardfn.search.engine import visits
from shardfn.search.problem import (
    LEVELS,
    Answer,
    Figures,
    Rank,
    SearchCandidate,
    SearchProblem,
    affordable_compiles,
    rank,
    unit_slip,
)
from shardfn.units import bytes_text


def count_of(problem: SearchProblem, asked: int | str) -> int:
    """How many candidates to compile: as many as the user asks for; for "auto", where the devices are here, what a part of the
    search's budget compiles.
    """
    if not isinstance(asked, str):
        return asked
    if not problem.hardware.is_here:
        return 0
    return min(MOST_COMPILED, affordable_compiles(visits(problem), len(problem.graph.ops)))


def answers(posed: PosedCall, answer: Answer, count: int) -> tuple[tuple[str, Answer], ...]:
    """The answers to compile, by name: the search's own, what it found for the other objectives, and the other candidates.

    The best candidate of each generator comes before further ones: alike candidates compile to alike programs. Candidates of
    equal cost count once, and those with an op that XLA computes wrongly are left out.
    """
    problem = posed.problem
    own = problem.as_candidate("the search's", answer)
    every = sorted((own, *answer.others), key=problem.at(LEVELS[0]).rank)  # in one order for all objectives
    for_level = (min(every, key=problem.at(level).rank) for level in LEVELS)
    of_generator = {c.generator: c for c in reversed(every)}.values()
    found: dict[object, SearchCandidate] = {}
    for c in (own, *for_level, *reversed(of_generator), *every):
        sizes = tuple(sorted(size for _, size in c.axes))
        found.setdefault((sizes, c.cost.bytes_sent, c.cost.memory.peak, c.cost.time_s), c)
    entered = list(itertools.islice((c for c in found.values() if c is own or is_correct(posed, c)), count))
    names = distinct_names(problem.names, entered)
    named = [dataclasses.replace(c, name=name) for name, c in zip(names, entered, strict=True)]
    return tuple((c.name, chosen(answer, c, "the best compiled candidate")) for c in named)


KEPT = 256
"""Programs whose figures are remembered."""

_made: dict[object, Compiled] = {}


def program_key(program: str, problem: SearchProblem, answer: Answer) -> object:
    """The cache key of a compiled program: the text of the function's module, and an answer's shardings."""
    constraints = tuple(sorted(answer.constraints.items(), key=lambda item: item[0]))
    ends = tuple(problem.results.items()), tuple(problem.same_as.items()), problem.donated
    text, result_specs = hashlib.sha256(program.encode()).digest(), tuple(sorted(answer.result_specs.items()))
    return text, problem.hardware, ends, answer.axes, answer.specs, constraints, result_specs


def compiled_once(key: object, compile_: Callable[[], Compiled]) -> Compiled:
    """The compiled program of a key, for any level and limit; the oldest of `KEPT` programs is dropped."""
    if key not in _made:
        found = compile_()
        while len(_made) >= KEPT:
            _made.pop(next(iter(_made)), None)
        _made[key] = found
    return _made[key]


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A compiled candidate and its figures, per device and call."""

    name: str
    axes: Axes
    level: int
    bytes_sent: int
    flops: float
    figures: Figures

    def rank(self, limit: float) -> Rank:
        """The rank at the level's objective, within the memory limit first."""
        return rank(self.level, limit, self.figures)


def judged(name: str, problem: SearchProblem, answer: Answer, made: Compiled) -> CompiledCandidate:
    """A compiled candidate with its modelled time: bytes over the links, and predicted compute scaled by the FLOPs."""
    hardware = problem.hardware
    cost = problem.evaluate_answer(answer)
    sent_s = sum(collective_s(c, hardware, answer.axes) for c in made.collectives)
    predicted = matrix_flops(problem.partitioned_of(answer))
    share = made.flops / predicted if made.flops and predicted else 1.0
    told = made.together(hardware.platform)
    peak = cost.memory.peak if told is None else told + cost.memory.constants
    sent = sum(c.total_bytes for c in made.collectives)
    figures = Figures(sent_s, share * cost.compute_s, problem.even_s, peak, hardware.chip.memory_bytes)
    return CompiledCandidate(name, answer.axes, problem.level, sent, made.flops or cost.flops, figures)


def check(winner: CompiledCandidate, count: int, limit: float) -> None:
    """Check that the best compiled candidate keeps the user's memory limit.

    Raises:
      StrategyError: it does not. The limit ranks first, so no other candidate fits either.
    """
    peak = winner.figures.peak
    if peak > limit:
        unit = f"{slip}; or " if (slip := unit_slip(limit)) else ""
        fail(StrategyError, f"none of {count} plans fits, as compiled, in {bytes_text(limit)} per device",
             where=f"memory_limit = {limit:,.0f}", why=f"the least is {bytes_text(peak)}: {winner.name}",
             fix=f"{unit}compile more of them (compile_candidates=), use more devices, a smaller batch, "
                 "donate_argnums for updated arguments, jax.checkpoint for what the backward pass keeps, or "
                 f"memory_limit={peak}")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Refused:
    """A candidate that XLA does not compile: the first line of the error, a fix where one is known, and the user's line."""

    name: str
    axes: Axes
    why: str
    fix: str = ""
    where: str = ""

    def __str__(self) -> str:
        line = f" ({self.where})" if self.where else ""
        return (
            f"{self.name}, mesh {mesh_sizes_text(self.axes)}, is left out, as XLA does not compile it: {self.why}{line}"
        )


def refused(name: str, answer: Answer, error: Exception) -> Refused:
    """The candidate of an answer that raised an error while it was compiled.

    Raises:
      StrategyError: XLA does not take the user's `compiler_options`, whatever the plan.
    """
    if option := JaxError.COMPILER_OPTION.match(error):
        name = option["what"] or option["value"]
        what = (
            f"XLA has no compiler option {name!r}"
            if option["what"]
            else f"XLA's compiler option {name!r} has another type"
        )
        why = option["why"] or "the names are those of XLA_FLAGS, without the dashes in front"
        fix = f"correct its {'name' if option['what'] else 'value'}, or leave {name!r} out of compiler_options"
        raise StrategyError(Problem(what, f"compiler_options[{name!r}]", why, fix)) from None
    why, fix = str(error), ""
    if isinstance(error, ShardError):
        why, fix = error.problems[0].why or error.problems[0].what, error.problems[0].fix
    first = why.strip().split("\n")[0].rstrip(" {:") or type(error).__name__
    return Refused(name, answer.axes, first, fix, user_line(_FRAME.findall(why)))


_FRAME = re.compile(r"^ +(\S.*?):(\d+):\d+ \[", re.MULTILINE)
"""File and line of a frame in an error of XLA."""


def none_compiles(function: str, left_out: Sequence[Refused], is_asked: bool = True) -> NoReturn:
    """Raise that no candidate compiles.

    Args:
      function: its name.
      left_out: the candidates.
      is_asked: whether the user asked for compiled candidates.
    """
    reasons = list(dict.fromkeys(one.why for one in left_out))[:3]
    advice = "leave unsharded, in in_strategy, the arrays that XLA names"
    fail(StrategyError, f"none of {len(left_out)} plans of `{function}` compiles" if left_out[1:] else
         f"the plan of `{function}` does not compile",
         where=f"compile_candidates = {len(left_out)}" if is_asked else left_out[0].where, why="; ".join(reasons),
         fix=left_out[0].fix or (f"compile more of them (compile_candidates=), or {advice}" if is_asked else
                                 f"{advice}: REPLICATED is such an entry"))  # fmt: skip


def best(
    compile_candidates: Sequence[CompiledCandidate], limit: float, alone: str = "", verb: str = "compiled"
) -> tuple[int, str]:
    """The index of the best compiled candidate at its level, and a diagnostic that compares all of them.

    Args:
      compile_candidates: the compiled candidates.
      limit: the memory limit in bytes per device.
      alone: the candidate that the search alone would have picked, where that is not the first.
      verb: what was done with them.
    """
    winner = min(range(len(compile_candidates)), key=lambda i: (compile_candidates[i].rank(limit), i))
    lines = [
        f"{f.name}, mesh {mesh_sizes_text(f.axes)}: {f.bytes_sent:,} B sent, {f.figures.peak:,} B peak, "
        f"{f.flops:,.0f} matmul FLOPs, {f.figures.time_s * 1e6:,.1f} µs"
        for f in compile_candidates
    ]
    is_own = not winner and not alone
    end = (
        "the search alone picked it too"
        if is_own
        else f"the search alone would have picked {alone or compile_candidates[0].name}"
    )
    count = f"{len(compile_candidates)} plan{'s'[: len(compile_candidates) != 1]}"
    return winner, f"{verb} {count}, per device: {'; '.join(lines)}. Best: {compile_candidates[winner].name}; {end}"
