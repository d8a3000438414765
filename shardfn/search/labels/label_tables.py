"""A graph on a mesh as a labelling problem: nodes with the labels of each, and tables of the resharding costs between them.

An op whose result has no factor that an operand lacks (elementwise, transpose, reshape, …) follows that operand's node. Of
several such operands it follows the one that is computed last. Every other op is a node of its own. A node has the costs of
its ops (`op_costs`) under each label. The form is that of Alpa (Zheng et al., OSDI 2022), on Shardy's rules instead of
hand-written ones.

Equal ops on equal layouts are computed once, so a model of many equal layers costs little more than one layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from shardfn.cost.memory.live_ranges import LiveBuffer
from shardfn.ir.model import Graph, InnerSpec, Op, ShardingRule, Spec
from shardfn.partition.op_rules import follow_result, replicate, rule_for
from shardfn.search.labels import op_labels
from shardfn.search.labels.convolution_labels import computed_correctly
from shardfn.search.labels.mesh_model import MeshModel, label_of_spec
from shardfn.search.labels.op_costs import OpCosts, OpLayouts
from shardfn.search.labels.resharding_costs import resharding_cost
from shardfn.search.problem import SLICED, GraphFacts
from shardfn.solver.labelling import Array, UsageInterval

SCATTERED, SCATTERED_LAST = 1, 2
"""Along how many of a result's largest factors its partial sums may be reduce-scattered: of a result on which a matmul depends,
and of one on which none does."""


@dataclasses.dataclass
class Node:
    """A decision: `labels` [labels, axes] of what each axis shards (`op_labels.op_codes` for an op), and `sums` [4, labels] over
    the ops that follow the node."""

    labels: Array
    sums: Array

    @property
    def compute_s(self) -> Array:
        """Seconds of compute."""
        return self.sums[0]

    @property
    def sent(self) -> Array:
        """Bytes that one device sends, as the tests hold them against partitioned programs."""
        return self.sums[1]

    @property
    def sent_s(self) -> Array:
        """Seconds of communication."""
        return self.sums[2]

    @property
    def argument_bytes(self) -> Array:
        """Bytes of arguments."""
        return self.sums[3]


@dataclasses.dataclass(frozen=True)
class ReshardingTable:
    """Resharding between two nodes: bytes and seconds for each pair of labels."""

    first: int
    second: int
    sent: Array
    sent_s: Array


@dataclasses.dataclass(frozen=True)
class LabelSpace:
    """All choices of a graph on a mesh.

    `layouts[v]` is (node, the layout under each label) of a value; `reads[i]` is (node, the layouts in which op i reads its
    operands). A layout gives for each axis the dimension that it shards, -1 for none.
    """

    nodes: tuple[Node, ...]
    reshardings: tuple[ReshardingTable, ...]
    layouts: Mapping[int, tuple[int, Array]]
    reads: Mapping[int, tuple[int, tuple[Array, ...]]]
    intervals: tuple[UsageInterval, ...]
    allowed: tuple[tuple[int, Array], ...] = ()
    """Nodes, and which of their labels are allowed: XLA computes convolutions correctly, and reads values as the user
    shards them for a function inside."""


class _Builder:
    """Builds the `LabelSpace` of a graph op by op.

    A node is named by its index; `(node, layouts)` is a value's layout under each label of the node. Arrays are interned (`one`),
    so that caches can use their identity.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: MeshModel,
        given: Mapping[int, Spec],
        chosen: Sequence[Array] | None,
        facts: GraphFacts,
        inner: Mapping[int, InnerSpec],
    ):
        self.graph, self.mesh, self.given, self.chosen, self.facts = graph, mesh, given, chosen, facts
        self.inner = inner
        self.nodes: list[Node] = []
        self.tables: dict[tuple[int, int], list[Array]] = {}
        self.layouts: dict[int, tuple[int, Array]] = {}
        self.sources: dict[int, tuple[int, Array]] = {}
        """Where ops read a value from: its layouts, or those of the shared copy of an argument."""
        self.views: dict[int, tuple[int, Array]] = {}
        """For a broadcast, its operand, and the operand's dimension for each of its dimensions."""
        self.reads: dict[int, tuple[int, tuple[Array, ...]]] = {}
        self.depth: dict[int, int] = {}
        """How many ops lead to a value, at most."""
        self.trips = facts.trips
        self.sizes = mesh.sizes
        self.costs = OpCosts(graph, mesh, facts)
        self.scattered = SCATTERED if mesh.rules.makes_reduce_scatters else 0
        self.is_first = not facts.leaders  # the first mesh: leaders are not known yet
        self.interned: dict[tuple[bytes, tuple[int, ...]], Array] = {}
        self.made: dict[object, Array] = {}
        self.decoded: dict[int, tuple[Array, Array]] = {}
        self.costed: dict[tuple[object, ...], tuple[OpLayouts, Array]] = {}
        self.changes: dict[tuple[int, int, float, float, int, int], tuple[Array, Array]] = {}
        self.pairs: dict[int, tuple[tuple[tuple[tuple[int, int], ...], ...], ...]] = {}
        self.broadcasts: dict[int, Array] = {}
        self.seen: dict[tuple[int, int], Array] = {}
        self.followed: dict[tuple[int, int, int], Array] = {}

    # ---- nodes

    def one(self, array: Array) -> Array:
        """The one array for its content, so that caches by identity hit."""
        return self.interned.setdefault((array.tobytes(), array.shape), array)

    def node(self, labels: Callable[[Array | None], Array]) -> tuple[int, Array]:
        """A new node, with the labels of `labels(row)`. `row` is the label that was chosen for it, which they extend; None if all
        are open."""
        row = self.chosen[len(self.nodes)] if self.chosen is not None else None
        found = labels(row)
        self.nodes.append(Node(found, np.zeros((4, len(found)))))
        return len(self.nodes) - 1, found

    def labels(self, key: object, make: Callable[[Array | None], Array]) -> Callable[[Array | None], Array]:
        """`make`, but called only once for each key and row."""

        def found(row: Array | None) -> Array:
            full = key, None if row is None else row.tobytes()
            if full not in self.made:
                self.made[full] = self.one(make(row))
            return self.made[full]

        return found

    def fixed(self, spec: Spec) -> Callable[[Array | None], Array]:
        """The one label of a given sharding."""
        return lambda row: self.one(np.array([label_of_spec(spec, self.mesh.names)], np.int16))

    def value_node(self, value: int) -> None:
        """A node for the sharding of a value that no op decides; of one label if the user gave it."""
        shape = self.graph.values[value].shape
        spec = self.given.get(value)
        labels = self.labels(shape, lambda row: op_labels.value_labels(shape, self.sizes, row))
        self.sources[value] = self.layouts[value] = self.node(self.fixed(spec) if spec is not None else labels)
        self.depth[value] = 0

    def argument(self, value: int, readers: int) -> None:
        """An argument's node. Several ops that read all of it share one copy, so that its all-gather is paid once. An argument
        that the user replicated needs none."""
        self.value_node(value)
        node, labels = self.layouts[value]
        self.nodes[node].sums[3] += self.facts.bytes[value] / self.costs.shards(labels)
        shape, spec = self.graph.values[value].shape, self.given.get(value)
        if readers > 1 and shape and (spec is None or any(spec)):
            self.sources[value] = self.node(
                self.labels(shape, lambda row: op_labels.value_labels(shape, self.sizes, row))
            )
            gathers = (self.facts.gathers or {}).get(value, 1)
            self.connect(node, labels, self.sources[value][0], self.sources[value][1], value, gathers, 1)

    # ---- resharding

    def need(self, value: int, wanted: Array, node: int, trips: int, from_argument: bool = False) -> None:
        """Resharding for a `node` that reads `value` in the layouts `wanted`, one per label: from the shared copy of an
        argument, or `from_argument` from the argument itself."""
        while value in self.views:
            value, table = self.views[value]
            key = id(table), id(wanted)
            seen = self.seen.get(key)
            if seen is None:
                seen = self.seen[key] = self.one(table[wanted])
            wanted = seen
        if value in self.sources:  # else a constant
            owner, have = self.layouts[value] if from_argument else self.sources[value]
            once = min(trips, self.trips[value])
            self.connect(owner, have, node, wanted, value, once if self.facts.gathers is None else trips, once)

    def connect(self, owner: int, have: Array, node: int, wanted: Array, value: int, gathers: int, others: int) -> None:
        """Add the cost of resharding a value from the layouts of node `owner` to those that `node` wants, with the times that
        all-gathers and other collectives run."""
        if owner == node and have is wanted:
            return
        full, share = self.facts.bytes[value], self.costs.sent_part(value)
        key = id(have), id(wanted), full, share, gathers, others
        found = self.changes.get(key)
        if found is None:
            found = self.changes[key] = resharding_cost(have, wanted, full, self.mesh, share, gathers, others)
        if owner == node:
            self.nodes[node].sums[1:3] += [np.diagonal(found[0]), np.diagonal(found[1])]
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

    def is_replicated(self, op: Op) -> bool:
        """Whether each device computes all of an op."""
        return rule_for(op.name, self.mesh.chip.platform) is replicate

    def leader(self, op: Op, rule: ShardingRule) -> int | None:
        """The operand that an op follows, by position: of those with every factor of the result the one that is computed last.

        None for an op that sums, has several results, is computed in full on each device, or whose sharding the partitioner would
        gather; and where no operand has every factor.
        """
        if op.reduced or rule.reduction or len(op.outputs) != 1 or self.is_replicated(op):
            return None
        operands, results = self.factor_pairs(rule)
        wanted = {f for f, _ in results[0]}
        if wanted & rule.replicated and rule_for(op.name, self.mesh.chip.platform) is follow_result:
            return None
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
        if op.outputs and (spec := self.inner.get(op.outputs[0])) is not None:
            value, source = op.outputs[0], op.inputs[0]
            shape, wanted = (
                self.graph.values[value].shape,
                label_of_spec(tuple(dim or () for dim in spec), self.mesh.names),
            )
            free = [d for d, dim in enumerate(spec) if dim is None]
            make = self.labels((shape, spec), lambda row: op_labels.given_labels(wanted, free, shape, self.sizes, row))
            node, labels = self.sources[value] = self.layouts[value] = self.node(make)
            self.depth[value] = 1 + self.depth.get(source, 0)
            self.reads[index] = node, (labels,)
            self.need(source, labels, node, op.trips)
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
                kept = {f for f, _ in results[0]}  # the result has the others unsharded
                pairs = [(f, dim) for f, dim in operands[lead] if f in kept]
                work = self.followed[key] = self.one(op_labels.dims_to_factors(have, pairs, rule, self.sizes))
            layouts, costs = self.costed_op(index, rule, work, work, True)
        else:
            scattered = SCATTERED_LAST if index in self.facts.last else self.scattered
            make = lambda row: op_labels.op_codes(rule, self.sizes, scattered, row)  # noqa: E731
            node, codes = self.node(
                self.fixed(()) if self.is_replicated(op) else self.labels((id(rule), scattered), make)
            )
            parts = self.decoded.get(id(codes))
            if parts is None:
                work, out = op_labels.decoded(codes)
                parts = self.decoded[id(codes)] = self.one(work), self.one(out)
            layouts, costs = self.costed_op(index, rule, *parts, index in self.facts.last)
        target = self.nodes[node].sums[:3]
        target += costs * op.trips if op.trips != 1 else costs
        if index in self.facts.sums:
            target[1:] -= costs[1:] * (op.trips - self.facts.sums[index])
        for value, wanted in zip(op.inputs, layouts.operands, strict=True):
            self.need(value, wanted, node, op.trips, op.name == SLICED)
        for value, made in zip(op.outputs, layouts.results, strict=True):
            self.sources[value] = self.layouts[value] = node, made
        if self.is_first:
            depth = 1 + max((self.depth.get(v, 0) for v in op.inputs), default=0)
            self.depth |= dict.fromkeys(op.outputs, depth)
        self.reads[index] = node, layouts.operands

    def view(self, rule: ShardingRule) -> Array:
        """A table from the dimensions of a broadcast to those of its operand."""
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

    def costed_op(
        self, index: int, rule: ShardingRule, work: Array, out: Array, is_last: bool
    ) -> tuple[OpLayouts, Array]:
        """An op under labels that shard these factors, and its costs for one run: the first three rows of `Node.sums`."""
        key = (self.facts.kinds[index], is_last, id(work), id(out))
        found = self.costed.get(key)
        if found is None:
            operands, results = self.factor_pairs(rule)
            layouts = OpLayouts(
                work,
                out,
                tuple(self.one(op_labels.factors_to_dims(work, pairs, len(rule.sizes))) for pairs in operands),
                tuple(self.one(op_labels.factors_to_dims(out, pairs, len(rule.sizes))) for pairs in results),
            )
            found = self.costed[key] = layouts, self.costs.of(index, rule, layouts, is_last)
        return found


def build(
    graph: Graph,
    mesh: MeshModel,
    given: Mapping[int, Spec],
    results: Mapping[int, Spec],
    same_as: Mapping[int, int],
    chosen: Sequence[Array] | None,
    facts: GraphFacts,
    inner: Mapping[int, InnerSpec] = MappingProxyType({}),
    operands: Collection[int] = (),
) -> LabelSpace:
    """The choices of a graph on a mesh.

    Args:
      graph: the function.
      mesh: axes, links and chip.
      given: fixed shardings of inputs, by value.
      results: fixed shardings of results, by value.
      same_as: result value -> input value whose sharding it takes.
      chosen: for each node a label of which one column is `op_labels.FREE`: only that is decided.
      facts: `graph_facts.facts_of` the graph.
      inner: fixed shardings of values inside, by value.
      operands: those of them that ops read as they are sharded.
    """
    builder = _Builder(graph, mesh, given, chosen, facts, inner)
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
    reshardings = tuple(ReshardingTable(a, b, sent, seconds) for (a, b), (sent, seconds) in builder.tables.items())
    intervals = _argument_intervals(builder, facts.buffers)
    return LabelSpace(tuple(builder.nodes), reshardings, builder.layouts, builder.reads, intervals,
                 (*_convolutions(builder), *_read_as_given(builder, operands)))  # fmt: skip


def _convolutions(builder: _Builder) -> Iterator[tuple[int, Array]]:
    graph = builder.graph
    for index, (node, wanted) in builder.reads.items():
        op = graph.ops[index]
        if op.convolution:
            shapes = [graph.values[v].shape for v in (*op.inputs, *op.outputs)]
            shardings = (*wanted, builder.layouts[op.outputs[0]][1])
            yield node, computed_correctly(op.convolution, shapes, shardings, builder.mesh.sizes)


def _read_as_given(builder: _Builder, operands: Collection[int]) -> Iterator[tuple[int, Array]]:
    for index, (node, wanted) in builder.reads.items():
        for value, layouts in zip(builder.graph.ops[index].inputs, wanted, strict=True):
            if value in operands and len(given := builder.layouts[value][1]) == 1:
                yield node, (layouts == given).all(axis=1)


def _argument_intervals(builder: _Builder, places: Sequence[LiveBuffer]) -> tuple[UsageInterval, ...]:
    full = builder.facts.bytes
    total: dict[tuple[int, int, int], Array] = {}
    for place in places:
        value = max(place.values, key=lambda v: (full[v], v), default=-1)
        if value in builder.layouts:
            node, layouts = builder.layouts[value]
            key = (node, place.start, place.end + 1)
            total[key] = total.get(key, 0.0) + builder.costs.stored_bytes(value, layouts)
    for value in sorted(builder.facts.row_major_copies):
        node, layouts = builder.layouts[value]
        rows, (first, last) = builder.costs.padding(value, layouts), builder.facts.read[value]
        key = (node, 2 * first, 2 * last + 1)
        total[key] = total.get(key, 0.0) + np.where(rows > 1, full[value] / builder.costs.shards(layouts) * rows, 0.0)
    return tuple(UsageInterval(node, start, end, held) for (node, start, end), held in total.items())
