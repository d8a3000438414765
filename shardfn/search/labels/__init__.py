"""The label model: a graph on a mesh as a labelling problem, which `shardfn.solver` solves.

| module | holds |
|---|---|
| `mesh_model` | a mesh: axes with their links, and layouts |
| `op_labels` | the strategies of one op |
| `convolution_labels` | the layouts in which XLA computes a convolution correctly |
| `op_costs` | what an op costs under each label |
| `halo_costs` | its halo exchange |
| `partial_sum_costs` | the reduction of its partial sums |
| `resharding_costs` | a resharding between two labels |
| `label_tables` | nodes, their labels, and the tables between them |
| `level_costs` | the objective of a level as the costs of a labelling |
| `filters` | labels that a search leaves out |
| `mesh_solution` | the solution on one mesh |
"""

from shardfn.search.labels.filters import filtered, keeps_rules, with_loss
from shardfn.search.labels.label_tables import LabelSpace, build
from shardfn.search.labels.level_costs import labelling_of, with_smallest_arguments
from shardfn.search.labels.mesh_model import MeshModel, shard_count
from shardfn.search.labels.mesh_solution import (
    LEAST_SENT,
    LEAST_SENT_BALANCED,
    LEAST_SENT_IN_SMALLEST_SHARDS,
    LEAST_TIME,
    LEAST_TIME_IN_LESS_MEMORY,
    MeshSolution,
    Objective,
    SolvedProposal,
    estimated_rank,
    is_reached,
    next_strategies,
    operand_specs,
    specs_of,
    transposed_mesh,
)
from shardfn.search.labels.op_labels import FREE
from shardfn.search.labels.resharding_costs import resharding_cost

__all__ = [
    "FREE", "LEAST_SENT", "LEAST_SENT_BALANCED", "LEAST_SENT_IN_SMALLEST_SHARDS", "LEAST_TIME", "LEAST_TIME_IN_LESS_MEMORY",
    "LabelSpace", "MeshModel", "MeshSolution", "Objective", "SolvedProposal", "build", "estimated_rank",
    "filtered", "is_reached", "keeps_rules", "labelling_of", "next_strategies", "operand_specs", "resharding_cost",
    "shard_count", "specs_of", "transposed_mesh", "with_loss", "with_smallest_arguments",
]  # fmt: skip
