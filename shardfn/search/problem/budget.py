"""How much work a search may do, in one unit: ops visited. Work is counted and never timed: every machine finds the same plan.

Evaluating a candidate visits each op of the program once, at `VISIT` units of the solver's work. So evaluations, the tables of
a mesh and the solver's steps spend one `Budget`.
"""

from __future__ import annotations

from shardfn.solver.budget import Budget

VISIT = 2e4
"""Work of visiting one op while a candidate is evaluated, in the solver's units: about 0.1 ms of a core."""

FIXED_VISITS = 15
"""Fixed work of evaluating a candidate, in visits; the ops come on top."""

TOLERANCE = 0.01
"""A search ends when its plan is proved to cost at most this part more than the optimum."""

MESH_VISITS, OTHER_MESHES, HALF_VISITS = 6_000, 4, 200
"""The default work of a search is at most `MESH_VISITS`, half a second, for each mesh of one or two axes and for
`OTHER_MESHES` more, and half of that where a candidate takes `HALF_VISITS`."""

DEFAULT = "default"

BUDGETS = {"fast": 0.25, DEFAULT: 1.0, "thorough": 10.0}
"""The named budgets, as multiples of the default work."""


def visits_of(budget: str | float, ops: int, meshes: int) -> float:
    """The ops that a search of a program may visit.

    Args:
      budget: a key of `BUDGETS`, or the number of visits.
      ops: the size of the program.
      meshes: the number of meshes of one or two axes.

    >>> visits_of("default", 385, 2), visits_of("fast", 385, 2), visits_of(1e6, 385, 2)
    (24000.0, 6000.0, 1000000.0)
    """
    if not isinstance(budget, str):
        return float(budget)
    each = FIXED_VISITS + ops
    return BUDGETS[budget] * MESH_VISITS * (OTHER_MESHES + meshes) * each / (each + HALF_VISITS)


COMPILE_VISITS = 30
"""Work of compiling one op with XLA, in visits: some 3 ms of a core."""


def affordable_compiles(visits: float, ops: int) -> int:
    """How many candidates compile in as much work as the search may do; 0 where not two, as one is compared with none.

    Args:
      visits: the ops that the search may visit.
      ops: the size of the program.

    >>> affordable_compiles(24_000, 185), affordable_compiles(24_000, 985)
    (4, 0)
    """
    count = int(visits / (COMPILE_VISITS * (FIXED_VISITS + ops)))
    return count if count > 1 else 0


def work_of(visits: float, seconds: float) -> Budget:
    """The budget of a search, in the solver's units, which ends after a time limit too."""
    return Budget(VISIT * visits, seconds)
