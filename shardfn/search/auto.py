"""The default search: exact while that is quick, else the devices are divided."""

from __future__ import annotations

from shardfn.search import dynamic, propagation, recursive
from shardfn.search.problem import Answer, Problem

QUICK = 100_000
"""Ops up to which the exact search takes seconds, and less than dividing the devices."""


def search(problem: Problem) -> Answer:
    """The exact optimum of a program of up to `QUICK` ops, else what dividing the devices finds."""
    if not problem.is_open:
        return propagation.search(problem)
    if len(problem.graph.ops) <= QUICK:
        return dynamic.search(problem)
    return recursive.search(problem)
