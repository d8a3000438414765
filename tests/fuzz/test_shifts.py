"""The shifted form of random programs computes what they compute."""

import pytest

from tests.fuzz.shifts import differs


@pytest.mark.parametrize("seed", range(12))
def test_a_program_of_shifts_is_the_program(seed):
    assert not differs(seed)
