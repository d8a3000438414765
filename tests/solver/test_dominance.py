"""Dominated labels are left out, and with them no optimum."""

import math

import numpy as np
import pytest

from shardfn.solver.budget import Budget
from shardfn.solver.content import Store
from shardfn.solver.dominance import most_more, reduced
from shardfn.solver.labelling import labelling
from tests.solver.exhaustive import exhaustive
from tests.solver.random_problems import KINDS, drawn
from tests.solver.test_solve import enumerated


def reduce(problem):
    return reduced(problem, Store(), Budget())


def test_label_that_costs_and_uses_more_is_left_out():
    found = reduce(labelling([[1, 2, 0], [5, 0]], [[3, 4, 9], [1, 9]], limit=10))
    assert [labels.tolist() for labels in found.core.kept.values()] == [[0, 2], [0, 1]]


def test_label_that_is_cheaper_beside_one_label_of_a_neighbour_stays():
    table = [
        0,
        9,
        1,
        9,
        9,
        0,
    ]  # the second label is never better than the first, the third is beside the neighbour's second
    found = reduce(labelling([[0, 0, 0], [0, 0]], [[1, 1, 2], [5, 1]], tables=[((0, 1), table)], limit=6))
    assert [labels.tolist() for labels in found.core.kept.values()] == [[0, 2], [0, 1]]


def test_nodes_whose_best_label_uses_least_are_settled():
    rng = np.random.default_rng(0)
    costs = [np.sort(rng.integers(0, 99, 6)).tolist() for _ in range(50)]
    usages = [np.sort(rng.integers(1, 99, 6)).tolist() for _ in range(50)]
    found = reduce(labelling(costs, usages, limit=sum(use[0] for use in usages)))
    assert not found.nodes and found.core.constant == sum(cost[0] for cost in costs)


def test_most_more_of_rows_with_forbidden_entries():
    table = np.array([[1.0, np.inf], [3.0, 4.0]])
    assert most_more(table).tolist() == [[0.0, math.inf], [2.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_has_the_same_optimum(kind):
    for seed in range(3):
        problem = drawn(KINDS[kind], 3000 + seed, 5)
        best, found = enumerated(problem), reduce(problem)
        if found is None or (found.memory.limit < 0).any():
            assert math.isinf(best), seed
            continue
        kept = [found.core.kept[v] for v in found.nodes]
        tables = [((u, w), table.ravel()) for u, row in enumerate(found.tables) for w, table in row.items() if u < w]
        rows = [
            (v, time, time + 1, use)
            for v, labels in enumerate(kept)
            for time, use in enumerate(found.memory.dense(np.arange(len(found.memory.limit))).T[:, found.memory.first[v]:][:, : len(labels)])
        ]  # fmt: skip
        slack = found.memory.limit.max(initial=0.0) - found.memory.limit
        rows += [(len(kept), time, time + 1, [more]) for time, more in enumerate(slack)]
        left = labelling(
            [*found.costs, [0.0]], tables=tables, usage_intervals=rows, limit=found.memory.limit.max(initial=0.0)
        )
        assert exhaustive(left).cost + found.core.constant == pytest.approx(best, rel=1e-9, abs=1e-30), seed
