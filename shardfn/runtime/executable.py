"""From a program to one plan, compiled for the calls it fits: the search's own, or the best as compiled of a few."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardfn.compiled import candidates
from shardfn.compiled.executable import read
from shardfn.compiled.targets import target
from shardfn.errors import StrategyError, warn
from shardfn.layoutfile import plan_file
from shardfn.planning.diagnostics import not_fully_used
from shardfn.planning.plan import Plan, op_strategies
from shardfn.planning.workarounds import wrong_ops
from shardfn.report.report import save_graphs
from shardfn.runtime.apply import shardings, whole
from shardfn.runtime.program import Laid, Program, sound
from shardfn.runtime.progress import progress
from shardfn.search.problem import Answer, SearchProblem


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan, compiled for the calls it fits."""

    plan: Plan
    jitted: Callable[..., Any]
    nested: Callable[..., Any]
    """The same for a call inside a transformation."""
    targets: tuple[NamedSharding, ...]
    """Where the arrays of a call belong."""
    replaced: frozenset[int]
    """Those of them whose place a result takes, and donated ones, by position: the next call brings results."""


def make_entry(program: Program) -> Entry:
    """Plan, and write what the context asks to be written.

    Raises:
      ShardError: all that is wrong with the call.
    """
    question, answer, found = program.question(program.find)
    if program.options.compile_candidates > 1 and question.is_open:
        found = best_compiled(program, question, answer)
    made = found.plan
    if told := not_fully_used(made, program.current.algorithm):
        warn(told)
        made = dataclasses.replace(made, diagnostics=(*made.diagnostics, told))
    made = dataclasses.replace(made, _verifier=program.verifier(found))
    found = dataclasses.replace(found, plan=made)
    current = program.current
    if current.plan_file and jax.process_index() == 0:
        plan_file.save_plan(made, current.plan_file, op_strategies(made), current.saves_parameters_only)
    if current.graphs:
        save_graphs(made, current.graphs_path)
    targets = tuple(shardings(made.inputs, whole(made)))
    replaced = frozenset((*program.same_as.values(), *program.donated_leaves))
    return Entry(made, program.jitted(found), program.jitted(found, nested=True), targets, replaced)


def best_compiled(program: Program, question: SearchProblem, answer: Answer) -> Laid:
    """Of the finalists the one that XLA made best, within the memory limit first; what it does not compile is left out.

    Raises:
      StrategyError: none of them compiles, or keeps the memory limit. DeviceError: there is no compiler for the devices.
    """
    if not question.hardware.is_here:
        target(question.hardware)  # that nothing compiles for it is said before minutes of planning
    limited = program.options.memory_limit is not None
    others = {level: program.find(dataclasses.replace(question, level=level)) for level in (0, 1, 2)
              if level != question.level}  # fmt: skip
    levels = {level: sound(dataclasses.replace(question, level=level), one)
              for level, one in (others | {question.level: answer}).items()}  # fmt: skip
    more = []
    if limited:  # what sends least without it may fit in pieces
        unlimited = dataclasses.replace(question, level=0, memory_limit=math.inf)
        more.append(sound(unlimited, program.find(unlimited)))

    def laid(one: Answer) -> Laid:
        return program.laid(lambda _: one, is_chosen=True)

    def compiled(one: Answer) -> Any:
        found = laid(one)
        return program.verifier(found).compiled(found.plan, quick=True)

    is_right = lambda c: not wrong_ops(question.partitioned_of(c))  # noqa: E731
    entered = candidates.answers(question, levels, more, program.options.compile_candidates, is_right)
    source = str(program.traced.module)
    judged, ran, left_out = [], [], []
    for name, one in entered:
        try:
            with progress(f"compiling {program.name}: {name}"):
                made = candidates.compiled_once(source, question, one, lambda one=one: read(compiled(one)))
        except (jax.errors.JaxRuntimeError, StrategyError) as error:
            left_out.append(candidates.refused(name, one, error))
            continue
        ran.append(one)
        judged.append(candidates.judged(name, question, one, made))
    if not judged:
        candidates.none_compiles(program.name, left_out)
    own = entered[0]
    at, told = candidates.best(judged, question.memory_limit, "" if ran[0] is own[1] else own[0])
    if limited:
        candidates.check(judged[at], len(judged), question.memory_limit)
    winner = laid(ran[at])
    diagnostics = (*winner.plan.diagnostics, told, *map(str, left_out))
    return dataclasses.replace(winner, plan=dataclasses.replace(winner.plan, diagnostics=diagnostics))
