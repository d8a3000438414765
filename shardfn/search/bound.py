"""A lower bound by message passing, and what it proves about single labels (TRW-S: Kolmogorov, PAMI 28(10), 2006).

The tables are split over chains that follow the order of the nodes. A pass forward and one backward moves cost along
the chains until their separate minima, which sum to a lower bound of the whole, stop growing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.search.labelling import Array


class Messages:
    """The state of the passes over nodes 0, 1, … with `costs[v]` (may be changed between passes) and `tables[u][v]`.

    A cost may be infinite (a label that is out); a table may not have a row or column that is infinite throughout.
    """

    def __init__(self, costs: Sequence[Array], tables: Sequence[dict[int, Array]]):
        self.costs = list(costs)
        self.into = [np.zeros((len(neighbours), len(cost))) for cost, neighbours in zip(costs, tables, strict=True)]
        place = [{w: row for row, w in enumerate(sorted(neighbours))} for neighbours in tables]
        self.ahead, self.behind = ([
            [(w, row, np.ascontiguousarray(tables[v][w]), self.into[w][place[w][v]])
             for w, row in place[v].items() if (w > v) == later]
            for v in range(len(costs))
        ] for later in (True, False))  # fmt: skip
        self.share = [1 / max(len(a), len(b), 1) for a, b in zip(self.ahead, self.behind, strict=True)]

    def belief(self, v: int) -> Array:
        """What each label of `v` costs as far as the messages know."""
        return self.costs[v] + np.add.reduce(self.into[v], 0)

    def forward(self, decide: bool = False) -> list[int] | None:
        """One pass in the order of the nodes; with `decide`, each node takes its best label given those before it."""
        choice: list[int] = []
        for v, ahead in enumerate(self.ahead):
            into = self.into[v]
            belief = self.costs[v] + np.add.reduce(into, 0)
            self._send(belief * self.share[v], into, ahead)
            if decide:
                known = belief
                if self.behind[v]:
                    known = self.costs[v] + np.add.reduce(into[len(self.behind[v]) :], 0)
                    for w, _, table, _ in self.behind[v]:
                        known = known + table[:, choice[w]]
                choice.append(int(known.argmin()))
        return choice if decide else None

    def backward(self, gap: float = np.inf) -> float:
        """One pass back: the lower bound. Labels that cost `gap` more than the best of their node are put out.

        With `gap` = (a known solution) - (the bound of the last pass), no better solution takes such a label.
        """
        bound = 0.0
        for v in range(len(self.costs) - 1, -1, -1):
            into = self.into[v]
            belief = self.costs[v] + np.add.reduce(into, 0)
            least = np.minimum.reduce(belief)
            bound += float(least)
            belief -= least
            if gap < np.inf:
                self.costs[v] = np.where(belief > gap, np.inf, self.costs[v])
            bound += self._send(belief * self.share[v], into, self.behind[v])
        return bound

    @staticmethod
    def _send(part: Array, into: Array, edges: Sequence[tuple[int, int, Array, Array]]) -> float:
        settled = 0.0
        for _, row, table, out in edges:
            np.minimum.reduce(table + (part - into[row])[:, None], 0, out=out)
            least = np.minimum.reduce(out)
            out -= least
            settled += least
        return float(settled)
