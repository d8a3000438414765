"""The contracted problem without its dominated labels (dead-end elimination: Desmet et al., Nature 356, 1992; Goldstein,
Biophysical Journal 66, 1994).

A label dominates another of its node if taking it instead costs no more, whatever the neighbours take, and uses no more
memory at any time. Without the dominated labels, more nodes follow a neighbour or use the same whatever they take, so the
problem is contracted again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from shardfn.solver.budget import CALL, Budget
from shardfn.solver.content import Store
from shardfn.solver.contract import Contraction, Core
from shardfn.solver.labelling import Array, Labelling
from shardfn.solver.memory import MemoryConstraint, memory_constraint

WORTH = 0.1  # of the labels: fewer dominated ones stay, because nodes that were equal without would no longer be
MOST = 5e7  # entries compared for one table or node; larger ones are passed over
CHUNK = 1 << 18  # entries worked on at once


@dataclasses.dataclass(frozen=True)
class Reduced:
    """The contracted problem: costs, tables and usage of the remaining `nodes` of `core`, numbered in their order."""

    core: Core
    nodes: tuple[int, ...]
    costs: list[Array]
    tables: list[dict[int, Array]]
    memory: MemoryConstraint

    @classmethod
    def of(cls, problem: Labelling, core: Core) -> Reduced:
        """The state of a contraction."""
        nodes = tuple(sorted(core.costs))
        place = {v: at for at, v in enumerate(nodes)}
        tables = [{place[w]: table for w, table in core.tables[v].items()} for v in nodes]
        return cls(core, nodes, [core.costs[v] for v in nodes], tables, memory_constraint(problem, core, nodes))


def reduced(problem: Labelling, store: Store, budget: Budget) -> Reduced | None:
    """The problem contracted, and, where the limit matters, without dominated labels if these are many.

    Returns:
      What is left, or None where every labelling is forbidden.
    """
    contraction = Contraction(problem, store)
    core = contraction.run()
    if not core.possible:
        return None
    found = Reduced.of(problem, core)
    if not len(found.memory.limit) or not found.nodes or (found.memory.limit < 0).any():
        return found
    kept = undominated(found, budget)
    if sum(map(len, kept)) > (1 - WORTH) * found.memory.first[-1]:
        return found
    first = found.memory.first[:-1].tolist()
    uses = np.diff(found.memory.change.indptr) > 0
    limited = {v: bool(uses[at + labels].any()) for v, labels, at in zip(found.nodes, kept, first, strict=True)}
    core = contraction.run({v: store.of(labels) for v, labels in zip(found.nodes, kept, strict=True)}, limited)
    return Reduced.of(problem, core) if core.possible else None


def undominated(found: Reduced, budget: Budget) -> list[Array]:
    """The labels of each node that no other dominates; of labels that are equal in all, the first."""
    known: dict[tuple[object, ...], Array] = {}
    worst: dict[int, Array | None] = {}
    kept = []
    for cost, row, use in zip(found.costs, found.tables, _usages(found.memory), strict=True):
        key = (id(cost), *sorted(map(id, row.values())), use.tobytes())
        if key not in known:
            for table in row.values():
                if id(table) not in worst:
                    budget.spend(table.size * len(table) + CALL)
                    worst[id(table)] = most_more(table)
            budget.spend(len(cost) * use.size + 4 * CALL)
            known[key] = _best(cost, [worst[id(table)] for table in row.values()], use)
        kept.append(known[key])
    return kept


def most_more(table: Array) -> Array | None:
    """`[b, a]`: how much more row `b` costs than row `a` at most; None where that takes too long.

    >>> most_more(np.array([[1.0, 2.0], [3.0, 2.0]])).tolist()
    [[0.0, 0.0], [2.0, 0.0]]
    """
    if table.size * len(table) > MOST:
        return None
    finite = np.isfinite(table)
    less = np.where(finite, table, 0.0)
    found = np.empty((len(table), len(table)))
    step = max(1, CHUNK // table.size)
    for at in range(0, len(table), step):
        more = table[at : at + step, None] - less
        found[at : at + step] = np.where(finite, more, -np.inf).max(2, initial=-np.inf)
    return found


def _best(cost: Array, worst: list[Array | None], use: Array) -> Array:
    """The labels that are not dominated."""
    count = len(cost)
    if count < 2 or any(each is None for each in worst) or count * use.size > MOST:
        return np.arange(count)
    more = np.subtract.outer(cost, cost)
    for each in worst:
        more += each
    ahead = more <= 0  # [b, a]: b costs no more
    for at in range(use.shape[1]):
        ahead &= np.less_equal.outer(use[:, at], use[:, at])
    ahead &= ~(ahead.T & np.tri(count, dtype=bool))  # of two that are equal the first
    return np.flatnonzero(~ahead.any(0))


def _usages(memory: MemoryConstraint) -> Iterator[Array]:
    """For each node the usage of its labels at the times at which one of them changes."""
    change = memory.change
    starts = change.indptr[memory.first].tolist()
    for v, (begin, end) in enumerate(itertools.pairwise(starts)):
        first, last = memory.first[v], memory.first[v + 1]
        times, at = np.unique(change.indices[begin:end], return_inverse=True)
        use = np.zeros((last - first, len(times)))
        use[np.repeat(np.arange(last - first), np.diff(change.indptr[first : last + 1])), at] = change.data[begin:end]
        yield np.cumsum(use, 1)
