"""Derivatives of a sharded function that are taken from outside, as planned functions of their own.

`jax.grad(shard(f))` differentiates a function that is planned already. The transposes of its ops are in no plan: XLA would shard
them as it likes, with the bugs that `planning.workarounds` keeps out of a plan, and without the exchanges with neighbours that
`movement` writes. So a derivative is three functions, each planned when it is first needed:

| function | takes | gives |
|---|---|---|
| forward | the arguments | the results and the residuals |
| tangents | residuals, tangents of the arguments | tangents of the results |
| cotangents | residuals, cotangents of the results | cotangents of the arguments |

Tangents and cotangents are sharded as what they belong to, residuals as the plan of the forward function says. The last two
functions have derivatives in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.sharding import NamedSharding

from shardfn.ir.linear_call import linear_call, without_linear_calls
from shardfn.movement import with_rotations_back
from shardfn.planning.call import settings

Flat = Callable[..., Sequence[Any]]
"""Takes arrays and gives arrays."""
Shardings = tuple[NamedSharding, ...]
Planner = Callable[[Flat, Sequence[Any], Shardings, Sequence[NamedSharding | None]], tuple[Flat, Shardings]]
"""Plans a function by the shapes of its arguments, their shardings, and those of its results, of which None is open. Gives the
function with its constraints, and the shardings of all results."""


class Derived(NamedTuple):
    """A function and what its derivatives are planned with."""

    run: Flat
    """The function as it is planned."""
    function: Flat
    """What is differentiated: the same in another form."""
    shapes: Sequence[jax.ShapeDtypeStruct]
    """Those of its arguments, with weak types."""
    ins: Shardings
    outs: Shardings
    plan: Planner


def differentiable(derived: Derived) -> Flat:
    """The function of `derived`, whose derivatives are planned when they are taken.

    >>> same = lambda function, shapes, ins, outs: (function, (None,) * 9)
    >>> f, x = lambda x: [x * x], jax.ShapeDtypeStruct((), "float32")
    >>> jax.grad(lambda x: differentiable(Derived(f, f, [x], (None,), (None,), same))(x)[0])(jnp.float32(3)).item()
    6.0
    """

    @functools.cache
    def linearized(active: tuple[int, ...], settings: Any) -> _Linearized:
        return _Linearized(derived, active)

    function = jax.custom_jvp(lambda *arrays: list(derived.run(*arrays)))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        active = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
        made = linearized(active, settings())
        results, residuals = made.forward(primals)
        types = [results[i] for i in made.inexact]
        moved = linear_call(made.tangents, made.cotangents, residuals, [tangents[i] for i in active], types)
        moving = dict(zip(made.inexact, moved, strict=True))
        return results, [moving[i] if i in moving else _no_tangent(y) for i, y in enumerate(results)]

    function.defjvp(derivative, symbolic_zeros=True)
    return function


class _Linearized:
    """A function, linearized for tangents of its arguments at `active`."""

    def __init__(self, derived: Derived, active: tuple[int, ...]):
        self.derived, self.active = derived, active
        self.inexact: Sequence[int] = ()
        """The results that have tangents."""
        closed, (_, linear) = jax.make_jaxpr(self._linearize, return_shape=True)(*derived.shapes)
        self.linear = tree_util.tree_structure(linear)
        """Of the linear function, whose leaves are the residuals."""
        self.residuals = Residuals(closed, len(derived.outs))
        results = (*derived.outs, *(None,) * self.residuals.returned)
        self.run, outs = derived.plan(
            without_linear_calls(self.residuals.forward), derived.shapes, derived.ins, results
        )
        self.residual_shardings = self.residuals.handed_on(outs[len(derived.outs) :], derived.ins)
        self.planned: dict[Any, Flat] = {}

    def _linearize(self, *arrays: Any) -> tuple[Sequence[Any], Any]:
        function = with_rotations_back(self.derived.function)

        def split(*own: Any) -> tuple[list[Any], list[Any]]:
            whole = dict(enumerate(arrays)) | dict(zip(self.active, own, strict=True))
            results = function(*(whole[i] for i in range(len(arrays))))
            self.inexact = [i for i, y in enumerate(results) if jnp.issubdtype(y.dtype, jnp.inexact)]
            return [results[i] for i in self.inexact], list(results)

        _, linear, results = jax.linearize(split, *(arrays[i] for i in self.active), has_aux=True)
        return results, linear

    def forward(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results and the residuals."""
        made, count = self.run(*arrays), len(self.derived.outs)
        return list(made[:count]), self.residuals.handed_on(made[count:], arrays)

    def tangents(self, *arrays: Any) -> Sequence[Any]:
        """The tangents of the inexact results, of residuals and the tangents of the active arguments."""

        def tangents(*arrays: Any) -> Sequence[Any]:
            linear, own = self._linear(arrays)
            return linear(*own)

        ins, outs = _at(self.derived.ins, self.active), _at(self.derived.outs, self.inexact)
        return self._planned(None, tangents, arrays, ins, outs)

    def cotangents(self, *arrays: Any, which: tuple[int, ...]) -> Sequence[Any]:
        """The cotangents of the active arguments, of residuals and the cotangents of the inexact results at `which`."""
        shapes = [_strong(self.derived.shapes[i]) for i in self.active]

        def cotangents(*arrays: Any) -> Sequence[Any]:
            linear, own = self._linear(arrays)

            def chosen(*tangents: Any) -> list[Any]:
                made = linear(*tangents)
                return [made[i] for i in which]

            return jax.linear_transpose(chosen, *shapes)(list(own))

        ins = _at(self.derived.outs, [self.inexact[i] for i in which])
        return self._planned(which, cotangents, arrays, ins, _at(self.derived.ins, self.active))

    def _linear(self, arrays: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The linear function, of residuals, and what follows them."""
        count = len(self.residual_shardings)
        return tree_util.tree_unflatten(self.linear, self.residuals.whole(arrays[:count])), arrays[count:]

    def _planned(
        self, key: Any, function: Flat, arrays: Sequence[Any], ins: Shardings, outs: Shardings
    ) -> Sequence[Any]:
        arrays = [_of_its_dtype(x) for x in arrays]
        key = key, settings()
        if key not in self.planned:
            shapes, ins = [*map(_strong, arrays)], (*self.residual_shardings, *ins)
            function = without_linear_calls(function)
            run, _ = self.derived.plan(function, shapes, ins, outs)
            self.planned[key] = differentiable(Derived(run, function, shapes, ins, outs, self.derived.plan))
        return self.planned[key](*arrays)


class Residuals:
    """What a forward function hands on to the functions after it.

    An argument is not returned again, and what depends on no argument, such as a mask of positions, is computed again.
    """

    def __init__(self, closed: Any, count: int):
        """Of the jaxpr of a function that returns `count` results, and then residuals."""
        jaxpr, known, eqns = closed.jaxpr, set(closed.jaxpr.constvars), []
        for eqn in jaxpr.eqns:
            if all(isinstance(v, core.Literal) or v in known for v in eqn.invars) and not eqn.effects:
                known.update(eqn.outvars)
                eqns.append(eqn)
        self.variables = jaxpr.outvars[count:]
        self.is_constant = [isinstance(v, core.Literal) or v in known for v in self.variables]
        self.arguments = {v: i for i, v in enumerate(jaxpr.invars)}
        rows = list(zip(self.variables, self.is_constant, strict=True))
        constant = [v for v, is_constant in rows if is_constant]
        returned = [v for v, is_constant in rows if not is_constant and v not in self.arguments]
        self.returned = len(returned)
        self.constant = _evaluated(jaxpr.replace(invars=[], outvars=constant, eqns=eqns), closed.consts)
        self.forward = _evaluated(jaxpr.replace(outvars=[*jaxpr.outvars[:count], *returned]), closed.consts)

    def handed_on(self, returned: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Of what stands for the residuals that are returned and for the arguments, what stands for those that are handed on."""
        rest = iter(returned)
        own = [v for v, is_constant in zip(self.variables, self.is_constant, strict=True) if not is_constant]
        return [arguments[self.arguments[v]] if v in self.arguments else next(rest) for v in own]

    def whole(self, handed_on: Sequence[Any]) -> list[Any]:
        """All residuals, of those that are handed on."""
        own, constant = iter(handed_on), iter(self.constant())
        return [next(constant if is_constant else own) for is_constant in self.is_constant]


def _at(values: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in places)


def _evaluated(jaxpr: Any, consts: Sequence[Any]) -> Flat:
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))


def _of_its_dtype(x: Any) -> Any:
    """An array or a number without a weak type."""
    kind = jax.typeof(x)
    return lax.convert_element_type(x, kind.dtype) if kind.weak_type else x


def _strong(shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype)


def _no_tangent(x: Any) -> Any:
    """The tangent of an array of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)
