"""The derivatives of a plan's function: `runtime.derivatives` for the devices and the mesh of the plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, warn
from shardfn.frontend.arguments import Call, bind
from shardfn.frontend.callee import describe
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import AUTO, PassedOn
from shardfn.ir.mlir import ir
from shardfn.movement import is_still, with_rotations_back
from shardfn.partition.xla_bugs import may_end_process
from shardfn.planning.answers import plan_search_answer, search
from shardfn.planning.call import CallFunction, pose
from shardfn.planning.meshes import PlanMesh
from shardfn.planning.plan import Plan, answered_call, shardings_on
from shardfn.planning.workarounds import rotations_apart
from shardfn.runtime.derivatives import Derived, Flat, Shardings, differentiable


def with_planned_derivatives(
    plan: Plan, function: CallFunction, mesh: PlanMesh, run: Callable[..., Any], nested: Callable[[Plan], Flat]
) -> Callable[..., Any]:
    """The function of a call with the constraints of a plan, whose derivatives are planned too.

    Args:
      plan: the plan.
      function: the function, without constraints.
      mesh: that of the constraints.
      run: the function with them.
      nested: makes a function, for calls inside a transformation, of the plan of a derivative.
    """
    planned, shared = answered_call(plan).posed.call, _shared_mesh(plan)
    if plan.hardware.count == 1 or (is_still(planned.traced.jaxpr) and not may_end_process(shared.mesh.shape.values())):
        return run
    if len(mesh.mesh.shape) > 1:
        run = functools.wraps(run)(rotations_apart(run, mesh.mesh, function.call.statics))
    own_derivatives = with_rotations_back(run, function.call.statics)
    if _keeps_own_derivatives(plan):
        return functools.wraps(run)(own_derivatives)
    call, results = function.call, tree_util.tree_structure(planned.traced.results)
    treedef = tree_util.tree_structure(call.dynamic)

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: tree_util.tree_leaves(function(*call.replaced(treedef, arrays)))

    @functools.cache  # most functions are never called inside a transformation
    def found() -> tuple[Derived, Flat]:
        own = flat(run)
        if not plan.constraints:  # the plans of the derivatives have workarounds and detours of their own
            own = flat(dataclasses.replace(function, halo_shards={}, wrong=()).on(mesh))
        shapes = jax.eval_shape(lambda *own: own, *tree_util.tree_leaves(call.dynamic))
        ins, outs = map(tree_util.tree_leaves, shardings_on(plan, shared))
        derived = Derived(flat(run), own, shapes, tuple(ins), tuple(outs), functools.partial(_plan_flat, plan, nested))
        return derived, differentiable(derived)

    @functools.wraps(run)
    def with_derivatives(*values: Any) -> Any:
        arrays = tree_util.tree_leaves(dataclasses.replace(call, values=values).dynamic)
        if any(_varying(x) for x in arrays):
            made = _warned(flat(own_derivatives), plan.function)(*arrays)
        else:
            derived, function = found()
            made = _with_captured(plan, derived, arrays) if planned.traced.captured else function(*arrays)
        return tree_util.tree_unflatten(results, made)

    return with_derivatives


def _keeps_own_derivatives(plan: Plan) -> bool:
    """Whether JAX differentiates the function of a plan: one with arrays in another memory, or with refs."""
    effects = {type(effect).__name__ for effect in answered_call(plan).posed.call.traced.jaxpr.effects}
    return not effects <= _CALLBACKS or any(d.memory_kind for d in (*plan.inputs, *plan.outputs))


_CALLBACKS = frozenset({"DebugEffect", "IOEffect"})
"""Effects that a function with derivative rules of its own may have."""


def _varying(x: Any) -> bool:
    """Whether an array in a `shard_map` has a type that says along which axes it differs between devices."""
    return bool(jax.typeof(x).manual_axis_type.varying)


def _warned(function: Flat, name: str) -> Flat:
    """`function`, with a warning where it is differentiated."""

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        warn(f"the derivative of `{name}` has no plan of its own here, in a shard_map that checks which arrays vary, so that "
             "bugs of XLA may show in it. Write jax.shard_map(..., check_vma=False), or shard the gradient: "
             "shard(jax.grad(...))")  # fmt: skip
        return jax.jvp(function, tuple(primals), tuple(tangents))

    warned = jax.custom_jvp(function)
    warned.defjvp(derivative)
    return warned


def _with_captured(plan: Plan, derived: Derived, arrays: Sequence[Any]) -> Sequence[Any]:
    """The results of a function that closes over traced arrays. They become arguments, as what is differentiated may not be
    closed over."""
    forms = [jax.make_jaxpr(function)(*arrays) for function in (derived.run, derived.function)]
    captured = list({id(c): c for closed in forms for c in closed.consts if isinstance(c, Tracer)}.values())

    def opened(closed: Any) -> Flat:
        places = [next((i for i, c in enumerate(captured) if c is own), None) for own in closed.consts]

        def function(*every: Any) -> Sequence[Any]:
            own = [c if i is None else every[len(arrays) + i] for i, c in zip(places, closed.consts, strict=True)]
            return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(closed.jaxpr, own))(*every[: len(arrays)])

        return function

    run, function = map(opened, forms)
    shapes = (jax.ShapeDtypeStruct(c.shape, c.dtype, weak_type=jax.typeof(c).weak_type) for c in captured)
    ins = (*derived.ins, *_captured_shardings(plan, captured))
    return differentiable(Derived(run, function, (*derived.shapes, *shapes), ins, derived.outs, derived.plan))(
        *arrays, *captured
    )


def _captured_shardings(plan: Plan, captured: Sequence[Any]) -> list[NamedSharding]:
    """The shardings of the arrays that a function closes over, as they are propagated; replicated where they cannot be told."""
    graph, mesh, found = plan.partitioned.graph, _shared_mesh(plan), list[NamedSharding]()
    left = list(graph.inputs[: answered_call(plan).posed.call.traced.captured])
    for array in captured:
        value = next((v for v in left if graph.values[v].shape == array.shape), None)
        spec = ((),) * array.ndim
        if value is not None:
            left.remove(value)
            own = plan.partitioned.specs[value]
            spec = own if all(axis in mesh.parts for dim in own for axis in dim) else spec
        found.append(mesh.sharding(spec))
    return found


def _plan_flat(
    plan: Plan,
    nested: Callable[[Plan], Flat],
    function: Flat,
    shapes: Sequence[Any],
    ins: Shardings,
    outs: Sequence[NamedSharding | None],
) -> tuple[Flat, Shardings]:
    """A `runtime.derivatives.Planner` for the hardware of a plan."""

    def named(*arrays: Any) -> tuple[Any, ...]:
        return tuple(function(*arrays))

    named.__name__ = named.__qualname__ = plan.function
    is_ambient, mesh = answered_call(plan).posed.call.ambient_mesh is not None, plan.mesh
    # in the order of the plan
    devices = plan.hardware if is_ambient or not isinstance(mesh, Mesh) else tuple(mesh.devices.flat)
    given = (lambda s: s.spec) if is_ambient else (lambda s: s)  # the mesh around has axes of its own
    entries = tuple(PassedOn(AUTO, "") if s is None else given(s) for s in outs)  # of which none is searched
    callee = describe(named)
    slots, values = bind(callee.signature, shapes, {})
    call = Call(slots, values, stateful=False).in_place()

    def planned(ins: Shardings) -> Plan:
        options = Options(in_strategy=tuple(map(given, ins)), out_strategy=entries, device=devices)
        with ir.Context():  # JAX may be lowering the program around it: no op is to be put there
            posed = pose(callee, options, call, Defaults(), None)
            function = dataclasses.replace(posed.call.function, has_residuals=True)
            posed = dataclasses.replace(posed, call=dataclasses.replace(posed.call, function=function))
            return plan_search_answer(posed, search(posed))

    try:
        own = planned(ins)
    except StrategyError:  # XLA does not reshard the arguments to the results (`refuse_reshardings`)
        own = planned(tuple(NamedSharding(s.mesh, PartitionSpec()) for s in ins))
    return nested(own), tuple(shardings_on(own, _shared_mesh(own))[1])


def _shared_mesh(plan: Plan) -> PlanMesh:
    """The mesh around the call, or that which all plans on the devices share."""
    ambient = answered_call(plan).posed.call.ambient_mesh
    return PlanMesh.with_prime_axes(plan.mesh) if ambient is None else PlanMesh.of(ambient.auto)
