"""Which ops of a partitioned program XLA computes wrongly, or does not compile."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from shardfn.errors import StrategyError, fail
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Graph, Op, Spec, axes_of, axis_size
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.movement import Turn
from shardfn.partition.xla_bugs import ends_process, is_miscompiled
from shardfn.planning.workarounds.even_scatters import is_unsigned, rows_multiple
from shardfn.planning.workarounds.nested_movement import nested_concatenations
from shardfn.planning.workarounds.self_updates import reads_its_array
from shardfn.planning.workarounds.uneven_movement import (
    Dims,
    Movement,
    before_resharding,
    indexed_dims,
    is_at_risk,
    moved_dims,
    movement_of,
    reshardings,
    writes_one_window,
)

REDUCTIONS_OF_XLA = frozenset({"add", "multiply", "minimum", "maximum"})
"""What XLA has all-reduces for; of bools `and` and `or` as well."""


class WrongOp(NamedTuple):
    """An op that XLA gets wrong: its `file:line`, and whether it is a convolution or pooling (a `window`), a windowed op with
    two results (a `pair`), a Fourier `transform` (or its `layout`, if nothing is gathered), a matmul (`product`), a
    `reduction`, a `padding`, a `scatter`, a gather or scatter whose `places` are sharded, an `update`, a dynamic slice
    (`bounds`), an update that reads its own array (`self`), a rotation or a concatenation that reads another one (`nested`) or a
    `movement`; or a resharding (`reshard`), which has no workaround."""

    where: str
    kind: str = "window"
    multiple: int = 1
    """Of what the number of a scatter's updates must be a multiple."""
    movement: Movement | None = None
    """What a `movement`, `bounds`, `self` or `nested` moves."""
    dims: Dims = ()
    """The dimensions along which it moves."""
    turn: Turn | None = None
    """The rotation that a `nested` one is."""
    is_grouped: bool = False
    """Whether a `window` is a grouped convolution, of which all dimensions are gathered."""


def wrong_ops(
    partitioned: PartitionedProgram, known: Collection[WrongOp] = (), has_residuals: bool = False
) -> tuple[WrongOp, ...]:
    """The ops that XLA gets wrong with these shardings: convolutions and poolings whose values or gradients may be wrong,
    Fourier transforms that may not run, reductions that do not compile, pads that may do either, and reshardings that end the
    process.

    Args:
      partitioned: the program with its shardings.
      known: the ops that the program has a workaround for already.
      has_residuals: whether its arguments are made in the same compiled program.
    """
    done = {(w.movement, w.dims) for w in known}
    moved_from, moved_to = _moves(partitioned.graph)
    found: dict[WrongOp, None] = {}
    if any(ends_process(before, after, partitioned.axes) for before, after in _may_end(partitioned)):
        found.setdefault(WrongOp("", "reshard"))
    for op in partitioned.graph.ops:
        if op.name == "select_and_scatter" and _is_wrong_pooling(op, partitioned):
            found.setdefault(WrongOp(op.where))
        if op.name == "reduce" and partitioned.platform != "tpu" and _lacks_all_reduce(op, partitioned):
            found.setdefault(WrongOp(op.where, "reduction"))
        if op.name == "dot_general" and _is_wrong_product(op, partitioned, moved_to):
            found.setdefault(WrongOp(op.where, "product"))
        if (
            op.name == "reduce_window"
            and len(op.outputs) > 1
            and any(map(any, map(partitioned.specs.__getitem__, op.outputs)))
        ):
            found.setdefault(WrongOp(op.where, "pair"))
        if op.name in ("pad", "reduce_window") and _is_wrong_pad(
            op, moved_from.get(op.inputs[0], op.inputs[0]), partitioned
        ):
            found.setdefault(WrongOp(op.where, "padding"))
        if op.name == "scatter" and op.combines:
            multiple = rows_multiple(op, partitioned, moved_from)
            if multiple > 1 or is_unsigned(op, partitioned):
                found.setdefault(WrongOp(op.where, "scatter", multiple))
        if op.name in ("gather", "scatter") and _splits_places(op, partitioned, moved_from):
            found.setdefault(WrongOp(op.where, "places"))
        if op.name == "scatter" and op.rule is not None and _updates_slice(op, moved_from, partitioned):
            found.setdefault(WrongOp(op.where, "update"))
        if op.name in AT_PLACES and _forgets_bounds(op, moved_to, partitioned):
            found.setdefault(WrongOp(op.where, "bounds", movement=movement_of(op, partitioned, moved_from)))
        if partitioned.platform == "cpu" and reads_its_array(op, partitioned):
            found.setdefault(WrongOp(op.where, "self", movement=movement_of(op, partitioned, moved_from)))
        if is_at_risk(op, partitioned, moved_from):
            movement, dims = movement_of(op, partitioned, moved_from), moved_dims(op, partitioned)
            if (movement, dims) not in done:
                found.setdefault(WrongOp(op.where, "movement", movement=movement, dims=dims))
        if op.name == "fft" and partitioned.platform == "cpu" and partitioned.axes:
            own = op.inputs[0]
            is_gathered = partitioned.specs[moved_from.get(own, own)][1:] != partitioned.specs[own][1:]
            found.setdefault(WrongOp(op.where, "transform" if is_gathered else "layout"))
        if _is_wrong_convolution(op, partitioned, moved_from, moved_to) or _crops_between(op, partitioned):
            found.setdefault(WrongOp(op.where, is_grouped=op.convolution is not None and bool(op.convolution.grouped)))
    for op, turn in nested_concatenations(partitioned, has_residuals):
        found.setdefault(WrongOp(op.where, "nested", movement=movement_of(op, partitioned, moved_from), turn=turn))
    return tuple(found)


def in_program(wrong: WrongOp, own: Collection[Movement]) -> list[WrongOp]:
    """What a program has of a wrong op; `own` are the movements of its equations. A rotation may be slices and a concatenation.

    >>> rotation, halves = Movement("rotate", ((8,),), (8,)), Movement("concatenate", ((3,), (5,)), (8,))
    >>> [one] = in_program(WrongOp("", "movement", movement=rotation, dims=((0,), (0,))), [halves])
    >>> one.movement == halves, one.dims
    (True, ((0,), (0,), (0,)))
    """
    moved, dims = wrong.movement, wrong.dims
    found = [wrong] if moved is None or moved in own else []  # JAX lowers other ops to slices and pads too
    if moved is None or wrong.kind != "movement" or moved.op != "rotate":
        return found
    slices = [m for m in own if m.op == "slice" and m.operands == moved.operands]
    joined = [m for m in own if m.op == "concatenate" and m.result == moved.result]
    halves = [m for m in (*slices, *joined) if _differs_only_along(m, dims[0])]
    return [*found, *(wrong._replace(movement=m, dims=dims[:1] * (len(m.operands) + 1)) for m in halves)]


def _differs_only_along(movement: Movement, dims: Collection[int]) -> bool:
    """Whether what is moved and the result have the same sizes along all other dimensions."""
    sizes = enumerate(zip(*movement.operands, movement.result, strict=True))
    return all(len({*own}) == 1 for d, own in sizes if d not in dims)


def _may_end(partitioned: PartitionedProgram) -> list[tuple[Spec, Spec]]:
    """The shardings before and after each resharding on a mesh of several axes; none before JAX 0.12, which none ends."""
    if IS_BEFORE_JAX_0_12 or len(partitioned.axes) == 1:
        return []
    moved = before_resharding(partitioned.graph).items()
    return [(partitioned.specs[before], partitioned.specs[after]) for after, before in moved]


def _moves(graph: Graph) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """For values that are resharded, what they were before, and what they are in the end."""
    after: dict[int, int] = {}
    for before, made in reversed(reshardings(graph)):
        after[before] = after.get(made, made)
    return before_resharding(graph), after


def _is_wrong_convolution(
    op: Op, partitioned: PartitionedProgram, before: Mapping[int, int], after: Mapping[int, int]
) -> bool:
    """Whether an op is a convolution that XLA may get wrong; `before` and `after` are those of `_moves`."""
    if op.convolution is None:
        return False
    image, kernel = (partitioned.specs[before.get(v, v)] for v in op.inputs[:2])
    result = partitioned.specs[after.get(op.outputs[0], op.outputs[0])]
    window = [partitioned.graph.values[op.inputs[1]].shape[d] for d in op.convolution.kernel]
    return is_miscompiled(op.convolution, (image, kernel, result), window, partitioned.axes)


def _crops_between(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether an op is a convolution, such as the gradient of one with strides, of an image that is padded between its elements
    and cropped in front along a sharded dimension, which ends the process."""
    return op.convolution is not None and any(
        w.operand == 0 and w.spacing > 1 and w.low > 0 and partitioned.specs[op.outputs[0]][w.out_dim]
        for w in op.window_dims
    )


def _splits_places(op: Op, partitioned: PartitionedProgram, before: Mapping[int, int]) -> bool:
    """Whether the index of a gather or scatter is sharded along its last dimension, the coordinates of a place, as a column of a
    sharded array is. XLA then combines shards with neutral elements of another axis, or does not compile."""
    own = op.inputs[1]
    return any(partitioned.shards(value)[-1] > 1 for value in {own, before.get(own, own)})


def _updates_slice(op: Op, before: Mapping[int, int], partitioned: PartitionedProgram) -> bool:
    """Whether a scatter of one window is into a sharded array that other ops make or read."""
    graph, array = partitioned.graph, before.get(op.inputs[0], op.inputs[0])
    if not writes_one_window(op, graph):
        return False
    if not any(partitioned.shards(v)[d] > 1 for v in {array, op.inputs[0]} for d in indexed_dims(op)):
        return False
    maker = graph.maker(array)
    if maker is None or maker.seen:  # an argument
        return (
            sum(array in (before.get(v, v) for v in other.inputs) for other in graph.ops if other.rule is not None) > 1
        )
    return maker.name != "optimization_barrier"


def _forgets_bounds(op: Op, after: Mapping[int, int], partitioned: PartitionedProgram) -> bool:
    """Whether the result of a dynamic slice, or of an update at a dynamic place, is sharded along a dimension of which the op
    reads or writes a part; `after` are resharded values."""
    table, part = (partitioned.graph.values[v].shape for v in (op.inputs[0], AT_PLACES[op.name](op)))
    shards = [partitioned.shards(v) for v in {op.outputs[0], after.get(op.outputs[0], op.outputs[0])}]
    shortened = [d for d, (before, rows) in enumerate(zip(table, part, strict=True)) if before != rows]
    return op.rule is not None and any(each[d] > 1 for each in shards for d in shortened)


AT_PLACES: dict[str, Callable[[Op], int]] = {
    "dynamic_slice": lambda op: op.outputs[0],
    "dynamic_update_slice": lambda op: op.inputs[1],
}
"""What these ops read or write at a place."""


def _lacks_all_reduce(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether the op reduces over a sharded dimension in a way that XLA has no all-reduce for."""
    is_known = op.combines in REDUCTIONS_OF_XLA or (
        op.combines in ("and", "or") and partitioned.graph.values[op.inputs[0]].dtype == "i1"
    )
    return len(op.outputs) == 1 and not is_known and any(partitioned.shards(op.inputs[i])[d] > 1 for i, d in op.reduced)


def _is_wrong_product(op: Op, partitioned: PartitionedProgram, after: Mapping[int, int]) -> bool:
    """Whether a matmul leaves partial sums over several axes that its result's batch dimensions are then sharded over as many
    ways, and not just over these axes; `after` are resharded values.

    Found by trying all shardings of the batch and the contracted dimension of a matmul over 2 x 2 x 2 devices.
    """
    assert op.rule is not None
    roles, operand = op.rule.matmul_roles(0), partitioned.specs[op.inputs[0]]
    batch, summed = ([d for d, role in enumerate(roles) if role == which] for which in (0, 2))
    before, parts = (axes_of(operand[d] for d in dims) for dims in (batch, summed))
    result = partitioned.specs[after.get(op.outputs[0], op.outputs[0])]
    rows = axes_of(result[: len(batch)])
    size = lambda axes: math.prod(axis_size(axis, partitioned.axes) for axis in axes)  # noqa: E731
    return len(parts) > 1 and size(before) > 1 and rows not in (before, parts) and size(rows) == size(parts)


def _is_wrong_pooling(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether windows that overlap by half or more run along a sharded dimension; True in doubt, as padding may hide it."""
    operand, source = (partitioned.graph.values[v].shape for v in op.inputs[:2])
    for window in op.window_dims:
        overlap = -window.low
        least_stride = (operand[window.dim] - overlap) // (source[window.dim] + 1) + 1
        if overlap >= least_stride and (
            partitioned.specs[op.inputs[0]][window.dim] or partitioned.specs[op.outputs[0]][window.dim]
        ):
            return True
    return False


def _is_wrong_pad(op: Op, operand: int, partitioned: PartitionedProgram) -> bool:
    """Whether a dimension is made of shards by a pad, or the padding of windows, that XLA gets wrong.

    A replicated one is padded between elements, by a negative number in front, or in front and by a negative number behind.
    Any dimension is padded between elements and by a negative number in front, or has fewer elements than there are shards.
    """
    before, after = (partitioned.graph.values[v].shape for v in (operand, op.outputs[0]))
    for window in op.window_dims:
        if not partitioned.specs[op.outputs[0]][window.out_dim]:
            continue
        stop = (after[window.out_dim] - 1) * window.stride + window.low + window.extent
        high = stop - (before[window.dim] - 1) * window.spacing - 1
        is_wrong = window.spacing > 1 or window.low > 0 or (window.low < 0 and high < 0)
        has_few_rows = before[window.dim] < partitioned.shards(op.outputs[0])[window.out_dim]
        if window.spacing > 1 and (window.low > 0 or has_few_rows):
            return True
        if is_wrong and not partitioned.specs[operand][window.dim]:
            return True
    return False


def refuse_reshardings(wrong: Sequence[WrongOp]) -> None:
    """Refuse a plan whose resharding ends the process.

    Raises:
      StrategyError: there is one.
    """
    if any(w.kind == "reshard" for w in wrong):
        fail(
            StrategyError,
            "this plan moves shards of one dimension to another in a way that ends the process in JAX 0.12",
            why="the axes have sizes of which none divides the other, as 2 and 3 on 6 devices",
            fix="use a number of devices that is a power of two, or leave one of the two dimensions unsharded",
        )
