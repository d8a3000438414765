"""How much work a search may do, in one unit: ops visited. Work is counted and never timed: every machine finds the same plan.

Evaluating a candidate visits each op of the program once, at `VISIT` units of the solver's work. So evaluations, the tables of
a mesh and the solver's steps spend one `Budget`.
"""

from __future__ import annotations

from shardfn.solver.budget import Budget

VISIT = 2e4
"""Work of visiting one op while a candidate is evaluated, in the solver's units: about 0.1 ms of a core."""

FIXED_VISITS = 15
"""Work of evaluating a candidate beside its ops, in visits."""

MOST_VISITS, HALF_VISITS = 40_000, 400
"""The default work of a search is at most `MOST_VISITS`, about three seconds, and half of that where a candidate takes
`HALF_VISITS`: about what JAX and XLA need to trace and compile such a program."""

DEFAULT = "default"

BUDGETS = {"fast": 0.25, DEFAULT: 1.0, "thorough": 10.0}
"""The named budgets, as multiples of the default work."""


def visits_of(budget: str | float, ops: int) -> float:
    """The ops that a search of a program may visit.

    Args:
      budget: a key of `BUDGETS`, or the number of visits.
      ops: the size of the program.

    >>> visits_of("default", 385), visits_of("fast", 385), visits_of(1e6, 385)
    (20000.0, 5000.0, 1000000.0)
    """
    if not isinstance(budget, str):
        return float(budget)
    each = FIXED_VISITS + ops
    return BUDGETS[budget] * MOST_VISITS * each / (each + HALF_VISITS)


def work_of(budget: str | float, ops: int, seconds: float) -> Budget:
    """The budget of a search, in the solver's units, which ends after a time limit too."""
    return Budget(VISIT * visits_of(budget, ops), seconds)
