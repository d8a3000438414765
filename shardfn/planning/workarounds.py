"""Workarounds for XLA bugs: shardings for which XLA computes wrong values or a program that cannot run.

`partition.xla_bugs` has the rule for convolutions. The other bugs (JAX 0.10.2 and 0.12.0.1):

- The gradient of max pooling is wrong where a dimension is sharded and windows overlap by half or more.
- On CPU a Fourier transform near a collective may read a transposed array and fail when it runs. It has one dimension
  more here, of one element, and its own dimensions are gathered before and after it.
- Before JAX 0.12 two windowed ops (`reduce_window`, `jnp.pad`, convolutions) with the same window over one array along a
  sharded dimension may get each other's padding. An optimization barrier on the operand avoids it.
- An array that is replicated along a dimension, and padded between its elements or by negative numbers into shards, gets
  wrong values or does not compile. A pad between elements and by a negative number before them ends the process.
  Windows with such padding (`reduce_window`) meet the same.
- A scatter that combines counts the padding of unevenly sharded updates (`even_scatters`).
- A scatter of one window becomes an update of a slice. If its operand is such a slice itself, after partitioning, XLA merges
  the two and forgets that each stays within its array: shards that have no part in the update are changed. An optimization
  barrier on the operand avoids it.
- Of a dynamic slice that is sharded along a dimension that it shortens, XLA forgets that its place is clamped. An explicit clamp
  avoids it.
- A matmul whose batch dimension and several axes of a contracted dimension are sharded gets wrong values where its result is
  sharded along the batch over as many shards as the contracted dimension, but over other axes.
- A sharding constraint on the derivative of a minimum or maximum over windows, which is one of the two results of a windowed
  op, ends the process. An optimization barrier on the result avoids it.
- On CPU a reduction over a sharded dimension does not compile unless it is a sum, product, minimum or maximum, or `and` or
  `or` of bools. GPUs are treated alike; on TPU it compiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Graph, Op, Spec, axes_of, axis_size
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.rewrite import bind_one, equations, inner, rebind
from shardfn.movement import is_rotation
from shardfn.partition.xla_bugs import ends_process, is_miscompiled
from shardfn.planning.even_scatters import NEUTRAL, even_scatter, is_unsigned, rows_multiple
from shardfn.planning.uneven_movement import (
    Dims,
    Movement,
    before_resharding,
    gathered_dims,
    indexed_dims,
    is_uneven,
    moved_dims,
    movement_of,
    movements_of_equation,
    reshardings,
)

REDUCTIONS_OF_XLA = frozenset({"add", "multiply", "minimum", "maximum"})
"""What XLA has all-reduces for; of bools `and` and `or` as well."""


def has_windows(jaxpr: Any) -> bool:
    """Whether a traced function has an op that `separate_windows` would change."""
    return any(eqn.primitive.name in _OVER_WINDOWS for _, eqn, _ in equations(jaxpr))


def windows_clash(graph: Graph) -> bool:
    """Whether several ops read one array through the same window, not all of them convolutions, whose padding is zero: XLA may
    give one the padding of another."""
    readers: dict[object, list[str]] = {}
    for op in graph.ops if IS_BEFORE_JAX_0_12 else ():
        if op.name in _PADDED:
            windows = (
                (t.dim, t.low, t.extent, t.stride, t.spacing) for t in op.window_dims if t.operand == 0 and t.over < 0
            )
            window = frozenset(w for w in windows if w[1:] != (0, 1, 1, 1))
            readers.setdefault((op.inputs[0], window), []).append(op.name)
    return any(len(names) > 1 and set(names) != {"convolution"} for names in readers.values())


def separate_windows(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function` with every window that is no convolution over an array of its own (`windows_clash`): an optimization barrier."""

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        return bind_one(eqn, [jax.lax.optimization_barrier(inputs[0]), *inputs[1:]])

    return rebind(function, lambda eqn, number: eqn.primitive.name in _OVER_WINDOWS, bind, static_argnums)


_PADDED = frozenset({"reduce_window", "pad", "convolution"})
_OVER_WINDOWS = frozenset(
    {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "pad", "cumsum", "cumprod", "cummax",
     "cummin", "cumlogsumexp"}
)  # fmt: skip
"""Primitives."""


class WrongOp(NamedTuple):
    """An op that XLA gets wrong: its `file:line`, and whether it is a convolution or pooling (a `window`), a windowed op with
    two results (a `pair`), a Fourier `transform` (or its `layout`, if nothing is gathered), a matmul (`product`), a
    `reduction`, a `padding`, a `scatter`, an `update`, a dynamic slice (`bounds`) or a `movement`; or a resharding (`reshard`),
    which has no workaround."""

    where: str
    kind: str = "window"
    multiple: int = 1
    """Of what the number of a scatter's updates must be a multiple."""
    movement: Movement | None = None
    """What a `movement` or `bounds` moves."""
    dims: Dims = ()
    """The dimensions along which it moves."""


def wrong_ops(partitioned: PartitionedProgram, known: Collection[WrongOp] = ()) -> tuple[WrongOp, ...]:
    """The ops that XLA gets wrong with these shardings: convolutions and poolings whose values or gradients may be wrong,
    Fourier transforms that may not run, reductions that do not compile, pads that may do either, and reshardings that end the
    process.

    Args:
      partitioned: the program with its shardings.
      known: the ops that the program has a workaround for already.
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
        if op.name == "scatter" and op.rule is not None and _updates_slice(op, partitioned):
            found.setdefault(WrongOp(op.where, "update"))
        if op.name in AT_PLACES and _forgets_bounds(op, moved_to, partitioned):
            found.setdefault(WrongOp(op.where, "bounds", movement=movement_of(op, partitioned, moved_from)))
        if is_uneven(op, partitioned, moved_from):
            movement, dims = movement_of(op, partitioned, moved_from), moved_dims(op, partitioned)
            if (movement, dims) not in done:
                found.setdefault(WrongOp(op.where, "movement", movement=movement, dims=dims))
        if op.name == "fft" and partitioned.platform == "cpu" and partitioned.axes:
            own = op.inputs[0]
            is_gathered = partitioned.specs[moved_from.get(own, own)][1:] != partitioned.specs[own][1:]
            found.setdefault(WrongOp(op.where, "transform" if is_gathered else "layout"))
        if _is_wrong_convolution(op, partitioned, moved_from, moved_to):
            found.setdefault(WrongOp(op.where))
    return tuple(found)


def _may_end(partitioned: PartitionedProgram) -> list[tuple[Spec, Spec]]:
    """The shardings before and after each resharding on a mesh of several axes; none before JAX 0.12, which none ends."""
    if IS_BEFORE_JAX_0_12 or len(partitioned.axes) == 1:
        return []
    moved = before_resharding(partitioned.graph).items()
    return [(partitioned.specs[before], partitioned.specs[after]) for after, before in moved]


def ends_process_backwards(partitioned: PartitionedProgram) -> bool:
    """Whether a resharding of the program, in the other direction, ends the process (`xla_bugs.ends_process`)."""
    return any(ends_process(after, before, partitioned.axes) for before, after in _may_end(partitioned))


def _moves(graph: Graph) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """For values that are resharded, what they were before, and what they are in the end."""
    after: dict[int, int] = {}
    for before, made in reversed(reshardings(graph)):
        after[before] = after.get(made, made)
    return before_resharding(graph), after


def _is_wrong_convolution(
    op: Op,
    partitioned: PartitionedProgram,
    before: Mapping[int, int],
    after: Mapping[int, int],
    transposed: bool = False,
) -> bool:
    """Whether an op is a convolution that XLA may get wrong, or the one that makes the image's gradient of the result's; `before`
    and `after` are those of `_moves`."""
    if op.convolution is None:
        return False
    image, kernel = (partitioned.specs[before.get(v, v)] for v in op.inputs[:2])
    result = partitioned.specs[after.get(op.outputs[0], op.outputs[0])]
    window = [partitioned.graph.values[op.inputs[1]].shape[d] for d in op.convolution.kernel]
    if transposed:
        return is_miscompiled(op.convolution.transposed, (result, kernel, image), window, partitioned.axes)
    return is_miscompiled(op.convolution, (image, kernel, result), window, partitioned.axes)


Shapes = tuple[tuple[int, ...], ...]
"""Of the operands of an op and its result."""


def transposed_wrongly(partitioned: PartitionedProgram) -> frozenset[Shapes]:
    """The convolutions, by the shapes of image, kernel and result, of which XLA may get the image's gradient wrong if it is taken
    outside of the plan: it makes the image's sharding of the result's."""
    before, after = _moves(partitioned.graph)
    return frozenset(
        tuple(partitioned.graph.values[v].shape for v in (*op.inputs[:2], op.outputs[0]))
        for op in partitioned.graph.ops
        if _is_wrong_convolution(op, partitioned, before, after, transposed=True)
    )


def _updates_slice(op: Op, partitioned: PartitionedProgram) -> bool:
    """Whether a scatter of one window is into a sharded array that other ops make."""
    maker = partitioned.graph.maker(op.inputs[0])
    is_made = maker is not None and not maker.seen and maker.name != "optimization_barrier"
    return (
        is_made
        and math.prod(partitioned.graph.values[op.inputs[1]].shape[:-1]) == 1
        and any(partitioned.shards(op.inputs[0])[d] > 1 for d in indexed_dims(op))
    )


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
    Any dimension is padded between elements and by a negative number in front.
    """
    before, after = (partitioned.graph.values[v].shape for v in (operand, op.outputs[0]))
    for window in op.window_dims:
        if not partitioned.specs[op.outputs[0]][window.out_dim]:
            continue
        stop = (after[window.out_dim] - 1) * window.stride + window.low + window.extent
        high = stop - (before[window.dim] - 1) * window.spacing - 1
        is_wrong = window.spacing > 1 or window.low > 0 or (window.low < 0 and high < 0)
        if (window.spacing > 1 and window.low > 0) or (is_wrong and not partitioned.specs[operand][window.dim]):
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


def workaround_note(wrong: Sequence[WrongOp]) -> str:
    """The diagnostic of the workarounds in a plan."""
    said = []
    for kind, note in _NOTES.items():
        lines: dict[str, dict[str, None]] = {}
        for one in wrong:
            if one.kind == kind:
                lines.setdefault(one.where, {})[_shapes(one.movement)] = None
        if lines:
            said.append(note.format(", ".join(_place(line, [*filter(None, of)]) for line, of in lines.items())))
    return "; ".join(said)


def _place(line: str, shapes: Sequence[str]) -> str:
    """A line with the shapes of what is moved there."""
    return (line or "a line that is not known") + (f" ({', '.join(shapes)})" if shapes else "")


def _shapes(movement: Movement | None) -> str:
    return "" if movement is None else f"{movement.op} of {movement.operands[0]} to {movement.result}"


_NOTES = {
    "window": (
        "shardfn gathers the spatial dimensions of the convolutions and pooling gradients at {}, and all dimensions of "
        "grouped convolutions: for this sharding XLA computes wrong values or gradients. To avoid it, shard one spatial "
        "dimension, and the image over all devices, or use shardfn.halo.conv, which exchanges halos itself"
    ),
    "transform": (
        "shardfn gathers the operands and results of the Fourier transforms at {}: for this sharding XLA on CPU compiles "
        "a program that may stop when it runs. To avoid it, shard the first dimension only"
    ),
    "padding": (
        "shardfn gathers the dimensions that are padded between elements, or cropped, at {}: for this sharding XLA computes "
        "wrong values or does not compile"
    ),
    "scatter": "shardfn pads the updates at {} to even shards: XLA combines the padding of uneven shards with row 0",
    "movement": (
        "shardfn gathers the dimensions along which elements move at {}: their shards are uneven, and XLA may compute wrong "
        "values. To avoid it, use sizes that the number of shards divides, or apply the op that reads these rows to all rows"
    ),
    "update": "shardfn puts an optimization barrier before the updates at {}: XLA changes shards that they do not reach",
    "bounds": "shardfn clamps the places of the dynamic slices and updates at {}: XLA forgets to, if their results are sharded",
    "product": (
        "shardfn gathers the batch dimensions of the results of the matmuls at {}: for this sharding XLA computes wrong values"
    ),
    "reduction": (
        "shardfn gathers the reduced dimensions at {}: XLA has all-reduces for sums, products, minima and maxima only, and "
        "for `and` and `or` of bools. To avoid it, leave these dimensions unsharded"
    ),
}
"""The diagnostic of a plan by kind, with the lines of the ops."""


def replicate_wrong_ops(
    function: Callable[..., Any], mesh: Any, wrong: Sequence[WrongOp], static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` with constraints that unshard the spatial dimensions of convolutions and pooling gradients, all dimensions of
    grouped convolutions, the transformed ones of Fourier transforms, the reduced ones of reductions without an all-reduce, and
    the padded ones of the pads among `wrong`. Scatters that combine get updates of even shards, updates of one window a barrier,
    and dynamic slices a clamped place.

    Args:
      function: the function.
      mesh: the mesh of the constraints.
      wrong: the ops that `wrong_ops` found in it.
      static_argnums: as in `jax.jit`.

    Raises:
      StrategyError: when traced, such an op is inside an equation that is not opened.
    """

    kinds = {w.kind for w in wrong}
    multiple = math.lcm(*(w.multiple for w in wrong))
    moved: dict[Movement, list[Dims]] = {}
    for w in wrong:
        if w.movement and w.kind == "movement":
            moved.setdefault(w.movement, []).append(w.dims)
    at_places = {w.movement for w in wrong if w.kind == "bounds"}
    is_one = {
        **_IS_ONE,
        "movement": lambda eqn: not moved.keys().isdisjoint(movements_of_equation(eqn)),
        "bounds": lambda eqn: not at_places.isdisjoint(movements_of_equation(eqn)),
    }

    def kinds_of(eqn: Any) -> list[str]:
        return [kind for kind in kinds if kind in is_one and is_one[kind](eqn)]

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        if is_rotation(eqn):  # whose shards are even
            return bind_one(eqn, inputs)
        own = kinds_of(eqn)
        dims = gathered_dims(eqn, moved) if "movement" in own else _gathered(eqn, own)
        if "bounds" in own:
            inputs = clamped(eqn, inputs)
        if "update" in own and "movement" not in own:
            inputs = [jax.lax.optimization_barrier(inputs[0]), *inputs[1:]]
        inputs = [unsharded(mesh, x, of) for x, of in zip(inputs, dims, strict=False)]
        if "scatter" in own:
            outputs = even_scatter(eqn, inputs, multiple)
        else:
            outputs = [transformed(eqn, *inputs)] if _IS_ONE["layout"](eqn) else bind_one(eqn, inputs)
        if "pair" in own:
            outputs = jax.lax.optimization_barrier(outputs)
        return [unsharded(mesh, x, of) for x, of in zip(outputs, dims[len(inputs) :], strict=True)]

    def refuse(eqn: Any) -> None:
        found = {kind for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr) for kind in kinds_of(one)}
        if found - {"bounds", "layout", "pair"}:
            fail(
                StrategyError,
                f"an op inside a `{eqn.primitive.name}` might be computed wrongly by XLA, or not compile",
                why=f"shardfn does not rewrite what is inside a `{eqn.primitive.name}`",
                fix="leave the dimensions along which the op works unsharded, or take it out",
            )

    return rebind(function, lambda eqn, number: is_rotation(eqn) or bool(kinds_of(eqn)), bind, static_argnums, refuse)


def clamped(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a `dynamic_slice` or `dynamic_update_slice` with its place within the array."""
    count = len(inputs) - np.ndim(inputs[0])
    sizes = np.shape(inputs[1]) if count == 2 else eqn.params["slice_sizes"]
    last = [n - rows for n, rows in zip(np.shape(inputs[0]), sizes, strict=True)]
    return [*inputs[:count], *(jnp.clip(start, 0, most) for start, most in zip(inputs[count:], last, strict=True))]


def unsharded(mesh: Any, x: Any, dims: Sequence[int]) -> Any:
    """An array with a constraint that unshards some of its dimensions; a scalar as it is."""
    if not dims or not np.ndim(x):
        return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for dim in dims:
        spec[dim] = None
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _reduced(eqn: Any) -> tuple[int, ...]:
    """The dims that an equation reduces, if XLA may have no all-reduce for it."""
    name = eqn.primitive.name
    if name not in _REDUCTIONS or len(eqn.outvars) > 1:
        return ()
    is_known = name in ("reduce_and", "reduce_or") and eqn.invars[0].aval.dtype == bool
    return () if is_known else tuple(eqn.params[_REDUCTIONS[name]])


def _gathered(eqn: Any, kinds: Collection[str]) -> list[Sequence[int]]:
    """By operand and result of an equation of some kinds of wrong ops, the dimensions to gather."""
    name, params, values = eqn.primitive.name, eqn.params, (*eqn.invars, *eqn.outvars)
    if "padding" in kinds:
        return [_padded(eqn)] * len(values)
    if "product" in kinds:
        return [(), (), range(len(params["dimension_numbers"][1][0]))]
    if "reduction" in kinds:
        return [*[_reduced(eqn)] * len(eqn.invars), ()]
    if name == _POOLING:
        return [[d for d, size in enumerate(params["window_dimensions"]) if size > 1]] * len(values)
    if name == _TRANSFORM:
        return [transformed_dims(eqn)] * len(values)
    if "window" in kinds and max(map(params.__getitem__, _GROUPS)) > 1:
        return [range(len(v.aval.shape)) for v in values]
    if "window" in kinds:
        numbers = params["dimension_numbers"]
        kernel = (eqn.invars[1].aval.shape[d] for d in numbers.rhs_spec[2:])
        if max((*kernel, *itertools.chain.from_iterable(params[step] for step in _STEPS)), default=1) > 1:
            return [spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)]
    return [()] * len(values)


def transformed_dims(eqn: Any) -> range:
    """The dimensions of a Fourier transform."""
    rank = len(eqn.outvars[0].aval.shape)
    return range(rank - len(eqn.params["fft_lengths"]), rank)


def transformed(eqn: Any, x: Any) -> Any:
    """A Fourier transform of an array with one dimension more, which XLA on CPU does not hand over transposed."""
    before = transformed_dims(eqn).start
    return jnp.squeeze(bind_one(eqn, [jnp.expand_dims(x, before)])[0], before)


def _padded(eqn: Any) -> list[int]:
    """The dimensions that a pad or the padding of windows fills between elements, crops in front, or moves backwards."""
    params = eqn.params
    if eqn.primitive.name == "pad":
        config = list(params["padding_config"])
    elif eqn.primitive.name in _REDUCED_WINDOWS:
        config = [(*edges, base - 1) for edges, base in zip(params["padding"], params["base_dilation"], strict=True)]
    else:
        return []
    return [d for d, (low, high, holes) in enumerate(config) if holes > 0 or low < 0 or low > 0 > high]


_REDUCED_WINDOWS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})
_POOLING = "select_and_scatter_add"
_TRANSFORM = "fft"
_STEPS = ("window_strides", "lhs_dilation", "rhs_dilation")
_GROUPS = ("feature_group_count", "batch_group_count")
_REDUCTIONS = {"reduce": "dimensions", "reduce_xor": "axes", "reduce_and": "axes", "reduce_or": "axes"}
"""With the name of the parameter that holds the dims."""

_IS_ONE: dict[str, Callable[[Any], Any]] = {
    "window": lambda eqn: eqn.primitive.name in ("conv_general_dilated", _POOLING),
    "transform": lambda eqn: eqn.primitive.name == _TRANSFORM,
    "layout": lambda eqn: eqn.primitive.name == _TRANSFORM,
    "pair": lambda eqn: eqn.primitive.name in ("reduce_window", "select_and_gather_add") and len(eqn.invars) > 1,
    "padding": _padded,
    "scatter": lambda eqn: eqn.primitive.name in NEUTRAL,
    "update": lambda eqn: eqn.primitive.name in ("scatter", *NEUTRAL) and math.prod(eqn.invars[1].aval.shape[:-1]) == 1,
    "reduction": _reduced,
    "product": lambda eqn: eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0]),
}
"""Whether an equation may be a wrong op of a kind; of a movement and of places its shapes tell."""
