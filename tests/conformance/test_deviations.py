"""The table of deviations itself."""

import collections

from tests.conformance import facts, functions, programs
from tests.conformance.deviations import ACCEPTS, ROWS, Ask, row_of
from tests.conformance.running import slices_said

ASKS = (
    *map(programs.ask_of, facts.load("single_op")),
    *map(functions.ask_of, facts.load("shard_function")),
    *map(Ask, facts.load("api_args")),
)


def test_every_fact_is_here():
    kinds = collections.Counter(ask.case.kind for ask in ASKS)
    assert kinds == {"single_op": 748, "shard_function": 43, "api_args": 16}
    names = [ask.case.name for ask in ASKS]
    assert len(set(names)) == len(names)


def test_every_row_speaks_of_a_case():
    assert {row.name for row in ROWS} == {row.name for row in map(row_of, ASKS) if row}


def test_a_row_says_something_else_than_mindspore():
    for ask in ASKS:
        row = row_of(ask)
        if row is not None and ask.case.accepted == (row.does == ACCEPTS):
            # both accept: MindSpore lays out nothing, or other slices than the cuts say
            assert not all(ask.case.held) or tuple(h.slice_shape for h in ask.case.held) != slices_said(ask)
