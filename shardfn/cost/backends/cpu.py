"""Rewrites of XLA's CPU backend before scheduling: operand layouts of matmuls and convolutions, half precision,
scatters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Convolution, DimFactors, Graph, Op, ShardingRule
from shardfn.ir.op_traits import CONTRACTIONS, ELEMENTWISE
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.windows import halo_extent
from shardfn.partition.rebuild import ProgramBuilder


def on_cpu(partitioned: PartitionedProgram) -> PartitionedProgram:
    """The program with the copies that XLA's CPU backend inserts, and scatters into the array they are added to."""
    return _Backend(partitioned).rewritten()


def is_flattened(partitioned: PartitionedProgram, op: Op, operand: int) -> bool:
    """Whether an op is a matmul that reads an operand of higher rank as a matrix, through a view."""
    if op.name != "dot_general" or op.rule is None:
        return False
    return sum(n > 1 for n in partitioned.local_shape(operand)) > op.rule.matmul_roles(0).count(0) + 2


_HALF = frozenset({"bf16", "f16"} if IS_BEFORE_JAX_0_12 else ())
"""Dtypes that matmuls convert to `f32` first. From JAX 0.12 on most do not; those with a transposed right operand do,
which is left out.
"""


_AT_ONCE = 16
"""Elements per step of a running sum in XLA's CPU backend (JAX 0.10.2)."""


class _Backend(ProgramBuilder):
    """Walks one program once; its lists fill on the way."""

    def rewritten(self) -> PartitionedProgram:
        graph = self.given.graph
        into, dropped = _scattered_into(self.given)
        dropped |= _known(graph)
        self.copies: dict[object, int] = {}
        self.there = graph.computed - dropped
        for op in graph.ops:
            if op.name != "transpose" or graph.read_counts[op.inputs[0]] > 1:
                continue
            made = graph.maker(op.inputs[0], "dot_general")
            if made and is_swap(op, made, made.rule and made.rule.results[0]):
                into[made.outputs[0]] = made.of(made.inputs, op.outputs)  # its operands change places
                dropped.add(op.outputs[0])
        for op in graph.ops:
            if op.outputs and op.outputs[0] in dropped:
                continue
            if op.outputs and op.outputs[0] in into:
                op = into[op.outputs[0]]
            rewrite = getattr(self, f"rewrite_{op.name}", None)
            op = rewrite(op) if rewrite else op
            self.ops.append(self.in_single_precision(op) if op.name in CONTRACTIONS else op)
        return self.built()

    def then(self, name: str, op: Op, *inputs: int, via: int | None = None) -> Op:
        """The step after an op, which computes the op's result. The op itself then computes a new value, or `via`."""
        via = self.like(op.outputs[0]) if via is None else via
        self.ops.append(op.of(inputs or op.inputs, (via,)))
        return self.step(name, (via,), op)

    def step(self, name: str, inputs: Sequence[int], op: Op, output: int | None = None) -> Op:
        """A further op of another one, which computes its result or `output`."""
        return Op(name, tuple(inputs), op.outputs if output is None else (output,), None, op.trips, op.where)

    def rewrite_all_to_all(self, op: Op) -> Op:
        """An all-to-all is followed by a copy."""
        return self.then("copy", op)

    def rewrite_dot_general(self, op: Op) -> Op:
        """A matmul whose operands have the layout it reads; a transposed operand is copied first, once."""
        if op.rule is None:
            return op
        inputs = list(op.inputs)
        for side in (0, 1):
            v = inputs[side]
            source = self.given.graph.maker(v, "transpose")
            if source and is_swap(source, op, op.rule.operands[side]):
                given = self.as_single_precision(source.inputs[0], op)
                inputs[side] = self.derived("swapped", given, v, (), op, self.values[given].dtype)
                continue
            order = copy_order(op.rule, side, self.given.local_shape(v))
            if order:
                inputs[side] = self.derived("copy", v, v, order, op)
            elif is_flattened(self.given, op, v):
                inputs[side] = self.derived("bitcast", v, v, (-4,), op)
        return op.of(tuple(inputs))

    def rewrite_divide(self, op: Op) -> Op:
        """A division by a broadcast: the reciprocal is computed before the broadcast, and multiplied."""
        source = self.given.graph.maker(op.inputs[1], "broadcast_in_dim")
        made = self.values[op.outputs[0]]
        if source is None or made.dtype not in ("f32", "f64"):
            return op
        if math.prod(self.values[source.inputs[0]].shape) >= math.prod(made.shape):
            return op
        few, many = source.inputs[0], op.inputs[1]
        if few in self.there:  # a constant is divided by when it is compiled
            many = self.derived("broadcast_in_dim", self.derived("divide", few, few, (-3,), op), many, (-3,), op)
        return Op("multiply", (op.inputs[0], many), op.outputs, None, op.trips, op.where, form=op.form)

    def rewrite_multiply(self, op: Op) -> Op:
        """A product with a converted bool becomes a select."""
        for side in (0, 1):
            mask = self.given.graph.maker(op.inputs[side], "convert")
            if mask is not None and self.values[mask.inputs[0]].dtype == "i1":
                chosen = op.of((mask.inputs[0], op.inputs[1 - side]), op.outputs)
                return dataclasses.replace(chosen, name="select", rule=None)
        return op

    def rewrite_reduce(self, op: Op) -> Op:
        """The sum of negated elements becomes the negated sum."""
        made = self.given.graph.maker(op.inputs[0], "negate")
        if op.combines != "add" or made is None or len(op.outputs) != 1:
            return op
        return self.then("negate", op, made.inputs[0], *op.inputs[1:])

    def rewrite_reduce_window(self, op: Op) -> Op:
        """A running sum of more than 16 elements becomes a tree: sums of 16 at a time, then sums of those."""
        shape = self.given.local_shape(op.outputs[0])
        long = [window for window in op.window_dims if window.extent > 1]
        if len(op.outputs) != 1 or len(long) != 1 or self.given.local_shape(op.inputs[0]) != shape:
            return op
        (window,) = long
        size = shape[window.dim]
        if window.extent != size or size <= _AT_ONCE or window.stride != 1 or window.low not in (0, 1 - size):
            return op
        v, steps, d = op.inputs[0], [], window.dim
        form, spec = self.values[op.outputs[0]], self.specs[op.outputs[0]]
        while True:
            groups = (-(-size // _AT_ONCE), _AT_ONCE) if size > _AT_ONCE else (1, size + 1)
            for name in ("slice", "reduce_window")[not steps :]:
                grouped = (*form.shape[:d], *groups, *form.shape[d + 1 :])
                made = self.like(op.outputs[0], (*spec[:d], (), *spec[d:]), grouped)
                self.ops.append(self.step(name, (v, *op.inputs[1:]), op, made))
                v = made
            steps.append(v)
            if size <= _AT_ONCE:
                return self.step("copy", steps, op)
            size = groups[0]

    def in_single_precision(self, op: Op) -> Op:
        """A matmul in half precision converts its operands to `f32` first and its result back."""
        inputs = [self.as_single_precision(v, op) for v in op.inputs]
        (result,) = op.outputs
        if self.values[result].dtype not in _HALF:
            return op.of(tuple(inputs))
        return self.then("convert", op, *inputs, via=self.like(result, dtype="f32"))

    def as_single_precision(self, value: int, reader: Op) -> int:
        """The value in `f32`, where it has half that precision."""
        if self.values[value].dtype not in _HALF:
            return value
        return self.derived("convert", value, value, (-2,), reader, "f32")

    def rewrite_convolution(self, op: Op) -> Op:
        """A convolution reads [batch, space, features] and [space, features, new features], and makes [batch, space,
        new features].
        """
        if op.rule is None or op.convolution is None:
            return op
        if op.convolution.in_batches:
            return self.in_batches(op, op.convolution)
        image, kernel, made = *op.rule.operands, op.rule.results[0]
        shape = op.convolution
        inputs = [self.with_edges(op), op.inputs[1]]
        if self.is_larger_kernel(op, shape):
            return op.of((inputs[0], self.derived("reverse", inputs[1], inputs[1], (-5,), op), *op.inputs[2:]))
        for side, own, ends, space in (
            (0, image, (made, kernel), shape.image),
            (1, kernel, (image, made), shape.kernel),
        ):
            order = _ordered(own, ends, space, is_kernel=side == 1)
            if order and _moves(order, self.given.local_shape(op.inputs[side])):
                inputs[side] = self.derived("copy", inputs[side], inputs[side], order, op)
        order = _ordered(made, (image, kernel), shape.result)
        if not order or not _moves(order, self.given.local_shape(op.outputs[0])):
            return op.of(tuple(inputs))
        return self.then("copy", op, *inputs)

    def is_larger_kernel(self, op: Op, shape: Convolution) -> bool:
        """Whether a kernel has more places than the image: XLA slides the image over the kernel, which it reverses."""
        sizes = self.given.local_shape(op.inputs[0]), self.given.local_shape(op.inputs[1])
        image, kernel = (
            math.prod(n[d] for d in dims) for n, dims in zip(sizes, (shape.image, shape.kernel), strict=True)
        )
        return kernel > image and not shape.grouped

    def in_batches(self, op: Op, shape: Convolution) -> Op:
        """A kernel gradient in groups reads the image as [groups, space, batch] and makes [group, space, channels].

        With one channel per group, XLA computes all channels with all and selects those of one group.
        """
        inputs = [self.with_edges(op), op.inputs[1]]
        grouped = {which: dim for which, dim, _ in shape.grouped}
        orders = []
        for side, space in enumerate((shape.image, shape.kernel, shape.result)):
            last = grouped.get(side, 0)
            rest = [d for d in range(len(space) + 2) if d not in space and d != last]
            orders.append(
                (last, *space, *rest) if side == 0 else (*space, *rest, last) if side == 1 else (*rest, *space, last)
            )
        for side in (0, 1):
            if _moves(orders[side], self.given.local_shape(op.inputs[side])):
                inputs[side] = self.derived("copy", inputs[side], inputs[side], orders[side], op)
        result, groups = op.outputs[0], all_groups(self.given, op)
        if groups == 1 and not _moves(orders[2], self.given.local_shape(result)):
            return op.of(tuple(inputs))
        first, *others = self.values[result].shape
        copied = self.then("copy", op, *inputs, via=self.like(result, shape=(groups * first, *others)))
        if groups == 1:
            return copied
        return self.then("reduce_window", copied, via=self.like(copied.inputs[0]))

    def with_edges(self, op: Op) -> int:
        """The image of a convolution with its halo, in a buffer of its own."""
        image, form = op.inputs[0], self.values[op.inputs[0]]
        shards, shape, grown = self.given.shards(image), list(form.shape), False
        for window in op.window_dims:
            other = op.outputs[0] if window.over < 0 else op.inputs[window.over]
            n, size = shards[window.dim], form.shape[window.dim]
            if n > 1 and self.given.shards(other)[window.out_dim] == n and shape[window.dim] == size:
                before, after = halo_extent(size, self.values[other].shape[window.out_dim], n, window)
                shape[window.dim] = (-(-size // n) + before + after) * n
                grown = grown or before + after > 0
        if not grown:
            return image
        padded = self.like(image, shape=tuple(shape))
        self.ops.append(self.step("copy", (image, *op.inputs[2:]), op, padded))
        return padded

    def rewrite_all_gather(self, op: Op) -> Op:
        """An all-gather works along one dimension at a time, the last one first; unless it is the major one, operand
        and result are transposed.
        """
        (v,), (result,) = op.inputs, op.outputs
        before, after = self.given.local_shape(v), self.given.local_shape(result)
        changed = [d for d, (m, n) in enumerate(zip(before, after, strict=True)) if m != n]
        spec, shape = list(self.specs[v]), list(before)
        for d in reversed(changed):
            spec[d], shape[d] = self.specs[result][d], after[d]
            is_last = d == changed[0]
            step = op.of((v,), (result if is_last else self.like(result, tuple(spec)),))
            if math.prod(shape[:d]) != 1:
                transposed = self.derived("copy", v, v, (-1,), op)
                step = self.then("copy", step, transposed, via=self.like(result, tuple(spec)))
            if is_last:
                return step
            self.ops.append(step)
            (v,) = step.outputs
        return op

    def derived(
        self, name: str, source: int, like: int, order: tuple[int, ...], reader: Op, dtype: str | None = None
    ) -> int:
        """A value with the sharding of `like`, computed from `source` by op `name`: once for all readers in one loop."""
        key = like, order, reader.trips, reader.form and reader.form[1]
        if key not in self.copies:
            self.copies[key] = self.like(like, dtype=dtype)
            self.ops.append(self.step(name, (source,), reader, self.copies[key]))
        return self.copies[key]


@functools.lru_cache(1 << 12)
def copy_order(rule: ShardingRule, side: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimension order in which XLA's CPU backend copies an operand of a matmul; empty where it reads it as it is.

    It reads [batch, free, contracting] and [batch, contracting, free]. One free and one contracting dimension may
    change places, if no dimension but the first batch dimensions has size 1.

    Args:
      rule: of the matmul.
      side: 0 for the left operand, 1 for the right one.
      shape: on one device.

    >>> step = ShardingRule((((0,), (1,), (2,)), ((0,), (1,), (3,))), (((2,), (3,)),), (8, 4, 16, 32), frozenset({0, 1}))
    >>> copy_order(step, 0, (8, 4, 16)), copy_order(step, 1, (8, 4, 32))
    ((2, 0, 1), ())
    """
    roles, others = rule.matmul_roles(side), rule.matmul_roles(1 - side)
    batch, free, summed = ([d for d, role in enumerate(roles) if role == wanted] for wanted in range(3))
    ones = 0 if any(others[: len(batch)]) else next((n for n, d in enumerate(batch) if shape[d] > 1), len(batch))
    if len(free) == len(summed) == 1 and batch == [*range(len(batch))] and min(shape[ones:]) > 1:
        return ()
    order = (*batch, *free, *summed) if side == 0 else (*batch, *summed, *free)
    return order if _moves(order, shape) else ()


def all_groups(partitioned: PartitionedProgram, op: Op) -> int:
    """Groups on one device of a kernel gradient with one channel per group, else 1: XLA's CPU backend computes all
    channels with all.
    """
    shape = op.convolution
    if shape is None or not shape.in_batches:
        return 1
    made, here = partitioned.graph.values[op.outputs[0]].shape, partitioned.local_shape(op.outputs[0])
    return next((here[dim] for which, dim, groups in shape.grouped if which == 2 and made[dim] == groups), 1)


def _moves(order: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dims of more than one element change places."""
    long = [d for d in order if shape[d] > 1]
    return long != sorted(long)


def _ordered(
    own: DimFactors, others: tuple[DimFactors, DimFactors], space: Sequence[int], is_kernel: bool = False
) -> tuple[int, ...]:
    """The dims of a part of a convolution in the order wanted: what it has in common with the first of `others`, then space,
    then what it has in common with the second; a kernel's space comes first. Nothing where that is not known."""
    rest = [d for d in range(len(own)) if d not in space]
    ends = [[d for d in rest if any(set(own[d]) & set(dim) for dim in dims)] for dims in others]
    if len(rest) != 2 or [len(end) for end in ends] != [1, 1]:
        return ()
    ((first,), (last,)) = ends
    return (*space, first, last) if is_kernel else (first, *space, last)


def is_swap(transpose: Op, matmul: Op, dims: DimFactors | None) -> bool:
    """Whether a transpose swaps the two non-batch dimensions of a matmul's operand or result, which the matmul does
    itself.
    """
    if transpose.rule is None or matmul.rule is None or dims is None:
        return False
    every = [{f for dim in row for f in dim} for row in (*matmul.rule.operands[:2], matmul.rule.results[0])]
    batch = next((n for n, dim in enumerate(dims) if not all(set(dim) <= row for row in every)), len(dims))
    before, after = transpose.rule.operands[0], transpose.rule.results[0]
    return len(before) == batch + 2 and after == (*before[:batch], before[-1], before[-2])


def _known(graph: Graph) -> set[int]:
    """Scalars computed from constants alone: XLA folds them at compile time."""
    made = set(graph.computed)
    known: set[int] = set()
    for op in graph.ops:
        if op.name not in ELEMENTWISE or len(op.outputs) != 1 or not made.isdisjoint(op.inputs):
            continue
        (value,) = op.outputs
        if math.prod(graph.values[value].shape) == 1 and value not in graph.outputs:
            known.add(value)
            made.discard(value)
    return known


def _scattered_into(partitioned: PartitionedProgram) -> tuple[dict[int, Op], set[int]]:
    """Scatters into zeros that are then added to an array, by that sum, and the results that nobody needs any more."""
    graph = partitioned.graph
    scatters = (op for op in graph.ops if op.name == "scatter" and len(op.inputs) == 3)
    single = {op.outputs[0]: op for op in scatters if graph.read_counts[op.outputs[0]] == 1}
    into: dict[int, Op] = {}
    dropped: set[int] = set()
    for op in graph.ops:
        found = next((v for v in op.inputs if v in single), None) if op.name == "add" else None
        if found is None:
            continue
        scatter = single.pop(found)
        zeros = graph.maker(scatter.inputs[0], "broadcast_in_dim")
        if zeros is None or zeros.inputs[0] in graph.computed or op.trips != scatter.trips:
            continue
        (other,) = [v for v in op.inputs if v != found] or [found]
        into[op.outputs[0]] = scatter.of((other, *scatter.inputs[1:]), op.outputs)
        dropped.add(found)
    return into, dropped
