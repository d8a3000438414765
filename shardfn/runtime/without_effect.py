"""Options of `shard` that are given and have no effect on a call: each is said once, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.frontend.options import Options
from shardfn.planning.call import PosedCall

_OF_THE_SEARCH = "budget", "tolerance", "time_limit", "compile_candidates", "rehearse_candidates"
"""Options that say how much is searched, and what becomes of the candidates."""


def without_effect(options: Options, posed: PosedCall) -> Iterator[str]:
    """A warning for each option without an effect. On one device nothing is said of options for several."""
    call, default = posed.call, Options()
    given = [name for name in _OF_THE_SEARCH if getattr(options, name) != getattr(default, name)]
    why, fix = "", "leave it out, or write AUTO for what a search shall choose"
    if call.hardware.count > 1 and not posed.problem.is_open:
        why = "every sharding is given, and nothing is searched"
    elif call.hardware.count > 1 and call.search.mode == "sharding_propagation":
        why, fix = 'search_mode="sharding_propagation" does not search', "leave it out, or choose another search_mode"
        given = [name for name in given if name in _OF_THE_SEARCH[:3]]
    for name in given if why else ():
        yield f"{name}={getattr(options, name)!r} has no effect on `{call.name}`: {why}; {fix}"
    if options.closed_over != default.closed_over and not (call.traced.closed_over or call.function.call.closed_over):
        yield f'closed_over="{options.closed_over}" has no effect on `{call.name}`: it closes over no array; leave it out'
    if options.assumed_trips != default.assumed_trips and not call.traced.graph.uncounted:
        yield (f"assumed_trips={options.assumed_trips} has no effect on `{call.name}`: the trips of all loops are known; "
               "leave it out")  # fmt: skip
