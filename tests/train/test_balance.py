"""Cuts of a chain, against all cuts there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfn.train.pipelines.balance import least_largest, split_chain

CHAINS = st.lists(st.integers(0, 9), min_size=1, max_size=8).flatmap(
    lambda costs: st.tuples(
        st.just(costs),
        st.integers(1, len(costs)),
        st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)),
        st.sampled_from([0.0, 0.1, 0.5]),
    )
)


def every(costs, pieces):
    for begins in itertools.combinations(range(1, len(costs)), pieces - 1):
        ends = [*begins, len(costs)]
        yield list(begins), max(sum(costs[a:b]) for a, b in zip([0, *begins], ends, strict=True))


@given(CHAINS)
def test_against_every_cut(chain):
    costs, pieces, sent, slack = chain
    least = min(largest for _, largest in every(costs, pieces))
    assert least_largest(costs, pieces) == pytest.approx(least)
    allowed = {
        tuple(b): sum(sent[i] for i in b) for b, largest in every(costs, pieces) if largest <= least * (1 + slack)
    }
    found = split_chain(costs, pieces, sent, slack)
    assert tuple(found) in allowed
    assert allowed[tuple(found)] == min(allowed.values())


def test_a_long_chain():
    costs = [(i * 7919) % 101 + 1 for i in range(2000)]
    begins = split_chain(costs, 16)
    largest = max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *begins, 2000]))
    assert largest == least_largest(costs, 16) <= sum(costs) / 16 + max(costs)
