"""A jaxpr that was traced with Explicit axes, as a jaxpr of the same ops with Auto axes.

With Explicit axes the sharding of each value is part of its type, and no op takes values of two meshes. Here the types lose
their shardings, in the constants and in the jaxprs inside too, so that the shardings are open again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import tree_util
from jax.core import ShapedArray, Tracer
from jax.extend import core, linear_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def with_auto_axes(closed: Any, mesh: AbstractMesh) -> Any:
    """The ops of a closed jaxpr with Auto axes in the place of Explicit ones.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> with jax.set_mesh(mesh):
    ...     table = jax.numpy.ones(8)
    ...     closed = jax.make_jaxpr(lambda x: x + table)(1.0)
    >>> auto = with_auto_axes(closed, mesh.abstract_mesh)
    >>> [one.out_avals[0].sharding.mesh.axis_types[0].name for one in (closed, auto)]
    ['Explicit', 'Auto']
    """
    return _ToAuto(mesh).value(closed)


@dataclasses.dataclass(frozen=True)
class _ToAuto:
    mesh: AbstractMesh

    def value(self, value: Any) -> Any:
        """A constant, a type, or the value of a parameter."""
        match value:
            case core.ClosedJaxpr():
                return core.ClosedJaxpr(self.jaxpr(value.jaxpr), [self.value(c) for c in value.consts])
            case core.Jaxpr():
                return self.jaxpr(value)
            case AbstractMesh():
                return value.update_axis_types(dict.fromkeys(value.explicit_axes, AxisType.Auto))
            case Mesh():
                types = self.value(value.abstract_mesh).axis_types
                return Mesh(value.devices, value.axis_names, axis_types=types)
            case NamedSharding():
                return NamedSharding(self.value(value.mesh), value.spec)
            case ShapedArray():
                unsharded = PartitionSpec(*[None] * value.ndim)
                return value.update(sharding=NamedSharding(self.value(value.sharding.mesh), unsharded))
            case Tracer():
                return value
            case jax.Array() if isinstance(value.sharding, NamedSharding):
                with jax.ensure_compile_time_eval():
                    return jax.device_put(value, self.value(value.sharding))
            case tuple() | list() if not tree_util.all_leaves([value]):
                return tree_util.tree_map(self.value, value, is_leaf=lambda one: one is not value)
        return value

    def parameter(self, name: str, value: Any) -> Any:
        """The value of a parameter of an equation."""
        rule = _RULES.get(name)
        return linear_util.wrap_init(rule(self, value), debug_info=value.debug_info) if rule else self.value(value)

    def jaxpr_rule(self, rule: Any) -> Callable[..., Any]:
        """A derivative rule that makes a jaxpr."""

        def run(*zeros: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh):
                found = rule.call_wrapped(*zeros)
            return self.value(found)

        return run

    def backward_rule(self, rule: Any) -> Callable[..., Any]:
        """A derivative rule that takes residuals and cotangents, and gives cotangents, which may be zeros instead of arrays."""

        def run(*args: Any) -> Any:
            results: list[Any] = []

            def arrays(*args: Any) -> list[Any]:
                results[:] = leaves, _ = tree_util.tree_flatten(rule.call_wrapped(*args), is_leaf=_is_zero)
                return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

            types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
            with jax.sharding.use_abstract_mesh(self.mesh):
                closed = jax.make_jaxpr(arrays)(*types)
            made = iter(core.jaxpr_as_fun(self.value(closed))(*args))
            leaves, tree = results
            return tree_util.tree_unflatten(
                tree, [type(leaf)(self.value(leaf.aval)) if _is_zero(leaf) else next(made) for leaf in leaves]
            )

        return run

    def jaxpr(self, jaxpr: Any) -> Any:
        made: dict[Any, Any] = {}

        def atom(old: Any) -> Any:
            if isinstance(old, core.Literal):
                return core.Literal(old.val, self.value(old.aval))
            if old not in made:
                made[old] = type(old)(self.value(old.aval))
            return made[old]

        def equation(eqn: Any) -> Any:
            params = {name: self.parameter(name, value) for name, value in eqn.params.items()}
            ins, outs = [*map(atom, eqn.invars)], [*map(atom, eqn.outvars)]
            primitive = eqn.primitive
            with jax.sharding.use_abstract_mesh(self.value(self.mesh)):  # which the equation keeps
                if primitive.name == "reshard":
                    primitive, params = _constraint(outs[0].aval, params["dst_sharding"])
                return core.new_jaxpr_eqn(ins, outs, primitive, params, eqn.effects, eqn.source_info)

        consts, ins, outs = ([*map(atom, found)] for found in (jaxpr.constvars, jaxpr.invars, jaxpr.outvars))
        return core.Jaxpr(consts, ins, outs, [*map(equation, jaxpr.eqns)], jaxpr.effects, jaxpr.debug_info)


def _is_zero(value: Any) -> bool:
    """Whether it is a cotangent that is zero, of which JAX keeps only the type."""
    return hasattr(value, "aval") and not isinstance(value, jax.Array)


def _constraint(aval: ShapedArray, sharding: NamedSharding) -> tuple[Any, dict[str, Any]]:
    """Primitive and parameters of the sharding constraint that stands for a `reshard`: this one takes Explicit axes only."""
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(aval).eqns
    return eqn.primitive, eqn.params


_RULES = {
    "jvp_jaxpr_fun": _ToAuto.jaxpr_rule,
    "fwd_jaxpr_thunk": _ToAuto.jaxpr_rule,
    "bwd": _ToAuto.backward_rule,
}
"""The parameters that hold a function's own derivatives. They know the types of the function's arguments."""
