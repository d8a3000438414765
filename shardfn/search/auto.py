"""The default search: exact while that is quick, else recursive."""

from __future__ import annotations

from shardfn.search import default_policy, dynamic_programming, recursive_programming
from shardfn.search.problem import Answer, SearchProblem


def search(problem: SearchProblem) -> Answer:
    """The exact search where it is quick (`SearchEffort.is_exact`), else the recursive one."""
    if not problem.is_open:
        return default_policy.search(problem)
    return dynamic_programming.search(problem) if problem.effort.is_exact else recursive_programming.search(problem)
