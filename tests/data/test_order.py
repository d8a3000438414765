"""The order of shuffled records."""

import itertools

import numpy as np
import pytest

from shardfn.data.order import permuted


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 255, 256, 257, 1000, 65_536, 65_537])
def test_every_number_comes_once_whatever_is_asked_for_together(count):
    whole = permuted(np.arange(count), count, (7, 1))
    assert np.array_equal(np.sort(whole), np.arange(count))
    part = np.arange(count)[:: max(1, count // 50)]
    assert np.array_equal(permuted(part, count, (7, 1)), whole[part])


def test_the_order_of_a_seed_stays_as_it_is():
    assert permuted(np.arange(8), 8, (0, 0)).tolist() == [1, 2, 7, 5, 3, 0, 4, 6]
    assert permuted(np.arange(3), 10**12, (2**32 - 1, 5)).tolist() == [807459514261, 219429335323, 339099322042]


@pytest.mark.slow
def test_all_orders_of_four_records_come_about_equally_often():
    found = [tuple(permuted(np.arange(4), 4, (seed, epoch)).tolist()) for seed in range(60) for epoch in range(40)]
    counts = [found.count(order) for order in itertools.permutations(range(4))]
    expected = len(found) / 24
    # Chi squared with 23 degrees of freedom is above 50 once in a thousand.
    assert sum((count - expected) ** 2 / expected for count in counts) < 50


@pytest.mark.parametrize("count", [64, 1000, 5000])
def test_neighbours_and_epochs_are_as_far_apart_as_random_numbers(count):
    first, second = (permuted(np.arange(count), count, (3, epoch)) for epoch in (0, 1))
    for one, other in ((np.arange(count), first), (first[1:], first[:-1]), (first, second)):
        # The correlation of two random orders has a standard deviation of 1 / sqrt(count).
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / count**0.5
