"""From what was found on a grid to candidates, priced by their flows: how much of it is held inside (`OpConstraint`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from shardfn.ir.model import Op, OpConstraint, Spec
from shardfn.search.mesh_solution import MeshSolution, matches_estimate, mesh_text, operand_specs, specs_of
from shardfn.search.problem import OpConstraints, SearchCandidate, SearchProblem
from shardfn.search.refinement import MAKERS
from shardfn.search.resharding_costs import Axes, merge_axes

FAR, BACK = 2.0, 0.75
"""Of the time of the best flow so far: from there holding every decision does not make a flow the best. Of 60 plans of
programs of 500 ops and more the most that it saved was 38 %. And how far it brings a flow back towards what the model
promised: where anything was to be won, by two thirds at most."""

FOLLOWING = frozenset({"add", "multiply"})
"""Ops that follow an operand and can be held."""

TWICE = 2
"""How often what a flow lays out otherwise than was found is held: holding some of it moves the rest."""

HELD_FIRST = MAKERS | {"concatenate", "dynamic_slice"}
"""Ops whose layouts are decisions of their own, and that gain by being held; the others follow them. Held sums cut what
elementwise ops made, which is read whole elsewhere: of flows of eight models they made none better that was the best."""


def candidates(problem: SearchProblem, found: MeshSolution, best_s: float = math.inf) -> Iterator[SearchCandidate]:
    """The optimum on a grid, priced by its flow: first with what products make held, and how they read their operands left
    to the compiler, which moves those in the way that is best for a product; and with every decision held, where the flow
    of the first does not keep what the model promised: not even to fit, if it did; and with all held that this flow lays
    out otherwise, where it does not either. Where another flow takes `best_s` seconds, these are left out if they cannot be
    expected to take less."""
    axes, specs, held = _as_found(problem, found)
    ops = problem.graph.ops
    constraints = {
        index: constraint
        if _is_held_as_read(ops[index])
        else OpConstraint((None,) * len(constraint.operands), constraint.results)
        for index, constraint in held.items()
        if ops[index].name in MAKERS | FOLLOWING
    }
    loose = problem.candidate(mesh_text(axes), axes, specs, constraints)
    yield loose
    is_over = loose.cost.memory.peak > problem.memory_limit >= found.peak
    time_s = loose.cost.time_s
    expected_s = time_s - BACK * max(0.0, time_s - found.solution.cost)
    if problem.seconds_left <= 0 or time_s > FAR * best_s or expected_s > best_s:
        return
    if not is_over and matches_estimate(problem, found, loose):
        return
    full = problem.candidate(mesh_text(axes), axes, specs, held)
    yield full
    if not problem.is_large and problem.seconds_left > 0 and not matches_estimate(problem, found, full):
        yield from constrain_followers(problem, found, full)


def _is_held_as_read(op: Op) -> bool:
    """Whether what an op reads is held too: sums, as they are told by what they read; and what XLA gathers for a convolution
    by itself it computes wrongly (`graph.mistakes`)."""
    return op.name in FOLLOWING or op.convolution is not None


def candidate(problem: SearchProblem, found: MeshSolution) -> SearchCandidate:
    """The optimum on a grid with every decision held, priced by its flow."""
    axes, specs, constraints = _as_found(problem, found)
    return problem.candidate(mesh_text(axes), axes, specs, constraints)


def constrain_followers(
    problem: SearchProblem, found: MeshSolution, full: SearchCandidate
) -> Iterator[SearchCandidate]:
    """A candidate with its sums held as well, and what follows the decisions where its flow lays that out otherwise than was
    found; and the same once more."""
    axes, _, with_sums = _as_found(problem, found, HELD_FIRST | {"reduce"})
    wanted = specs_of(problem, found)
    constraints = {
        index: constraint if axes != found.axes or not _is_sliced(problem.graph.ops[index], constraint, found, wanted)
        else OpConstraint((None,) * len(constraint.operands), constraint.results)
        for index, constraint in with_sums.items()
    }  # fmt: skip
    for _ in range(TWICE if axes == full.axes == found.axes else 0):
        there = problem.partitioned_of(full)
        laid = {op.site: [there.specs[v] for v in op.outputs] for op in there.graph.ops if op.site >= 0}
        constraints |= {
            index: OpConstraint(
                constraints[index].operands if index in constraints else (None,) * len(op.inputs),
                tuple(map(wanted, op.outputs)),
            )
            for index, op in enumerate(problem.graph.ops)
            if index in problem.can_constrain
            and (index not in constraints or None in constraints[index].results)
            and all(v in found.space.layouts for v in op.outputs)
            and laid.get(op.site, ()) not in ((), [*map(wanted, op.outputs)])
        }
        if constraints == full.constraints or problem.seconds_left <= 0:
            return
        full = problem.again(full, constraints=dict(constraints))
        yield full


def _is_sliced(op: Op, constraint: OpConstraint, found: MeshSolution, laid: Callable[[int], Spec]) -> bool:
    """Whether a sum reads less of its operand than a device has of it, or a broadcast. That would cut what the operand is made
    of as well, which others read, and the sums would be over other axes than those beside which they are added up."""
    read = constraint.operands[0]
    if op.name != "reduce" or read is None:
        return False
    if op.inputs[0] not in found.space.layouts:
        return True
    made = laid(op.inputs[0])
    return made != read and all(after[: len(before)] == before for before, after in zip(made, read, strict=True))


def _as_found(
    problem: SearchProblem, found: MeshSolution, kinds: Collection[str] = HELD_FIRST
) -> tuple[Axes, tuple[Spec, ...], OpConstraints]:
    laid = specs_of(problem, found)
    specs = tuple(spec if spec is not None else laid(value)[: len(shape)]
                  for value, spec, shape in zip(problem.inputs, problem.specs, problem.shapes, strict=True))  # fmt: skip
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_constrain and index in found.space.reads and op.name in kinds:
            constraints[index] = OpConstraint(operand_specs(problem, found, index), tuple(map(laid, op.outputs)))
    constraints |= _broadcasts(problem, found, laid)
    axes = found.axes
    if not problem.axes:
        axes, laid_out, constraints = merge_axes(axes, specs, constraints)
        specs = tuple(laid_out)
    return axes, specs, constraints


def _broadcasts(problem: SearchProblem, found: MeshSolution, laid: Callable[[int], Spec]) -> dict[int, OpConstraint]:
    """Sums and products that read a broadcast of what lies in pieces which they do not read: held to how they read it, as
    else the pieces of a bias or a scale would become those of the activation that it meets."""
    source = {op.outputs[0]: op.inputs[0] for op in problem.graph.ops if op.name == "broadcast_in_dim"}
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if op.name not in FOLLOWING or index not in problem.can_constrain or index not in found.space.reads:
            continue
        operands: list[Spec | None] = [None] * len(op.inputs)
        for position, (v, spec) in enumerate(zip(op.inputs, operand_specs(problem, found, index), strict=True)):
            root = v
            while root in source:
                root = source[root]
            if root == v or root not in found.space.layouts:
                continue
            if not {a for dim in laid(root) for a in dim} <= {a for dim in spec for a in dim}:
                operands[position] = spec
        if any(spec is not None for spec in operands):
            constraints[index] = OpConstraint(tuple(operands), (None,) * len(op.outputs))
    return constraints
