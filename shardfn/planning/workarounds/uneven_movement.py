"""Movement along dimensions with uneven shards, which XLA (JAX 0.10 to 0.12) may compute wrongly or not compile. So it may
rotations of resharded arrays, and windows whose results leave shards empty.

What `movement` does not write as shifts of even arrays, and what has uneven shards along a dimension that it moves, is computed
on dimensions that are gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardfn.ir.model import Graph, Op
from shardfn.ir.op_traits import RESHARDING_OPS
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.movement import turns

OP_OF = {
    "slice": "slice", "split": "slice", "pad": "pad", "concatenate": "concatenate", "rev": "reverse",
    "dynamic_slice": "dynamic_slice", "dynamic_update_slice": "dynamic_update_slice", "gather": "gather",
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), "scatter"),
}  # fmt: skip
"""The op that a primitive of movement becomes."""

WINDOWS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})
"""The primitives that reduce windows."""

_OPS = frozenset(OP_OF.values())
_DATA = {"concatenate": None, "scatter": (0, 2), "dynamic_update_slice": (0, 1)}
"""The operands that are moved; None for all. Others move operand 0."""


Dims = tuple[tuple[int, ...], ...]
"""By operand that is moved, and by result, the dimensions along which an op moves."""


class Movement(NamedTuple):
    """An op of movement by its name and the shapes of what it moves and makes."""

    op: str
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


def movement_of(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> Movement:
    """The movement of an op; `before` is that of `is_at_risk`."""
    operands = [before.get(v, v) for v in _moved(op.name, op.inputs)]
    shapes = [partitioned.graph.values[v].shape for v in (*operands, op.outputs[0])]
    return Movement(op.name, tuple(shapes[:-1]), shapes[-1])


def movements_of_equation(eqn: Any) -> list[Movement]:
    """The movements that an equation may be: of a `split` one for each result; of a dynamic slice also a slice, which it is at a
    constant place."""
    return [movement for _, movement in _movements(eqn)]


def _movements(eqn: Any) -> list[tuple[int, Movement]]:
    """The movements of an equation, each with the number of its result."""
    own = "rotate" if turns(eqn) else "reduce_window" if eqn.primitive.name in WINDOWS else ""
    if own and len(eqn.outvars) == 1:
        return [(0, Movement(own, (tuple(eqn.invars[0].aval.shape),), tuple(eqn.outvars[0].aval.shape)))]
    name = OP_OF.get(eqn.primitive.name)
    if name is None:
        return []
    if name == "pad" and all(low <= 0 and high <= 0 and not holes for low, high, holes in eqn.params["padding_config"]):
        name = "slice"  # as XLA sees it
    shapes = tuple(tuple(v.aval.shape) for v in _moved(name, eqn.invars))
    names = (name, "slice") if name == "dynamic_slice" else (name,)
    results = [(i, tuple(v.aval.shape)) for i, v in enumerate(eqn.outvars)]
    return [(i, Movement(one, shapes, result)) for one in names for i, result in results]


def gathered_dims(eqn: Any, moved: Mapping[Movement, Iterable[Dims]]) -> list[list[int]]:
    """By operand and result of an equation of movement, the dimensions to gather; `moved` are those of its kinds of movement."""
    found: list[set[int]] = [set() for _ in (*eqn.invars, *eqn.outvars)]
    places = _moved(OP_OF.get(eqn.primitive.name, ""), range(len(eqn.invars)))
    for result, movement in _movements(eqn):
        for dims in moved.get(movement, ()):
            for place, own in zip((*places, len(eqn.invars) + result), dims, strict=True):
                found[place].update(own)
    return [sorted(own) for own in found]


def reshardings(graph: Graph) -> list[tuple[int, int]]:
    """The values before and after each resharding.

    What the partitioner inserts has no rule: each device slices the part of a replicated operand that its windows read.
    """
    return [
        (op.inputs[0], op.outputs[0])
        for op in graph.ops
        if op.name in RESHARDING_OPS or (op.name in ("slice", "pad") and op.rule is None)
    ]


def before_resharding(graph: Graph) -> dict[int, int]:
    """By value that is resharded, the value that it comes of. XLA may drop the resharding around an op: judge the op by the
    shardings before and after."""
    found: dict[int, int] = {}
    for before, after in reshardings(graph):
        found[after] = found.get(before, before)
    return found


def is_at_risk(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> bool:
    """Whether XLA may compute an op wrongly, or not compile it, for how it moves along a sharded dimension.

    Args:
      op: the op.
      partitioned: the program with its shardings.
      before: a value that is resharded, by the value that comes of it.
    """
    if op.name == "rotate":
        return _is_resharded(op, partitioned, before)
    if op.name == "reduce_window":
        return _leaves_shards_empty(op, partitioned)
    return any(is_wrong for _, is_wrong in _along(op, partitioned, before))


def _is_resharded(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> bool:
    """Whether the operand of a rotation is resharded for it along its dimension: XLA may do so to the slices that it is made of,
    which have uneven shards."""
    own, dim = op.inputs[0], op.window_dims[0].dim
    first = before.get(own, own)
    return partitioned.shards(first)[dim] > 1 and partitioned.specs[first][dim] != partitioned.specs[own][dim]


def _leaves_shards_empty(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether some shard has no row of the result of windows with padding in front."""
    result, shards = partitioned.graph.values[op.outputs[0]].shape, partitioned.shards(op.outputs[0])
    dims = [w.out_dim for w in op.window_dims if w.low < 0 and w.extent > 1]
    return any(result[d] <= (shards[d] - 1) * -(-result[d] // shards[d]) for d in dims)


def moves_shards(partitioned: PartitionedProgram) -> bool:
    """Whether an op moves along a sharded dimension, or puts rows that were sharded into an array."""
    before, ops = before_resharding(partitioned.graph), partitioned.graph.ops
    return any(
        any(shards > 1 for shards, _ in _along(op, partitioned, before))
        or (op.name == "scatter" and _puts_shards(op, partitioned, before))
        or (op.convolution is not None and _has_sharded_image(op, partitioned, before))
        for op in ops
    )


def _has_sharded_image(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> bool:
    """Whether the image of a convolution is sharded along a spatial dimension, maybe before it is resharded."""
    assert op.convolution is not None
    images = {op.inputs[0], before.get(op.inputs[0], op.inputs[0])}
    return any(partitioned.shards(one)[d] > 1 for one in images for d in op.convolution.image)


def _puts_shards(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> bool:
    """Whether the updates of a scatter are sharded along a dimension that its index lists, maybe before they are resharded."""
    if op.rule is None:
        return False
    updates, kept = op.inputs[2], {factor for factors in op.rule.results[0] for factor in factors}
    listed = [d for d, factors in enumerate(op.rule.operands[2]) if not kept & {*factors}]
    return any(partitioned.shards(one)[d] > 1 for one in {updates, before.get(updates, updates)} for d in listed)


def _along(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> Iterator[tuple[int, bool]]:
    """The dimensions along which an op moves: the number of shards, and whether XLA may get them wrong.

    Of one row that is sliced without a stride, XLA asks which device has it; but not of the first, if each shard is one row.
    """
    if op.name not in _OPS or not (moved := moved_dims(op, partitioned)):
        return
    result = partitioned.graph.values[op.outputs[0]].shape
    rows = {w.dim: w for w in op.window_dims if result[w.dim] == 1} if op.name == "slice" else {}
    for value, dims in zip((*_moved(op.name, op.inputs), op.outputs[0]), moved, strict=True):
        shape = partitioned.graph.values[value].shape
        for one in {value, before.get(value, value)}:
            shards = partitioned.shards(one)
            for d in dims:
                row, is_wrong = rows.get(d), shape[d] % shards[d] > 0
                if row is not None and shards[d] > 1:
                    is_wrong = row.stride > 1 or (row.low == 0 and shards[d] == shape[d])
                yield shards[d], is_wrong


def moved_dims(op: Op, partitioned: PartitionedProgram) -> Dims:
    """The dimensions along which an op moves; empty for other ops."""
    if op.name in ("rotate", "reduce_window"):
        return (tuple(w.dim for w in op.window_dims if op.name == "rotate" or w.extent > 1),) * 2
    if op.name not in _OPS or op.rule is None:
        return ()
    shapes = [partitioned.graph.values[v].shape for v in (*_moved(op.name, op.inputs), op.outputs[0])]
    if any(0 in shape for shape in (shapes[-1:] if op.name == "concatenate" else shapes)):
        return ()
    if op.name in ("gather", "scatter"):
        rows = op.rule.results[0] if op.name == "gather" else op.rule.operands[2]
        table = tuple(indexed_dims(op))
        return (table, _of_window(op, rows, shapes[0], shapes[1]), table)[: len(shapes)]
    if len({len(shape) for shape in shapes}) > 1:
        return ()
    windows = {w.dim for w in op.window_dims if not w.is_trivial(shapes[0], shapes[-1])}
    sizes = enumerate(zip(*shapes, strict=True))
    return (tuple(d for d, own in sizes if len({*own}) > 1 or d in windows),) * len(shapes)


def _moved(name: str, operands: Sequence[Any]) -> Sequence[Any]:
    places = _DATA.get(name, (0,))
    return operands if places is None else [operands[i] for i in places]


def writes_one_window(op: Op, graph: Graph) -> bool:
    """Whether a scatter writes at one place."""
    return math.prod(graph.values[op.inputs[1]].shape[:-1]) == 1


def indexed_dims(op: Op) -> list[int]:
    """The dimensions of a table that an index counts, or of which it takes a part."""
    assert op.rule is not None
    rows = op.rule.results[0] if op.name == "gather" else op.rule.operands[2]
    shared = {factor for dim in rows for factor in dim}
    return [
        d
        for d, dim in enumerate(op.rule.operands[0])
        if not shared.issuperset(dim) or op.rule.replicated.intersection(dim)
    ]


def _of_window(op: Op, rows: Any, table: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of what is read or written that are a part of a table's dimension."""
    assert op.rule is not None
    in_index = {factor for dim in op.rule.operands[1] for factor in dim}
    in_table = {f: n for dim, n in zip(op.rule.operands[0], table, strict=True) for f in dim}
    return tuple(
        d
        for d, (dim, n) in enumerate(zip(rows, shape, strict=True))
        if not in_index.intersection(dim) and any(in_table.get(f, 0) != n for f in dim)
    )
