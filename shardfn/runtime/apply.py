"""From a plan to a function that runs: `jax.jit` with the plan's shardings, or the function for a user's own `jax.jit`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardfn.errors import ShardError, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.ambient_mesh import AmbientMesh, explained_types
from shardfn.frontend.arguments import Call, bind, missing_arguments, signature, split
from shardfn.frontend.callee import Callee, describe, is_function
from shardfn.frontend.memories import brought, other_memory
from shardfn.frontend.notes import Counted, counting
from shardfn.frontend.other_call import arguments_text, differences
from shardfn.frontend.outer_call import inside
from shardfn.frontend.static_leaves import hide_static, restore_static
from shardfn.frontend.strategy import short
from shardfn.frontend.trace_errors import explained_by_arguments
from shardfn.frontend.user_errors import begin_in_function
from shardfn.ir.model import mesh_sizes
from shardfn.planning.call import CallFunction, OtherCall, TracedCall, closed_over_arguments, pure_function
from shardfn.planning.inside import apply_constraints
from shardfn.planning.meshes import PlanMesh, expresses
from shardfn.planning.plan import Plan, answered_call, code_of_plan, shardings_on
from shardfn.runtime.plan_derivatives import with_planned_derivatives
from shardfn.runtime.processes import as_global, is_local_input, own_copy, spans_processes


def jitted(plan: Plan) -> Any:
    """`jax.jit` of the function of a plan, with the planned shardings of arguments and results.

    Args:
      plan: the plan, made in this process.
    """
    function, options = _on_own_mesh(plan, nested=False)
    return jax.jit(function, **options)


def jitted_for_calls(plan: Plan, nested: bool = False) -> Any:
    """`jitted` for calls such as the one that was planned, on the mesh around them.

    Args:
      plan: the plan, made in this process.
      nested: whether it is for calls inside a transformation. Arguments and results then get constraints: shardings of the
        `jit` would also apply to tangents and cotangents, which may come with any sharding.
    """
    function, options = _for_calls(plan, nested)
    return jax.jit(function, **options)


def counted_run(plan: Plan, arrays: Sequence[Any]) -> tuple[Counted, ...]:
    """Run a plan once, on its arrays, which are not donated, for what its function counts (`frontend.notes.counted`)."""
    function, options = _for_calls(plan, nested=False)
    found: list[Counted] = []
    run = counting(function, found.append, options["static_argnums"])
    jax.block_until_ready(jax.jit(run, **{**options, "donate_argnums": ()})(*arrays))
    jax.effects_barrier()
    return tuple(found)


def _for_calls(plan: Plan, nested: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function and its options, as `jitted_for_calls` gives them to `jax.jit`."""
    ambient = answered_call(plan).posed.call.ambient_mesh
    if ambient is not None and (nested or ambient.explicit):
        return _on_ambient_mesh(plan, ambient, nested)
    return _on_own_mesh(plan, nested)


def _on_own_mesh(plan: Plan, nested: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a plan on a mesh of its devices, and its options for `jax.jit`.

    The mesh is the plan's own, or one with prime axes if the function has meshes of its own. A nested function always uses
    prime axes, so that all plans on these devices share a mesh: `jit` cannot express a result sharding for which its mesh
    has no axes.
    """
    call = answered_call(plan).posed.call
    shapes = [*map(mesh_sizes, call.traced.meshes)]
    meshes = [shape for shape in shapes if math.prod(shape) == plan.hardware.count]
    is_prime = nested or not all(expresses(plan.axes, shape) for shape in meshes)
    mesh = (PlanMesh.with_prime_axes if is_prime else PlanMesh.of)(plan.mesh)
    static_argnums = call.function.call.statics
    ins, outs = shardings_on(plan, mesh)
    if nested:
        function = _differentiable(plan, call.function, mesh)

        @functools.wraps(function)
        def constrained(*flat: Any) -> Any:
            own = dataclasses.replace(call.function.call, values=flat)
            placed = tree_util.tree_map(_placed, own.dynamic, ins)
            results = function(*own.replaced(tree_util.tree_structure(own.dynamic), tree_util.tree_leaves(placed)))
            return tree_util.tree_map(_placed, results, outs)

        return constrained, {"static_argnums": static_argnums}
    function = _constrained(plan, call.function, mesh)
    return function, {"in_shardings": ins, "out_shardings": outs, **outermost(call)}


def _on_ambient_mesh(plan: Plan, ambient: AmbientMesh, nested: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a plan on the mesh around the call, which has no devices in a traced function; and its options.

    Inside, all axes but Manual ones are Auto, and the arguments and results have constraints. Outside, their types have the
    Explicit axes of the plan's shardings.
    """
    planned = answered_call(plan).posed.call
    call, mesh = planned.function.call, PlanMesh.of(ambient.auto)
    function = _differentiable(plan, planned.function, mesh)
    ins, outs = shardings_on(plan, mesh)
    in_types, out_types = tree_util.tree_map(ambient.type_of, (ins, outs))

    @functools.wraps(function)
    def on_ambient_mesh(*flat: Any) -> Any:
        own = dataclasses.replace(call, values=flat)
        treedef = tree_util.tree_structure(own.dynamic)

        def inside(*dynamic: Any) -> Any:
            placed = tree_util.tree_map(_placed, dynamic, ins)
            with explained_types(function.__name__):
                results = function(*own.replaced(treedef, tree_util.tree_leaves(placed)))
            return tree_util.tree_map(_placed, results, outs)

        if not ambient.explicit:
            return inside(*own.dynamic)
        typed = tree_util.tree_map(jax.sharding.reshard, own.dynamic, in_types)
        return jax.sharding.auto_axes(inside, axes=tuple(ambient.explicit), out_sharding=out_types)(*typed)

    return on_ambient_mesh, {"static_argnums": call.statics} if nested else outermost(planned)


def _placed(value: Any, sharding: NamedSharding) -> Any:
    """A traced array in the memory of a sharding, with the sharding as a constraint."""
    return jax.lax.with_sharding_constraint(brought(value, sharding.memory_kind), sharding)


def outermost(call: TracedCall) -> dict[str, Any]:
    """The options of `jax.jit` for calls outside transformations."""
    options = dict(call.compiler_options) if call.compiler_options else None
    function = call.function
    return {
        "static_argnums": function.call.statics,
        "donate_argnums": function.donate_argnums,
        "compiler_options": options,
    }


def _constrained(plan: Plan, function: CallFunction, mesh: PlanMesh) -> Callable[..., Any]:
    """The function of a call with the constraints of a plan."""
    found = function.on(mesh)
    if not plan.constraints and not plan.detours:
        return found
    return functools.wraps(found)(apply_constraints(found, plan.constraints, mesh, function.call.statics, plan.detours))


def _differentiable(plan: Plan, function: CallFunction, mesh: PlanMesh) -> Callable[..., Any]:
    """The function of a call with the constraints of a plan. Derivatives that are taken from outside are planned too."""
    run = _constrained(plan, function, mesh)
    return with_planned_derivatives(plan, function, mesh, run, lambda own: _for_calls(own, nested=True)[0])


def apply_plan(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`Plan.apply`."""
    planned = answered_call(plan).posed.call.function
    if not is_function(fn):
        fail(StrategyTypeError, f"`plan.apply` takes a function, not {a(fn)}", where=f"fn = {short(fn)}",
             why="it is the function that gets the plan's constraints",
             fix=f"pass the planned one: plan.apply({plan.function})")  # fmt: skip
    callee = dataclasses.replace(describe(fn), objects=planned.callee.objects, refs=planned.callee.refs)
    _check_signature(plan, callee, planned.call)
    try:
        return _applied(plan, planned, callee, fn)
    except Exception as error:
        begin_in_function(error)
        if not isinstance(error, ShardError):
            given = arguments_text(planned.call)
            error.add_note(f"plan.apply traced `{callee.name}` with the arguments that were planned: {given}")
        raise


def _check_signature(plan: Plan, callee: Callee, call: Call) -> None:
    """Raise a StrategyTypeError if the planned arguments do not fit the signature of another function."""
    args, kwargs = split(call.slots, [*call.arguments().values()])
    try:
        if callee.signature is not None:
            callee.signature.bind(*args, **kwargs)
    except TypeError as error:
        wrong = missing_arguments(callee.signature, args, kwargs) or error
        fail(StrategyTypeError, f"the planned arguments do not fit `{callee.name}`: {wrong}",
             where=f"plan.apply({callee.name}): {callee.name}{callee.signature}; planned: {arguments_text(call)}",
             why=f"it is called as `{plan.function}` was, to see whether it is the same program",
             fix=f"plan it: shardfn.plan({callee.name}, ...), or apply the plan to the function itself")  # fmt: skip


def _applied(plan: Plan, planned: CallFunction, callee: Callee, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_plan` of a function that takes the planned arguments."""
    call, arrays = planned.call, callee.read()
    if call.closed_over is not None:
        own = closed_over_arguments(callee, call.without_closed_over(), call.closed_over.only_refs)
        call, arrays = dataclasses.replace(call, closed_over=own), {**arrays, **own.current()}
    function = planned.of(inside(pure_function(callee.frozen(call), call), planned.outer))
    if _program(function) != _program(planned):
        fail(StrategyError, f"`{callee.name}` is another function than `{plan.function}`, which was planned",
             where=f"plan.apply({callee.name})",
             why="it traces to another program, in which the plan's constraints have no place",
             fix=f"plan it: shardfn.plan({callee.name}, ...), or apply the plan to the function itself")  # fmt: skip
    mesh = PlanMesh.of(plan.mesh)
    constrained, expected = _differentiable(plan, function, mesh), signature(call.values, call.statics)

    @functools.wraps(function.pure)
    def applied(*values: Any) -> Any:
        given = [*map(hide_static, values)]
        if len(given) == len(call.values) and signature(given, call.statics) == expected:
            with contextlib.suppress(OtherCall):  # of types
                return restore_static(constrained(*given))
        fix = f"plan again for these arguments: {code_of_plan(plan, callee.name)}"
        if planned.call.stateful or planned.callee.has_held:
            fix = f"pass plan.apply({callee.name}).arguments(...), which takes modules apart; or {fix}"
        fail(StrategyError, f"`{callee.name}` is called with other arguments than it was planned for",
             where=f"plan.apply({callee.name}): {differences(call, given) or 'types with Explicit mesh axes'}",
             why="a plan is for one structure, one set of shapes and dtypes, and the static values of its call",
             fix=fix)  # fmt: skip

    def arguments(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        static = frozenset(slot.name for slot in call.slots if slot.is_static)
        slots, values = bind(callee.signature, args, kwargs, static_argnames=static)
        _, values = describe(fn).of_call(slots, values)
        return ({**arrays, **callee.read()}, *values) if planned.call.stateful else tuple(values)

    applied.arguments = arguments  # type: ignore[attr-defined]
    if planned.call.stateful:
        applied.arrays = arrays  # type: ignore[attr-defined]
    return applied


def _program(function: CallFunction) -> tuple[str, Any]:
    """The jaxpr of a function, without the addresses of Python objects, and the structure of its result."""
    with explained_by_arguments(function.call):
        traced = jax.jit(function.pure, static_argnums=function.call.statics).trace(*function.call.values)
    return re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)), tree_util.tree_structure(traced.out_info)


def moved(
    values: Sequence[Any], targets: Sequence[NamedSharding], replaced: Collection[int] = frozenset()
) -> list[Any]:
    """Transfer the arrays that are committed to another sharding, which `jax.jit` refuses, and uncommitted ones at `replaced`.

    The next call passes a result at these positions. Committed now, the array does not cause a second compile then. For
    devices of several processes, an array of one process becomes a global one; all processes hold the same content.
    """
    return [_moved(v, target, i in replaced) for i, (v, target) in enumerate(zip(values, targets, strict=True))]


def _moved(value: Any, target: NamedSharding, is_replaced: bool) -> Any:
    if isinstance(
        value, np.ndarray
    ):  # JAX (0.10.2, 0.12) may run float32 code on float64 after a change of `jax_enable_x64`
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    if is_local_input(value, target):
        return as_global(value, target)
    if target.is_fully_addressable and spans_processes(value):
        value = own_copy(value, target)
    is_kept = is_replaced or other_memory(target) is not None
    is_moved = lies_elsewhere(value, target) or (is_kept and is_loose(value, target))
    return jax.device_put(value, target) if is_moved else value


def is_loose(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is an uncommitted array that this process can transfer to `target`."""
    is_array = isinstance(value, jax.Array | np.ndarray) and not isinstance(value, Tracer)
    return is_array and not getattr(value, "committed", False) and target.is_fully_addressable


def lies_elsewhere(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is a concrete JAX array that is committed to another sharding than `target`."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.committed:
        return False
    return not value.sharding.is_equivalent_to(target, value.ndim)


def finish(callee: Callee, call: Call, result: Any, holds_static: bool = True) -> Any:
    """The user's result of a call; what it changed is put back into the callee's objects."""
    if holds_static:
        result = restore_static(result)
    if not call.returns_changes:
        return result
    result, changed = result
    if call.closed_over is not None:
        changed = call.closed_over.write(changed)
    if changed:
        callee.write(changed)
    return result
