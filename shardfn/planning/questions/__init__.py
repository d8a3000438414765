"""What is asked of a finished plan: other shardings, other objectives, and the causes of a collective.

| module | holds |
|---|---|
| `what_if` | the costs of other shardings of an array; the plan with other entries |
| `other_objective` | the plan for another objective |
| `dominated` | entries of the user that another sharding of the array beats |
| `tied_replicas` | replicated entries with a dimension that is tied to a sharded one |
| `reasons` | why an array is replicated |
| `attribution` | which sharded dimensions of arguments cause a collective |
| `tested_attribution` | a minimal set of shardings without which it is gone |
"""

from shardfn.planning.questions.dominated import with_dominated_entries
from shardfn.planning.questions.tested_attribution import Cause, causes
from shardfn.planning.questions.tied_replicas import with_tied_replicas
from shardfn.planning.questions.what_if import with_runners_up

__all__ = ["Cause", "causes", "with_dominated_entries", "with_runners_up", "with_tied_replicas"]
