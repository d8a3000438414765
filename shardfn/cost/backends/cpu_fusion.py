"""Fusion in XLA's CPU backend: library calls first, and values that some readers load from memory and others
recompute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from shardfn.cost.backends.cpu_library import CpuLibrary
from shardfn.cost.fusion_walk import MAX_DUPLICATES, Fuser, FusionPlan
from shardfn.ir.model import Graph, Op, PartitionedProgram
from shardfn.ir.op_traits import BRANCHES_ON_CPU, COMPUTED_ONCE_ON_CPU, CONTRACTIONS, ELEMENTWISE, REPEATED_READS, VIEWS

BY_TREE = 32
"""Elements of a reduced dimension up to which the operand is fused; longer ones are reduced in two steps from memory
(JAX 0.10.2).
"""

_WRITTEN_OUT = 15
"""How often the code of one op may be emitted inside another: XLA's `kAllowedCodeDuplication`."""

_KEEPS = VIEWS | {"slice"}
"""Ops that may leave dims as they are."""

_AT_ROOT = frozenset({-1})
"""What reads where the op that others are computed inside writes."""

_NOWHERE: frozenset[int] = frozenset()


class CpuFuser(Fuser):
    """Fuses one graph as on a CPU."""

    def __init__(self, partitioned: PartitionedProgram):
        super().__init__(partitioned)
        self.maker = {v: i for i in self.alive for v in self.graph.ops[i].outputs}
        self.calls = CpuLibrary(partitioned, self.readers, self.maker).calls()
        """Ops that a call of the library computes, and the one whose result it gives."""
        self.called = frozenset(self.calls.values())
        self.spread |= _repeating(partitioned.graph, self.made)
        self.constants = _constant_broadcasts(partitioned.graph, self.made)
        self.after: list[int] = []
        self.shown: set[int] = set()
        """What a view gives that a product, a collective or a library needs in memory. What it is of is computed as it is
        written, if it can be."""
        self.repeated: set[int] = set()
        """Ops that read an element of an operand more than once, or are computed inside such."""
        self.places: dict[tuple[int, int], frozenset[int]] = {}
        """For an op that is computed inside another, by both: the ops in there that each read it at a place of their own."""
        self.times: dict[tuple[int, int], int] = {}
        """How often its code is written out there."""
        self.filled: set[int] = set()
        """Ops inside which another is computed."""
        self.reading: dict[tuple[int, int], frozenset[int]] = {}
        """What `read_at` found. It is asked when all readers of a value are settled, and finds the same each time."""

    def settle(self, i: int) -> None:
        """Decide where op `i` is computed; that of its readers is decided."""
        super().settle(i)
        op = self.graph.ops[i]
        for home in self.homes[i]:
            if home != i and len(op.outputs) == 1:
                self.places[home, i] = places = self.read_at(op.outputs[0], home)
                self.times[home, i] = sum([self.times.get((home, r), 1) for r in places])
                self.filled.add(home)
        if op.name in REPEATED_READS or (i in self.later and self.repeats(op.outputs[0])):
            self.repeated.add(i)

    def as_settled(self) -> FusionPlan:
        """What each op reads from memory and computes inside, now that it is decided where each is computed."""
        self.seen_through()
        return super().as_settled()

    def is_needed(self, op: Op) -> bool:
        """Whether an op makes a result that readers cannot recompute."""
        return op.outputs[0] in self.held and self.partitioned.is_view(op)

    def computed_in(self, i: int, op: Op) -> tuple[int, ...] | None:
        """The ops inside which op `i` is computed, or None where it runs by itself."""
        if i in self.calls:
            return None if self.calls[i] == i else (self.calls[i],)
        return super().computed_in(i, op)

    def where(self, op: Op, readers: Sequence[int], homes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The ops inside which `op` is computed; what some readers need in memory, others may recompute."""
        if self.partitioned.is_view(op):
            return self.written_through(op, readers, homes)
        if op.name in VIEWS or op.name in CONTRACTIONS:
            return None
        value, users = op.outputs[0], self.final_users(readers)
        loop_of = self.graph.loop_of
        here = [r for r in users if loop_of[r] == loop_of[self.maker[value]]]
        is_constant = value in self.constants  # the library repeats it itself
        inner = [r for r in here if (is_constant or r not in self.calls) and self.can_read(r)]
        if not inner:
            return None
        is_whole = len(inner) == len(users) and value not in self.held
        if is_whole and len(homes) <= 1:
            if any(self.is_too_often(op, home, readers) for home in homes):
                return None
            return homes if op.name not in COMPUTED_ONCE_ON_CPU or not self.repeats(value) else None
        if op.name in COMPUTED_ONCE_ON_CPU:
            return None
        if not self.is_unary(op) and (
            not is_whole or any(self.follows(home) >> r & 1 for home in homes for r in users)
        ):
            return None
        if not is_whole:
            homes = self.homes_of(inner)
        if len(homes) > MAX_DUPLICATES and value not in self.spread:
            return None
        too_often = frozenset([home for home in homes if self.is_too_often(op, home, readers)])
        if is_whole and not too_often:
            return homes
        if len(too_often) < len(homes):
            self.anew[value], self.apart[value] = frozenset(inner), too_often
        return None

    def read_at(self, value: int, home: int) -> frozenset[int]:
        """The ops inside `home` that each read a value at a place of their own: what has the value's shape reads it where it is
        read itself."""
        found = self.reading.get((value, home))
        if found is not None:
            return found
        found, shape_of = _NOWHERE, self.partitioned.local_shape
        for r in self.readers.get(value, ()):
            if r != home and home not in self.homes[r]:
                continue
            op = self.graph.ops[r]
            is_same = op.name == "transpose" or (len(op.outputs) == 1 and shape_of(op.outputs[0]) == shape_of(value))
            found |= self.places.get((home, r), _AT_ROOT) if is_same else {r}
        self.reading[value, home] = found
        return found

    def is_too_often(self, op: Op, home: int, readers: Sequence[int]) -> bool:
        """Whether an op's code would be written out more often inside `home` than XLA lets it.

        That is its `FusionNodeIndexingEvaluation`, which does not look at the first op that is computed inside another.
        """
        if op.outputs[0] in self.spread or home not in self.filled:
            return False
        times = sum([self.times.get((home, r), 1) for r in self.read_at(op.outputs[0], home)])
        if op.name in BRANCHES_ON_CPU:
            return times > 1 or sum([len(self.homes[r]) for r in readers]) + (op.outputs[0] in self.held) > 1
        return times > _WRITTEN_OUT

    def written_through(self, op: Op, readers: Sequence[int], homes: tuple[int, ...]) -> tuple[int, ...] | None:
        """`where`, of a view: it is an op of its own, in which what it is of is computed, where a reader needs it
        in memory. Where that is stored itself, `seen_through` takes it back."""
        inner = [r for r in readers if r not in self.calls and self.can_read(r)]
        before, after = (self.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
        if len(inner) == len(readers) or not (op.name == "bitcast" or (op.name == "reshape" and before != after)):
            return homes
        if inner:
            self.anew[op.outputs[0]] = frozenset(inner)
        self.shown.add(op.outputs[0])
        return None

    def seen_through(self) -> None:
        """Views of what is stored itself are nothing."""
        for i in sorted(self.alive):
            value = self.graph.ops[i].outputs[0] if self.graph.ops[i].outputs else -1
            if value not in self.shown:
                continue
            source = self.graph.ops[i].inputs[0]
            while (made := self.maker.get(source, -1)) in self.later and self.partitioned.is_view(self.graph.ops[made]):
                source = self.graph.ops[made].inputs[0]
            if made not in self.later and i not in self.anew.get(source, ()):
                self.anew.pop(value, None)
                self.later.add(i)

    def repeats(self, value: int) -> bool:
        """Whether an op that reads a value does so more than once for an element, itself or that inside which it is computed."""
        return any(r in self.repeated for r in self.readers.get(value, ()))

    def final_users(self, readers: Sequence[int]) -> list[int]:
        """The ops that read a value, also behind views of it that are no results."""
        found: list[int] = []
        for r in readers:
            op = self.graph.ops[r]
            through = (
                self.partitioned.is_view(op) and op.outputs[0] not in self.held and op.outputs[0] not in self.shown
            )
            found += self.final_users(self.readers.get(op.outputs[0], ())) if through else [r]
        return found

    def is_unary(self, op: Op) -> bool:
        """Whether at most one operand that is no broadcast is as large as the result."""
        size = math.prod(self.graph.values[op.outputs[0]].shape)
        large = [v for v in set(op.inputs) if math.prod(self.graph.values[v].shape) >= size and v not in self.spread]
        return len(large) <= 1

    def follows(self, i: int) -> int:
        """The ops that need what op `i` makes, however many others lie between: a bit for each."""
        if not self.after:
            self.after = [0] * len(self.graph.ops)
            for j in reversed(range(len(self.after))):
                for v in self.graph.ops[j].outputs:
                    for r in self.readers.get(v, ()):
                        self.after[j] |= 1 << r | self.after[r]
        return self.after[i]

    def can_run_with(self, i: int) -> bool:
        """`can_read`, worked out."""
        op = self.graph.ops[i]
        if i in self.called:
            return True
        if op.outputs and op.outputs[0] in self.shown and self.partitioned.is_view(op):
            return True
        if op.name == "reduce":
            shape = self.partitioned.local_shape(op.inputs[0])
            return len(op.outputs) > 1 or all(shape[d] <= BY_TREE for _, d in op.reduced)
        return super().can_run_with(i)


def _constant_broadcasts(graph: Graph, made: Collection[int]) -> frozenset[int]:
    """Broadcasts of constants, directly or through views and other broadcasts."""
    found: set[int] = set()
    for op in graph.ops:
        is_spread = op.name in VIEWS or op.name == "broadcast_in_dim"
        if is_spread and op.inputs and all(v not in made or v in found for v in op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _repeating(graph: Graph, made: Collection[int]) -> set[int]:
    """What elementwise ops and slices make of one broadcast, and of numbers: XLA broadcasts what they make of the few."""
    of: dict[int, frozenset[tuple[int, tuple[int, ...]]]] = {}
    """Of what is broadcast, or made of such: of what, and along which dims it does not repeat."""
    found: set[int] = set()
    for op in graph.ops:
        if len(op.outputs) != 1 or not op.inputs:
            continue
        (value,) = op.outputs
        if op.name == "broadcast_in_dim":
            if not graph.values[op.inputs[0]].shape:
                of[value] = frozenset()
            elif op.rule is not None:
                own = {f for dim in op.rule.operands[0] for f in dim}
                dims = tuple([d for d, dim in enumerate(op.rule.results[0]) if own.intersection(dim)])
                of[value] = frozenset({(op.inputs[0], dims)})
        elif (op.name in ELEMENTWISE or op.name in _KEEPS) and all(v in of or v not in made for v in op.inputs):
            sources = frozenset().union(*[of[v] for v in op.inputs if v in of])
            before, after = (graph.values[v].shape for v in (op.inputs[0], value))
            is_same = op.name == "slice" or before == after
            if is_same and len(sources) <= 1 and all(before[d] == after[d] for _, dims in sources for d in dims):
                of[value] = sources
                found.add(value)
    return found
