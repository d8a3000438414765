"""Local search: moves around the best candidates of an objective.

| module | holds |
|---|---|
| `local_search` | the moves, until none of them makes a better candidate: `MOVES` |
| `array_changes` | another sharding of one array, or of all that are alike |
| `many_array_changes` | other shardings of many arrays at once |
| `result_shardings` | constraints for open results |
| `fewer_constraints` | constraints taken away |
| `scattered_sums` | sums over devices that each device keeps a part of |
| `constrained` | candidates from a mesh solution: which ops get a constraint |
| `baselines` | the parts of baseline plans: batch, parameters, optimizer state |
"""

from shardfn.search.moves.array_changes import CHANGED, array_specs
from shardfn.search.moves.baselines import (
    ArgumentSharding,
    are_meant,
    argument_specs,
    batch_arguments,
    is_optimizer_state,
    is_state_or_gradient,
    matmul_constraints,
)
from shardfn.search.moves.constrained import constrained, fully_constrained
from shardfn.search.moves.fewer_constraints import fewer_constraints

__all__ = [
    "CHANGED", "ArgumentSharding", "are_meant", "argument_specs", "array_specs", "batch_arguments", "constrained",
    "fewer_constraints", "fully_constrained", "is_optimizer_state", "is_state_or_gradient",
    "matmul_constraints",
]  # fmt: skip
