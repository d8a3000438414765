"""What a plan says of itself: where it costs more than necessary, and what the model does not cover.

| module | holds |
|---|---|
| `rules` | the diagnostics, one function each, listed in `RULES` |
| `batch_over_weights` | batches that are sharded over the mesh axes of tensor-parallel weights |
| `unpredicted` | what the cost model does not predict |
| `expert_einsums` | mixtures of experts that are written in einsums |
| `field_lookups` | lookups of several fields in one table |
| `random_numbers` | random numbers that every device draws alike |
| `gathered_windows` | what to write where convolutions are gathered |
| `entries_note` | the headline's line on the user's entries |

`planning.answers.finish` writes them into the plan. What is asked of a plan later is in `planning.questions`.
"""

from shardfn.planning.diagnostics.entries_note import entries_note, shared_axes_note
from shardfn.planning.diagnostics.gathered_windows import windows_fix
from shardfn.planning.diagnostics.rules import advice, not_fully_used
from shardfn.planning.diagnostics.unpredicted import not_predicted, of_program

__all__ = ["advice", "entries_note", "not_fully_used", "not_predicted", "of_program", "shared_axes_note", "windows_fix"]
