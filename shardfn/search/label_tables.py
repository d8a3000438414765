"""A graph on a grid as a labelling problem: how each op may be cut, what that costs, what it costs to change layout.

An op that computes nothing new beside an operand that holds all its factors (elementwise, transpose, reshape, …) follows
that operand's node, of several the one made last; every other op is a node of its own. Tables price the change of layout
between nodes. The form is Alpa's (Zheng et al., OSDI 2022), on Shardy's rules instead of rules by hand.

Equal ops on equal layouts are worked out once, so that a model of many equal layers costs little more than one layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from shardfn.cost.backends.tpu import LANES, MAX_ROW_MAJOR_BYTES
from shardfn.cost.compute import rate
from shardfn.cost.memory.live_ranges import LiveBuffer
from shardfn.ir.model import Graph, Op, ShardingRule, Spec
from shardfn.ir.op_traits import CONTRACTIONS, PARTIAL_READS, UPDATES
from shardfn.search import op_labels
from shardfn.search.convolution_labels import computed_correctly
from shardfn.search.graph_facts import SLICED, GraphFacts
from shardfn.search.halo_costs import halo_cost
from shardfn.search.partial_sum_costs import PartialSums
from shardfn.search.resharding_costs import Array, MeshModel, change, label_of_spec, pieces
from shardfn.solver.labelling import UsageInterval

SCATTERED, SCATTERED_LAST = 1, 2
"""Along how many factors of a result its sum may be left in pieces: of what is multiplied again, and of the rest."""


@dataclasses.dataclass
class Node:
    """Something to decide: [labels, axes] of what each axis cuts (`forms.op_codes` for an op), and [6, labels] summed over
    the ops that follow it: FLOPs, those of products, seconds of work, bytes and seconds of communication, and bytes held by
    arguments."""

    labels: Array
    sums: Array

    @property
    def flops(self) -> Array:
        """Of one device."""
        return self.sums[0]

    @property
    def matrix_flops(self) -> Array:
        """Those of products and convolutions."""
        return self.sums[1]

    @property
    def compute_s(self) -> Array:
        """Seconds of work."""
        return self.sums[2]

    @property
    def sent(self) -> Array:
        """Bytes that one device sends."""
        return self.sums[3]

    @property
    def sent_s(self) -> Array:
        """Seconds of communication."""
        return self.sums[4]

    @property
    def argument_bytes(self) -> Array:
        """Bytes held by arguments."""
        return self.sums[5]


@dataclasses.dataclass(frozen=True)
class ReshardingTable:
    """Change of layout between two nodes: bytes and seconds for each pair of labels."""

    first: int
    second: int
    sent: Array
    sent_s: Array


@dataclasses.dataclass(frozen=True)
class LabelSpace:
    """All choices of a graph on a grid.

    `layouts[v]` is (node, its layout under each label) of a value; `reads[i]` is (node, the layouts in which op i reads
    its operands). A layout is the dim that each axis cuts, -1 for none.
    """

    nodes: tuple[Node, ...]
    edges: tuple[ReshardingTable, ...]
    layouts: Mapping[int, tuple[int, Array]]
    reads: Mapping[int, tuple[int, tuple[Array, ...]]]
    held: tuple[UsageInterval, ...]
    copies: tuple[UsageInterval, ...]
    """What changes of layout hold for a while: arguments as they are gathered, operands as an op reads them, sums before
    each device has its part. Too much where nothing changes, so they only count where the least memory is looked for."""
    right: tuple[tuple[int, Array], ...] = ()
    """Of each convolution its node, and under which labels of that XLA computes it rightly."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """An op on a node's labels, worked out: layouts of its operands and results, and its costs for one run."""

    wanted: tuple[Array, ...]
    made: tuple[Array, ...]
    sums: Array
    """The first five rows of `Node.sums`."""
    partial: Array | None
    """Bytes of a sum before each device has its part of it, beyond that part."""


class _Builder:
    def __init__(
        self,
        graph: Graph,
        grid: MeshModel,
        given: Mapping[int, Spec],
        chosen: Sequence[Array] | None,
        facts: GraphFacts,
    ):
        self.graph, self.grid, self.given, self.chosen, self.facts = graph, grid, given, chosen, facts
        self.nodes: list[Node] = []
        self.tables: dict[tuple[int, int], list[Array]] = {}
        self.layouts: dict[int, tuple[int, Array]] = {}
        self.sources: dict[int, tuple[int, Array]] = {}
        self.views: dict[int, tuple[int, Array]] = {}
        self.reads: dict[int, tuple[int, tuple[Array, ...]]] = {}
        self.depth: dict[int, int] = {}
        self.copies: list[UsageInterval] = []
        self.trips = facts.trips
        self.sizes = grid.sizes
        self.cuts: dict[int, Array] = {}
        self.is_first = not facts.leaders  # of the grids: what follows what is not known yet
        self.interned: dict[tuple[bytes, tuple[int, ...]], Array] = {}
        self.made: dict[object, Array] = {}
        self.decoded: dict[int, tuple[Array, Array]] = {}
        self.pieces: dict[tuple[object, ...], _Piece] = {}
        self.changes: dict[tuple[int, int, float, float], tuple[Array, Array]] = {}
        self.narrowed = _multiplied(graph) if grid.narrows else frozenset()
        self.pairs: dict[int, tuple[tuple[tuple[tuple[int, int], ...], ...], ...]] = {}
        self.broadcasts: dict[int, Array] = {}
        self.seen: dict[tuple[int, int], Array] = {}
        self.followed: dict[tuple[int, int, int], Array] = {}

    # ---- nodes

    def one(self, array: Array) -> Array:
        """The same array for the same content: what is cached by identity is found again."""
        return self.interned.setdefault((array.tobytes(), array.shape), array)

    def ways(self, layouts: Array) -> Array:
        """`pieces` of layouts that come from `one`."""
        found = self.cuts.get(id(layouts))
        if found is None:
            found = self.cuts[id(layouts)] = pieces(layouts, self.sizes)
        return found

    def node(self, labels: Callable[[Array | None], Array]) -> tuple[int, Array]:
        """A new node, whose labels go on from what is chosen of it already."""
        row = self.chosen[len(self.nodes)] if self.chosen is not None else None
        found = labels(row)
        self.nodes.append(Node(found, np.zeros((6, len(found)))))
        return len(self.nodes) - 1, found

    def labels(self, key: object, make: Callable[[Array | None], Array]) -> Callable[[Array | None], Array]:
        """`make`, but once for each key and row."""

        def found(row: Array | None) -> Array:
            full = key, None if row is None else row.tobytes()
            if full not in self.made:
                self.made[full] = self.one(make(row))
            return self.made[full]

        return found

    def fixed(self, spec: Spec) -> Callable[[Array | None], Array]:
        """The one label of what was given."""
        return lambda row: self.one(np.array([label_of_spec(spec, self.grid.names)], np.int16))

    def value_node(self, value: int) -> None:
        shape = self.graph.values[value].shape
        spec = self.given.get(value)
        labels = self.labels(shape, lambda row: op_labels.value_labels(shape, self.sizes, row))
        self.sources[value] = self.layouts[value] = self.node(self.fixed(spec) if spec is not None else labels)
        self.depth[value] = 0

    def argument(self, value: int, readers: int) -> None:
        """An argument's node; where several ops read all of it, they read one copy, so that a gather is paid for once. What is
        given whole is not gathered."""
        self.value_node(value)
        node, labels = self.layouts[value]
        self.nodes[node].sums[5] += self.facts.bytes[value] / self.ways(labels)
        shape, spec = self.graph.values[value].shape, self.given.get(value)
        if readers > 1 and shape and (spec is None or any(spec)):
            self.sources[value] = self.node(
                self.labels(shape, lambda row: op_labels.value_labels(shape, self.sizes, row))
            )
            rounds = (self.facts.gathers or {}).get(value, 1)
            self.connect(node, labels, self.sources[value][0], self.sources[value][1], value, rounds)
            first, last = self.facts.read[value]
            self.copied(value, self.sources[value], 2 * first, 2 * last + 1)

    def copied(self, value: int, laid: tuple[int, Array], start: int, end: int) -> None:
        full = self.facts.bytes[value]
        least = full / math.prod(self.sizes)
        self.copies.append(UsageInterval(laid[0], start, end, full / self.ways(laid[1]) - least))

    def padding(self, value: int, layouts: Array) -> Array:
        """By how much rows in these layouts grow that are padded to whole lanes (`cost.tpu.rows_bytes`)."""
        shape = self.graph.values[value].shape
        cuts = np.where(layouts == len(shape) - 1, self.sizes, 1).prod(axis=1)
        columns = shape[-1] / cuts if shape else np.full(len(layouts), float(LANES))
        grown = np.ceil(columns / LANES) * LANES / columns
        return np.where(self.facts.bytes[value] / self.ways(layouts) * grown <= MAX_ROW_MAJOR_BYTES, grown, 1.0)

    def stored(self, value: int, layouts: Array) -> Array:
        """Bytes of a value on one device, as it lies in memory."""
        size = self.facts.bytes[value] / self.ways(layouts)
        return size * self.padding(value, layouts) if value in self.facts.rows else size

    # ---- edges

    def need(self, value: int, wanted: Array, node: int, trips: int, as_it_lies: bool = False) -> None:
        """`node` reads `value` in the layouts `wanted`, one for each of its labels; an argument in the copy that others read
        too, or `as_it_lies`."""
        while value in self.views:
            value, table = self.views[value]
            key = id(table), id(wanted)
            seen = self.seen.get(key)
            if seen is None:
                seen = self.seen[key] = self.one(table[wanted])
            wanted = seen
        if value in self.sources:  # else a constant, made where it is needed
            owner, have = self.layouts[value] if as_it_lies else self.sources[value]
            rounds = min(trips, self.trips[value]) if self.facts.gathers is None else trips
            self.connect(owner, have, node, wanted, value, rounds)

    def connect(self, owner: int, have: Array, node: int, wanted: Array, value: int, trips: int) -> None:
        if owner == node and have is wanted:
            return
        full = self.facts.bytes[value]
        share = 0.5 if value in self.narrowed else 1.0
        key = (id(have), id(wanted), full * trips, share)
        found = self.changes.get(key)
        if found is None:
            sent, seconds = change(have, wanted, full, self.grid, share)
            found = self.changes[key] = (sent * trips, seconds * trips)
        if owner == node:
            self.nodes[node].sums[3:5] += [np.diagonal(found[0]), np.diagonal(found[1])]
            return
        if not found[1].any():
            return
        pair = (owner, node) if owner < node else (node, owner)
        tables = found if owner < node else (found[0].T, found[1].T)
        before = self.tables.get(pair)
        if before is None:
            self.tables[pair] = list(tables)
        else:
            self.tables[pair] = [x + y for x, y in zip(before, tables, strict=True)]

    # ---- ops

    def factor_pairs(self, rule: ShardingRule) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        found = self.pairs.get(id(rule))
        if found is None:
            found = self.pairs[id(rule)] = (
                tuple(op_labels.factor_dims(d, rule.sizes) for d in rule.operands),
                tuple(op_labels.factor_dims(d, rule.sizes) for d in rule.results),
            )
        return found

    def leader(self, op: Op, rule: ShardingRule) -> int | None:
        """The operand that an op follows: it holds every factor of the result, and is made last."""
        if op.reduced or rule.reduction or len(op.outputs) != 1:
            return None
        operands, results = self.factor_pairs(rule)
        wanted = {f for f, _ in results[0]}
        best = None
        for position, value in enumerate(op.inputs):
            if value not in self.sources or not wanted <= {f for f, _ in operands[position]}:
                continue
            if best is None or self.depth[value] > self.depth[op.inputs[best]]:
                best = position
        return best

    def op(self, index: int, op: Op) -> None:
        rule = op.rule
        if op.name == "broadcast_in_dim" and rule is not None:
            self.views[op.outputs[0]] = op.inputs[0], self.view(rule)
            return
        if op.name == "optimization_barrier":
            for source, value in zip(op.inputs, op.outputs, strict=True):
                if source in self.views:
                    self.views[value] = self.views[source]
                elif source in self.sources:
                    self.sources[value] = self.layouts[value] = self.sources[source]
                    self.depth[value] = self.depth.get(source, 0)
            return
        if rule is None or not rule.operands:
            for value in op.outputs:
                if value not in self.sources:
                    self.value_node(value)
            return
        lead = self.facts.leaders.get(index, -1)
        if lead == -1:
            lead = self.facts.leaders[index] = self.leader(op, rule)
        if lead is not None:
            node, have = self.sources[op.inputs[lead]]
            key = (id(rule), lead, id(have))
            work = self.followed.get(key)
            if work is None:
                operands, results = self.factor_pairs(rule)
                kept = {f for f, _ in results[0]}  # the others the result has whole
                pairs = [(f, dim) for f, dim in operands[lead] if f in kept]
                work = self.followed[key] = self.one(op_labels.factors_of(have, pairs, rule, self.sizes))
            piece = self.piece(index, op, rule, work, work, True)
        else:
            scattered = SCATTERED_LAST if index in self.facts.last else SCATTERED if self.grid.scatters else 0
            node, codes = self.node(
                self.labels((id(rule), scattered), lambda row: op_labels.op_codes(rule, self.sizes, scattered, row))
            )
            parts = self.decoded.get(id(codes))
            if parts is None:
                work, out = op_labels.decoded(codes)
                parts = self.decoded[id(codes)] = self.one(work), self.one(out)
            piece = self.piece(index, op, rule, *parts, index in self.facts.last)
        target = self.nodes[node].sums[:5]
        target += piece.sums * op.trips if op.trips != 1 else piece.sums
        if index in self.facts.sums:
            target[3:] -= piece.sums[3:] * (op.trips - self.facts.sums[index])
        at = self.facts.runs[index]
        for value, wanted in zip(op.inputs, piece.wanted, strict=True):
            self.need(value, wanted, node, op.trips, op.name == SLICED)
            if op.name in CONTRACTIONS and value >= len(self.graph.inputs):
                self.copied(value, (node, wanted), 2 * at, 2 * at + 1)
        if piece.partial is not None:
            self.copies.append(UsageInterval(node, 2 * at, 2 * at + 1, piece.partial))
        for value, made in zip(op.outputs, piece.made, strict=True):
            self.sources[value] = self.layouts[value] = node, made
        if self.is_first:
            depth = 1 + max((self.depth.get(v, 0) for v in op.inputs), default=0)
            self.depth |= dict.fromkeys(op.outputs, depth)
        self.reads[index] = node, piece.wanted

    def view(self, rule: ShardingRule) -> Array:
        """From the dims of a broadcast's result to those of its operand."""
        table = self.broadcasts.get(id(rule))
        if table is not None:
            return table
        dim_of = dict(self.factor_pairs(rule)[1][0])
        table = self.broadcasts[id(rule)] = np.full(op_labels.NOWHERE + 2, -1, np.int16)
        for source, factors in enumerate(rule.operands[0]):
            for factor in factors:
                if factor in dim_of:
                    table[dim_of[factor]] = source
                    break
        return table

    def piece(self, index: int, op: Op, rule: ShardingRule, work: Array, out: Array, is_last: bool) -> _Piece:
        key = (self.facts.kinds[index], is_last, id(work), id(out))
        found = self.pieces.get(key)
        if found is None:
            found = self.pieces[key] = self.worked_out(index, rule, work, out, is_last)
        return found

    def worked_out(self, index: int, rule: ShardingRule, work: Array, out: Array, is_last: bool) -> _Piece:
        op, grid, full = self.graph.ops[index], self.grid, self.facts.bytes
        operands, results = self.factor_pairs(rule)
        wanted = tuple(self.one(op_labels.dims_of(work, pairs, len(rule.sizes))) for pairs in operands)
        made = tuple(self.one(op_labels.dims_of(out, pairs, len(rule.sizes))) for pairs in results)
        flops, moved = self.work(index, work, wanted, made)
        is_sum = np.isin(work, list(rule.reduction))
        sent, sent_s = np.zeros(len(work)), np.zeros(len(work))
        whole: Array | None = None
        if is_sum.any():
            of = [f for dim in rule.operands[0] for f in dim if f in rule.reduction] if op.name == "convolution" else []
            sums = PartialSums(work, out, is_sum, of, op.name == "dot_general", is_last)
            for value, after in zip(op.outputs, made, strict=True):
                partial = full[value] / pieces(np.where(is_sum & (out >= 0), -1, after), grid.sizes)
                parts = sums.cost(partial, grid)
                sent, sent_s = sent + parts[0], sent_s + parts[1]
                more = partial - full[value] / self.ways(after)
                whole = more if whole is None else whole + more
            parts_of = self.facts.together.get(index, 1)
            sent, sent_s = sent / parts_of, sent_s / parts_of
        if op.window_dims:
            local = [full[v] / self.ways(w) for v, w in zip(op.inputs, wanted, strict=True)]
            parts = halo_cost(op, self.graph, wanted, made, local, grid)
            sent, sent_s = sent + parts[0], sent_s + parts[1]
        computing_s = self.facts.kernels[index].computes * flops / rate(self.graph, op, grid.chip)
        moving_s = moved / grid.chip.memory_bytes_s
        compute_s = np.maximum(computing_s, moving_s) if op.name in CONTRACTIONS else computing_s + moving_s
        of_products = flops if op.name in CONTRACTIONS else np.zeros(len(work))
        return _Piece(wanted, made, np.array([flops, of_products, compute_s, sent, sent_s]), whole)

    def work(self, index: int, work: Array, wanted: Sequence[Array], made: Sequence[Array]) -> tuple[Array, Array]:
        """FLOPs of one run of an op on one device, and bytes that count in all kernels that it is computed in."""
        op, kernels = self.graph.ops[index], self.facts.kernels[index]
        moved = np.zeros(len(work))
        for position, (value, layouts) in enumerate(zip(op.inputs, wanted, strict=True)):
            if kernels.reads[position]:
                size = self.stored(value, layouts)
                if position == 0 and op.name in PARTIAL_READS:
                    size = np.minimum(size, self.stored(op.outputs[0], made[0]))
                elif position == 0 and op.name in UPDATES:
                    size = np.zeros(len(work))
                moved = moved + kernels.reads[position] * size
        if kernels.is_written and op.name in UPDATES and op.inputs:  # in place: what changes is read and written
            at = UPDATES[op.name]
            moved = moved + 2 * self.stored(op.inputs[at], wanted[at])
        elif kernels.is_written:
            moved = moved + sum(self.stored(v, layouts) for v, layouts in zip(op.outputs, made, strict=True))
        return self.facts.op_flops[index] / self.ways(work), moved


def _multiplied(graph: Graph) -> frozenset[int]:
    """The `f32` values that products read."""
    read = {v for op in graph.ops if op.name in CONTRACTIONS for v in op.inputs}
    return frozenset(v for v in read if graph.values[v].dtype == "f32")


def build(
    graph: Graph,
    grid: MeshModel,
    given: Mapping[int, Spec],
    results: Mapping[int, Spec],
    same_as: Mapping[int, int],
    chosen: Sequence[Array] | None,
    facts: GraphFacts,
) -> LabelSpace:
    """The choices of a graph on a grid.

    Args:
      graph: the function.
      grid: axes, links and chip.
      given: layouts of inputs that are not to be changed, by value.
      results: layouts that results must have, by value.
      same_as: output value -> input value whose layout it takes.
      chosen: for each node a label of which one column is `forms.FREE`: only that is to be decided.
      facts: `known` of the graph.
    """
    builder = _Builder(graph, grid, given, chosen, facts)
    for value in graph.inputs:
        builder.argument(value, facts.readers.get(value, 0))
    loops = facts.loops
    for value in loops.carried:
        builder.value_node(value)
    for index, op in enumerate(graph.ops):
        if op.name == "while":
            for result in op.outputs:
                source = loops.results.get(result)
                if source in builder.sources:
                    builder.sources[result] = builder.layouts[result] = builder.sources[source]
                    builder.depth[result] = 1 + builder.depth.get(source, 0)
        builder.op(index, op)
    for source, value, trips in loops.carries:
        if value in builder.sources:
            node, have = builder.sources[value]
            builder.need(source, have, node, trips)
    for value, spec in results.items():
        node, wanted = builder.node(builder.fixed(spec))
        builder.need(value, wanted, node, 1)
    for value, source in same_as.items():
        node, have = builder.layouts[source]
        builder.need(value, have, node, 1)
    edges = tuple(ReshardingTable(a, b, sent, seconds) for (a, b), (sent, seconds) in builder.tables.items())
    held = _holders(builder, facts.places)
    return LabelSpace(tuple(builder.nodes), edges, builder.layouts, builder.reads, held, tuple(builder.copies),
                 tuple(_convolutions(builder)))  # fmt: skip


def _convolutions(builder: _Builder) -> Iterator[tuple[int, Array]]:
    graph = builder.graph
    for index, (node, wanted) in builder.reads.items():
        op = graph.ops[index]
        if op.convolution:
            shapes = [graph.values[v].shape for v in (*op.inputs, *op.outputs)]
            laid = (*wanted, builder.layouts[op.outputs[0]][1])
            yield node, computed_correctly(op.convolution, shapes, laid, builder.grid.sizes)


def _holders(builder: _Builder, places: Sequence[LiveBuffer]) -> tuple[UsageInterval, ...]:
    full = builder.facts.bytes
    total: dict[tuple[int, int, int], Array] = {}
    for place in places:
        value = max(place.values, key=lambda v: (full[v], v), default=-1)
        if value in builder.layouts:
            node, layouts = builder.layouts[value]
            key = (node, place.start, place.end + 1)
            total[key] = total.get(key, 0.0) + builder.stored(value, layouts)
    for value in sorted(builder.facts.turned):
        node, layouts = builder.layouts[value]
        rows, (first, last) = builder.padding(value, layouts), builder.facts.read[value]
        key = (node, 2 * first, 2 * last + 1)
        total[key] = total.get(key, 0.0) + np.where(rows > 1, full[value] / builder.ways(layouts) * rows, 0.0)
    return tuple(UsageInterval(node, start, end, held) for (node, start, end), held in total.items())
