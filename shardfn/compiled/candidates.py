"""The best few plans, compiled: the one wins that XLA made best, whatever was predicted."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

from shardfn.compiled.executable import Compiled
from shardfn.cost.compute import matrix_flops
from shardfn.cost.estimate import collective_s
from shardfn.errors import ShardError, StrategyError, fail
from shardfn.ir.model import Axes
from shardfn.planning.candidates import distinct_names
from shardfn.planning.planner import chosen, is_correct
from shardfn.search import baselines
from shardfn.search.mesh_solution import mesh_text
from shardfn.search.objectives import BALANCED, Rank, imbalance, rank
from shardfn.search.problem import Answer, SearchCandidate, SearchProblem, objective
from shardfn.search.refinement import fully_sharded, refine


def answers(
    problem: SearchProblem,
    levels: Mapping[int, Answer],
    more: Sequence[Answer],
    count: int,
) -> tuple[tuple[str, Answer], ...]:
    """The answers to compile, by name, `count` in all: the search's own first, polished where that is better by its flow;
    those of the other levels, and `more`; these polished; what of all these sends least, in pieces; then in turn the best
    of what else was priced for each level, of the plain layouts on one axis, and of those on two. The flow does not always
    tell which of them XLA likes. Of those that cost the same, the first stands for all: they compile to one program, or as
    good.

    But for the order, which is the level's own, they are the same at each level (of seven or more): what is best as
    compiled at a level's aim is there at the others too.

    Args:
      problem: what is asked.
      levels: what the search found at each level, the problem's own among them.
      more: what else it found, as without a memory limit.
      count: how many.
    """
    answer = levels[problem.level]
    at = {level: dataclasses.replace(problem, level=level) for level in levels}

    def better(level: int, one: SearchCandidate) -> Sequence[SearchCandidate]:
        other = refine(at[level], one)
        return [other] if objective(other.cost, at[level]) < objective(one.cost, at[level]) else []

    own = problem.as_candidate("the search's", answer)
    others = {
        level: problem.as_candidate(f"level {level}'s", one) for level, one in levels.items() if level != problem.level
    }
    first = [
        own,
        *better(problem.level, own),
        *others.values(),
        *(problem.as_candidate("level 0's without the limit", o) for o in more),
    ]
    first += [made for level, one in others.items() for made in better(level, one)]
    unlimited = dataclasses.replace(problem, level=0, memory_limit=math.inf)
    least = min(first, key=lambda c: (objective(c.cost, unlimited), c.cost.memory.peak))
    first += [fully_sharded(problem, least), fully_sharded(problem, least, only_state=True)]
    fast = dataclasses.replace(problem, level=2)
    single = baselines.evaluated_baselines(fast, pairs=False)
    double = tuple(c for c in baselines.evaluated_baselines(fast) if c not in single)
    priced = [sorted(levels[level].others, key=lambda c: objective(c.cost, at[level])) for level in sorted(levels)]
    found: dict[object, SearchCandidate] = {}
    for turn in (first, *itertools.zip_longest(*priced, single, double)):
        for c in filter(None, turn):
            sizes = tuple(sorted(size for _, size in c.axes))
            found.setdefault((sizes, c.cost.bytes_sent, c.cost.memory.peak, c.cost.time_s), c)
    entered = list(itertools.islice((c for c in found.values() if c is own or is_correct(problem, c)), count))
    names = distinct_names(problem.names, entered)
    named = [dataclasses.replace(c, name=name) for name, c in zip(names, entered, strict=True)]
    return tuple((c.name, chosen(answer, c, "best as compiled of the finalists")) for c in named)


KEPT = 256
"""Programs whose figures are remembered."""

_made: dict[object, Compiled] = {}


def program_key(program: str, problem: SearchProblem, answer: Answer) -> object:
    """What one compiled program is remembered by: the text of the function's module, and an answer's shardings."""
    constraints = tuple(sorted(answer.constraints.items(), key=lambda item: item[0]))
    ends = tuple(problem.results.items()), tuple(problem.same_as.items()), problem.donated
    text = hashlib.sha256(program.encode()).digest()
    return (
        text,
        problem.hardware,
        ends,
        answer.axes,
        answer.specs,
        constraints,
        tuple(sorted(answer.result_specs.items())),
    )


def known(key: object) -> Compiled | None:
    """The compiled program of a key, whatever the level and the limit were."""
    return _made.get(key)


def remember(key: object, compiled: Compiled) -> Compiled:
    """Keep a compiled program; the oldest goes where there are `KEPT`."""
    while len(_made) >= KEPT:
        _made.pop(next(iter(_made)), None)
    _made[key] = compiled
    return compiled


@dataclasses.dataclass(frozen=True)
class CompiledCandidate:
    """A layout on a grid and what one device does in one call of what XLA made of it."""

    name: str
    axes: Axes
    level: int
    bytes_sent: int
    peak: int
    flops: float
    time_s: float

    def rank(self, limit: float, least: float) -> Rank:
        """What the level makes least, within the memory limit first; `least` are the fewest FLOPs of any finalist."""
        more = imbalance(self.flops, BALANCED * least)
        return rank(self.level, limit, imbalance=more, sent=self.bytes_sent, time_s=self.time_s, peak=self.peak)


def judged(name: str, problem: SearchProblem, answer: Answer, made: Compiled) -> CompiledCandidate:
    """What was compiled, by the cost model's rates: bytes over the links, and work as predicted, scaled by the FLOPs."""
    hardware = problem.hardware
    cost = problem.evaluate_answer(answer)
    sent_s = sum(collective_s(c, hardware, answer.axes) for c in made.collectives)
    predicted = matrix_flops(problem.partitioned_of(answer))
    share = made.flops / predicted if made.flops and predicted else 1.0
    told = made.together(hardware.platform)
    peak = cost.memory.peak if told is None else told
    sent = sum(c.total_bytes for c in made.collectives)
    return CompiledCandidate(
        name, answer.axes, problem.level, sent, peak, made.flops or cost.flops, sent_s + share * cost.compute_s
    )


def check(winner: CompiledCandidate, count: int, limit: float) -> None:
    """That the best as compiled keeps a limit that the user gave.

    Raises:
      StrategyError: it holds more; as the limit comes first, none of the others fits either.
    """
    if winner.peak > limit:
        fail(StrategyError, f"none of {count} plans compiled holds at most {limit:,.0f} bytes per device",
             where=f"memory_limit = {limit:,.0f}", why=f"the least is {winner.peak:,} bytes: {winner.name}",
             fix="compile more of them (compile_candidates=), use more devices, a smaller batch, donate_argnums for what is "
                 f"given back, jax.checkpoint for what is kept for the backward pass, or memory_limit={winner.peak}")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Refused:
    """A layout that XLA does not compile: the first line of what it says, and what may be done about it, where that is known."""

    name: str
    axes: Axes
    why: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}, grid {mesh_text(self.axes)}, is left out, as XLA does not compile it: {self.why}"


def refused(name: str, answer: Answer, error: Exception) -> Refused:
    """An answer of which the compiler, or what asks it, raised an error."""
    why, fix = str(error), ""
    if isinstance(error, ShardError):
        why, fix = error.problems[0].why or error.problems[0].what, error.problems[0].fix
    return Refused(name, answer.axes, why.strip().split("\n")[0].rstrip(" {") or type(error).__name__, fix)


def none_compiles(function: str, left_out: Sequence[Refused]) -> NoReturn:
    """Raise that of none of the finalists there is a program."""
    reasons = dict.fromkeys(one.why for one in left_out)
    advice = "compile more of them (compile_candidates=), or leave whole, in in_strategy, what XLA names there"
    fail(StrategyError, f"none of {len(left_out)} plans of `{function}` compiles", where=f"compile_candidates = {len(left_out)}",
         why="; ".join(list(reasons)[:3]), fix=left_out[0].fix or advice)  # fmt: skip


def best(compile_candidates: Sequence[CompiledCandidate], limit: float, alone: str = "") -> tuple[int, str]:
    """Which one is best as compiled at its plan's level, and a finding that says how all of them came out.

    Args:
      compile_candidates: what was compiled.
      limit: bytes that one device may hold.
      alone: what the search alone would have picked, where that is not the first of them.
    """
    least = min(f.flops for f in compile_candidates)
    winner = min(range(len(compile_candidates)), key=lambda i: (compile_candidates[i].rank(limit, least), i))
    lines = [
        f"{f.name}, grid {mesh_text(f.axes)}: {f.bytes_sent:,} B sent, {f.peak:,} B peak, "
        f"{f.flops:,.0f} FLOPs of products, {f.time_s * 1e6:,.1f} us"
        for f in compile_candidates
    ]
    is_own = not winner and not alone
    end = (
        "the search alone picked it too"
        if is_own
        else f"the search alone would have picked {alone or compile_candidates[0].name}"
    )
    count = f"{len(compile_candidates)} plan{'s'[: len(compile_candidates) != 1]}"
    return winner, f"compiled {count}, per device: {'; '.join(lines)}. Best: {compile_candidates[winner].name}; {end}"
