"""Plans of random programs keep their promises (`promises`)."""

import pytest

from tests.fuzz.promises import broken


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_programs_keep_their_promises(seed):
    assert not list(broken(seed))
