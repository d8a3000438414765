"""Fusion in XLA's CPU backend: library calls first, and values that some readers load from memory and others
recompute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from shardfn.cost.backends.cpu_library import CpuLibrary
from shardfn.cost.fusion_walk import MAX_DUPLICATES, Fuser, FusionPlan
from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import BRANCHES_ON_CPU, COMPUTED_ONCE_ON_CPU, CONTRACTIONS, ELEMENTWISE, REPEATED_READS, VIEWS
from shardfn.ir.partitioned import PartitionedProgram

BY_TREE = 32
"""Elements of a reduced dimension up to which the operand is fused; longer ones are reduced in two steps from memory
(JAX 0.10.2).
"""

_WRITTEN_OUT = 15
"""How often XLA may emit the code of one op inside another: its `kAllowedCodeDuplication`."""

_KEEPS = VIEWS | {"slice"}
"""Ops that may leave dims as they are."""

_AT_ROOT = frozenset({-1})
"""Stands for readers that read at the element which the root writes."""

_NOWHERE: frozenset[int] = frozenset()


class CpuFuser(Fuser):
    """Fuses one graph as on a CPU."""

    def __init__(self, partitioned: PartitionedProgram):
        super().__init__(partitioned)
        self.maker = {v: i for i in self.alive for v in self.graph.ops[i].outputs}
        self.calls = CpuLibrary(partitioned, self.readers, self.maker).calls()
        """Ops that a call of the library computes, and the one whose result it gives."""
        self.called = frozenset(self.calls.values())
        self.broadcasts |= _repeating(partitioned.graph, self.computed)
        self.constants = _constant_broadcasts(partitioned.graph, self.computed)
        self.after: list[int] = []
        self.shown: set[int] = set()
        """Results of views that a matmul, a collective or the library needs in memory. The value that such a view shows is fused
        into it, if possible."""
        self.repeated: set[int] = set()
        """Ops that read an element of an operand more than once, or that are fused into such ops."""
        self.readers_at: dict[tuple[int, int], frozenset[int]] = {}
        """By root and op in its fusion: the ops of the fusion that each read that op at an index of their own (`read_at`)."""
        self.times: dict[tuple[int, int], int] = {}
        """By root and op in its fusion: how often XLA emits the op's code there."""
        self.filled: set[int] = set()
        """Roots of fusions of more than one op."""
        self.reading: dict[tuple[int, int], frozenset[int]] = {}
        """The cache of `read_at`, which is called when all readers of a value are decided."""

    def settle(self, i: int) -> None:
        """Decide in which fusions op `i` is computed; its readers are decided already."""
        super().settle(i)
        op = self.graph.ops[i]
        for root in self.roots[i]:
            if root != i and len(op.outputs) == 1:
                self.readers_at[root, i] = readers_here = self.read_at(op.outputs[0], root)
                self.times[root, i] = sum([self.times.get((root, r), 1) for r in readers_here])
                self.filled.add(root)
        if op.name in REPEATED_READS or (i in self.fused and self.repeats(op.outputs[0])):
            self.repeated.add(i)

    def as_settled(self) -> FusionPlan:
        """The plan, once all ops are decided."""
        self.seen_through()
        return super().as_settled()

    def is_needed(self, op: Op) -> bool:
        """Whether an op makes a result that readers cannot recompute."""
        return op.outputs[0] in self.must_store and self.partitioned.is_view(op)

    def computed_in(self, i: int, op: Op) -> tuple[int, ...] | None:
        """The roots of the fusions in which op `i` is computed; None if it is not fused."""
        if i in self.calls:
            return None if self.calls[i] == i else (self.calls[i],)
        return super().computed_in(i, op)

    def fusion_roots(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in` for an op with one result. Where some readers load the value from memory, others may recompute it."""
        if self.partitioned.is_view(op):
            return self.written_through(op, readers, roots)
        if op.name in VIEWS or op.name in CONTRACTIONS:
            return None
        value, users = op.outputs[0], self.final_users(readers)
        loop_of = self.graph.loop_of
        here = [r for r in users if loop_of[r] == loop_of[self.maker[value]]]
        is_constant = value in self.constants  # the library repeats it itself
        inner = [r for r in here if (is_constant or r not in self.calls) and self.can_read(r)]
        if not inner:
            return None
        is_fully_fused = len(inner) == len(users) and value not in self.must_store
        if is_fully_fused and len(roots) <= 1:
            if any(self.is_too_often(op, root, readers) for root in roots):
                return None
            return roots if op.name not in COMPUTED_ONCE_ON_CPU or not self.repeats(value) else None
        if op.name in COMPUTED_ONCE_ON_CPU:
            return None
        if not self.is_unary(op) and (
            not is_fully_fused or any(self.follows(root) >> r & 1 for root in roots for r in users)
        ):
            return None
        if not is_fully_fused:
            roots = self.roots_of(inner)
        if len(roots) > MAX_DUPLICATES and value not in self.broadcasts:
            return None
        too_often = frozenset([root for root in roots if self.is_too_often(op, root, readers)])
        if is_fully_fused and not too_often:
            return roots
        if len(too_often) < len(roots):
            self.recomputing[value], self.loading[value] = frozenset(inner), too_often
        return None

    def read_at(self, value: int, root: int) -> frozenset[int]:
        """The ops in the fusion of `root` that each read a value at an index of their own.

        An op whose result has the value's shape reads it at the index at which the result is read.
        """
        found = self.reading.get((value, root))
        if found is not None:
            return found
        found, shape_of = _NOWHERE, self.partitioned.local_shape
        for r in self.readers.get(value, ()):
            if r != root and root not in self.roots[r]:
                continue
            op = self.graph.ops[r]
            is_same = op.name == "transpose" or (len(op.outputs) == 1 and shape_of(op.outputs[0]) == shape_of(value))
            found |= self.readers_at.get((root, r), _AT_ROOT) if is_same else {r}
        self.reading[value, root] = found
        return found

    def is_too_often(self, op: Op, root: int, readers: Sequence[int]) -> bool:
        """Whether an op's code would be written out more often in the fusion of `root` than XLA allows.

        That is its `FusionNodeIndexingEvaluation`, which does not look at the first op that is computed inside another.
        """
        if op.outputs[0] in self.broadcasts or root not in self.filled:
            return False
        times = sum([self.times.get((root, r), 1) for r in self.read_at(op.outputs[0], root)])
        if op.name in BRANCHES_ON_CPU:
            return times > 1 or sum([len(self.roots[r]) for r in readers]) + (op.outputs[0] in self.must_store) > 1
        return times > _WRITTEN_OUT

    def written_through(self, op: Op, readers: Sequence[int], roots: tuple[int, ...]) -> tuple[int, ...] | None:
        """`fusion_roots` for a view. It is not fused where a reader needs it in memory, and the value that it shows is fused into
        it. Where that value is stored itself, `seen_through` fuses the view after all."""
        inner = [r for r in readers if r not in self.calls and self.can_read(r)]
        before, after = (self.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
        if len(inner) == len(readers) or not (op.name == "bitcast" or (op.name == "reshape" and before != after)):
            return roots
        if inner:
            self.recomputing[op.outputs[0]] = frozenset(inner)
        self.shown.add(op.outputs[0])
        return None

    def seen_through(self) -> None:
        """Fuse the views of values that are stored themselves: such a view costs nothing."""
        for i in sorted(self.alive):
            value = self.graph.ops[i].outputs[0] if self.graph.ops[i].outputs else -1
            if value not in self.shown:
                continue
            source = self.graph.ops[i].inputs[0]
            while (made := self.maker.get(source, -1)) in self.fused and self.partitioned.is_view(self.graph.ops[made]):
                source = self.graph.ops[made].inputs[0]
            if made not in self.fused and i not in self.recomputing.get(source, ()):
                self.recomputing.pop(value, None)
                self.fused.add(i)

    def repeats(self, value: int) -> bool:
        """Whether an op that reads a value does so more than once for an element, itself or that inside which it is computed."""
        return any(r in self.repeated for r in self.readers.get(value, ()))

    def final_users(self, readers: Sequence[int]) -> list[int]:
        """The ops that read a value, also behind views of it that are no results."""
        found: list[int] = []
        for r in readers:
            op = self.graph.ops[r]
            through = (
                self.partitioned.is_view(op)
                and op.outputs[0] not in self.must_store
                and op.outputs[0] not in self.shown
            )
            found += self.final_users(self.readers.get(op.outputs[0], ())) if through else [r]
        return found

    def is_unary(self, op: Op) -> bool:
        """Whether at most one operand that is no broadcast is as large as the result."""
        size = math.prod(self.graph.values[op.outputs[0]].shape)
        large = [
            v for v in set(op.inputs) if math.prod(self.graph.values[v].shape) >= size and v not in self.broadcasts
        ]
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
        """`can_read`, without its cache."""
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
    """Results of elementwise ops and slices of one broadcast and of scalars: XLA computes them before the broadcast."""
    of: dict[int, frozenset[tuple[int, tuple[int, ...]]]] = {}
    """For a broadcast, or a value computed from one: the broadcast value, and the dimensions along which it does not repeat."""
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
