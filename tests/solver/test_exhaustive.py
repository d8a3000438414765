"""The oracle itself, against the plainest enumeration there is."""

import itertools

import numpy as np
import pytest

from shardfn.errors import ShardError
from shardfn.solver.labelling import labelling, peak_of, total_cost
from tests.solver.exhaustive import exhaustive
from tests.solver.test_solve import enumerated


def drawn(seed, limit):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, 6)
    pairs = [pair[:: random.choice([-1, 1])] for pair in itertools.combinations(range(6), 2) if random.random() < 0.5]
    tables = []
    for a, b in pairs:
        costs = random.integers(0, 9, sizes[a] * sizes[b]).astype(float)
        costs[random.random(len(costs)) < 0.1] = 1e18  # never
        tables.append(((a, b), costs))
    usage_intervals = [(v, start, start + 3, random.integers(0, 9, n)) for v, n in enumerate(sizes) for start in (0, 2)]
    return labelling(
        [random.integers(0, 9, n) for n in sizes], tables=tables, usage_intervals=usage_intervals, limit=limit
    )


@pytest.mark.parametrize("limit", [None, 40, 30])
def test_exhaustive_finds_what_listing_all_finds(limit):
    found = []
    for seed in range(40):
        one = drawn(seed, limit)
        wanted = enumerated(one)
        best = exhaustive(one)
        assert best.cost == pytest.approx(wanted)
        assert exhaustive(one, below=wanted).choice == ()
        if np.isfinite(wanted):
            assert total_cost(one, best.choice) == pytest.approx(wanted) and peak_of(one, best.choice) <= one.limit
            assert exhaustive(one, below=wanted + 0.5).cost == pytest.approx(wanted)
        found.append(np.isfinite(wanted))
    assert any(found)


def test_exhaustive_of_a_large_problem_is_refused():
    with pytest.raises(ShardError, match="6 nodes is too large to try everything"):
        exhaustive(drawn(0, None), most=3)
    with pytest.raises(ShardError, match="a table of 3 nodes cannot be tried"):
        exhaustive(labelling([[1, 2]] * 3, tables=[((0, 1, 2), [0] * 8)]))
