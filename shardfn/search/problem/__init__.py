"""The question and the answer of a search: one signature for every search.

| module | holds |
|---|---|
| `search_problem` | `SearchProblem`, `Proposal`, `SearchCandidate`, `Answer` |
| `objectives` | what each level compares |
| `budget` | how much work a search may do |
| `graph_facts` | facts of a graph that depend on no mesh: trip counts, readers, live ranges |
| `kernel_costs` | an op as a part of the kernels that XLA computes it in |
| `read_as_given` | constraints that keep the shardings of functions inside |
| `memory_limit` | notes and errors on memory limits |
"""

from shardfn.search.problem.budget import (
    BUDGETS,
    DEFAULT,
    FIXED_VISITS,
    TOLERANCE,
    VISIT,
    affordable_compiles,
    visits_of,
    work_of,
)
from shardfn.search.problem.graph_facts import SLICED, GraphFacts, array_bytes, unsharded_program
from shardfn.search.problem.memory_limit import near_limit_note, refuse_implausible_limit, refuse_limit, unit_slip
from shardfn.search.problem.objectives import (
    BALANCED,
    COMMUNICATION,
    LEVELS,
    MEMORY,
    OBJECTIVES,
    TIME,
    Figures,
    Rank,
    is_no_worse,
    rank,
)
from shardfn.search.problem.search_problem import (
    NO_RESULT_SPECS,
    Algorithm,
    Answer,
    Memo,
    OpConstraints,
    OpenResult,
    Partitioner,
    Proposal,
    ResultSpecs,
    Search,
    SearchCandidate,
    SearchProblem,
    SmallerProblem,
    figures,
    gap_of,
    objective,
    runner_up,
)

__all__ = [
    "BALANCED", "BUDGETS", "COMMUNICATION", "DEFAULT", "FIXED_VISITS", "LEVELS", "MEMORY", "NO_RESULT_SPECS", "OBJECTIVES",
    "SLICED", "TIME", "TOLERANCE", "VISIT", "Algorithm", "Answer", "Figures", "GraphFacts", "Memo", "OpConstraints",
    "OpenResult", "Partitioner", "Proposal", "Rank", "ResultSpecs", "Search", "SearchCandidate", "SearchProblem",
    "SmallerProblem", "affordable_compiles", "array_bytes", "figures", "gap_of", "is_no_worse", "near_limit_note", "objective",
    "rank", "refuse_implausible_limit", "refuse_limit", "runner_up", "unit_slip",
    "unsharded_program", "visits_of", "work_of",
]  # fmt: skip
