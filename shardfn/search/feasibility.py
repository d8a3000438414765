"""Whether there is room at all: a program of which no layout fits into a device need not be searched for one that does."""

from __future__ import annotations

from shardfn.cost.memory.live_ranges import memory
from shardfn.ir.model import PartitionedProgram
from shardfn.search.problem import SearchProblem

ROUGH, SURE = 0.8, 0.95
"""How much of an even share counts: of one with the ops in the order in which they stand, and of the smaller of that and one
with the ops as XLA has them. Of 900 flows of 18 programs none held less than 0.88 of the first, or 0.99 of the smaller."""


def is_infeasible(problem: SearchProblem) -> bool:
    """Whether one device would hold more than the limit though all that the program holds at once were spread evenly over the
    devices. Where a chip keeps arrays in a memory of its own beside, nobody can tell."""
    if problem.hardware.chip.fast_bytes or memory_lower_bound(problem) <= problem.memory_limit:
        return False
    if ROUGH * memory_lower_bound(problem) > problem.memory_limit or problem.axes:
        return ROUGH * memory_lower_bound(problem) > problem.memory_limit
    return SURE * min(memory_lower_bound(problem), memory_lower_bound(problem, True)) > problem.memory_limit


def memory_lower_bound(problem: SearchProblem, as_run: bool = False) -> float:
    """Bytes that the program holds at once on one device alone, over the devices; `as_run` costs a flow."""
    shares = problem.memo.shares
    if as_run not in shares:
        if as_run:
            peak = problem.evaluate((("a", 1),), tuple(((),) * len(shape) for shape in problem.shapes), {}).memory.peak
        else:
            graph = problem.graph
            whole = PartitionedProgram(
                graph, tuple(((),) * len(v.shape) for v in graph.values), {}, (), problem.hardware.platform
            )
            peak = memory(whole, problem.donated, problem.hardware.chip).peak
        shares[as_run] = peak / problem.devices
    return shares[as_run]
