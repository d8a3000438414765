"""The plan as data: what it holds, its names, its text, and what differs between two.

| module | holds |
|---|---|
| `plan` | `Plan` |
| `late` | fields that are worked out when they are first read |
| `decisions` | its parts: decisions on arrays, tied dimensions, candidates, alternatives, changes |
| `plan_kind` | the textbook name: FSDP, tensor parallel, … |
| `op_strategies` | the strategy of each op |
| `summary` | the lines of `print(plan)` and of a report's headline |
| `plain_jax` | the plan as code of plain JAX |
| `plain_nnx` | Flax NNX objects in that code |
| `as_function` | what to write where a plan is called |
| `plan_diff` | what differs between two plans of one function |

Methods of `Plan` that ask for more than the plan holds are in the folders and packages above.
"""

from shardfn.planning.plan.as_function import code_of_plan
from shardfn.planning.plan.decisions import (
    BY_DATA_PARALLEL,
    Alternative,
    Alternatives,
    Candidate,
    Candidates,
    Change,
    Changes,
    Decision,
    DimensionGroup,
    Figures,
    in_rows,
)
from shardfn.planning.plan.late import changed, later, read
from shardfn.planning.plan.op_strategies import op_strategies
from shardfn.planning.plan.plan import Plan, answered_call, argument_names, decision_of, shardings_on
from shardfn.planning.plan.plan_kind import Layouts, kind_of, layouts_of
from shardfn.planning.plan.summary import FIX, devices_text, fit_text, headline

__all__ = [
    "BY_DATA_PARALLEL", "FIX", "Alternative", "Alternatives", "Candidate", "Candidates", "Change", "Changes", "Decision",
    "DimensionGroup", "Figures", "Layouts", "Plan", "answered_call", "argument_names", "changed", "code_of_plan",
    "decision_of", "devices_text", "fit_text", "headline", "in_rows", "kind_of", "later", "layouts_of", "op_strategies", "read",
    "shardings_on",
]  # fmt: skip
