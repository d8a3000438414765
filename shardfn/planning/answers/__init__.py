"""From a posed call to a plan: the search's answer, finished, and planned again around XLA bugs.

| module | holds |
|---|---|
| `planner` | search, finish, and work around the XLA bugs that the plan would meet |
| `finish` | from an answer to a plan: decisions, constraints, collectives, diagnostics |
| `candidates` | the evaluated candidates, with distinct names |
| `open_dimensions` | entries such as `(4, AUTO)`: every number of shards that fits |
"""

from shardfn.planning.answers.candidates import distinct_names
from shardfn.planning.answers.open_dimensions import with_completed_entries
from shardfn.planning.answers.planner import (
    alternatives,
    chosen,
    correct_answer,
    is_correct,
    plan_fixed_answer,
    plan_search_answer,
    search,
    with_notes,
    without_workarounds,
)

__all__ = [
    "alternatives", "chosen", "correct_answer", "distinct_names", "is_correct", "plan_fixed_answer", "plan_search_answer",
    "search", "with_completed_entries", "with_notes", "without_workarounds",
]  # fmt: skip
