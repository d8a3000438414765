"""A lower bound by message passing, and the labels it excludes (TRW-S: Kolmogorov, PAMI 28(10), 2006).

The tables are split over chains that follow an order of the nodes. Passes forward and backward move cost along the chains until
their separate minima, whose sum is a lower bound, stop growing. The order is by colours: nodes of one colour share no table, so
each colour is one step over arrays, and equal tables are one array.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse

from shardfn.solver import debug_nans
from shardfn.solver.budget import CALL, Budget
from shardfn.solver.labelling import Array

LARGE = (
    1 << 12
)  # entries of a table, or of all its uses in a colour, from which it is not stacked with others of its shape
ALIKE = 4  # edges of one colour that have the same table, from which they may be sent together
MANY = 16  # edges of one colour that have the same shape; fewer are filled up to multiples of
ROUND = 4
TWICE = 1 << 9  # entries of a table from which equal messages are computed once
PERIOD = 4  # of the order of the nodes: with more, cost moves further in a pass, with fewer a pass is faster
CHUNK = 1 << 15  # entries worked on at once: they stay in the cache
FEW = 8  # edges at once, below which their dim is too short for a loop: then one at a time


@dataclasses.dataclass(frozen=True)
class EdgeGroup:
    """Directed edges worked on together: `tables[label of sender, label of receiver, edge or 0]`, filled up to one shape.

    What they send is at `mine` of the numbers of their `ColourEdges`, the messages go to `out` of the state. The edges are
    the last dim, because NumPy takes a minimum over the first several times as fast as over one in the middle.
    """

    tables: Array
    mine: slice
    out: slice
    edges: int


@dataclasses.dataclass(frozen=True)
class ColourEdges:
    """All edges from the nodes of one colour to later ones, or to earlier ones.

    Each number that is sent is computed from the colour's label at `rows` and from the message in the other direction, which is
    stored at `back`. The messages are stored in the slice `out` of the state. Each begins at `starts` there and has `widths`
    labels. `who` is the sender of each, and `entries[table[edge] + label * tall[edge] + inside]` is the row of the table for its
    label.
    """

    groups: tuple[EdgeGroup, ...]
    rows: Array
    back: Array
    out: slice
    starts: Array
    widths: Array
    who: Array
    entries: Array
    table: Array
    tall: Array
    inside: Array


@dataclasses.dataclass(frozen=True)
class Colour:
    """Nodes that share no table: their labels in a row, where each node starts, and what they receive and send.

    `share` is the part of a belief that one message takes. `inbox` sums the messages to each label.
    """

    nodes: Array
    labels: slice
    starts: Array
    sizes: Array
    share: Array
    inbox: sparse.csr_matrix
    ahead: ColourEdges | None
    behind: ColourEdges | None


class Messages:
    """The state of the passes over nodes with the labels `first[v]` to `first[v + 1]` and `tables[u][v]`.

    A cost may be infinite (a label that is out); so may entries of a table. A pass spends `effort` of the budget.
    """

    def __init__(
        self, costs: Sequence[Array], first: Array, tables: Sequence[dict[int, Array]], budget: Budget | None = None
    ):
        self.first = first
        self.budget = budget or Budget()
        rank = colours(costs, tables)
        nodes = np.argsort(rank, kind="stable")
        sizes = np.diff(first)
        self.order = ranges(first[nodes], sizes[nodes])
        self.place: dict[tuple[int, int], int] = {}
        self.colours = tuple(_coloured(rank, nodes, sizes, tables, self.place))
        every = [each for colour in self.colours for each in (colour.ahead, colour.behind) if each is not None]
        self.sent = np.zeros(max((each.out.stop for each in every), default=0))
        entries = sum(g.edges * g.tables.shape[0] * g.tables.shape[1] + CALL for each in every for g in each.groups)
        self.effort = entries / 2 + CALL * len(self.colours) + int(first[-1])
        self.budget.spend(4 * self.effort)  # the work of building the groups
        self.set_costs(np.concatenate([np.zeros(0), *costs]))

    def set_costs(self, costs: Array) -> None:
        self.inner = costs[self.order]

    def costs(self) -> Array:
        """The cost of each label, those that are out infinite."""
        found = np.empty_like(self.inner)
        found[self.order] = self.inner
        return found

    def take(self, other: Messages, kept: Sequence[Array], stay: Sequence[int]) -> None:
        """Go on from the messages of a larger problem, of which the nodes `stay` with the labels `kept` are left."""
        for (u, w), at in self.place.items():
            labels = kept[stay[w]]
            self.sent[at : at + len(labels)] = other.sent[other.place[stay[u], stay[w]] + labels]

    def _belief(self, colour: Colour, sent: Array) -> Array:
        return self.inner[colour.labels] + colour.inbox @ sent

    def forward(self, decide: bool = False) -> Array | None:
        """One pass in the order of the colours; with `decide`, nodes take their best label given those before them."""
        self.budget.spend(self.effort)
        choice = np.zeros(len(self.first) - 1, np.int64)
        known = self.sent.copy() if decide else self.sent
        for colour in self.colours:
            belief = self._belief(colour, self.sent)
            if decide:
                cost = self._belief(colour, known)
                if debug_nans.DEBUG_NANS:
                    debug_nans.check_numbers(cost, "a belief")
                best = np.repeat(np.minimum.reduceat(cost, colour.starts), colour.sizes)
                least = np.flatnonzero(cost == best)
                taken = least[np.searchsorted(least, colour.starts)] - colour.starts
                choice[colour.nodes] = taken
                ahead = colour.ahead
                if ahead is not None:
                    row = ahead.table + taken[ahead.who] * ahead.tall
                    known[ahead.out] = ahead.entries[np.repeat(row, ahead.widths) + ahead.inside]
            self._send(belief, colour, colour.ahead)
        return choice if decide else None

    def backward(self, gap: float = np.inf) -> float:
        """One pass back: the lower bound. Labels that cost `gap` more than the best of their node are put out.

        With `gap` = (a known solution) - (the bound of the last pass), no better solution takes such a label.
        """
        self.budget.spend(self.effort)
        bound = 0.0
        for colour in reversed(self.colours):
            belief = self._belief(colour, self.sent)
            least = np.minimum.reduceat(belief, colour.starts)
            bound += float(least.sum())
            if not np.isfinite(least).all():
                debug_nans.check_numbers(least, "a belief")
                return np.inf
            belief -= np.repeat(least, colour.sizes)
            if gap < np.inf:
                self.inner[colour.labels][belief > gap] = np.inf
            bound += self._send(belief, colour, colour.behind)
        return bound

    def _send(self, belief: Array, colour: Colour, sending: ColourEdges | None) -> float:
        if sending is None:
            return 0.0
        part = belief * colour.share
        mine = part[sending.rows]
        if math.isfinite(part.sum()):
            mine -= self.sent[sending.back]
        else:
            np.subtract(mine, self.sent[sending.back], out=mine, where=np.isfinite(mine))
        for group in sending.groups:
            self._work(group, mine[group.mine].reshape(-1, group.edges))
        found = self.sent[sending.out]
        least = np.minimum.reduceat(found, sending.starts)
        if debug_nans.DEBUG_NANS:
            debug_nans.check_numbers(found, "a message")
        if not np.isfinite(least).all():
            debug_nans.check_numbers(least, "a message")
            return np.inf
        found -= np.repeat(least, sending.widths)
        return float(least.sum())

    def _work(self, group: EdgeGroup, mine: Array) -> None:
        """The messages of a group, not yet brought to a least of zero."""
        labels, edges = mine.shape
        width = group.tables.shape[1]
        found = self.sent[group.out].reshape(edges, width)
        if group.tables.shape[2] == 1 < edges and labels * width >= TWICE:
            once: dict[bytes, int] = {}
            same = np.array([once.setdefault(row.tobytes(), at) for at, row in enumerate(mine.T)])
            if len(once) < edges:
                alone = np.array(list(once.values()))
                least = np.empty((edges, width))
                least[alone] = _passed(group.tables, mine[:, alone])
                found[:] = least[same]
                return
        _passed(group.tables, mine, found)


def _passed(tables: Array, mine: Array, out: Array | None = None) -> Array:
    """The least over the sender's labels of each table with the sender's part: [edges, labels of the receiver]."""
    labels, edges = mine.shape
    found = np.empty((edges, tables.shape[1])) if out is None else out
    step = CHUNK // (labels * tables.shape[1])
    step = step if step >= FEW else 1
    for at in range(0, edges, step):
        table = tables[:, :, at : at + step] if tables.shape[2] > 1 else tables
        found[at : at + step] = np.minimum.reduce(table + mine[:, None, at : at + step], 0).T
    return found


def colours(costs: Sequence[Array], tables: Sequence[dict[int, Array]]) -> Array:
    """A colour for each node, different from its neighbours': low where few come before it.

    The nodes are taken as `PERIOD` runs side by side, so that along each run cost moves far in one pass. Nodes alike
    (whose arrays are the same objects) are taken together: equal blocks send equal messages.
    """
    kinds: dict[tuple[int, ...], int] = {}
    kind = [kinds.setdefault((id(cost), *sorted(map(id, row.values()))), len(kinds))
            for cost, row in zip(costs, tables, strict=True)]  # fmt: skip
    found: list[int] = [-1] * len(tables)
    for v in sorted(range(len(tables)), key=lambda v: (kind[v] % PERIOD, kind[v], v)):
        found[v] = 1 + max((found[w] for w in tables[v]), default=-1)
    return np.array(found, np.int64)


def ranges(starts: Array, sizes: Array) -> Array:
    """The ranges of `sizes` from `starts`, one after the other."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)


def _coloured(rank: Array, nodes: Array, sizes: Array, tables: Sequence[dict[int, Array]],
              place: dict[tuple[int, int], int]) -> Iterator[Colour]:  # fmt: skip
    """The colours; `place` is told where the message of each directed edge begins."""
    number = int(rank.max(initial=-1)) + 1
    sorts: dict[tuple[int, bool], dict[tuple[int, ...], list[tuple[int, int]]]] = {}
    directed = [((int(rank[u]), bool(rank[w] > rank[u])), u, w) for u in nodes.tolist() for w in sorted(tables[u])]
    alike = collections.Counter((sort, id(tables[u][w])) for sort, u, w in directed)
    shapes = collections.Counter((sort, tables[u][w].shape) for sort, u, w in directed)
    for sort, u, w in directed:
        table = tables[u][w]
        many = alike[sort, id(table)]
        alone = table.size >= LARGE or (many >= ALIKE and many * table.size >= LARGE)
        shape = table.shape if shapes[sort, table.shape] >= MANY else tuple(-(-n // ROUND) * ROUND for n in table.shape)
        key = (id(table), *table.shape) if alone else shape
        sorts.setdefault(sort, {}).setdefault(key, []).append((u, w))
    at = 0
    for found in sorts.values():
        for key, edges in found.items():
            for u, w in edges:
                place[u, w] = at
                at += key[-1]
    begin = 0
    for colour in range(number):
        mine = nodes[rank[nodes] == colour]
        size = sizes[mine]
        starts = np.cumsum(size) - size
        start = dict(zip(mine.tolist(), starts.tolist(), strict=True))
        index = {v: i for i, v in enumerate(start)}
        share = [1 / max(ahead, len(tables[v]) - ahead, 1)
                 for v in start for ahead in [sum(bool(rank[w] > colour) for w in tables[v])]]  # fmt: skip
        into = [(place[w, v], start[v], int(sizes[v])) for v in start for w in tables[v]]
        count = int(size.sum())
        into_at, into_to, into_n = np.array(into, np.int64).reshape(-1, 3).T
        columns, rows = ranges(into_at, into_n), ranges(into_to, into_n)
        inbox = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (count, at))
        ahead, behind = (
            _sending(sorts.get((colour, later), {}), tables, start, index, place) for later in (True, False)
        )
        labels = slice(begin, begin + count)
        begin += count
        yield Colour(mine, labels, starts, size, np.repeat(np.array(share), size), inbox, ahead, behind)


def _sending(sorts: dict[tuple[int, ...], list[tuple[int, int]]], tables: Sequence[dict[int, Array]],
             start: dict[int, int], index: dict[int, int], place: dict[tuple[int, int], int]) -> ColourEdges | None:  # fmt: skip
    """The edges of one colour and one direction, in groups of one shape; None where there are none."""
    if not sorts:
        return None
    groups: list[EdgeGroup] = []
    rows, back, stacks, table, steps = [], [], [], [], []
    mine = entries = 0
    begin = out = min(place[edges[0]] for edges in sorts.values())
    for (*_, tall, wide), edges in sorts.items():
        every = [tables[u][w] for u, w in edges]
        stack = _stacked(every, (tall, wide))
        labels = np.arange(tall)[:, None]
        labels = np.where(labels < np.array([len(each) for each in every]), labels, 0)
        rows.append((np.array([start[u] for u, _ in edges]) + labels).ravel())
        back.append((np.array([place[w, u] for u, w in edges]) + labels).ravel())
        stacks.append(stack)
        step = stack.shape[2]
        table.append(entries + np.arange(len(edges)) * (step > 1))
        steps.append(np.full(len(edges), step))
        groups.append(
            EdgeGroup(stack, slice(mine, mine + len(edges) * tall), slice(out, out + len(edges) * wide), len(edges))
        )
        mine, entries, out = mine + len(edges) * tall, entries + stack.size, out + len(edges) * wide
    widths = np.array([key[-1] for key, edges in sorts.items() for _ in edges])
    starts = np.cumsum(widths) - widths
    who = np.array([index[u] for edges in sorts.values() for u, _ in edges])
    flat = np.concatenate([stack.ravel() for stack in stacks])
    at = 0
    for number, stack in enumerate(stacks):  # one copy of each
        groups[number] = dataclasses.replace(groups[number], tables=flat[at : at + stack.size].reshape(stack.shape))
        at += stack.size
    stride = np.concatenate(steps)
    return ColourEdges(tuple(groups), np.concatenate(rows), np.concatenate(back), slice(begin, out), starts, widths, who, flat,
                   np.concatenate(table), widths * stride,
                   ranges(np.zeros_like(starts), widths) * np.repeat(stride, widths))  # fmt: skip


def _stacked(every: list[Array], shape: tuple[int, int]) -> Array:
    """Tables along the last dim, a single one where all are one object, filled up to `shape` with what is never the least."""
    if all(table is every[0] for table in every) and every[0].shape == shape:
        return np.ascontiguousarray(every[0])[:, :, None]
    stack = np.full((len(every), *shape), np.inf)
    for at, table in enumerate(every):
        stack[at, : table.shape[0], : table.shape[1]] = table
    return np.ascontiguousarray(stack.transpose(1, 2, 0))
