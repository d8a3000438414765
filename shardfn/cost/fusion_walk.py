"""The walk that fuses ops, readers first, by the rules that XLA's backends share.

The *root* of a fusion is the op whose result the fusion writes. The other ops of the fusion are computed inside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import CHEAP, CONTRACTIONS, EXPENSIVE, SLICES, VIEWS
from shardfn.ir.partitioned import PartitionedProgram

MAX_DUPLICATES = 16
"""The most readers into which one op is duplicated that reads an array as large as its result."""

READERS = CHEAP | EXPENSIVE | SLICES
"""Ops that others can be fused into."""

_INSIDE = READERS | VIEWS | CONTRACTIONS
_REPEATABLE = READERS | VIEWS


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """Which ops are fused into which."""

    stored: frozenset[int]
    """Values with a buffer."""
    reads: tuple[tuple[int, ...], ...]
    """For each op the stored values that it reads, also through the ops that are fused into it."""
    inside: tuple[tuple[int, ...] | None, ...]
    """For each op those that are fused into it; None for an op that is fused itself, or dead."""
    dead: frozenset[int]
    """Ops whose results nothing reads."""
    narrow: frozenset[int] = frozenset()
    """The stored `f32` values that are kept as `bf16`: on a TPU, those that only matmuls of default precision read."""

    def ordered(self, turn: Sequence[int]) -> FusionPlan:
        """The same plan for a graph whose ops run in another order: `turn` lists their present numbers in that order."""
        place = {i: at for at, i in enumerate(turn)}
        inside = (self.inside[i] for i in turn)
        return FusionPlan(
            self.stored,
            tuple(self.reads[i] for i in turn),
            tuple(None if inner is None else tuple(place[j] for j in inner) for inner in inside),
            frozenset(place[i] for i in self.dead),
            self.narrow,
        )


class Fuser:
    """Fuses one graph. A platform with rules of its own overrides `computed_in`, `fusion_roots`, `can_run_with` or `narrowed`."""

    def __init__(self, partitioned: PartitionedProgram):
        self.partitioned, self.graph = partitioned, partitioned.graph
        ops = partitioned.graph.ops
        self.alive = _alive(partitioned.graph)
        self.readers: dict[int, list[int]] = {}
        for i in sorted(self.alive):
            for v in dict.fromkeys(ops[i].inputs):
                self.readers.setdefault(v, []).append(i)
        self.computed = partitioned.graph.computed
        self.must_store = frozenset(partitioned.graph.outputs) | self.carried_in()
        self.broadcasts = {v for op in ops if op.name in ("broadcast_in_dim", "iota") for v in op.outputs}
        self.roots: dict[int, tuple[int, ...]] = {}
        """For each op the roots of the fusions in which it is computed, or itself."""
        self.recomputing: dict[int, frozenset[int]] = {}
        """For a value that is stored for some of its readers only, the others, which recompute it."""
        self.loading: dict[int, frozenset[int]] = {}
        """For such a value, the roots that always load it, also where its readers are fused into them."""
        self.readable: dict[int, bool] = {}
        self.fused: set[int] = set()
        """Ops that are fused into others."""

    def carried_in(self) -> frozenset[int]:
        """Values that a loop's body reads from outside: nothing is fused across its boundary. A view counts as the value that it
        shows, and a constant is computed in the body again."""
        ops, makers, loop_of = self.graph.ops, self.graph.makers, self.graph.loop_of
        found: set[int] = set()
        for v, readers in self.readers.items() if any(i >= 0 for i in loop_of) else ():
            at = makers.get(v, -1)
            if at >= 0 and any(loop_of[r] != loop_of[at] for r in readers if ops[r].name != "while"):
                while at >= 0 and self.partitioned.is_view(ops[at]):
                    v = ops[at].inputs[0]
                    at = makers.get(v, -1)
                if at >= 0 and not self.is_constant(v):
                    found.add(v)
        return frozenset(found)

    def is_constant(self, value: int) -> bool:
        """Whether a value is a constant, or a broadcast or conversion of one: XLA folds it."""
        if value not in self.computed:
            return True
        at = self.graph.makers.get(value, -1)
        op = self.graph.ops[at] if at >= 0 else None
        return op is not None and op.name in ("broadcast_in_dim", "convert") and self.is_constant(op.inputs[0])

    def fusion(self) -> FusionPlan:
        """How the ops are fused."""
        for i in reversed(range(len(self.graph.ops))):
            if i in self.alive:
                self.settle(i)
        return self.as_settled()

    def settle(self, i: int) -> None:
        """Decide in which fusions op `i` is computed; its readers are decided already."""
        op = self.graph.ops[i]
        roots = self.computed_in(i, op)
        self.roots[i] = roots if roots is not None else (i,)
        if roots is not None:
            self.fused.add(i)
        if op.outputs and (again := self.recomputing.get(op.outputs[0])):
            loading = self.loading.get(op.outputs[0], ())
            self.roots[i] = tuple(dict.fromkeys([i, *[h for r in again for h in self.roots[r] if h not in loading]]))

    def as_settled(self) -> FusionPlan:
        """The plan, once all ops are decided: what each op reads from memory, and which ops are fused into it."""
        graph, fused = self.graph, self.fused
        views = self.seen_as()
        inner = {
            v: i
            for i in self.alive
            for v in graph.ops[i].outputs
            if (i in fused and v not in views) or v in self.recomputing
        }
        stored = set(graph.inputs).union(b for _, b in graph.ties).difference(*(op.outputs for op in graph.ops))
        for i in self.alive - fused:
            stored.update(graph.ops[i].outputs)
        reads: list[tuple[int, ...]] = []
        inside: list[tuple[int, ...] | None] = []
        for i in range(len(graph.ops)):
            if i in fused or i not in self.alive:
                reads.append(())
                inside.append(None)
            else:
                under, before = self.computed_with(i, stored, inner, views)
                reads.append(under)
                inside.append(before)
        stored.update(b for _, b in graph.ties if b not in inner)
        return FusionPlan(
            frozenset(stored),
            tuple(reads),
            tuple(inside),
            frozenset(range(len(graph.ops))) - self.alive,
            self.narrowed(stored),
        )

    def seen_as(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """For the result of each fused view, the value that it shows, and the views on the way to that.

        Empty where no value is stored for some of its readers only: a view is then treated as any other fused op.
        """
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for i in sorted(self.fused) if self.recomputing else ():
            op = self.graph.ops[i]
            if self.partitioned.is_view(op):
                v, through = found.get(op.inputs[0], (op.inputs[0], ()))
                found[op.outputs[0]] = v, (*through, i)
        return found

    def computed_with(
        self,
        root: int,
        stored: Collection[int],
        inner: Mapping[int, int],
        views: Mapping[int, tuple[int, tuple[int, ...]]],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stored values that op `root` reads, and the ops that are fused into it, in program order.

        Args:
          root: an op that is not fused.
          stored: values with a buffer.
          inner: the op that makes a value, where it may be computed inside another.
          views: from `seen_as`.
        """
        ops, recomputing, loading = self.graph.ops, self.recomputing, self.loading
        under: dict[int, None] = {}
        done: dict[int, None] = {}
        met = {root}
        ahead: list[tuple[int, Iterator[int], tuple[int, ...]]] = [(root, iter(ops[root].inputs), ())]
        while ahead:
            i, rest, after = ahead[-1]
            for v in rest:
                through: tuple[int, ...] = ()
                if v in views:
                    v, through = views[v]
                if v in inner and (v not in recomputing or (i in recomputing[v] and root not in loading.get(v, ()))):
                    j = inner[v]
                    if j not in met:
                        met.add(j)
                        ahead.append((j, iter(ops[j].inputs), through))
                        break
                elif v in stored:
                    under[v] = None
                if through:
                    done.update(dict.fromkeys(through))
            else:
                ahead.pop()
                if i != root:
                    done[i] = None
                    done.update(dict.fromkeys(after))
        return tuple(under), tuple(done)

    def narrowed(self, stored: Collection[int]) -> frozenset[int]:
        """The stored values that are kept in fewer bytes: none by default."""
        return frozenset()

    def computed_in(self, i: int, op: Op) -> tuple[int, ...] | None:
        """The roots of the fusions in which op `i` is computed; None if it is not fused."""
        if len(op.outputs) != 1 or op.name not in _INSIDE or self.is_needed(op):
            return None
        value = op.outputs[0]
        readers = self.readers.get(value, [])
        if op.name == "broadcast_in_dim" and op.inputs[0] not in self.computed:  # of a constant
            readers = [r for r in readers if not _passes(self.graph.ops[r], value)]
        roots = self.roots[readers[0]] if len(readers) == 1 else self.roots_of(readers)
        return self.fusion_roots(op, readers, roots)

    def roots_of(self, readers: Sequence[int]) -> tuple[int, ...]:
        """The roots of the fusions in which any of `readers` is computed."""
        return tuple(dict.fromkeys([root for r in readers for root in self.roots[r]]))

    def is_needed(self, op: Op) -> bool:
        """Whether the value of an op must be stored: a result, or a value that a loop's body reads from outside."""
        return op.outputs[0] in self.must_store

    def fusion_roots(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in` for an op with one result, whose `readers` are computed in the fusions of `roots`."""
        if self.partitioned.is_view(op):
            return roots
        if op.name in VIEWS or op.name in CONTRACTIONS:
            return None
        value = op.outputs[0]
        is_given = bool(self.sources[value])  # else it reads nothing large, and any number of readers make it again
        if (len(roots) > MAX_DUPLICATES and is_given) or not all(self.can_read(r) for r in readers):
            return None
        if len(roots) <= 1:
            return roots
        return roots if value not in self.sources[value] and len(self.sources[value]) <= 1 else None

    @functools.cached_property
    def sources(self) -> dict[int, frozenset[int]]:
        """For the result of an elementwise op, the stored values of its size that it is computed from, through any number of ops.

        Each reader can recompute a result that comes from one large value.
        """
        found: dict[int, frozenset[int]] = {}
        sizes = [value.elements for value in self.graph.values]
        for i, op in enumerate(self.graph.ops):
            if op.name not in _REPEATABLE or len(op.outputs) != 1 or i not in self.alive:
                continue
            (value,) = op.outputs
            own, size = frozenset((value,)), sizes[value]
            found[value] = own
            if value in self.must_store:
                continue
            parts = {found[v] if v in found else frozenset((v,)) for v in op.inputs if v not in self.broadcasts}
            large = frozenset([v for part in parts for v in part if sizes[v] >= size])
            if len(large) <= 1 or len(self.readers.get(value, ())) <= 1:
                found[value] = large
        return found

    def can_read(self, i: int) -> bool:
        """Whether the operands of op `i` can be fused into it."""
        if i not in self.readable:
            self.readable[i] = self.can_run_with(i)
        return self.readable[i]

    def can_run_with(self, i: int) -> bool:
        """`can_read`, without its cache."""
        op = self.graph.ops[i]
        if self.partitioned.is_view(op):  # as its own readers do
            following = self.readers.get(op.outputs[0], ())
            return op.outputs[0] not in self.must_store and bool(following) and all(map(self.can_read, following))
        if op.name == "reduce":  # over other dims XLA wants its operand in memory
            rank = len(self.graph.values[op.inputs[0]].shape)
            return any(d == rank - 1 for _, d in op.reduced)
        return op.name in READERS


def _alive(graph: Graph) -> frozenset[int]:
    """Ops whose results are needed."""
    needed = set(graph.outputs)
    alive = set()
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if not op.outputs or not needed.isdisjoint(op.outputs) or "custom_call" in op.name:
            alive.add(i)
            needed.update(op.inputs)
    return frozenset(alive)


def _passes(op: Op, value: int) -> bool:
    """Whether a loop passes the value through unchanged: XLA recomputes a constant inside."""
    return op.name == "while" and all(operand != value for operand, *_ in op.carries)
