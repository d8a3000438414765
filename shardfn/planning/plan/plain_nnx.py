"""Flax NNX objects in the code of a plan (`plain_jax`): `nnx.jit` takes them, by an `nnx.StateSharding` for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import tree_util

from shardfn.frontend import nnx_objects
from shardfn.planning.plan.plan import Decision, Plan, answered_call

OBJECT = "model"
"""The name of the object that a planned method belongs to, or that is itself the planned function."""

NAMED = """
def named(spec):
    if isinstance(spec, nnx.StateSharding):
        return nnx.StateSharding([(path, named(one)) for path, one in zip(spec.filters, spec.shardings)])
    return spec if isinstance(spec, NamedSharding) else NamedSharding(mesh, spec)


in_shardings, out_shardings = jax.tree.map(named, (in_specs, out_specs))
""".strip()
"""The shardings of specs, some of which are those of objects."""


def object_arguments(plan: Plan) -> tuple[int, ...]:
    """The numbers of the dynamic arguments that are or hold Flax NNX objects, where `nnx.jit` can take them."""
    function = answered_call(plan).posed.call.function
    call, callee = function.call, function.callee
    if call.closed_over is not None or callee.refs or any(callee.bound) or (call.stateful and not _is_nnx(plan)):
        return ()
    held = [i + call.stateful for i, name in enumerate(call.names) if name in callee.objects.places]
    return (*[0] * call.stateful, *held)


def object_name(plan: Plan) -> str:
    """The name of the object that is called, or whose method is; "" where the function has none."""
    call = answered_call(plan).posed.call.function.call
    if not call.stateful:
        return ""
    return next(name for name in (OBJECT, *(f"{OBJECT}_{i}" for i in range(99))) if name not in call.names)


def called(plan: Plan) -> str:
    """What is called of the object `object_name`: itself, or a method."""
    method = answered_call(plan).posed.call.function.callee.function.__name__
    return object_name(plan) + ("" if method == "__call__" else f".{method}")


def with_objects(plan: Plan, i: int, tree: Any, write: Callable[[dict[Any, Any]], Any]) -> Any:
    """An argument with what `write` makes of each object's values, by the object's own paths, in the place of the object.

    Args:
      plan: the plan.
      i: the argument's number among the dynamic ones.
      tree: the values in the structure in which the argument is planned.
      write: makes one leaf of the values of one object.

    Returns:
      The argument; None if an object cannot be written (`nnx_objects.with_values`).
    """
    function = answered_call(plan).posed.call.function
    callee, owned = function.callee, function.call.stateful
    if owned and i == 0:
        values = nnx_objects.with_values(callee.owner, tree)
        return None if values is None else write(values)
    treedef, paths = callee.objects.places[function.call.names[i - owned]]
    parts = treedef.flatten_up_to(tree)
    for at, path in enumerate(paths):
        if path:
            values = nnx_objects.with_values(callee.objects.nodes[path], nnx_objects.by_path(parts[at]))
            if values is None:
                return None
            parts[at] = write(values)
    return tree_util.tree_unflatten(treedef, parts)


def results(plan: Plan, tree: Any) -> tuple[Any, Sequence[Decision], Iterator[str]]:
    """The result of the user's function, the decisions on it, and a caution for each array that a call changes and that
    `nnx.jit`, which returns it as it came, shards otherwise than the plan."""
    result, _ = tree
    count = len(tree_util.tree_leaves(result))
    given = {d.path: d.spec for d in plan.inputs}
    changed = ((d.path.partition("/")[2], d) for d in plan.outputs[count:])
    moved = (path for path, d in changed if given.get(path, d.spec) != d.spec)
    return (
        result,
        plan.outputs[:count],
        (f"plan.apply returns `{path}` in another sharding than it takes it." for path in moved),
    )


def _is_nnx(plan: Plan) -> bool:
    callee = answered_call(plan).posed.call.function.callee
    return callee.adapter is not None and nnx_objects.is_module(callee.owner)
