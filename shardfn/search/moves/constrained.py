"""Candidates from a mesh solution: which ops get a sharding constraint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping

from shardfn.ir.correspondence import pairs
from shardfn.ir.model import Axes, Op, OpConstraint, Spec, axes_of, mesh_sizes_text
from shardfn.ir.op_traits import CONTRACTIONS, LIBRARY
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.specs import merge_axes, results_only
from shardfn.search.engine import Archive
from shardfn.search.labels import MeshSolution, SolvedProposal, is_reached, operand_specs, specs_of
from shardfn.search.moves.fewer_constraints import fewer_constraints
from shardfn.search.moves.result_shardings import results_as_solved
from shardfn.search.problem import OpConstraints, Proposal, SearchCandidate, SearchProblem

REPEATS = 2
"""How often ops that propagation shards otherwise are constrained: a constraint on some changes the rest."""

DECIDING_OPS = CONTRACTIONS | {"gather", "scatter"}
"""Matmuls, convolutions, gathers and scatters: the sharding of their results is a decision, which sums and elementwise ops
follow."""

FOLLOWING_OPS = frozenset({"add", "multiply"})
"""Ops that follow an operand's sharding and can be constrained."""

CONSTRAINED_OPS = DECIDING_OPS | LIBRARY | {"concatenate", "dynamic_slice"}
"""Ops whose shardings are decisions of their own and that gain by a constraint; the others follow them."""


def constrained(
    problem: SearchProblem, found: MeshSolution, archive: Archive
) -> Generator[Proposal, None, SearchCandidate]:
    """Proposals of a mesh solution until one costs what its estimate says; returns the best.

    The first constrains every decision. The next ones also constrain the ops that propagation shards otherwise. Then some take
    constraints of the first away: of the operands of matmuls and gathers, and those that propagation does not need. The last
    shards open results as in the solution.

    Args:
      problem: the question, at the level that the solution was solved for.
      found: the solution.
      archive: where the proposals are evaluated.
    """
    full = fully_constrained(problem, found)
    yield full
    best = archive.of(full)
    fewer = (dataclasses.replace(full, constraints=one.constraints) for one in fewer_constraints(problem, best))
    others = itertools.chain(
        _constrain_followers(problem, found, best, archive), [_loosely_constrained(problem, full)], fewer
    )
    for other in others:
        if is_reached(problem, found, best):
            break
        yield other
        best = min(best, archive.of(other), key=problem.rank)
    if problem.open_results and (other := results_as_solved(problem, best, found)) is not None:
        yield other
        best = min(best, archive.of(other), key=problem.rank)
    return best


def _loosely_constrained(problem: SearchProblem, full: SolvedProposal) -> SolvedProposal:
    """The proposal with the results of matmuls and gathers constrained, but not their operands."""
    ops = problem.graph.ops
    loose = {
        index: constraint if _keeps_operands(ops[index]) else results_only(constraint)
        for index, constraint in full.constraints.items()
        if ops[index].name in DECIDING_OPS | FOLLOWING_OPS
    }
    return dataclasses.replace(full, constraints=loose)


def fully_constrained(problem: SearchProblem, found: MeshSolution) -> SolvedProposal:
    """The proposal of a mesh solution with every decision constrained."""
    axes, specs, constraints = _decisions(problem, found)
    return SolvedProposal(mesh_sizes_text(axes), axes, specs, constraints, solution=found)


def _constrain_followers(
    problem: SearchProblem, found: MeshSolution, full: SearchCandidate, archive: Archive
) -> Iterator[Proposal]:
    """Proposals with constraints on reductions as well, and on each op that the partitioned program shards otherwise than
    the solution; and the same once more (`REPEATS`)."""
    axes, specs, with_sums = _decisions(problem, found, CONSTRAINED_OPS | {"reduce"})
    ops, wanted = problem.graph.ops, specs_of(problem, found)
    is_same_mesh = axes == found.axes
    constraints = {
        i: results_only(c) if is_same_mesh and _is_sliced(ops[i], c, found, wanted) else c for i, c in with_sums.items()
    }
    for _ in range(REPEATS if axes == full.axes == found.axes else 0):
        actual = results_there(problem, problem.partitioned_of(full))
        constraints |= {
            index: OpConstraint(
                constraints[index].operands if index in constraints else (None,) * len(op.inputs),
                tuple(map(wanted, op.outputs)),
            )
            for index, op in enumerate(ops)
            if index in problem.can_constrain
            and (index not in constraints or None in constraints[index].results)
            and all(v in found.space.layouts for v in op.outputs)
            and actual.get(index, ()) not in ((), [*map(wanted, op.outputs)])
        }
        if constraints == full.constraints:
            return
        other = SolvedProposal(full.name, axes, specs, dict(constraints), solution=found)
        yield other
        full = archive.of(other)


def results_there(problem: SearchProblem, there: PartitionedProgram) -> Mapping[int, list[Spec]]:
    """By op, its results' shardings in a partitioned program. One that may be the program as written has sites of its own."""
    if problem.written is None:
        sites = {op.site: op for op in there.graph.ops if op.site >= 0}
        same = [(index, sites[op.site]) for index, op in enumerate(problem.graph.ops) if op.site in sites]
    else:
        same = [(index, at) for index, _, at in pairs(problem.graph, there.graph)]
    return {index: [there.specs[v] for v in at.outputs] for index, at in same}


def _keeps_operands(op: Op) -> bool:
    """Whether a constraint keeps its operands' shardings. An addition follows its operands, and XLA computes a wrong convolution
    from operands that it gathers itself (`partition.xla_bugs`)."""
    return op.name in FOLLOWING_OPS or op.convolution is not None


def _is_sliced(op: Op, constraint: OpConstraint, found: MeshSolution, spec_of: Callable[[int], Spec]) -> bool:
    """Whether a reduction reads a slice of its operand's shard, or a broadcast. The constraint would then shard the operand too,
    which other ops read."""
    read = constraint.operands[0]
    if op.name != "reduce" or read is None:
        return False
    if op.inputs[0] not in found.space.layouts:
        return True
    have = spec_of(op.inputs[0])
    return have != read and all(after[: len(before)] == before for before, after in zip(have, read, strict=True))


def _decisions(
    problem: SearchProblem, found: MeshSolution, kinds: Collection[str] = CONSTRAINED_OPS
) -> tuple[Axes, tuple[Spec, ...], OpConstraints]:
    """Mesh, argument shardings and constraints of a solution, with axes that always shard together merged."""
    spec_of = specs_of(problem, found)
    specs = tuple(spec if spec is not None else spec_of(value)[: len(shape)]
                  for value, spec, shape in zip(problem.inputs, problem.specs, problem.shapes, strict=True))  # fmt: skip
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if index in problem.can_constrain and index in found.space.reads and op.name in kinds:
            constraints[index] = OpConstraint(operand_specs(problem, found, index), tuple(map(spec_of, op.outputs)))
    constraints |= _broadcast_operands(problem, found, spec_of)
    if problem.axes:
        return found.axes, specs, constraints
    axes, merged, constraints = merge_axes(found.axes, specs, constraints)
    return axes, tuple(merged), constraints


def _broadcast_operands(
    problem: SearchProblem, found: MeshSolution, spec_of: Callable[[int], Spec]
) -> dict[int, OpConstraint]:
    """Constraints on additions and multiplications that read a broadcast of a more sharded value. Without them, propagation would
    shard the activation like the bias or scale."""
    source = {op.outputs[0]: op.inputs[0] for op in problem.graph.ops if op.name == "broadcast_in_dim"}
    constraints: dict[int, OpConstraint] = {}
    for index, op in enumerate(problem.graph.ops):
        if op.name not in FOLLOWING_OPS or index not in problem.can_constrain or index not in found.space.reads:
            continue
        operands: list[Spec | None] = [None] * len(op.inputs)
        for position, (v, spec) in enumerate(zip(op.inputs, operand_specs(problem, found, index), strict=True)):
            root = v
            while root in source:
                root = source[root]
            if root != v and root in found.space.layouts and not set(axes_of(spec_of(root))) <= set(axes_of(spec)):
                operands[position] = spec
        if any(spec is not None for spec in operands):
            constraints[index] = OpConstraint(tuple(operands), (None,) * len(op.outputs))
    return constraints
