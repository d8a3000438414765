"""Deep networks of equal blocks: work done once for all gives what plain work gives."""

import numpy as np
import pytest

from shardfn.solver.eliminate import eliminate
from shardfn.solver.labelling import labelling, total_cost
from shardfn.solver.solve import solve


def blocks(seed: int, count: int, inside: int = 6, labels: int = 4, whole: bool = False):
    """`count` equal random blocks in a row, each tied to the next by two tables, with a first and a last of their own."""
    rng = np.random.default_rng(seed)
    draw = (
        (lambda *shape: rng.integers(0, 50, shape).tolist()) if whole else (lambda *shape: rng.random(shape).tolist())
    )
    pairs = [(u, v) for u in range(inside) for v in range(u) if rng.random() < 0.6]
    costs, between = [draw(labels) for _ in range(inside)], [draw(labels * labels) for _ in pairs]
    links = [(a, b, draw(labels * labels)) for a, b in ((inside - 1, 0), (inside - 2, 1))]
    tables = []
    for block in range(count):
        at = block * inside
        tables += [((at + u, at + v), table) for (u, v), table in zip(pairs, between, strict=True)]
        if block:
            tables += [((at - inside + a, at + b), table) for a, b, table in links]
    every = [list(cost) for _ in range(count) for cost in costs]
    every[0], every[-1] = draw(labels), draw(labels)
    return labelling(every, tables=tables)


def plain(problem) -> float:
    """The least cost by elimination alone, nothing shared."""
    tables = [{} for _ in problem.costs]
    for table in problem.tables:
        u, v = table.nodes
        tables[u][v] = tables[u].get(v, 0.0) + table.cost
        tables[v][u] = tables[u][v].T
    return total_cost(problem, eliminate(problem.costs, tables, 1e9))


@pytest.mark.parametrize("seed", range(12))
def test_solve_of_equal_blocks_costs_what_each_block_alone_costs(seed):
    problem = blocks(seed, count=3 + seed % 6, whole=seed % 2 == 0)
    found = solve(problem)
    assert found.proved and found.cost == pytest.approx(plain(problem), rel=1e-12)
