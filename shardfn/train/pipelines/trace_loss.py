"""A pipeline's loss, or its function of outputs, as a flat list of equations, each with its stage mark and its modelled cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.cost.devices.chips import CHIPS
from shardfn.errors import StrategyError, fail
from shardfn.ir.rewrite import inner
from shardfn.train.flat_jaxpr import FlatJaxpr, flatten_jaxpr

MARK = "pipeline_stage_"
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


def trace_loss(loss_fn: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> FlatJaxpr:
    """Trace `loss_fn(params, *batch)` on shapes.

    An equation's label is the (stage, segment) of the `staged` function it stands in.

    Raises:
      StrategyError: the loss is not one floating-point number.
    """
    closed, shape = jax.make_jaxpr(loss_fn, return_shape=True)(params, *batch)
    if not tree_util.all_leaves([shape]) or shape.shape or not jnp.issubdtype(shape.dtype, jnp.floating):
        given = tree_util.tree_map(lambda x: f"{x.dtype}{list(x.shape)}", shape)
        fail(StrategyError, "the loss of a pipeline must be one floating-point number", where=f"it returns {given}",
             why="the last stage sums the losses of the micro-batches",
             fix="return only the mean of the loss over the batch")  # fmt: skip
    return _flattened(closed, params)


def trace_outputs(function: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> tuple[FlatJaxpr, Any]:
    """Trace `function(params, *batch)` on shapes, and the structure of its outputs.

    Raises:
      StrategyError: an output has not the batch in dimension 0.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, *batch)
    rows = [x.shape[0] for x in tree_util.tree_leaves(batch)[:1]]
    if any(list(x.shape[:1]) != rows for x in tree_util.tree_leaves(shapes)):
        given = tree_util.tree_map(lambda x: f"{x.dtype}{list(x.shape)}", shapes)
        fail(StrategyError, "the outputs of a pipeline must have the batch in dimension 0",
             where=f"of {rows[0] if rows else 'no'} rows of the batch it returns {given}",
             why="the outputs of the micro-batches are put after each other",
             fix="return what each example has; for a loss, leave loss=None out")  # fmt: skip
    return _flattened(closed, params), tree_util.tree_structure(shapes)


def _flattened(closed: Any, params: Any) -> FlatJaxpr:
    return flatten_jaxpr(closed, len(tree_util.tree_leaves(params)), lambda eqn: eqn.primitive.name in _INLINED, _mark)


def _mark(eqn: Any) -> tuple[int, int] | None:
    found = re.fullmatch(MARK + r"(\d+)_(\d+)", eqn.params.get("name", ""))
    return (int(found[1]), int(found[2])) if found else None


_CHIP = CHIPS["h100"]
"""Stages are balanced with its figures on every platform: only the ratio of FLOP/s to bytes/s matters, and the stage
boundaries stay the same everywhere."""


def cost_s(eqn: Any) -> float:
    """Modelled seconds of an equation: matmuls and convolutions by their FLOPs, other ops by the bytes of their results.

    The model knows no fusion and no cache, and counts a loop of unknown length once.
    """
    bodies = inner(eqn)
    if bodies and eqn.primitive.name not in ("reduce", "scatter", "scatter-add", "argmax", "argmin"):
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        each = [sum(map(cost_s, body.eqns)) for body in bodies]
        return trips * (max(each) if eqn.primitive.name == "cond" else sum(each))
    written = sum(math.prod(v.aval.shape) * _itemsize(v.aval) for v in eqn.outvars)
    return max(_flops(eqn) / _CHIP.flops, written / _CHIP.memory_bytes_s)


def _itemsize(aval: Any) -> int:
    return getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _flops(eqn: Any) -> float:
    if eqn.primitive.name == "dot_general":
        return dot_flops(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[out]
    return 0.0


def dot_flops(eqn: Any) -> int:
    """Floating-point operations of a `dot_general`."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracted)
