"""A function and shapes to a lowered module, on paper: no device is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.extend import core as jex_core

from shardfn.errors import StrategyError, fail
from shardfn.frontend.closed_over import ClosedOverArray, closed_over
from shardfn.frontend.memories import kind_of_type, typed
from shardfn.ir import shardy
from shardfn.ir.model import Axes, Graph
from shardfn.ir.rewrite import inner, rebind


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function lowered for a platform.

    The module's arguments are `captured` arrays first (those the function closes over, where they are tracers of a
    transformation outside), then the call's arrays; `results` is the pytree of result shapes.
    """

    module: Any
    graph: Graph
    captured: int
    results: Any
    meshes: tuple[Axes, ...]
    """The meshes that the function itself brings along (an inner `shard`, a `shard_map`)."""
    jaxpr: Any
    consts: tuple[Any, ...] = ()
    """The values of the jaxpr's constants."""
    platform: str = ""
    """What it was lowered for."""
    seen: shardy.ReaderCache | None = None
    """What was read of the module, for its partitioned programs."""
    closed_over: tuple[ClosedOverArray, ...] = ()
    """The arrays that the function closes over."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Graph values of the call's arrays."""
        return self.graph.inputs[self.captured :]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Graph values of the results, without tokens of ordered effects."""
        return self.graph.outputs[len(self.graph.outputs) - len(tree_util.tree_leaves(self.results)) :]


@dataclasses.dataclass(frozen=True)
class TracedJaxpr:
    """A function as a jaxpr, before it is lowered, which takes far longer than the trace."""

    stage: jax.stages.Traced
    results: Any
    """The pytree of result shapes."""
    arrays: int
    """How many arrays the call has."""
    closed_over: tuple[ClosedOverArray, ...]
    """The arrays that the function closes over."""
    is_rewritten: bool = False
    """Whether `stage` is of another function, which takes tracers that the function closes over as arguments."""

    @property
    def jaxpr(self) -> Any:
        """What the function computes."""
        return self.stage.jaxpr.jaxpr


def trace(function: Callable[..., Any], args: Sequence[Any], static_argnums: tuple[int, ...], platform: str) -> Traced:
    """`trace_jaxpr` and `lower` in one."""
    return lower(trace_jaxpr(function, args, static_argnums), platform)


def trace_jaxpr(
    function: Callable[..., Any],
    args: Sequence[Any],
    static_argnums: tuple[int, ...],
    names: Callable[..., Any] | None = None,
) -> TracedJaxpr:
    """Trace `function`. `names` is the user's function, whose variables give the arrays that it closes over their names.

    Errors of the function itself come out as they are.
    """
    traced = jax.jit(function, static_argnums=static_argnums, keep_unused=True).trace(*args)
    jaxpr = traced.jaxpr
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in tree_util.tree_leaves(traced.out_info)]
    kinds = map(kind_of_type, jaxpr.out_avals)
    results = tree_util.tree_unflatten(tree_util.tree_structure(traced.out_info), map(typed, shapes, kinds))
    held = closed_over(jaxpr, names)
    if mapped := _axes_around(jaxpr):
        if mapped[0] in jax.sharding.get_abstract_mesh().manual_axes:
            fail(StrategyError, f"`{function.__name__}` works along the axis `{mapped[0]}` of the shard_map around it",
                 where=f"axis_name = {mapped[0]!r}", why="it is planned over the other axes, where that axis is not there",
                 fix="call the collective in the function of the shard_map, on arguments or results of this one")  # fmt: skip
        fail(StrategyError, f"`{function.__name__}` works along the axis `{mapped[0]}` of a vmap around it",
             where=f"axis_name = {mapped[0]!r}", why="it is planned on its own, where that axis is not there",
             fix=f"shard what is mapped: shard(jax.vmap(f, axis_name={mapped[0]!r}), ...)")  # fmt: skip
    is_rewritten = any(isinstance(c, Tracer) for c in jaxpr.consts)
    if is_rewritten:
        open_ = jaxpr.jaxpr

        def with_constants(consts: list[Any], flat: list[Any]) -> list[Any]:
            return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(open_, consts))(*flat)

        shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in jaxpr.consts]
        flat = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in jaxpr.in_avals]
        traced = jax.jit(with_constants, keep_unused=True).trace(shapes, flat)
    dynamic = [a for i, a in enumerate(args) if i not in static_argnums]
    return TracedJaxpr(traced, results, len(tree_util.tree_leaves(dynamic)), held, is_rewritten)


def _axes_around(closed: Any) -> list[str]:
    """The named axes, of a `shard_map` or a `vmap` around, that a program works along."""
    found = [effect.name for effect in closed.effects if type(effect).__name__ == "NamedAxisEffect"]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return found if found or not manual else [name for name in _permuted(closed.jaxpr) if name in manual]


def _permuted(jaxpr: Any) -> Iterator[str]:
    """The axes of the `ppermute`s outside of a `shard_map`: JAX counts them as no effect."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            names = eqn.params["axis_name"]
            yield from (names if isinstance(names, tuple) else (names,))
        elif eqn.primitive.name != "shard_map":
            for body in inner(eqn):
                yield from _permuted(body)


def lower(traced: TracedJaxpr, platform: str, assumed_trips: int = 1) -> Traced:
    """Lower a traced function for `platform` (as `lowering_platforms` of JAX names it), and read the module.

    What calls back into Python cannot be lowered for a platform that is not here: then it is lowered for the one that is,
    whose ops are the same but for those that a platform has of its own. Loops of unknown length count `assumed_trips` times.
    """
    stage = _without_checks(traced.stage)
    try:
        lowered = stage.lower(lowering_platforms=(platform,))
    except ValueError:
        if platform == jax.default_backend():
            raise
        platform, lowered = jax.default_backend(), stage.lower()
    module = shardy.flat(lowered.compiler_ir("stablehlo"))
    seen = shardy.ReaderCache(assumed_trips)
    graph = shardy.read_graph(module, seen)
    captured, meshes = len(graph.inputs) - traced.arrays, shardy.used_meshes(module)
    return Traced(module, graph, captured, traced.results, meshes, traced.jaxpr, tuple(traced.stage.jaxpr.consts), platform,
                  seen, traced.closed_over)  # fmt: skip


def _without_checks(stage: jax.stages.Traced) -> jax.stages.Traced:
    """A traced function without the checks of `jax.experimental.checkify`. JAX does not lower them: `checkify.checkify` around a
    sharded function makes values of them after it is planned. They have no results that anything else could read."""
    closed = stage.jaxpr
    if not any(type(effect).__name__ == "ErrorEffect" for effect in closed.effects):
        return stage
    run = rebind(jex_core.jaxpr_as_fun(closed), lambda eqn, _: eqn.primitive.name == "check", lambda *_: [])
    shapes = [typed(jax.ShapeDtypeStruct(v.shape, v.dtype), kind_of_type(v)) for v in closed.in_avals]
    return jax.jit(run, keep_unused=True).trace(*shapes)


def shaped(leaf: Any) -> Any:
    """A leaf as tracing sees it, without its data; numbers stay as they are, for their weak type."""
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)
