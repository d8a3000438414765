"""The local search alone: its labels keep the limit, and are the same again."""

import numpy as np
import pytest

from shardfn.solver.budget import Budget
from shardfn.solver.content import Store
from shardfn.solver.dominance import reduced
from shardfn.solver.local_search import Local
from tests.solver.random_problems import KINDS, drawn


@pytest.mark.parametrize("kind", ["blocks with hubs", "crossing tables"])
@pytest.mark.parametrize("seed", [1, 3])
def test_improve_keeps_the_limit_and_gives_the_same_labels_again(kind, seed):
    left = reduced(drawn(KINDS[kind], seed, 60), Store(), Budget())
    assert left is not None

    def improved():
        local = Local(left.costs, left.tables, left.memory, Budget())
        prices = np.zeros(len(left.memory.limit))
        assert local.fit(np.zeros(len(left.nodes), np.int64), prices, 12)
        before = local.cost
        local.improve(prices, 30)
        assert local.best is not None and local.excess(local.best).max(initial=0.0) <= 0
        assert local.cost == pytest.approx(local.cost_of(local.best)) and local.cost < before
        return local.best.tolist()

    assert improved() == improved()
