"""A call that is linear in some of its arguments, with a transpose that is a function of its own.

JAX transposes a linear function op by op. Here the function says how: `jax.custom_derivatives.linear_call` does the same, but not
under `jax.vmap`, and not where its other arguments are differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from shardfn.ir.rewrite import rebind


class Transpose(Protocol):
    """The transpose of a linear function."""

    def __call__(self, *arrays: Any, which: tuple[int, ...]) -> Sequence[Any]:
        """The cotangents of all linear arguments, of the other arguments and the cotangents of the results at `which`."""
        ...


def linear_call(
    linear: Callable[..., Sequence[Any]],
    transpose: Transpose,
    others: Sequence[Any],
    operands: Sequence[Any],
    types: Sequence[Any],
) -> list[Any]:
    """The results of a function that is linear in its last arguments.

    Neither function is called before it is known which of them is needed: `linear` where the call is lowered or evaluated,
    `transpose` where it is transposed.

    Args:
      linear: takes `others` and `operands`.
      transpose: its transpose.
      others: arguments that it need not be linear in.
      operands: arguments that it is linear in.
      types: arrays of the types of the results, or these types (`jax.typeof`).

    >>> double = lambda scale, x: [scale * x]
    >>> back = lambda scale, cotangent, which: [scale * cotangent]
    >>> jax.grad(lambda x: linear_call(double, back, [2.0], [x], [x])[0])(jnp.float32(1)).item()
    2.0
    """
    own = (t if isinstance(t, ShapedArray) else jax.typeof(t) for t in types)
    own = tuple(t.update(weak_type=False) for t in own)
    return _LINEAR.bind(*others, *operands, linear=linear, transpose=transpose, count=len(others), types=own)


def without_linear_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with what its linear calls compute in their place."""
    name = _LINEAR.name
    return rebind(
        function, lambda eqn, number: eqn.primitive.name == name, lambda eqn, xs, number: _evaluate(*xs, **eqn.params)
    )


def _evaluate(*arrays: Any, linear: Any, **_: Any) -> list[Any]:
    return list(linear(*arrays))


def _types(*_: Any, types: Sequence[Any], **__: Any) -> list[Any]:
    return list(types)


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Any, transpose: Any, count: int, types: Any
) -> tuple[list[Any], list[Any]]:
    call = functools.partial(linear_call, linear, transpose, types=types)
    results, parts = call(primals[:count], primals[count:]), list[list[Any]]()
    if not all(map(_is_zero, tangents[count:])):
        parts.append(call(primals[:count], [*map(ad.instantiate_zeros, tangents[count:])]))
    moving = [i for i, t in enumerate(tangents[:count]) if not _is_zero(t)]
    if moving:

        def of(*own: Any) -> list[Any]:
            arrays = dict(enumerate(primals)) | dict(zip(moving, own, strict=True))
            return list(linear(*(arrays[i] for i in range(len(primals)))))

        # the results above stay calls that can be transposed
        parts.append(jax.jvp(of, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))[1])
    if not parts:
        return results, [ad.Zero(jax.typeof(y)) for y in results]
    return results, [functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)]


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def _transposed(cotangents: Sequence[Any], *arrays: Any, transpose: Any, count: int, **_: Any) -> list[Any]:
    which = tuple(i for i, c in enumerate(cotangents) if type(c) is not ad.Zero)
    if not which:
        return [None] * count + [ad.Zero(a.aval) for a in arrays[count:]]
    return [None] * count + [*transpose(*arrays[:count], *(cotangents[i] for i in which), which=which)]


def _batched(
    arrays: Sequence[Any], dims: Sequence[int | None], *, linear: Any, transpose: Any, count: int, types: Any
) -> tuple[list[Any], list[int]]:
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, dims, strict=True)]
    others, operands = moved[:count], moved[count:]
    operands = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else a for a, d in zip(operands, dims[count:], strict=True)
    ]
    of_others = tuple(None if d is None else 0 for d in dims[:count])

    def back(*arrays: Any, which: tuple[int, ...]) -> Sequence[Any]:
        axes = (*of_others, *(0,) * len(which))
        return jax.vmap(functools.partial(transpose, which=which), in_axes=axes)(*arrays)

    forth = jax.vmap(linear, in_axes=(*of_others, *(0,) * len(operands)))
    return linear_call(forth, back, others, operands, [unmapped_aval(size, 0, t) for t in types]), [0] * len(types)


_LINEAR = Primitive("linear_call")
_LINEAR.multiple_results = True
_LINEAR.def_impl(_evaluate)
_LINEAR.def_abstract_eval(_types)
ad.primitive_jvps[_LINEAR] = _derivative
ad.primitive_transposes[_LINEAR] = _transposed
batching.primitive_batchers[_LINEAR] = _batched
mlir.register_lowering(_LINEAR, mlir.lower_fun(_evaluate, multiple_results=True))
