"""What is wrong with an answer of a user's search, or a proposal of a user's generator: the built-in ones need no check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardfn.errors import ContextTypeError, StrategyError, a, fail
from shardfn.ir.model import Axes, OpConstraint, axes_of
from shardfn.search.engine.archive import Archive
from shardfn.search.engine.turns import CandidateGenerator
from shardfn.search.problem import Answer, Proposal, SearchProblem


def checked(
    name: str, generator: CandidateGenerator, problem: SearchProblem, archive: Archive
) -> Iterator[Proposal | None]:
    """The proposals of a user's generator.

    Raises:
      ContextTypeError: it does not return an iterable of proposals.
      StrategyError: a proposal does not fit the problem, or contradicts the user's entries.
    """
    where = f"search_mode = {name!r}"
    proposals: Any = generator(problem, archive)
    if not isinstance(proposals, Iterable):
        fail(ContextTypeError, f"the generator {name!r} returned {a(proposals)}", where=where,
             why="a search with two parameters is a generator of candidates",
             fix="yield Proposals, or take the problem alone and return an Answer")  # fmt: skip
    for proposal in proposals:
        if not isinstance(proposal, Proposal | None):
            fail(ContextTypeError, f"the generator {name!r} yielded {a(proposal)}", where=where,
                 why="a candidate is a Proposal", fix="yield a Proposal, or None to end the turn")  # fmt: skip
        if proposal is not None and not isinstance(proposal.name, str):
            fail(ContextTypeError, f"the generator {name!r} named a proposal {proposal.name!r}", where=where,
                 why="reports show the name", fix="name it by a text")  # fmt: skip
        if proposal is not None and (why := fault(problem, proposal)):
            fail(StrategyError, f"the generator {name!r} yielded a proposal that does not fit this call: {proposal.name}",
                 where=where, why=why, fix="take mesh, shapes and entries from the SearchProblem")  # fmt: skip
        yield proposal


def checked_answer(name: str, answer: object, problem: SearchProblem) -> Answer:
    """The answer of a user's search.

    Raises:
      ContextTypeError: it is no `Answer`.
      StrategyError: it does not fit the problem, or contradicts the user's entries.
    """
    where = f"search_mode = {name!r}"
    if not isinstance(answer, Answer):
        fail(ContextTypeError, f"the search {name!r} returned {a(answer)}", where=where,
             why="a search takes a SearchProblem and returns an Answer; a generator takes the Archive too",
             fix='return one, such as that of MODES["sharding_propagation"](problem)')  # fmt: skip
    why = fault(problem, answer)
    if not why and len(answer.reasons) != len(problem.shapes):
        why = f"it has {len(answer.reasons)} reasons for {len(problem.shapes)} arguments"
    if why:
        fail(StrategyError, f"the search {name!r} returned an answer that does not fit this call",
             where=where, why=why, fix="take mesh, shapes and entries from the SearchProblem")  # fmt: skip
    return answer


def fault(problem: SearchProblem, choice: Proposal | Answer) -> str:
    """Why a proposal or an answer is not a choice for a problem; empty if it is one."""
    if not all(isinstance(of, Mapping) for of in (choice.constraints, choice.result_specs)):
        return "constraints and result_specs must be dictionaries"
    if not all(isinstance(constraint, OpConstraint) for constraint in choice.constraints.values()):
        return "a constraint must be an OpConstraint"
    try:
        hash((choice.axes, choice.specs, *choice.result_specs.items()))
        return _axes_fault(problem, choice.axes) or _fault(problem, choice)
    except TypeError:
        return "axes and shardings must be tuples of tuples, such as (('a', 8),) and (('a',), ())"


def _axes_fault(problem: SearchProblem, axes: Any) -> str:
    if not all(isinstance(axis, tuple) and len(axis) == 2 for axis in axes):
        return f"its mesh is {axes}, and a mesh is a tuple of pairs of a name and a size"
    for name, size in axes:
        if not isinstance(name, str) or not name.isprintable() or not name.strip() or '"' in name:
            return f"its mesh has an axis named {name!r}"
        if not isinstance(size, int) or size < 1:
            return f"its axis {name!r} has the size {size!r}"
    return ""


def _fault(problem: SearchProblem, choice: Proposal | Answer) -> str:
    axes, specs = choice.axes, choice.specs
    sizes = dict(axes)
    if problem.axes and axes != problem.axes:
        return f"its mesh is {axes}, that of the entries is {problem.axes}"
    if len(sizes) != len(axes) or math.prod(sizes.values()) != problem.devices:
        return f"its mesh is {axes}, which does not name {problem.devices} devices"
    if len(specs) != len(problem.shapes):
        return f"it has {len(specs)} shardings for {len(problem.shapes)} arguments"
    for name, shape, given, spec in zip(problem.names, problem.shapes, problem.specs, specs, strict=True):
        if given is not None and spec != given:
            return f"`{name}` has {spec} there, and {given} by an entry"
        if why := _spec_fault(f"`{name}`", shape, spec, sizes):
            return why
    for at, spec in choice.result_specs.items():
        if at not in problem.open_results:
            return f"result {at} is not open"
        if why := _spec_fault(f"`{problem.open_results[at].name}`", problem.open_results[at].shape, spec, sizes):
            return why
    return _constraint_fault(problem, choice, axes)


def _constraint_fault(problem: SearchProblem, choice: Proposal | Answer, axes: Axes) -> str:
    for index, constraint in choice.constraints.items():
        if index not in problem.can_constrain:
            return f"op {index} cannot be constrained"
        op = problem.graph.ops[index]
        for values, own in ((op.inputs, constraint.operands), (op.outputs, constraint.results)):
            if len(values) != len(own):
                return f"the constraint of op {index} has {len(own)} shardings for {len(values)} arrays"
            for value, spec in zip(values, own, strict=True):
                shape = problem.graph.values[value].shape
                if spec is not None and (why := _spec_fault(f"an array of op {index}", shape, spec, dict(axes), False)):
                    return why
    return ""


def _spec_fault(name: str, shape: tuple[int, ...], spec: Any, sizes: Mapping[str, int], is_even: bool = True) -> str:
    """Why a sharding does not fit an array; where `is_even`, because it does not divide it too."""
    if not isinstance(spec, tuple) or len(spec) != len(shape) or not all(isinstance(dim, tuple) for dim in spec):
        return f"{name} has the sharding {spec!r}, which is not one tuple of axes for each of {len(shape)} dimensions"
    used = axes_of(spec)
    if len(set(used)) < len(used) or not sizes.keys() >= set(used):
        return f"{name} has the sharding {spec}, and each of the axes {', '.join(sizes)} can shard one dimension"
    for size, dim in zip(shape, spec, strict=True):
        if is_even and size % math.prod(sizes[axis] for axis in dim):
            return f"{name} has the sharding {spec}, which does not divide its shape {shape}"
    return ""
