"""The solver against enumeration, and the parts it is made of."""

import gzip
import json
import math
import time

import numpy as np
import pytest

from benchmarks import iopddl
from shardfn.solver.budget import Budget
from shardfn.solver.labelling import labelling, peak_of, total_cost
from shardfn.solver.solve import Effort, solve
from tests.solver.exhaustive import exhaustive

NEVER = 10**18


def random_problem(seed: int, nodes: int | None = None):
    """A few nodes with followers, forbidden pairs, tables of one to three nodes, and a limit that may be too low."""
    rng = np.random.default_rng(seed)
    count = nodes or int(rng.integers(1, 8))
    sizes = rng.integers(1, 5, count)
    costs = [rng.integers(0, 30, k).tolist() for k in sizes]
    usages = [(rng.integers(0, 12, k) * (rng.random() < 0.8)).tolist() for k in sizes]
    start = rng.integers(0, 10, count)
    intervals = np.stack([start, start + rng.integers(0, 8, count)], 1).tolist()
    tables = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        width = int(rng.choice([1, 2, 2, 2, 2, 3]))
        ends = rng.integers(0, count, width).tolist()
        flat = rng.integers(0, 40, math.prod(sizes[ends]))
        kind = rng.random()
        if kind < 0.3:
            flat[rng.random(len(flat)) < 0.4] = NEVER
        elif kind < 0.5 and width == 2:
            flat = np.where(np.arange(sizes[ends[0]])[:, None] % sizes[ends[1]] == np.arange(sizes[ends[1]])[None],
                            flat.reshape(sizes[ends]), NEVER).ravel()  # fmt: skip
        tables.append((ends, flat.tolist()))
    limit = None if rng.random() < 0.3 else int(rng.integers(2, 6 + 6 * count))
    return labelling(costs, usages, intervals, tables, limit)


def every_labelling(problem):
    """The cost and the peak of every labelling, one dim per node, counted in the plainest way."""
    labels = np.indices([len(cost) for cost in problem.costs])
    nothing = np.zeros(labels.shape[1:])
    cost = sum((own[at] for own, at in zip(problem.costs, labels, strict=True)), nothing)
    cost = sum((table.cost[tuple(labels[v] for v in table.nodes)] for table in problem.tables), cost)
    rows = [(v, s, e, u) for v, ((s, e), u) in enumerate(zip(problem.intervals.tolist(), problem.usages, strict=True))]
    rows += [(each.node, each.start, each.end, each.usage) for each in problem.usage_intervals]
    used = [sum((u[labels[v]] for v, s, e, u in rows if s <= t < e), nothing) for t in {s for _, s, *_ in rows}]
    return cost, np.max([nothing, *used], axis=0)


def enumerated(problem) -> float:
    cost, peak = every_labelling(problem)
    return cost[peak <= problem.limit].min(initial=math.inf)


@pytest.mark.parametrize("block", range(8))
def test_solve_is_the_optimum_of_enumeration(block):
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed)
        found, best = solve(problem), enumerated(problem)
        if math.isinf(best):
            assert not found.feasible, seed
            continue
        assert found.feasible and found.cost == best, seed
        assert found.proved and found.bound == best, seed
        assert total_cost(problem, found.choice) == best and peak_of(problem, found.choice) <= problem.limit


def dense_problem(seed: int, whole: bool, nodes: int = 9, labels: int = 3, limited: bool = True):
    """Most pairs of nodes have a table, and a limit binds; of 11 nodes with 4 labels the tables are too large to eliminate."""
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: rng.integers(0, 50, shape)) if whole else (lambda *shape: rng.random(shape))
    pairs = [(u, v) for u in range(nodes) for v in range(u) if nodes > 9 or rng.random() < 0.8]
    usages = rng.integers(0, 20, (nodes, labels))
    limit = int(usages.min(1).sum() + rng.integers(5, 60)) if limited else None
    tables = [(pair, draw(labels * labels).tolist()) for pair in pairs]
    return labelling(draw(nodes, labels).tolist(), usages.tolist(), None, tables, limit)


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_solve_of_tables_too_large_to_eliminate_finds_the_optimum(seed, limited):
    problem = dense_problem(seed, seed % 2 == 0, nodes=11, labels=4, limited=limited)
    best = exhaustive(problem).cost
    found = solve(problem)
    assert found.proved and found.cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_solve_stopped_early_has_a_valid_bound(seed):
    problem = dense_problem(seed, whole=True)
    best = enumerated(problem)
    for effort in (Effort(1, 1, 0, 0), Effort(1, 5, 1, 1), Effort(3, 5, 2, 3)):
        found = solve(problem, effort=effort)
        assert found.bound <= best + 1e-9
        assert not found.feasible or found.cost >= best


def test_solve_with_a_time_limit_answers_and_is_deterministic():
    problem = dense_problem(3, whole=False)
    assert math.isfinite(solve(problem, Budget(seconds=0.0)).cost)
    first, second = solve(problem), solve(problem)
    assert first.choice == second.choice and first.bound == second.bound


def test_solve_of_contradictory_tables_is_infeasible():
    table = [NEVER] * 4
    found = solve(labelling([[0, 0], [0, 0]], tables=[((0, 1), table)]))
    assert not found.feasible and found.proved and math.isinf(found.bound)


def test_solve_of_usage_over_the_limit_is_infeasible():
    found = solve(labelling([[0, 1], [0, 1]], [[5, 4], [5, 4]], [(0, 2), (1, 3)], limit=7))
    assert not found.feasible and found.proved
    assert solve(labelling([[0, 1], [0, 1]], [[5, 4], [5, 4]], [(0, 1), (1, 3)], limit=5)).cost == 0  # half-open


def ladder(length: int, labels: int, held: bool):
    """Two rails and rungs, as two streams of a deep network: width 2."""
    rng = np.random.default_rng(length)
    tables = []
    for i in range(length):
        ends = [(2 * i, 2 * i + 1)] + [(2 * i + r, 2 * i + 2 + r) for r in (0, 1) if i + 1 < length]
        tables += [(end, rng.integers(0, 100, labels * labels).tolist()) for end in ends]
    costs = rng.integers(0, 100, (2 * length, labels)).tolist()
    usages = rng.integers(0, 5, (2 * length, labels)).tolist() if held else None
    return labelling(costs, usages, [(i // 2, i // 2 + 3) for i in range(2 * length)], tables, 10**6)


@pytest.mark.slow
def test_solve_of_deep_networks_is_exact_and_fast():
    for problem in (ladder(1000, 16, held=False), ladder(500, 16, held=True)):
        begin = time.process_time()
        found = solve(problem)
        assert found.proved and found.feasible
        assert time.process_time() - begin < 5  # measured: 0.5 s; the machine may be busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(costs=[[1, 2]], usages=[[1]]), "same number of labels"),
        (dict(costs=[[1, 2]], usages=[[1, -1]]), "negative"),
        (dict(costs=[[1, 2]], tables=[((0, 1), [1])]), "nodes that exist"),
        (dict(costs=[[1, 2]], tables=[((0,), [1])]), "give 2"),
        (dict(costs=[[1, math.nan]]), "not a number"),
    ],
)
def test_labelling_that_is_malformed_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        labelling(**arguments)


EXAMPLE = {
    "problem": {
        "name": "tiny",
        "nodes": {"intervals": [[0, 2], [1, 3], [3, 3]], "costs": [[5, 1], [7, 2], [0, 4]],
                  "usages": [[1, 6], [1, 6], [9, 9]]},
        "edges": {"nodes": [[0, 1], [2]], "costs": [[0, 3, 3, 0], [2, NEVER]]},
        "usage_limit": 7,
    }
}  # fmt: skip


def test_iopddl_reads_solves_and_checks_a_file(tmp_path, capsys):
    file, out = tmp_path / "tiny.json.gz", tmp_path / "out.json"
    file.write_bytes(gzip.compress(json.dumps(EXAMPLE).encode()))
    assert iopddl.main([str(file), "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["tables"]["instances"]
    assert (row["cost"], row["peak"], row["feasible"], row["proved"]) == (12, 7, True, True)
    assert row["choice"] == [0, 1, 0] and row["bound"] == 12
    assert iopddl.main([str(file), "--no-memory", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["tables"]["instances"]
    assert row["cost"] == 5 and row["choice"] == [1, 1, 0]
    assert "tiny" in capsys.readouterr().out


def test_iopddl_check_agrees_with_the_problem():
    for seed in range(20):
        problem = random_problem(seed)
        data = {
            "nodes": {"intervals": problem.intervals.tolist(), "costs": [c.tolist() for c in problem.costs],
                      "usages": [u.tolist() for u in problem.usages]},
            "edges": {"nodes": [list(t.nodes) for t in problem.tables],
                      "costs": [np.where(np.isinf(t.cost), 0, t.cost).ravel().tolist() for t in problem.tables]},
        }  # fmt: skip
        choice = [len(c) - 1 for c in problem.costs]
        cost, peak = iopddl.check(data, choice)
        assert peak == peak_of(problem, choice)
        assert cost == total_cost(problem, choice) or math.isinf(total_cost(problem, choice))
