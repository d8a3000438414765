"""A graph on a grid as a labelling problem: how each op may be cut, what that costs, what it costs to change layout.

A label gives every grid axis to one factor of an op's sharding rule, or to none. An op that computes nothing new along
its largest operand (elementwise, transpose, reshape, …) follows that operand's node; every other op is a node of its
own. Tables price the change of layout between nodes: a slice is free, all-gather and all-to-all are not. The form is
Alpa's (Zheng et al., OSDI 2022), on Shardy's rules instead of rules by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from shardfn.cost.hardware import Chip
from shardfn.graph.model import Graph, Op, Rule, Spec, Value, dtype_bits

Array = np.ndarray
"""Layouts of one value under each label of its node: [labels, axes] of the dim that an axis cuts, -1 for none."""

MOST_LABELS = 64


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes that labels speak of, and the chip that prices them."""

    sizes: tuple[int, ...]
    chip: Chip


@dataclasses.dataclass
class Node:
    """Something to decide. Per label, summed over the ops that follow it: seconds of work and of communication, bytes
    sent, bytes held on one device by arguments and by what the ops make."""

    labels: Array
    compute_s: Array
    sent_s: Array
    sent: Array
    argument_bytes: Array
    made_bytes: Array


@dataclasses.dataclass(frozen=True)
class Edge:
    """Change of layout between two nodes: seconds and bytes for each pair of labels."""

    first: int
    second: int
    sent_s: Array
    sent: Array


@dataclasses.dataclass(frozen=True)
class Space:
    """All choices of a graph on a grid. `layouts[v]` is (node, layout under each of its labels) of a value."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    layouts: Mapping[int, tuple[int, Array]]


def value_labels(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
    """Every way to give each axis to a dim that it divides, or to none: [labels, axes].

    >>> value_labels((4, 3), (2,)).tolist()
    [[-1], [0]]
    """
    found = []
    for choice in itertools.product(range(-1, len(shape)), repeat=len(sizes)):
        if _divides(choice, shape, sizes):
            found.append(choice)
    return np.array(found[:MOST_LABELS], np.int8).reshape(-1, len(sizes))


def _divides(choice: Sequence[int], shape: Sequence[int], sizes: Sequence[int]) -> bool:
    left = list(shape)
    for dim, size in zip(choice, sizes, strict=True):
        if dim >= 0:
            if left[dim] % size:
                return False
            left[dim] //= size
    return True


@functools.lru_cache(maxsize=65536)
def _op_labels(rule: Rule, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Assignments of axes to factors that may be cut and that they divide."""
    usable = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in rule.replicated]
    found = []
    for choice in itertools.product([-1, *usable], repeat=len(sizes)):
        if _divides(choice, rule.sizes, sizes):
            found.append(choice)
    return tuple(found[: 4 * MOST_LABELS])


@functools.lru_cache(maxsize=65536)
def _factor_dims(rule: Rule, position: int, of_result: bool) -> tuple[tuple[int, int], ...]:
    """(factor, dim) for the factors of a tensor that can be cut there: the major one of a dim."""
    dims = (rule.results if of_result else rule.operands)[position]
    found = []
    for dim, factors in enumerate(dims):
        major = next((f for f in factors if rule.sizes[f] > 1), None)
        if major is not None:
            found.append((major, dim))
    return tuple(found)


def _dims_of(labels: Array, rule: Rule, position: int, of_result: bool) -> Array:
    """Factor labels as layouts of an operand or a result."""
    table = np.full(len(rule.sizes) + 1, -1, np.int8)
    for factor, dim in _factor_dims(rule, position, of_result):
        table[factor] = dim
    return table[labels]


def _factors_of(layouts: Array, rule: Rule, position: int, sizes: tuple[int, ...]) -> Array:
    """Layouts of an operand as factor labels; what the op cannot keep cut becomes -1."""
    table = np.full(max((d for _, d in _factor_dims(rule, position, False)), default=-1) + 64, -1, np.int8)
    for factor, dim in _factor_dims(rule, position, False):
        if factor not in rule.replicated:
            table[dim] = factor
    table[-1] = -1
    labels = table[layouts]
    for row in labels:  # an axis that no longer divides its factor
        left = list(rule.sizes)
        for axis, factor in enumerate(row):
            if factor >= 0:
                if left[factor] % sizes[axis]:
                    row[axis] = -1
                else:
                    left[factor] //= sizes[axis]
    return labels


def _shards(labels: Array, count: int, sizes: tuple[int, ...]) -> Array:
    """Pieces of each factor or dim under each label: [labels, count]."""
    pieces = np.ones((len(labels), count + 1))
    for axis, size in enumerate(sizes):
        np.multiply.at(pieces, (np.arange(len(labels)), labels[:, axis]), size)
    return pieces[:, :count]


def _bytes(value: Value) -> float:
    return math.prod(value.shape) * dtype_bits(value.dtype) / 8


def change(before: Array, after: Array, full_bytes: float, grid: Grid) -> tuple[Array, Array]:
    """Bytes sent and seconds to change the layout of a value, for all pairs: [before, after].

    Slices come first (free), then all-to-alls, then all-gathers from the piece that is left.
    """
    sizes = np.array(grid.sizes, float)
    b, a = before[:, None, :], after[None, :, :]
    held = np.prod(np.where((b >= 0) | (a >= 0), sizes, 1.0), axis=-1)
    piece = full_bytes / held
    swapped = (b >= 0) & (a >= 0) & (a != b)
    gathered = (b >= 0) & (a < 0)
    sent = np.sum(np.where(swapped, (sizes - 1) / sizes, 0.0), axis=-1) * piece
    ways = np.prod(np.where(gathered, sizes, 1.0), axis=-1)
    sent = sent + (ways - 1) * piece
    steps = np.sum(swapped, axis=-1) + np.any(gathered, axis=-1)
    return sent, sent / grid.chip.link_bytes_s + steps * grid.chip.latency_s


class _Builder:
    def __init__(self, graph: Graph, grid: Grid, given: Mapping[int, Spec], names: Sequence[str]):
        self.graph = graph
        self.grid = grid
        self.given = given
        self.names = names
        self.arguments = frozenset(graph.inputs)
        self.nodes: list[Node] = []
        self.layouts: dict[int, tuple[int, Array]] = {}
        self.views: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.depth: dict[int, int] = {}
        self.tables: dict[tuple[int, int], list[Array]] = {}
        self.changes: dict[tuple[bytes, bytes, float], tuple[Array, Array]] = {}

    def node(self, labels: Array) -> int:
        self.nodes.append(Node(labels, *(np.zeros(len(labels)) for _ in range(5))))
        return len(self.nodes) - 1

    def value_node(self, value: int) -> None:
        shape = self.graph.values[value].shape
        spec = self.given.get(value)
        labels = value_labels(shape, self.grid.sizes)
        if spec is not None:
            where = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
            labels = np.array([[where.get(name, -1) for name in self.names]], np.int8)
        node = self.node(labels)
        self.layouts[value] = node, labels
        self.depth[value] = 0
        pieces = np.prod(_shards(labels, max(1, len(shape)), self.grid.sizes), axis=1)
        if value in self.arguments:
            self.nodes[node].argument_bytes += _bytes(self.graph.values[value]) / pieces

    def need(self, value: int, wanted: Array, node: int, trips: int) -> None:
        """`node` reads `value` in the layouts `wanted`, one for each of its labels."""
        while value in self.views:
            value, dims = self.views[value]
            table = np.full(65, -1, np.int8)
            for source, dim in enumerate(dims):
                table[dim] = source
            wanted = table[wanted]
        if value not in self.layouts:
            return  # a constant, made where it is needed
        owner, have = self.layouts[value]
        full = _bytes(self.graph.values[value])
        if owner == node:
            if have is wanted or np.array_equal(have, wanted):
                return
            sent, seconds = change(have, wanted, full, self.grid)
            self.nodes[node].sent_s += np.diagonal(seconds) * trips
            self.nodes[node].sent += np.diagonal(sent) * trips
            return
        key = (have.tobytes(), wanted.tobytes(), full)
        found = self.changes.get(key)
        if found is None:
            found = self.changes[key] = change(have, wanted, full, self.grid)
        sent, seconds = found
        if not sent.any():
            return
        pair = (owner, node) if owner < node else (node, owner)
        tables = [sent * trips, seconds * trips] if owner < node else [sent.T * trips, seconds.T * trips]
        if pair in self.tables:
            self.tables[pair] = [x + y for x, y in zip(self.tables[pair], tables, strict=True)]
        else:
            self.tables[pair] = tables

    def leader(self, op: Op, rule: Rule) -> int | None:
        """The operand that an op follows: it holds every factor of the result, and is made last."""
        if op.reduced or rule.reduction or len(op.outputs) != 1:
            return None
        wanted = {f for f, _ in _factor_dims(rule, 0, True)}
        best = None
        for position, value in enumerate(op.inputs):
            holds = value in self.layouts and wanted <= {f for f, _ in _factor_dims(rule, position, False)}
            if holds and (best is None or self.depth[value] > self.depth[op.inputs[best]]):
                best = position
        return best

    def op(self, op: Op) -> None:
        rule = op.rule
        values = self.graph.values
        if op.name == "broadcast_in_dim" and rule is not None:
            where = {f: d for f, d in _factor_dims(rule, 0, True)}
            self.views[op.outputs[0]] = (
                op.inputs[0],
                tuple(next((where[f] for f in factors if f in where), 64) for factors in rule.operands[0]),
            )
            return
        if rule is None:
            for value in op.outputs:
                self.value_node(value)
            return
        if not any(value in self.layouts or value in self.views for value in op.inputs) and not op.inputs:
            return
        lead = self.leader(op, rule)
        if lead is not None:
            node, have = self.layouts[op.inputs[lead]]
            labels = _factors_of(have, rule, lead, self.grid.sizes)
        else:
            labels = np.array(_op_labels(rule, self.grid.sizes), np.int8).reshape(-1, len(self.grid.sizes))
            node = self.node(labels)
        for position, value in enumerate(op.inputs):
            self.need(value, _dims_of(labels, rule, position, False), node, op.trips)
        depth = 1 + max((self.depth.get(v, 0) for v in op.inputs), default=0)
        for position, value in enumerate(op.outputs):
            self.layouts[value] = node, _dims_of(labels, rule, position, True)
            self.depth[value] = depth
        self.price(op, rule, labels, node, values)

    def price(self, op: Op, rule: Rule, labels: Array, node: int, values: Sequence[Value]) -> None:
        grid = self.grid
        pieces = _shards(labels, len(rule.sizes), grid.sizes)
        work = float(max((math.prod(values[v].shape) for v in op.outputs), default=0))
        work *= math.prod(values[op.inputs[i]].shape[d] for i, d in op.reduced)
        flops = work * (2 if op.name in ("dot_general", "convolution") else 1) / np.prod(pieces, axis=1)
        moved = np.zeros(len(labels))
        made = np.zeros(len(labels))
        for row, ids in ((rule.operands, op.inputs), (rule.results, op.outputs)):
            for dims, value in zip(row, ids, strict=False):
                factors = [next((f for f in d if rule.sizes[f] > 1), None) for d in dims]
                cut = np.prod([pieces[:, f] for f in factors if f is not None] or [np.ones(len(labels))], axis=0)
                moved = moved + _bytes(values[value]) / cut
                if ids is op.outputs:
                    made = made + _bytes(values[value]) / cut
        compute = np.maximum(flops / grid.chip.flops, moved / grid.chip.memory_bytes_s) * op.trips
        sent = np.zeros(len(labels))
        steps = np.zeros(len(labels))
        if rule.reduction:
            ways = np.ones(len(labels))
            for axis, size in enumerate(grid.sizes):
                ways = np.where(np.isin(labels[:, axis], list(rule.reduction)), ways * size, ways)
            for position, value in enumerate(op.outputs):
                local = _bytes(values[value]) / np.prod(
                    _shards(_dims_of(labels, rule, position, True), max(1, len(values[value].shape)), grid.sizes),
                    axis=1,
                )
                sent = sent + 2 * (ways - 1) / ways * local
            steps = (ways > 1).astype(float)
        target = self.nodes[node]
        target.compute_s += compute
        target.sent_s += (sent / grid.chip.link_bytes_s + steps * grid.chip.latency_s) * op.trips
        target.sent += sent * op.trips
        target.made_bytes += made


def build(
    graph: Graph,
    grid: Grid,
    names: Sequence[str],
    given: Mapping[int, Spec],
    results: Mapping[int, Spec],
    same_as: Mapping[int, int],
) -> Space:
    """The choices of a graph on a grid.

    Args:
      graph: the function.
      grid: sizes of the axes, and the chip.
      names: names of the axes, as specs write them.
      given: layouts of inputs that are not to be changed, by value.
      results: layouts that results must have, by value.
      same_as: output value -> input value whose layout it takes.
    """
    builder = _Builder(graph, grid, given, names)
    made = {v for op in graph.ops for v in op.outputs}
    for value in graph.inputs:
        builder.value_node(value)
    for _, b in graph.ties:
        if b not in made and b not in builder.layouts:
            builder.value_node(b)
    for op in graph.ops:
        builder.op(op)
    trips = {v: op.trips for op in graph.ops for v in op.outputs}
    for a, b in graph.ties:
        if b in builder.layouts:
            builder.need(a, builder.layouts[b][1], builder.layouts[b][0], 1)
        elif a in builder.layouts:
            builder.need(b, builder.layouts[a][1], builder.layouts[a][0], trips.get(b, 1))
    for value, spec in results.items():
        where = {axis: dim for dim, axes in enumerate(spec) for axis in axes}
        wanted = np.array([[where.get(name, -1) for name in names]], np.int8)
        builder.need(value, wanted, builder.node(wanted), 1)
    for value, source in same_as.items():
        node, have = builder.layouts[source]
        builder.need(value, have, node, 1)
    edges = tuple(Edge(a, b, seconds, sent) for (a, b), (sent, seconds) in builder.tables.items())
    return Space(tuple(builder.nodes), edges, builder.layouts)
