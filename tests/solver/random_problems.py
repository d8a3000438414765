"""Random labelling problems of many kinds, and what every answer to one must satisfy.

The kinds differ in what a solver may rest on: how the tables hang together, how many labels are possible together, how
many nodes are equal, how costs and usage compare, and how much of the memory that the cheapest labels need is there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from shardfn.solver.labelling import FORBIDDEN, Array, Labelling, labelling, peak_of, total_cost
from shardfn.solver.solve import Solution

NEVER = 10 * FORBIDDEN
ROUNDING = 1e-7
"""Relative: tolerance of HiGHS."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a random problem is drawn from.

    Each node is alive for `alive` of `times` times. `edges` names how the tables connect nodes; `never` is the share of
    forbidden pairs, `never_labels` of forbidden labels, `following` of tables in which a label leaves one for the other
    node. Nodes and tables are drawn from `templates` different ones, 0 for all different. Costs are at most `cost` and
    whole numbers where `whole`; `negative` ones are possible. The `limit` lies between the least sum of usage (0) and
    the usage of the cheapest labels (1); None is no limit.
    """

    labels: tuple[int, int] = (2, 4)
    edges: str = "crossing"
    never: float = 0.0
    never_labels: float = 0.0
    following: float = 0.0
    templates: int = 0
    cost: float = 40
    whole: bool = True
    negative: bool = False
    between: float = 1.0
    usage: int = 9
    alive: tuple[int, int] = (1, 5)
    times: int = 9
    limit: float | None = 0.5


KINDS = {
    "crossing tables": Kind(),
    "chain": Kind(edges="chain", alive=(1, 3)),
    "grid": Kind(edges="grid"),
    "blocks with hubs": Kind(edges="hubs"),
    "blocks with hubs, all different": Kind(edges="hubs", labels=(2, 6), cost=1e6, alive=(3, 7), limit=0.3),
    "star": Kind(edges="star"),
    "all pairs": Kind(edges="all", labels=(2, 3)),
    "no tables": Kind(edges="none", usage=99),
    "tables of three nodes": Kind(edges="wide"),
    "forbidden pairs": Kind(never=0.5, never_labels=0.1, labels=(3, 5)),
    "hardly any pair allowed": Kind(never=0.8, labels=(3, 5), limit=0.9),
    "followers": Kind(following=0.7),
    "followers with other costs": Kind(following=0.7, between=0.0),
    "equal nodes": Kind(templates=2),
    "equal nodes without tables": Kind(templates=2, edges="none"),
    "many labels": Kind(labels=(8, 14), edges="chain"),
    "two labels": Kind(labels=(2, 2), usage=1),
    "one label": Kind(labels=(1, 2)),
    "loose limit": Kind(limit=0.95),
    "tight limit": Kind(limit=0.05),
    "limit below the least": Kind(limit=-0.05),
    "no limit": Kind(limit=None),
    "alive at all times": Kind(alive=(9, 9), usage=99),
    "alive at no time": Kind(alive=(0, 1)),
    "nothing costs": Kind(cost=0),
    "tables cost little": Kind(between=0.01, whole=False),
    "tables cost much": Kind(between=1e6),
    "fractions": Kind(whole=False, negative=True),
    "negative costs": Kind(negative=True),
    "costs near the forbidden": Kind(cost=1e16, whole=False),
    "tiny costs": Kind(cost=1e-12, whole=False),
}  # fmt: skip


def drawn(kind: Kind, seed: int, nodes: int) -> Labelling:
    """A problem of `nodes` nodes, the same for the same `seed`. With an odd one, one labelling at least is not forbidden.

    >>> problem = drawn(KINDS["chain"], seed=0, nodes=3)
    >>> [table.nodes for table in problem.tables]
    [(0, 1), (1, 2)]
    """
    rng = np.random.default_rng(seed)
    known: dict[tuple[object, ...], Array] = {}

    def costs(key: tuple[object, ...], shape: tuple[int, ...], scale: float, least: float) -> Array:
        made = rng.uniform(least, 1, shape) * scale
        made = np.rint(made) if kind.whole else made
        return known.setdefault(key, made) if kind.templates else made

    template = rng.integers(kind.templates, size=nodes) if kind.templates else np.arange(nodes)
    size_of = rng.integers(kind.labels[0], kind.labels[1] + 1, max(nodes, kind.templates))
    sizes = size_of[template]
    least = -1.0 if kind.negative else 0.0
    own = [
        costs(("node", t), (size,), kind.cost, least).copy() for t, size in zip(template.tolist(), sizes, strict=True)
    ]
    usage_of = [rng.integers(0, kind.usage + 1, size) for size in size_of.tolist()]
    usages = [usage_of[t] for t in template.tolist()]
    plan = rng.integers(sizes) if nodes else sizes

    def forbid(cost: Array, which: Array, at: tuple[int, ...]) -> None:
        which[at] &= not seed % 2
        cost[which] = NEVER

    for cost, label in zip(own, plan.tolist(), strict=True):
        forbid(cost, rng.random(len(cost)) < kind.never_labels, (label,))
    tables = []
    for ends in _ends(kind.edges, nodes, rng):
        shape = tuple(int(sizes[v]) for v in ends)
        table = costs(("table", *template[list(ends)].tolist()), shape, kind.cost * kind.between, least).copy()
        at = tuple(plan[list(ends)].tolist())
        if rng.random() < kind.following and len(ends) == 2:
            forbid(table, (np.arange(shape[0])[:, None] - at[0] + at[1] - np.arange(shape[1])) % max(shape) != 0, at)
        forbid(table, rng.random(shape) < kind.never, at)
        tables.append((ends, table.ravel().tolist()))
    start = rng.integers(0, kind.times - min(kind.alive[1], kind.times) + 1, nodes)
    length = rng.integers(kind.alive[0], kind.alive[1] + 1, nodes)
    stated = labelling(
        [c.tolist() for c in own], [u.tolist() for u in usages], np.stack([start, start + length], 1).tolist(), tables
    )
    if kind.limit is None or not nodes:
        return stated
    low, high = (peak_of(stated, [int(at) for at in choice]) for choice in
                 ([u.argmin() for u in usages], [c.argmin() for c in own]))  # fmt: skip
    return dataclasses.replace(stated, limit=float(math.floor(low + kind.limit * max(high - low, kind.usage))))


def _ends(edges: str, nodes: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    pairs = itertools.combinations(range(nodes), 2)
    if edges == "all":
        yield from pairs
    elif edges == "chain":
        yield from itertools.pairwise(range(nodes))
    elif edges == "star":
        yield from ((0, v) for v in range(1, nodes))
    elif edges == "grid":
        wide = math.isqrt(nodes)
        yield from ((v, v + 1) for v in range(nodes - 1) if (v + 1) % wide)
        yield from ((v, v + wide) for v in range(nodes - wide))
    elif edges == "hubs":  # blocks of six nodes with loops; each node of a block has a table with a hub, or with two
        hubs = 1 + nodes // 20
        for v in range(hubs, nodes):
            yield from ((v - step, v) for step in (1, 2) if v - step >= hubs and (v - hubs) % 6 >= step)
            yield from ((hub, v) for hub in np.unique(rng.integers(hubs, size=2)).tolist())
    elif edges == "crossing":
        for _ in range(3 * nodes // 2 if nodes > 1 else 0):
            yield tuple(rng.choice(nodes, 2, replace=False).tolist())
    elif edges == "wide":
        for _ in range(nodes // 2):
            yield tuple(rng.integers(0, nodes, 3).tolist())


def assert_consistent(problem: Labelling, found: Solution) -> None:
    """What holds for every answer, whatever the optimum is."""
    assert len(found.choice) == len(problem.costs)
    assert all(0 <= label < len(cost) for label, cost in zip(found.choice, problem.costs, strict=True))
    assert found.cost == total_cost(problem, found.choice)
    assert found.feasible == (math.isfinite(found.cost) and peak_of(problem, found.choice) <= problem.limit)
    assert not math.isnan(found.bound) and 0.0 <= found.gap <= 1.0
    if found.feasible:
        assert found.bound <= found.cost and (found.bound == found.cost or not found.proved)
        assert found.least_peak is None
    elif found.least_peak is not None:
        assert found.least_peak.bound <= found.least_peak.peak == peak_of(problem, found.least_peak.choice)
        assert found.least_peak.peak > problem.limit and math.isfinite(total_cost(problem, found.least_peak.choice))


def assert_between(found: Solution, least: float, most: float | None = None) -> None:
    """An answer's cost and bound against an optimum that lies between `least` and `most`; infinite where none fits."""
    most = least if most is None else most
    rounding = ROUNDING * max(abs(least), abs(most)) if math.isfinite(most) else 0.0
    if found.feasible:
        assert found.cost >= least - rounding
        assert not found.proved or found.cost <= most + rounding
    else:
        assert not found.proved or math.isinf(most)
    assert found.bound <= most + rounding
