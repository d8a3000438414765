"""Entries such as `(4, AUTO)`: the search evaluates every number of shards that the open dimensions can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardfn.errors import StrategyError
from shardfn.frontend.strategy import Leaf, has_open_dims
from shardfn.frontend.validation import completions
from shardfn.planning.answers.planner import cost_of_plan, search
from shardfn.planning.call import PosedCall, TracedCall, place_call
from shardfn.search.problem import objective


def with_completed_entries(posed: PosedCall) -> PosedCall:
    """The call with each open dimension fixed at the number of shards whose plan is best at the objective.

    One entry that covers several arrays of one shape gets one number. Several such entries are completed one after the
    other, while those to come are open throughout.

    Raises:
      StrategyError: no completion of an entry has a plan.
    """
    leaves = (*posed.call.inputs, *posed.call.outputs)
    for first in dict.fromkeys(_key(leaf) for leaf in leaves if has_open_dims(leaf.entry)):
        one = next(leaf for leaf in leaves if _key(leaf) == first)
        rated, refused = [], None
        for entry in completions(one, posed.call.hardware.count):
            try:
                other = place_call(_completed(posed.call, first, entry), [])
                found = cost_of_plan(other, search(other))
                rated.append((objective(found, other.problem), len(rated), other))
            except StrategyError as error:
                refused = refused or error
        if not rated:
            assert refused is not None
            raise refused
        posed = min(rated, key=lambda row: row[:2])[2]
    return posed


def _key(leaf: Leaf) -> tuple[object, ...]:
    return leaf.where, leaf.shape, leaf.entry if has_open_dims(leaf.entry) else None


def _completed(call: TracedCall, key: tuple[object, ...], entry: tuple[int, ...]) -> TracedCall:
    def fixed(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
        return tuple(
            dataclasses.replace(leaf, entry=entry, where=f"{leaf.where} = {leaf.entry!r}", completes=leaf)
            if _key(leaf) == key
            else leaf
            for leaf in leaves
        )

    return dataclasses.replace(call, inputs=fixed(call.inputs), outputs=fixed(call.outputs))
