"""The function of one kind of call, traced, with all that was asked of it: from here to a plan, and on to a jitted function."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfn import search
from shardfn.compiled import candidates
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import Problem, raise_problems
from shardfn.frontend.arguments import Call, signature, split
from shardfn.frontend.callee import Callee
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.inputs_outputs import changed_leaves, input_leaves, output_leaves, replacements
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import UNKNOWN, Leaf
from shardfn.frontend.trace import Traced, trace
from shardfn.frontend.validation import check_all
from shardfn.layoutfile.files import LayoutFile, with_layout
from shardfn.planning.layout_rules import mesh_axes
from shardfn.planning.make import make_plan
from shardfn.planning.plan import Plan
from shardfn.planning.tags import constrain_tags, match_tags
from shardfn.planning.workarounds import kept_apart, made_whole, mended_finding, share_windows, wrong_ops
from shardfn.runtime.apply import Grid, apply, finest, has_other_grids, on_paper, whole
from shardfn.runtime.verify import Verifier
from shardfn.search.objectives import other_level
from shardfn.search.problem import Answer, Search, SearchCandidate, SearchProblem, objective

RIGHTLY = "ops as XLA computes them rightly"
"""Why something else is chosen than what has the least price."""


class OtherCall(Exception):
    """Raised while tracing: the jitted function at hand was planned for other shapes or static values."""


@dataclasses.dataclass(frozen=True)
class Laid:
    """A plan, the function to apply it to on a grid, and that function traced."""

    plan: Plan
    on: Callable[[Grid], Callable[..., Any]]
    traced: Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A call as a pure function of its `shapes`, and what was asked of it."""

    name: str
    options: Options
    current: Defaults
    hardware: Hardware
    layout: LayoutFile | None
    shapes: Sequence[Any]
    statics: tuple[int, ...]
    donated: tuple[int, ...]
    donated_leaves: tuple[int, ...]
    on: Callable[[Grid], Callable[..., Any]]
    """The function on a grid, which the values that a layout file names are laid out on."""
    traced: Traced
    inputs: Sequence[Leaf]
    outputs: Sequence[Leaf]
    same_as: Mapping[int, int]
    problems: tuple[Problem, ...]
    """What was found wrong so far: `laid` raises it with what else is."""

    @property
    def find(self) -> Search:
        """The search that was asked for."""
        return search.select(self.options.search_mode or self.current.search_mode or "auto")

    def laid(self, find: Search, is_chosen: bool = False) -> Laid:
        """Planned by `find`. Where XLA would get an op wrong, it is made whole, and the rest planned anew.

        Args:
          find: a search.
          is_chosen: whether `find` gives an answer that is settled, which another plan must not take the place of.

        Raises:
          ShardError: all that is wrong with the call.
        """
        first, made = self._planned(self.traced, find)
        if not (wrong := wrong_ops(made.partitioned)):
            return Laid(made, self.on, self.traced)
        mended = lambda grid: made_whole(self.on(grid), grid.mesh, wrong, self.statics)  # noqa: E731
        again = trace(mended(whole(made)), self.shapes, self.statics, self.hardware.platform)
        question, answer = first
        # Its ops have other numbers there, and it does not cost there what was told.
        kept = dataclasses.replace(answer, constraints={}, runner_up="")
        _, made = self._planned(again, lambda problem: better(problem, kept, find(problem), answer))
        other = None if is_chosen else unmended(question, answer, *_aside(question, find))
        if other and objective(other.cost, question) < objective(made.cost, question):
            return self.laid(lambda _: rightly(answer, other), is_chosen=True)
        made = dataclasses.replace(made, diagnostics=(*made.diagnostics, mended_finding(wrong)))
        return Laid(made, mended, again)

    def question(self, find: Search) -> tuple[SearchProblem, Answer, Laid]:
        """`laid`, with what the search was asked first and what it answered."""
        noted = _Noted(find)
        found = self.laid(noted)
        return *noted.asked[0], found

    def jitted(self, found: Laid, nested: bool = False) -> Callable[..., Any]:
        """`jax.jit` of the function as planned; a `nested` one is for calls inside a transformation.

        It is on the plan's own grid, or on the finest where the function brings meshes along. A nested one is on the
        finest, which all plans on these devices share, because `jit` cannot name a layout of its results that its
        first grid has no axes for.
        """
        fine = nested or has_other_grids(found.plan, found.traced.grids)
        grid = finest(found.plan) if fine else whole(found.plan)
        return apply(found.plan, found.on(grid), self.shapes, found.traced.results, self.statics, self.donated, grid, nested,
                     self.options.compiler_options)  # fmt: skip

    def verifier(self, found: Laid) -> Verifier:
        """The way from other plans of the same function to what XLA makes of them."""
        return Verifier(lambda plan: self.jitted(dataclasses.replace(found, plan=plan)), tuple(self.shapes))

    def _planned(self, traced: Traced, find: Search) -> tuple[tuple[SearchProblem, Answer], Plan]:
        noted = _Noted(find)
        made = make_plan(
            self.name, self.inputs, self.outputs, traced, hardware=self.hardware, layout=self.layout,
            level=self.options.level or (self.layout and self.layout.level) or 0, problems=list(self.problems),
            donated=self.donated_leaves, wishes=self.options.wishes(self.current), again=self.find, same_as=self.same_as,
            search=noted,
        )  # fmt: skip
        return noted.asked[0], made


class _Noted:
    """A search that keeps what it was asked and what it answered."""

    def __init__(self, find: Search):
        self.find, self.asked = find, list[tuple[SearchProblem, Answer]]()

    def __call__(self, problem: SearchProblem) -> Answer:
        answer = self.find(problem)
        self.asked.append((problem, answer))
        return answer


def program_of(callee: Callee, options: Options, call: Call, current: Defaults, complete: bool = False) -> Program:
    """The program of a call.

    Args:
      complete: whether an array of which the layout file does not speak is a problem.

    Raises:
      ShardError: what is wrong with the call, where it cannot even be traced. The rest is in `problems`.
    """
    problems: list[Problem] = []
    inputs = input_leaves(callee, options, call, current, problems)
    hardware = options.hardware(inputs, current, problems)
    layout = options.layout_file(current)
    strict = options.layout is not None  # the context's is for every function of the program
    if layout is not None:
        inputs = with_layout(
            layout, inputs, hardware.count, problems, given=call.names, complete=complete, strict=strict
        )
    if any(leaf.dtype == UNKNOWN for leaf in inputs):  # it cannot be traced
        check_all(inputs, hardware.count, problems)
        raise_problems(problems)
    shapes, statics = call.shapes, call.statics
    pure = _pure(callee, call)
    traced = trace(pure, shapes, statics, hardware.platform)
    if hardware.count > 1 and share_windows(traced.graph):
        pure = kept_apart(pure, statics)
        traced = trace(pure, shapes, statics, hardware.platform)
    on: Callable[[Grid], Callable[..., Any]] = lambda grid: pure  # noqa: E731
    if layout is not None and layout.activations:
        axes = mesh_axes(layout, hardware.count, [])
        tags = match_tags(layout, traced.jaxpr, axes, hardware.count, problems, strict)
        if tags and hardware.count > 1 and not problems:
            on = lambda grid: constrain_tags(pure, tags, axes, grid.mesh, grid.parts, statics)  # noqa: E731
            traced = trace(on(on_paper(axes)), shapes, statics, hardware.platform)
    result, changed = traced.results if call.stateful else (traced.results, {})
    outputs = output_leaves(callee, options, result, current, hardware.count, problems)
    ends = [*outputs, *changed_leaves(changed)]
    if layout is not None:
        ends = with_layout(layout, ends, hardware.count, problems, section="results", strict=strict)
    donated = call.positions(options.donate_argnums, options.donate_argnames)
    state = {leaf.path: i for i, leaf in enumerate(inputs)}
    same_as = replacements(result, call.dynamic)
    same_as |= {len(outputs) + i: state[path] for i, path in enumerate(sorted(changed))}
    return Program(
        callee.name, options, current, hardware, layout, shapes, statics, donated, call.leaves_of(donated), on, traced,
        inputs, ends, same_as, tuple(problems),
    )  # fmt: skip


def better(problem: SearchProblem, kept: Answer, found: Answer, at_first: Answer) -> Answer:
    """Of a mended program the arguments' layouts as they were found before it was mended, or what was found anew, as long as
    that does not hold ops as they were."""
    if found is at_first:
        return kept
    right = [a for a in (kept, sound(problem, found)) if not wrong_ops(problem.partitioned_of(a))]
    return min(right or [kept], key=lambda a: objective(problem.evaluate_answer(a), problem))


def sound(problem: SearchProblem, answer: Answer) -> Answer:
    """An answer, or the best of what else was priced, if there is any, where XLA would get an op of it wrong."""
    other = unmended(problem, answer) if wrong_ops(problem.partitioned_of(answer)) else None
    return rightly(answer, other) if other else answer


def rightly(answer: Answer, other: SearchCandidate) -> Answer:
    """An answer with another in its place in which XLA computes all ops rightly, and the search that found both."""
    found = candidates.chosen(answer, other, RIGHTLY)
    return (
        answer
        if found is answer
        else dataclasses.replace(found, policy=f"{answer.policy}; in its place, for {found.policy}")
    )


def unmended(problem: SearchProblem, answer: Answer, *more: SearchCandidate) -> SearchCandidate | None:
    """The best of what else was priced, and of `more`, in which XLA computes all ops rightly."""
    every = sorted((*answer.others, *more), key=lambda c: objective(c.cost, problem))
    return next((c for c in every if not wrong_ops(problem.partitioned_of(c))), None)


def _aside(problem: SearchProblem, find: Search) -> tuple[SearchCandidate, ...]:
    """What a search finds for the other aim."""
    if not problem.is_open:
        return ()
    level = other_level(problem.level)
    found = find(dataclasses.replace(problem, level=level))
    return problem.as_candidate(f"level {level}'s", found), *found.others


def _pure(callee: Callee, call: Call) -> Callable[..., Any]:
    """The call as a function of its values in order, which gives the changed state too where there is one.

    It has the user's names: JAX's errors, profiles and the HLO show them. It keeps none of the call's arrays alive.
    """
    shapes, statics, slots, stateful = call.shapes, call.statics, call.slots, call.stateful
    frozen = callee.frozen(shapes[0]) if stateful else callee
    expected = signature(shapes, statics)

    def pure(*flat: Any) -> Any:
        if signature(flat, statics) != expected:
            raise OtherCall
        state, rest = (flat[0], flat[1:]) if stateful else ({}, flat)
        args, kwargs = split(slots, rest)
        result, changed = frozen.call(state, args, kwargs)
        return (result, changed) if stateful else result

    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["self"] * stateful + [s.name for s in slots]
    found = [n if n.isidentifier() and not keyword.iskeyword(n) else f"argument_{i}" for i, n in enumerate(names)]
    pure.__name__ = pure.__qualname__ = callee.name
    pure.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in found])  # type: ignore[attr-defined]
    pure.__wrapped__ = callee.function  # type: ignore[attr-defined]
    return pure
