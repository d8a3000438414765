"""The form of a module in which XLA propagates shardings.

XLA runs passes before propagation. Those that decide its outcome are repeated here: dynamic slices at constant places become
slices, calls are inlined, loop invariants are read from outside the loop, broadcasts that stretch dimensions of 1 are split,
and ops are ordered depth first from the results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfn.ir.extra_rules import MISSING_RULES
from shardfn.ir.mlir import MESH_NAME, NUMBER, attribute_names, ir, sdy, value_of
from shardfn.ir.model import DimFactors, ShardingRule
from shardfn.ir.op_attributes import constant_of, op_line


def to_xla_form(block: Any, arguments: set[Any]) -> None:
    """Bring a block into the form that XLA's own passes give it before it propagates, as far as that decides anything."""
    for view in list(block.operations):
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                to_xla_form(inner, arguments)
        if op.name == "stablehlo.while":
            _free_invariants(op, arguments)
        elif op.name == "stablehlo.broadcast_in_dim":
            _take_apart(op)
        elif op.name.startswith("chlo."):
            _add_rule(op)


def drop_identities(ops: Sequence[Any]) -> None:
    """Drop slices of whole arrays, and reshapes (or broadcasts that only add dims of 1) that end where they began."""
    for op in ops:
        if op.name not in _SAME_ELEMENTS or (op.name == "stablehlo.broadcast_in_dim" and not _is_reshape(op)):
            continue
        source = op.operands[0]
        while op.name != "stablehlo.slice" and not isinstance(source.owner, ir.Block):
            before = source.owner.operation
            if before.name != "stablehlo.reshape" and not _is_reshape(before):
                break
            source = before.operands[0]
        if source.type == op.results[0].type and source != op.results[0]:
            op.results[0].replace_all_uses_with(source)
    for op in reversed(ops):
        if op.name in _SAME_ELEMENTS and not list(op.results[0].uses):
            op.erase()


_SAME_ELEMENTS = frozenset({"stablehlo.reshape", "stablehlo.broadcast_in_dim", "stablehlo.slice"})


def _is_reshape(op: Any) -> bool:
    """Whether an op is a broadcast that only adds dims of 1."""
    if op.name != "stablehlo.broadcast_in_dim":
        return False
    source, result = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    return math.prod(source.shape) == math.prod(result.shape) and dims == sorted(dims)


def slice_at_constants(ops: Sequence[Any]) -> None:
    """Make slices of the dynamic slices whose places are constants, or integers that are computed of constants."""
    known: dict[Any, int] = {}
    for op in ops:
        if op.name != "stablehlo.dynamic_slice":
            if (number := _number(op, known)) is not None:
                known[op.results[0]] = number
            continue
        source, result = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
        starts = list(op.operands)[1:]
        places = [known[start] for start in starts if start in known]
        if len(places) < len(starts):
            continue
        rows = zip(places, source.shape, result.shape, strict=True)
        first = [min(max(place, 0), size - length) for place, size, length in rows]
        last = [place + length for place, length in zip(first, result.shape, strict=True)]
        numbers = {"start_indices": first, "limit_indices": last, "strides": [1] * len(first)}
        attributes: dict[str, Any] = {name: ir.DenseI64ArrayAttr.get(each) for name, each in numbers.items()}
        with ir.InsertionPoint(op), op.location:
            new = ir.Operation.create("stablehlo.slice", [result], [op.operands[0]], attributes)
        op.results[0].replace_all_uses_with(new.result)
        op.erase()


_FOLDED: dict[str, Callable[..., int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max, "minimum": min, "convert": int,
    "LT": operator.lt, "select": lambda chosen, one, other: one if chosen else other,
}  # fmt: skip
"""Ops, and the direction of a comparison, that indices are computed with."""


def _number(op: Any, known: Mapping[Any, int]) -> int | None:
    """The integer or bool that an op makes, a scalar, of the `known` ones; None if it is not known, or would wrap around."""
    name = op.name.removeprefix("stablehlo.")
    if name == "compare":
        name = str(op.attributes["comparison_direction"]).rpartition(" ")[2].rstrip(">")
    if name != "constant" and name not in _FOLDED:  # most ops
        return None
    made = op.results[0].type
    element = made.element_type
    if made.shape or not isinstance(element, ir.IntegerType):
        return None
    if name == "constant":
        return None if (given := constant_of(op.results[0])) is None else int(given)
    fold, operands = _FOLDED.get(name), [known.get(operand) for operand in op.operands]
    if fold is None or None in operands:
        return None
    found = int(fold(*operands))
    return found if abs(found) < 1 << element.width - 1 or element.width == 1 else None


def inline(block: Any, functions: Mapping[str, Any], lines: dict[Any, str] | None = None) -> None:
    """Put the body of a function in the place of its only call. An op without a line of the user's gets that of the call too."""
    lines = {} if lines is None else lines
    for view in list(block.operations):
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                inline(inner, functions, lines)
        if op.name != "func.call":
            continue
        function = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        body = function.regions[0].blocks[0]
        inline(body, functions, lines)
        for argument, operand in zip(list(body.arguments), list(op.operands), strict=True):
            argument.replace_all_uses_with(operand)
        *inside, end = [v.operation for v in body.operations]
        for moved in inside:
            moved.move_before(op)
            location = moved.location.attr
            if location not in lines:
                lines[location] = op_line(moved)
            if not lines[location]:
                moved.location = ir.Location.callsite(moved.location, [op.location])
        for result, value in zip(list(op.results), list(end.operands), strict=True):
            result.replace_all_uses_with(value)
        op.erase()
        function.erase()


def order_depth_first(block: Any) -> list[list[int]]:
    """Order ops as XLA does, depth first from what the block returns: layouts spread in the order of ops.

    Returns for this block, then for those inside it, how many ops stood before each op when it was come to.
    """
    ops = [view.operation for view in block.operations]
    here, end = set(ops), ops[-1]
    feeding = {op: _feeding(op, here) for op in ops}
    order: dict[Any, int] = {}
    for root in (end, *ops):
        stack = [(root, iter(feeding[root]), len(order) - (end in order))] if root not in order else []
        while stack:
            op, rest, begun = stack[-1]
            following = next((f for f in rest if f not in order), None)
            if following is not None:
                stack.append((following, iter(feeding[following]), len(order) - (end in order)))
                continue
            stack.pop()
            order[op] = begun
    order[end] = order.pop(end)  # last
    found = [list(order.values())]
    for op in order:
        if op != end:
            op.move_before(end)
        for region in op.regions:
            for inner in region.blocks:
                found += order_depth_first(inner)
    return found


def _feeding(op: Any, here: set[Any]) -> list[Any]:
    """Ops among `here` whose results an op reads, itself or in its regions."""
    owners = [value.owner for value in op.operands]
    found = [o.operation for o in owners if not isinstance(o, ir.Block) and o.operation in here]
    for region in op.regions:
        for inner in region.blocks:
            for view in inner.operations:
                found += _feeding(view.operation, here)
    return found


def _free_invariants(loop: Any, arguments: set[Any]) -> None:
    """Read loop invariants from outside the loop, so that the loop may shard them its own way.

    An argument of the program keeps its sharding, so an open constraint comes in between.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    end = body.operations[len(body.operations) - 1].operation
    kept = [i for i, argument in enumerate(body.arguments) if end.operands[i] != argument]
    if not kept or len(kept) == len(loop.operands):
        return
    with ir.InsertionPoint(loop), loop.location:
        new = ir.Operation.create(
            loop.name, [loop.results[i].type for i in kept], [loop.operands[i] for i in kept], regions=2
        )
        for i, value in enumerate(loop.operands):
            if i in kept:
                loop.results[i].replace_all_uses_with(new.results[kept.index(i)])
                continue
            loop.results[i].replace_all_uses_with(value)
            rank = len(value_of(value.type).shape)
            if rank and value in arguments:
                open_ = ir.Attribute.parse(f"#sdy.sharding<@{MESH_NAME}, [{', '.join(['{?}'] * rank)}]>")
                with ir.InsertionPoint(new):
                    value = sdy.ShardingConstraintOp(value, open_).result
            for inside in (condition, body):
                inside.arguments[i].replace_all_uses_with(value)
    with ir.InsertionPoint(end), end.location:
        ir.Operation.create(end.name, operands=[end.operands[i] for i in kept])
    end.erase()
    for inside, region in ((condition, new.regions[0]), (body, new.regions[1])):
        inside.append_to(region)
        for i in reversed(range(len(loop.operands))):
            if i not in kept:
                region.blocks[0].erase_argument(i)
    loop.erase()


def _take_apart(op: Any) -> None:
    """A broadcast that only adds dims of 1 is a reshape; one that stretches dims of 1 drops them first."""
    source, result = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    kept = [i for i, d in enumerate(dims) if source.shape[i] == result.shape[d]]
    with ir.InsertionPoint(op), op.location:
        if dims and _is_reshape(op):
            new = ir.Operation.create("stablehlo.reshape", [result], [op.operands[0]])
        elif len(kept) < len(dims):
            small = ir.RankedTensorType.get([source.shape[i] for i in kept], source.element_type)
            dropped = ir.Operation.create("stablehlo.reshape", [small], [op.operands[0]])
            at: dict[str, Any] = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([dims[i] for i in kept])}
            new = ir.Operation.create(op.name, [result], [dropped.result], at)
        else:
            return
    op.results[0].replace_all_uses_with(new.result)
    op.erase()


def _add_rule(op: Any) -> None:
    missing = MISSING_RULES.get(op.name.partition(".")[2])
    rule = missing and missing([value_of(o.type) for o in op.operands], [value_of(r.type) for r in op.results])
    if rule is not None:
        op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule_text(rule))


def rule_text(rule: ShardingRule) -> str:
    """A rule as Shardy writes it.

    >>> rule_text(ShardingRule((((0,), (1,)),), (((0,), (2,)),), (8, 64, 4), replicated=frozenset({1, 2})))
    '#sdy.op_sharding_rule<([i, j])->([i, k]) {i=8, j=64, k=4} need_replication={j, k}>'
    """

    def name(factor: int) -> str:
        return "ijklmnopqrstuvwxyz"[factor] if factor < 18 else f"z_{factor - 17}"

    def tensors(all_dims: Sequence[DimFactors]) -> str:
        return ", ".join("[" + ", ".join("".join(map(name, dim)) for dim in dims) + "]" for dims in all_dims)

    sizes = ", ".join(f"{name(f)}={n}" for f, n in enumerate(rule.sizes))
    needs = f" need_replication={{{', '.join(map(name, sorted(rule.replicated)))}}}" if rule.replicated else ""
    return f"#sdy.op_sharding_rule<({tensors(rule.operands)})->({tensors(rule.results)}) {{{sizes}}}{needs}>"


def number_duplicates(block: Any, made: dict[Any, Any], numbers: dict[Any, Any]) -> None:
    """Give ops of constants, and broadcasts, that make the same one number: Shardy puts them together."""
    for view in block.operations:
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                number_duplicates(inner, made, numbers)
        is_constant = all(value in made for value in op.operands)
        if not is_constant and op.name != "stablehlo.broadcast_in_dim":
            continue
        if len(op.regions) or len(op.results) != 1:
            continue
        try:
            attrs = [(name, op.attributes[name]) for name in attribute_names(op)]
        except TypeError:  # a complex constant, which the bindings do not read
            continue
        key = op.name, op.results[0].type, *attrs, *[made.get(v, v) for v in op.operands]
        number = numbers.setdefault(key, op.attributes[NUMBER] if NUMBER in op.attributes else key)
        if NUMBER in op.attributes:
            op.attributes[NUMBER] = number
        if is_constant:
            made[op.results[0]] = number
