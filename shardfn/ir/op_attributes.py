"""What one op of a module says, whatever the shardings: its sharding rule, window, source line and trip count."""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import Any

from shardfn.ir.mlir import attributes_of, ir, sdy, short_name, stablehlo
from shardfn.ir.model import Convolution, Op, ShardingRule, WindowDim
from shardfn.ir.source_lines import user_line
from shardfn.ir.windows import ATTRIBUTES, WINDOWED, window_dims


def rule_of(attribute: Any) -> ShardingRule:
    """Shardy's rule, as data."""
    r = sdy.OpShardingRuleAttr(attribute)

    def dims(mapping: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(mapping).dim_mappings)

    return ShardingRule(
        tuple(dims(m) for m in r.operand_mappings),
        tuple(dims(m) for m in r.result_mappings),
        tuple(r.factor_sizes),
        frozenset(r.reduction_factors),
        frozenset(r.need_replication_factors),
        frozenset(r.permutation_factors),
    )


def op_by_attributes(op: Any, short: str, **rest: Any) -> Op:
    """An op as its attributes and types describe it, without values and lines; `rest` are its other fields."""
    return Op(short, (), (), trips=0, where="", reduced=_reduced(op), convolution=_convolution(op), combines=_combines(op),
              window_dims=_window_dims(op, short), precision=_precision(op), **rest)  # fmt: skip


def _convolution(op: Any) -> Convolution | None:
    """Which dims of a convolution are spatial or in groups, and whether its window takes every element."""
    if op.name != "stablehlo.convolution":
        return None
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    steps = ("window_strides", "lhs_dilation", "rhs_dilation")
    is_dense = all(
        step == 1 for name in steps if name in op.attributes for step in ir.DenseI64ArrayAttr(op.attributes[name])
    )
    return Convolution(
        tuple(numbers.input_spatial_dimensions),
        tuple(numbers.kernel_spatial_dimensions),
        tuple(numbers.output_spatial_dimensions),
        is_dense,
        tuple(
            (which, dim, groups)
            for name, at in (
                ("feature_group_count", numbers.input_feature_dimension),
                ("batch_group_count", numbers.input_batch_dimension),
            )
            if (groups := ir.IntegerAttr(op.attributes[name]).value) > 1
            for which, dim in enumerate((at, numbers.kernel_output_feature_dimension, numbers.output_feature_dimension))
        ),
        ir.IntegerAttr(op.attributes["batch_group_count"]).value > 1,
    )


def _window_dims(op: Any, name: str) -> tuple[WindowDim, ...]:
    """The window dimensions of an op (`ir.windows`)."""
    if name not in WINDOWED:
        return ()
    numbers = {a: list(ir.DenseI64ArrayAttr(op.attributes[a])) for a in ATTRIBUTES if a in op.attributes}
    if "padding" in op.attributes:
        rows = ir.DenseIntElementsAttr(op.attributes["padding"])
        numbers["padding"] = [rows[i] for i in range(len(rows))]
    if name == "convolution":
        d = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        spatial = (d.input_spatial_dimensions, d.kernel_spatial_dimensions, d.output_spatial_dimensions)
        numbers |= {key: list(dims) for key, dims in zip(("image", "kernel", "result"), spatial, strict=True)}
    shapes = [ir.RankedTensorType(v.type).shape for v in (*op.operands, *op.results)]
    return window_dims(name, numbers, shapes)


def _reduced(op: Any) -> tuple[tuple[int, int], ...]:
    """(operand, dim) pairs whose sizes multiply the work of each element of the result."""
    if op.name == "stablehlo.dot_general":
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        return tuple((0, d) for d in numbers.lhs_contracting_dimensions)
    if op.name == "stablehlo.convolution":
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        kernel = ir.RankedTensorType(op.operands[1].type)
        return tuple((1, d) for d in range(kernel.rank) if d != numbers.kernel_output_feature_dimension)
    if op.name == "stablehlo.reduce":
        return tuple((0, int(d)) for d in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    return ()


def _precision(op: Any) -> str:
    """The precision that a matmul or convolution asks for, in lower case; empty for the default one."""
    if "precision_config" not in op.attributes:
        return ""
    names = _PRECISION.findall(str(op.attributes["precision_config"]))
    return next((name.lower() for name in ("HIGHEST", "HIGH") if name in names), "")


_PRECISION = re.compile(r"<precision (\w+)>")
"""An attribute of StableHLO, or of CHLO for `ragged_dot`."""


def _combines(op: Any) -> str:
    """By what a reduction of one array, or a scatter into one, combines elements, where that is one op; of an FFT its type; of a
    sort `keys` where it compares several arrays."""
    if op.name == "stablehlo.fft":
        return str(op.attributes["fft_type"]).rpartition(" ")[2].rstrip(">")
    if op.name == "stablehlo.sort":
        return "keys" if any(list(argument.uses) for argument in op.regions[0].blocks[0].arguments[2:]) else ""
    if op.name not in ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter") or len(op.results) > 1:
        return ""
    inside = [short_name(view.operation) for view in op.regions[0].blocks[0].operations]
    return inside[0] if inside[1:] == ["return"] else ""


def form_of(op: Any) -> tuple[Any, ...] | None:
    """What an op does: two with one form make the same of the same operands. None where twice is not the same as once."""
    if op.name in _EACH_TIME:
        return None
    inner = tuple([_form_inside(block) for region in op.regions for block in region.blocks])
    attributes = sorted(
        (pair for pair in attributes_of(op) if not pair[0].startswith("sdy.")), key=operator.itemgetter(0)
    )
    return op.name, *attributes, *[r.type for r in op.results], *inner


def _form_inside(block: Any) -> tuple[Any, ...]:
    """Of the ops in a block: what each does, and of what, by place."""
    place: dict[Any, int] = {argument: n for n, argument in enumerate(block.arguments)}
    found: list[Any] = [argument.type for argument in block.arguments]
    for view in block.operations:
        op = view.operation
        found.append((form_of(op), *[place.get(o, o) for o in op.operands]))
        for result in op.results:
            place[result] = len(place)
    return tuple(found)


_EACH_TIME = frozenset({"stablehlo.custom_call", "stablehlo.rng", "stablehlo.infeed", "stablehlo.outfeed",
                        "stablehlo.send", "stablehlo.recv", "stablehlo.create_token", "stablehlo.after_all"})  # fmt: skip


_FRAME = re.compile(r'"([^"]+)":(\d+):')


def op_line(op: Any) -> str:
    """`file:line` of the user's code that an op came from."""
    return _frame(str(op.location))


@functools.lru_cache(maxsize=65536)
def _frame(location: str) -> str:
    return user_line(_FRAME.findall(location))


def neutral_operand(op: Any) -> int:
    """Which operand an op gives back as it is, as the other one is a constant that changes nothing: -1 if none."""
    known = _NEUTRAL.get(op.name)
    if known is None:
        return -1
    constant, either = known
    for side in (1, 0) if either else (1,):
        if constant_of(op.operands[side]) == constant:
            return 1 - side
    return -1


_NEUTRAL = {
    "stablehlo.add": (0, True), "stablehlo.subtract": (0, False), "stablehlo.multiply": (1, True), "stablehlo.divide": (1, False),
    "stablehlo.maximum": (-math.inf, True), "stablehlo.minimum": (math.inf, True),
}  # fmt: skip
"""For an op the constant that changes nothing, and whether it may be either operand."""


def constant_of(value: Any) -> Any:
    """The number that a constant, or a broadcast one, has everywhere; None where it has none."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.operation.name == "stablehlo.broadcast_in_dim":
        owner = owner.operation.operands[0].owner
    if isinstance(owner, ir.Block) or not owner.operation.name.endswith(".constant"):
        return None
    try:
        every = ir.DenseElementsAttr(owner.operation.attributes["value"])
        element: Any = every.get_splat_value() if every.is_splat else None
        return None if element is None else element.value
    except (TypeError, ValueError, AttributeError):  # an element type that the bindings do not read
        return None


def trip_count(op: Any, condition: Any, body: Any) -> int | None:
    """Iterations of a `while` that counts from one constant to another, as JAX writes scan and fori_loop."""
    test = _unsharded(condition.operations[len(condition.operations) - 1].operation.operands[0]).owner
    if isinstance(test, ir.Block) or test.operation.name != "stablehlo.compare":
        return None
    test = test.operation
    if "LT" not in str(test.attributes["comparison_direction"]):
        return None
    counter, limit = map(_unsharded, test.operands)
    if not isinstance(counter.owner, ir.Block):
        return None
    position = ir.BlockArgument(counter).arg_number

    if isinstance(limit.owner, ir.Block) and limit.owner == condition:
        limit = _unsharded(op.operands[ir.BlockArgument(limit).arg_number])
    start, stop = constant_of(_unsharded(op.operands[position])), constant_of(limit)
    step_op = _unsharded(body.operations[len(body.operations) - 1].operation.operands[position]).owner
    if start is None or stop is None or isinstance(step_op, ir.Block) or step_op.operation.name != "stablehlo.add":
        return None
    steps = [c for v in step_op.operation.operands if (c := constant_of(_unsharded(v))) is not None]
    return max(0, -(-(stop - start) // steps[0])) if steps and steps[0] > 0 else None


def _unsharded(value: Any) -> Any:
    """A value before its sharding constraints. JAX constrains the numbers of a loop in a `shard_map` over a part of a mesh."""
    while not isinstance(value.owner, ir.Block) and value.owner.operation.name in (
        "sdy.sharding_constraint",
        "sdy.reshard",
    ):
        value = value.owner.operation.operands[0]
    return value
