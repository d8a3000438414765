"""A call on its way to a plan: a pure function of its values, traced, with its entries checked and posed as a search problem.

| module | holds |
|---|---|
| `call_function` | the call as a pure function, with the constraints that are written into it |
| `inner_calls` | a call of a sharded function inside another one |
| `propagation` | the partitioned program for chosen shardings |
| `posed_call` | `TracedCall`, `PosedCall`, `AnsweredCall`: a call at each stage |
| `problem_of_call` | the search problem of a call whose entries are placed |
| `forms` | the call as the user wrote it, and with its movement as shifts |
| `whole_and_fewer` | the call with fewer of its equal blocks |
| `pose` | from a call to a `PosedCall`; every user error of a call is raised here |
"""

from shardfn.planning.call.call_function import CallFunction, OtherCall, closed_over_arguments, pure_function
from shardfn.planning.call.first_trace import settings
from shardfn.planning.call.forms import as_written, in_other_form, is_shifted, moves, pose_shifted, rotated
from shardfn.planning.call.inner_calls import call_inside
from shardfn.planning.call.pose import place_call, pose
from shardfn.planning.call.posed_call import AnsweredCall, PosedCall, TracedCall
from shardfn.planning.call.problem_of_call import file_constraints, pose_again
from shardfn.planning.call.propagation import knowing, memoized
from shardfn.planning.call.whole_and_fewer import with_fewer_blocks

__all__ = [
    "AnsweredCall", "CallFunction", "OtherCall", "PosedCall", "TracedCall", "as_written", "call_inside",
    "closed_over_arguments", "file_constraints", "in_other_form", "is_shifted", "knowing", "memoized", "moves", "place_call",
    "pose", "pose_again", "pose_shifted", "pure_function", "rotated", "settings", "with_fewer_blocks",
]  # fmt: skip
