"""The one door to `jax.extend.mlir`: its bindings, and how a module is walked, numbered and run through passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir as ir
from jax.extend.mlir import passmanager as passmanager
from jax.extend.mlir.dialects import sdy as sdy
from jax.extend.mlir.dialects import stablehlo as stablehlo

from shardfn.ir.model import Value

MESH_NAME = "grid"  # the name of our mesh inside the module


NUMBER = "number"
"""Of an op in `PreparedModule.module`: an attribute that stays on it through the passes, and on its copies."""


_UNNUMBERED = frozenset({"builtin.module", "func.func", "stablehlo.constant"})
"""Ops that may not have the attribute, and constants, of which Shardy puts equal ones together."""

_SHARDY_NUMBERED = frozenset({"sdy.sharding_constraint"})
"""Of Shardy's own ops, which it changes, those that have it. Of each a propagation makes an `sdy.reshard` with its number."""


def parsed_passes(pipeline: str) -> Any:
    """Passes that can be run on any module of this context, which is to be verified before: again after each pass takes twice as
    long as the passes do."""
    passes = passmanager.PassManager.parse(pipeline)
    passes.enable_verifier(False)
    return passes


def run_passes(pipeline: str, module: Any) -> None:
    """Run passes on a module that is verified once, before."""
    module.verify()
    parsed_passes(pipeline).run(module)


def functions_of(module: Any) -> Iterator[Any]:
    """The functions that stand in a module."""
    return (op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == "func.func")


def meshes_of(module: Any) -> list[Any]:
    """The meshes that stand in a module."""
    return [op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == "sdy.mesh"]


def short_name(op: Any) -> str:
    """The name of an op without its dialect."""
    return op.name.split(".", 1)[-1]


def symbol_of(op: Any) -> str:
    """The name of a function or a mesh."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def preorder(op: Any) -> list[Any]:
    """An op and all ops inside it, in program order."""
    found = [op]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                found += preorder(inner.operation) if len(inner.operation.regions) else [inner.operation]
    return found


BlockPath = tuple[tuple[int, int, int], ...]
"""From a block to one inside it, by step: the position of an op, of its region, and of the block there."""


def blocks_of(block: Any, path: BlockPath = ()) -> Iterator[tuple[BlockPath, Any]]:
    """A block and those inside it, in the order of `order_depth_first`, each with the way to it."""
    yield path, block
    for turn, view in enumerate(block.operations):
        for n, region in enumerate(view.operation.regions):
            for m, inner in enumerate(region.blocks):
                yield from blocks_of(inner, (*path, (turn, n, m)))


def attribute_names(op: Any) -> list[str]:
    """The names of an op's attributes but its number."""
    names = (getattr(a, "name", a) for a in op.attributes)  # JAX 0.10 gives names, 0.12 may give pairs
    return [name for name in names if name != NUMBER]


def attributes_of(op: Any) -> list[tuple[str, Any]]:
    """(name, attribute) of an op, without its number; a complex constant, which the bindings do not read, gives its text."""
    try:
        return [(name, op.attributes[name]) for name in attribute_names(op)]
    except TypeError:
        return [("value", str(op).split(" = ", 1)[-1])]


def number_all(ops: Sequence[Any], first: int) -> int:
    """Number ops; gives the next number."""
    kind = ir.IntegerType.get_signless(64)
    for n, op in enumerate(ops, first):
        if op.name not in _UNNUMBERED and (op.name in _SHARDY_NUMBERED or not op.name.startswith("sdy.")):
            op.attributes[NUMBER] = ir.IntegerAttr.get(kind, n)
    return first + len(ops)


def number_of(op: Any) -> int:
    """An op's number, -1 where it has none."""
    return ir.IntegerAttr(op.attributes[NUMBER]).value if NUMBER in op.attributes else -1


def value_of(type_: Any) -> Value:
    """Shape and dtype of a type."""
    try:
        tensor = ir.RankedTensorType(type_)
    except ValueError:  # a token
        return Value((), "token")
    return Value(tuple(tensor.shape), str(tensor.element_type))


def mesh_axes(attribute: Any) -> list[tuple[str, int]]:
    """(name, size) of the axes of a mesh attribute."""
    return [(m[0], int(m[1])) for m in re.findall(r'"([^"]+)"=(\d+)', str(attribute))]
