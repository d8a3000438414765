"""How XLA's GPU backend assigns buffers: what library calls need, and values of loops that are made apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

from shardfn.cost.backends.gpu_library import GPU_LIBRARY, HAS_BUFFERS, SOLVERS, masked_rows, own_order
from shardfn.cost.backends.library_call import LibraryCall
from shardfn.cost.backends.loop_copies import loop_copies
from shardfn.cost.memory.live_ranges import LiveBuffer, LiveRanges
from shardfn.cost.schedule import Schedule
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE

_OUTERMOST = ("all_gather", "reduce_scatter")
_ANY_ORDER = ELEMENTWISE | CONTRACTIONS | {"reduce", "transpose"}
"""Ops that read an array in any order of its dimensions."""


class GpuLiveRanges(LiveRanges):
    """The common rules; work buffers of sorts, ragged matmuls and 3D convolutions; arrays that a library has in an order of its
    own."""

    def __init__(self, schedule: Schedule):
        super().__init__(schedule)
        self.library: list[int] = []
        """The ops that are calls of libraries with buffers of their own, once `from_ops` has seen them."""

    def add_own_buffers(self, i: int) -> None:
        """Add what a library call needs beside its operands and results."""
        op = self.graph.ops[i]
        if op.name in _OUTERMOST:
            self.send_in_order(i)
        if op.name not in HAS_BUFFERS and not op.name.startswith(SOLVERS):
            return
        self.library.append(i)
        call = self.library_call(i)
        if call and call.work_bytes and op.name != "ragged_dot":
            self.copies.append(LiveBuffer((), 2 * i, self.last_tick(i), int(call.work_bytes)))
        read, made = own_order(self.partitioned, op)
        copied = [op.inputs[at] for at in read if self.source(op.inputs[at]) in self.inputs]
        self.copies += [LiveBuffer((), 2 * i, self.last_tick(i), self.partitioned.local_bytes(v)) for v in copied]
        for v in (op.outputs[at] for at in made if op.outputs[at] in self.outputs):
            self.copies.append(LiveBuffer((), 2 * i, self.last_tick(i) + 1, self.partitioned.local_bytes(v)))
            self.start[v] = self.last_tick(i) + 1

    def send_in_order(self, i: int) -> None:
        """XLA gathers and scatters along the outermost dimension in memory only (`GpuLayoutAssignment`). Along another, an
        argument is copied to have that dimension first. What arrives is copied back for a result of the program, and for readers
        other than matmuls and what is fused."""
        op = self.graph.ops[i]
        if not self.is_moved(i):
            return
        (operand,), (arrived,) = op.inputs, op.outputs
        begin = 2 * self.together.get(i, (i, i))[0]
        if self.source(operand) in self.inputs or self.source(operand) in self.carried:
            self.copies.append(LiveBuffer((), begin, self.last_tick(i), self.partitioned.local_bytes(operand)))
        readers = [self.graph.ops[r].name for r, reads in enumerate(self.fusion.reads) if arrived in reads]
        if arrived in self.outputs or any(name not in _ANY_ORDER for name in readers):
            self.copies.append(LiveBuffer((), begin, self.last_tick(i) + 1, self.partitioned.local_bytes(arrived)))
            self.start[arrived] = self.last_tick(i) + 1

    def is_moved(self, i: int) -> bool:
        """Whether an all-gather or a reduce-scatter is along another dimension than the outermost one."""
        op = self.graph.ops[i]
        before, after = (self.partitioned.local_shape(v) for v in (op.inputs[0], op.outputs[0]))
        along = [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
        return bool(along) and max((1, *before[: along[0]])) > 1

    def from_ops(self) -> None:
        """Of a pooling's gradient that is cut, as JAX does after it padded the array, XLA makes what is left alone."""
        super().from_ops()
        self.copies += self.masked()
        for op in self.graph.ops if self.library else ():
            at = self.graph.makers.get(op.inputs[0], -1) if op.name == "slice" else -1
            if at < 0 or self.graph.ops[at].name != "select_and_scatter":
                continue
            whole, left = op.inputs[0], op.outputs[0]
            if self.graph.read_counts[whole] == 1 and whole in self.start and left in self.start:
                self.start[left] = self.start.pop(whole)

    def masked(self) -> Iterator[LiveBuffer]:
        """The rows that ragged matmuls store for each expert. What several of one loop need is stored from the first to the last
        of them, and besides in another order during each that contracts the experts too, as all but gradients of matrices do."""
        users: dict[tuple[int, int, int], list[int]] = {}
        for i in self.library:
            op = self.graph.ops[i]
            for v in masked_rows(self.partitioned, op) if op.name == "ragged_dot" else ():
                users.setdefault((v, op.inputs[2], self.graph.loop_of[i]), []).append(i)
        first = {(i, key[0]): min(ops) for key, ops in users.items() for i in ops}
        for (v, _, _), ops in users.items():
            stored = {i: masked_rows(self.partitioned, self.graph.ops[i]) for i in ops}
            # A gradient of matrices runs before what else reads the rows that it contracts.
            ran = {i: 2 * i if len(rows) == 1 else 2 * max(first[i, u] for u in rows) - 1 for i, rows in stored.items()}
            if is_shared := len(ops) > 1:
                yield LiveBuffer((), 2 * ops[0], max(2 * ops[0], *ran.values()), stored[ops[0]][v])
            for i in ops:
                if not is_shared or len(stored[i]) == 1:
                    yield LiveBuffer((), 2 * i, self.last_tick(i), stored[i][v])

    def library_call(self, i: int) -> LibraryCall | None:
        """The call of a library that an op is, if it has a rule."""
        op = self.graph.ops[i]
        rule = GPU_LIBRARY.get(op.name)
        return rule(self.partitioned, op, 1.0) if rule else None

    def source(self, v: int) -> int:
        """The value of which a value is a view."""
        ops, makers = self.graph.ops, self.graph.makers
        while (at := makers.get(v, -1)) >= 0 and self.partitioned.is_view(ops[at]):
            v = ops[at].inputs[0]
        return v

    def may_write_over(self, i: int, v: int) -> bool:
        """Nothing is written over an array that a library or a collective left in another order than the result's, nor over rows
        that the same kernel reduces first, as a softmax does."""
        at = self.graph.makers.get(self.source(v), -1)
        if (
            at >= 0
            and self.graph.ops[at].outputs.index(self.source(v)) in own_order(self.partitioned, self.graph.ops[at])[1]
        ):
            return False
        if at >= 0 and self.graph.ops[at].name in _OUTERMOST and self.is_moved(at):
            return False
        return not self.reduces_rows(i, v) and not self.is_reduced_at_once(i) and super().may_write_over(i, v)

    def is_reduced_at_once(self, i: int) -> bool:
        """Whether the kernel that makes an array reduces it too, which XLA does not write over anything."""
        return self.graph.ops[i].outputs[0] in self.reduced

    @functools.cached_property
    def reduced(self) -> frozenset[int]:
        """The values that reductions read."""
        ops, fusion = self.graph.ops, self.fusion
        found = (i for i, op in enumerate(ops) if op.name == "reduce" and fusion.inside[i] is not None)
        return frozenset().union(*map(fusion.reads.__getitem__, found))

    def reduces_rows(self, i: int, v: int) -> bool:
        """Whether what op `i` reads is made of the rows of a value that it reads too."""
        for u in self.fusion.reads[i]:
            at = self.graph.makers.get(u, -1)
            if at >= 0 and self.graph.ops[at].name == "reduce" and v in self.fusion.reads[at]:
                op = self.graph.ops[at]
                if len(self.partitioned.local_shape(op.inputs[0])) - 1 in {d for _, d in op.reduced}:
                    return True
        return False

    def write_over(self, bound: frozenset[int]) -> None:
        """Sorts by comparisons and solvers write over their operands too, and ops over one that they transpose for a matmul."""
        super().write_over(bound)
        self.write_over_transposed()
        for i in self.library:
            is_solver = self.graph.ops[i].name.startswith(SOLVERS)
            for v, made in self.written_by_library(i):
                is_free = is_solver and v in self.start and not {v} & (self.inputs | self.outputs)
                if made in self.start and v in self.fusion.reads[i] and (is_free or self.dies_in(v, i)):
                    self.end[v] = min(2 * i, self.start[made]) - 1

    def write_over_transposed(self) -> None:
        """XLA leaves what matmuls alone read in the order of a matmul's result of which it is computed, so it is written over
        that even if the program transposes in between."""
        ops, size = self.graph.ops, self.partitioned.local_bytes
        for i, op in enumerate(ops):
            if op.name not in ELEMENTWISE or len(op.outputs) != 1 or op.outputs[0] not in self.start:
                continue
            (made,), inner = op.outputs, self.fusion.inside[i]
            if not inner or made in self.outputs or all(ops[j].name != "transpose" for j in inner):
                continue
            readers = [r for r, reads in enumerate(self.fusion.reads) if made in reads]
            if not readers or any(ops[r].name != "dot_general" for r in readers):
                continue
            shape = self.partitioned.local_shape(made)
            for v in self.fusion.reads[i]:
                other, at = self.partitioned.local_shape(v), self.graph.makers.get(v, -1)
                is_product = at >= 0 and ops[at].name == "dot_general" and size(v) == size(made)
                if is_product and other != shape and sorted(other) == sorted(shape) and self.dies_in(v, i):
                    self.end[v] = min(2 * i, self.start[made]) - 1
                    break

    def written_by_library(self, i: int) -> Iterable[tuple[int, int]]:
        """The results of a library call that may be written over an operand, each with that operand first."""
        op = self.graph.ops[i]
        if op.name == "sort":
            call = self.library_call(i)
            return zip(op.inputs, op.outputs, strict=True) if call and call.in_place else ()
        over = op.inputs[op.name == "triangular_solve"], op.outputs[0]
        is_over = op.name == "triangular_solve" or op.name.startswith(SOLVERS)
        return [over] if is_over and len(set(map(self.partitioned.local_bytes, over))) == 1 else ()

    def copied_carries(self) -> dict[int, int]:
        """Nothing is copied at the start of a body; a value that is copied at its end is made apart from the present one."""
        for seen, back, _ in itertools.chain.from_iterable(loop_copies(self.partitioned, self.fusion).values()):
            if back in self.start:
                self.end[seen] = max(self.end.get(seen, 0), self.start[back] + 2)
        return {}
