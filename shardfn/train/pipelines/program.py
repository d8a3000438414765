"""A loss function as one line of ops: `jit` opened, and which of them read parameters, the batch, both or neither."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.extend import core

from shardfn.cost.devices.chips import CHIPS
from shardfn.errors import StrategyError, fail
from shardfn.ir.rewrite import inner

MARK = "pipeline_stage_"
_OPENED = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclasses.dataclass(frozen=True)
class Op:
    """An equation between numbered values; an input that is no number is a literal's value."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    mark: tuple[int, int] | None = None
    """The stage and the segment of the `staged` function it stands in."""

    def reads(self) -> tuple[int, ...]:
        """The values among its inputs."""
        return tuple(v.number for v in self.inputs if isinstance(v, Value))


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program, by number."""

    number: int


@dataclasses.dataclass(frozen=True)
class Program:
    """Values 0, 1, ... are the parameters' leaves, then the batch's; then constants and what ops make."""

    params: int
    batch: int
    consts: dict[int, Any]
    ops: tuple[Op, ...]
    loss: Any
    avals: dict[int, Any]


def program_of(function: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> Program:
    """The program of `function(params, *batch)`, from shapes."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *batch)
    if not tree_util.all_leaves([shape]) or shape.shape or not jnp.issubdtype(shape.dtype, jnp.floating):
        given = tree_util.tree_map(lambda x: f"{x.dtype}{list(x.shape)}", shape)
        fail(StrategyError, "the loss of a pipeline must be one floating-point number", where=f"it gives {given}",
             why="the losses of the micro-batches are added up on the last stage",
             fix="return the mean of the loss over the batch, and nothing beside it")  # fmt: skip
    counts = len(tree_util.tree_leaves(params)), len(tree_util.tree_leaves(batch))
    consts: dict[int, Any] = {}
    avals: dict[int, Any] = {}
    ops: list[Op] = []

    def new(aval: Any) -> Value:
        avals[len(avals)] = aval
        return Value(len(avals) - 1)

    def constant(value: Any, aval: Any) -> Value:
        made = new(aval)
        consts[made.number] = value
        return made

    def walk(jaxpr: Any, inputs: Sequence[Any], mark: tuple[int, int] | None) -> list[Any]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
        for eqn in jaxpr.eqns:
            given = [read(v) for v in eqn.invars]
            if eqn.primitive.name in _OPENED:
                name = eqn.params.get("name", "")
                found = re.fullmatch(MARK + r"(\d+)_(\d+)", name)
                inside = inner(eqn)[0]
                consts_inside = getattr(eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr"), "consts", ())
                given = [*map(constant, consts_inside, (v.aval for v in inside.constvars)), *given]
                made = _walked(walk, inside, given, (int(found[1]), int(found[2])) if found else mark)
            else:
                made = [new(v.aval) for v in eqn.outvars]
                ops.append(Op(eqn, tuple(given), tuple(v.number for v in made), mark))
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    arguments = [new(v.aval) for v in closed.jaxpr.invars]
    arguments = [*map(constant, closed.consts, (v.aval for v in closed.jaxpr.constvars)), *arguments]
    (loss,) = _walked(walk, closed.jaxpr, arguments, None)
    return Program(*counts, consts, tuple(ops), loss, avals)


def _walked(walk: Any, jaxpr: Any, arguments: Sequence[Any], mark: tuple[int, int] | None) -> list[Any]:
    closed_over = len(jaxpr.constvars)
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]) if closed_over else jaxpr
    return walk(opened, arguments, mark)


_CHIP = CHIPS["h100"]
"""Whose figures stages are balanced by, whatever they run on: only the ratio of its two rates matters, and cuts are the same
everywhere."""


def cost_s(op: Op) -> float:
    """Seconds of an op, roughly: products by their FLOPs, all else by the bytes of what it makes.

    A guess for balancing: no fusion, no cache, and a loop whose length is not known counts once.
    """
    return _eqn_s(op.eqn)


def _eqn_s(eqn: Any) -> float:
    bodies = inner(eqn)
    if bodies and eqn.primitive.name not in ("reduce", "scatter", "scatter-add", "argmax", "argmin"):
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        each = [sum(_eqn_s(e) for e in body.eqns) for body in bodies]
        return times * (max(each) if eqn.primitive.name == "cond" else sum(each))
    made = sum(math.prod(v.aval.shape) * _itemsize(v.aval) for v in eqn.outvars)
    return max(_flops(eqn) / _CHIP.flops, made / _CHIP.memory_bytes_s)


def _itemsize(aval: Any) -> int:
    return getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _flops(eqn: Any) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        a = eqn.invars[0].aval
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(a.shape[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / kernel[out]
    return 0.0
