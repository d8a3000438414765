"""The walk that fuses ops, readers first, by the rules that XLA's backends share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.ir.model import Graph, Op, PartitionedProgram
from shardfn.ir.op_traits import CHEAP, CONTRACTIONS, EXPENSIVE, SLICES, VIEWS

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
    """Values with a place of their own."""
    reads: tuple[tuple[int, ...], ...]
    """For each op the stored values that it reads, also through what is computed inside it."""
    inside: tuple[tuple[int, ...] | None, ...]
    """For each op those that are computed inside it; None where it is itself computed elsewhere, or not at all."""
    dead: frozenset[int]
    """Ops whose results nobody needs."""
    narrow: frozenset[int] = frozenset()
    """Of the stored values, `f32` ones that are kept as `bf16`: on a TPU what products alone read, at default precision."""

    def ordered(self, turn: Sequence[int]) -> FusionPlan:
        """The same of a graph whose ops run in another order: `turn` has their numbers so far."""
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
    """Fuses one graph. A platform with rules of its own overrides `computed_in`, `where`, `can_run_with` or `narrowed`."""

    def __init__(self, partitioned: PartitionedProgram):
        self.partitioned, self.graph = partitioned, partitioned.graph
        ops = partitioned.graph.ops
        self.alive = _alive(partitioned.graph)
        self.readers: dict[int, list[int]] = {}
        for i in sorted(self.alive):
            for v in dict.fromkeys(ops[i].inputs):
                self.readers.setdefault(v, []).append(i)
        self.made = partitioned.graph.computed
        self.held = frozenset(partitioned.graph.outputs) | self.carried_in()
        self.spread = {v for op in ops if op.name in ("broadcast_in_dim", "iota") for v in op.outputs}
        self.homes: dict[int, tuple[int, ...]] = {}
        """For each op those inside which it is computed, or itself."""
        self.anew: dict[int, frozenset[int]] = {}
        """Of a value that is stored for some of its readers, the others: they compute it anew."""
        self.apart: dict[int, frozenset[int]] = {}
        """Of such a value, ops that read it from memory all the same, whichever of its readers are computed inside them."""
        self.can: dict[int, bool] = {}
        self.later: set[int] = set()
        """Ops that are computed in others."""

    def carried_in(self) -> frozenset[int]:
        """Values that a loop's body reads from outside: nothing is fused across its edge. What a view shows is what it is
        of, and a constant is made inside again."""
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
        if value not in self.made:
            return True
        at = self.graph.makers.get(value, -1)
        op = self.graph.ops[at] if at >= 0 else None
        return op is not None and op.name in ("broadcast_in_dim", "convert") and self.is_constant(op.inputs[0])

    def fusion(self) -> FusionPlan:
        """How the ops are put together."""
        for i in reversed(range(len(self.graph.ops))):
            if i in self.alive:
                self.settle(i)
        return self.as_settled()

    def settle(self, i: int) -> None:
        """Decide where op `i` is computed; that of its readers is decided."""
        op = self.graph.ops[i]
        homes = self.computed_in(i, op)
        self.homes[i] = homes if homes is not None else (i,)
        if homes is not None:
            self.later.add(i)
        if op.outputs and (again := self.anew.get(op.outputs[0])):
            apart = self.apart.get(op.outputs[0], ())
            self.homes[i] = tuple(dict.fromkeys([i, *[h for r in again for h in self.homes[r] if h not in apart]]))

    def as_settled(self) -> FusionPlan:
        """What each op reads from memory and computes inside, now that it is decided where each is computed."""
        graph, later = self.graph, self.later
        views = self.seen_as()
        inner = {
            v: i for i in self.alive for v in graph.ops[i].outputs if (i in later and v not in views) or v in self.anew
        }
        stored = set(graph.inputs).union(b for _, b in graph.ties).difference(*(op.outputs for op in graph.ops))
        for i in self.alive - later:
            stored.update(graph.ops[i].outputs)
        reads: list[tuple[int, ...]] = []
        inside: list[tuple[int, ...] | None] = []
        for i in range(len(graph.ops)):
            if i in later or i not in self.alive:
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
        """Of what views show that are no ops of their own, what they are of, and the views on the way; where some value is stored
        for a part of its readers, else views are as any op that is computed inside another."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for i in sorted(self.later) if self.anew else ():
            op = self.graph.ops[i]
            if self.partitioned.is_view(op):
                v, through = found.get(op.inputs[0], (op.inputs[0], ()))
                found[op.outputs[0]] = v, (*through, i)
        return found

    def computed_with(
        self,
        home: int,
        stored: Collection[int],
        inner: Mapping[int, int],
        views: Mapping[int, tuple[int, tuple[int, ...]]],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stored values that op `home` reads, and the ops that are computed inside it, in their order.

        Args:
          home: an op that runs by itself.
          stored: values with a place of their own.
          inner: the op that makes a value, where it may be computed inside another.
          views: of what is seen through views, what it is of, and these.
        """
        ops, anew, apart = self.graph.ops, self.anew, self.apart
        under: dict[int, None] = {}
        done: dict[int, None] = {}
        met = {home}
        ahead: list[tuple[int, Iterator[int], tuple[int, ...]]] = [(home, iter(ops[home].inputs), ())]
        while ahead:
            i, rest, after = ahead[-1]
            for v in rest:
                through: tuple[int, ...] = ()
                if v in views:
                    v, through = views[v]
                if v in inner and (v not in anew or (i in anew[v] and home not in apart.get(v, ()))):
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
                if i != home:
                    done[i] = None
                    done.update(dict.fromkeys(after))
        return tuple(under), tuple(done)

    def narrowed(self, stored: Collection[int]) -> frozenset[int]:
        """Those of the stored values that are kept in fewer bytes: none."""
        return frozenset()

    def computed_in(self, i: int, op: Op) -> tuple[int, ...] | None:
        """The ops inside which op `i` is computed, or None where it runs by itself."""
        if len(op.outputs) != 1 or op.name not in _INSIDE or self.is_needed(op):
            return None
        value = op.outputs[0]
        readers = self.readers.get(value, [])
        if op.name == "broadcast_in_dim" and op.inputs[0] not in self.made:  # of a constant
            readers = [r for r in readers if not _passes(self.graph.ops[r], value)]
        homes = self.homes[readers[0]] if len(readers) == 1 else self.homes_of(readers)
        return self.where(op, readers, homes)

    def homes_of(self, readers: Sequence[int]) -> tuple[int, ...]:
        """The ops inside which any of `readers` is computed."""
        return tuple(dict.fromkeys([home for r in readers for home in self.homes[r]]))

    def is_needed(self, op: Op) -> bool:
        """Whether what an op makes is a result, which takes a place of its own."""
        return op.outputs[0] in self.held

    def where(self, op: Op, readers: Sequence[int], homes: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in`, of an op of one result that `readers` need, which are computed in `homes`."""
        if self.partitioned.is_view(op):
            return homes
        if op.name in VIEWS or op.name in CONTRACTIONS:
            return None
        value = op.outputs[0]
        is_given = bool(self.sources[value])  # else it reads nothing large, and any number of readers make it again
        if (len(homes) > MAX_DUPLICATES and is_given) or not all(self.can_read(r) for r in readers):
            return None
        if len(homes) <= 1:
            return homes
        return homes if value not in self.sources[value] and len(self.sources[value]) <= 1 else None

    @functools.cached_property
    def sources(self) -> dict[int, frozenset[int]]:
        """For what an elementwise op makes, the values as large that it is computed from in the end: of what comes from one
        large value, through however many ops, each reader can make it again."""
        found: dict[int, frozenset[int]] = {}
        sizes = [value.elements for value in self.graph.values]
        for i, op in enumerate(self.graph.ops):
            if op.name not in _REPEATABLE or len(op.outputs) != 1 or i not in self.alive:
                continue
            (value,) = op.outputs
            own, size = frozenset((value,)), sizes[value]
            found[value] = own
            if value in self.held:
                continue
            parts = {found[v] if v in found else frozenset((v,)) for v in op.inputs if v not in self.spread}
            large = frozenset([v for part in parts for v in part if sizes[v] >= size])
            if len(large) <= 1 or len(self.readers.get(value, ())) <= 1:
                found[value] = large
        return found

    def can_read(self, i: int) -> bool:
        """Whether what an op reads can be computed inside it."""
        if i not in self.can:
            self.can[i] = self.can_run_with(i)
        return self.can[i]

    def can_run_with(self, i: int) -> bool:
        """`can_read`, worked out."""
        op = self.graph.ops[i]
        if self.partitioned.is_view(op):  # as its own readers do
            following = self.readers.get(op.outputs[0], ())
            return op.outputs[0] not in self.held and bool(following) and all(map(self.can_read, following))
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
