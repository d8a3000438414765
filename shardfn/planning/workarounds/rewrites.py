"""Functions without the ops that XLA gets wrong: dimensions are gathered, places clamped, barriers put in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.ir.rewrite import barred, bind_one, equations, inner, inserted, rebind
from shardfn.movement import is_rotation
from shardfn.planning.workarounds.even_scatters import NEUTRAL, even_scatter
from shardfn.planning.workarounds.nested_movement import separated, turned_movements
from shardfn.planning.workarounds.self_updates import COMBINED, selected, selected_scatter
from shardfn.planning.workarounds.uneven_movement import WINDOWS, Dims, Movement, gathered_dims, movements_of_equation
from shardfn.planning.workarounds.wrong_ops import WrongOp


def replicate_wrong_ops(
    function: Callable[..., Any], mesh: Any, wrong: Sequence[WrongOp], static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` with constraints that unshard the spatial dimensions of convolutions and pooling gradients, all dimensions of
    grouped convolutions, the transformed ones of Fourier transforms, the reduced ones of reductions without an all-reduce, the
    coordinates of places, and the padded ones of the pads among `wrong`. Scatters that combine get updates of even shards,
    updates of one window and rotations of what is rotated a barrier, dynamic slices a clamped place, and updates that read their
    own array become selects.

    Args:
      function: the function.
      mesh: the mesh of the constraints.
      wrong: the ops that `wrong_ops` found in it.
      static_argnums: as in `jax.jit`.

    Raises:
      StrategyError: when traced, such an op is inside an equation that is not opened.
    """

    kinds = {w.kind for w in wrong}
    multiple = math.lcm(*(w.multiple for w in wrong))
    moved: dict[Movement, list[Dims]] = {}
    for w in wrong:
        if w.movement and w.kind == "movement":
            moved.setdefault(w.movement, []).append(w.dims)
    at_places, in_themselves = ({w.movement for w in wrong if w.kind == kind} for kind in ("bounds", "self"))
    nested = {(w.movement, w.turn) for w in wrong if w.kind == "nested"}
    is_one = {
        **_IS_ONE,
        "movement": lambda eqn: not moved.keys().isdisjoint(movements_of_equation(eqn)),
        "nested": lambda eqn: not nested.isdisjoint(turned_movements(eqn)),
        "bounds": lambda eqn: not at_places.isdisjoint(movements_of_equation(eqn)),
        "self": lambda eqn: (
            not in_themselves.isdisjoint(movements_of_equation(eqn))
            and (eqn.primitive.name not in COMBINED or _updates_window(eqn))
        ),
    }

    def kinds_of(eqn: Any) -> list[str]:
        return [kind for kind in kinds if kind in is_one and is_one[kind](eqn)]

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        own = kinds_of(eqn)
        dims = gathered_dims(eqn, moved) if "movement" in own else _gathered(eqn, own)
        if "places" in own:
            dims = [dims[0], {*dims[1], inputs[1].ndim - 1}, *dims[2:]]
        if "bounds" in own:
            inputs = _clamped(eqn, inputs)
        if "update" in own and "movement" not in own:
            inputs = [barred(inputs[0]), *inputs[1:]]
        inputs = [_unsharded(mesh, x, of) for x, of in zip(inputs, dims, strict=False)]
        if "nested" in own:
            outputs = separated(eqn, inputs)
        elif "scatter" in own:
            outputs = even_scatter(eqn, inputs, multiple)
        elif "self" in own:
            is_scatter = eqn.primitive.name in COMBINED
            outputs = [selected_scatter(eqn, inputs) if is_scatter else selected(_clamped(eqn, inputs))]
        else:
            outputs = [_transformed(eqn, *inputs)] if _IS_ONE["layout"](eqn) else bind_one(eqn, inputs)
        if "pair" in own:
            outputs = barred(outputs)
        return [_unsharded(mesh, x, of) for x, of in zip(outputs, dims[len(inputs) :], strict=True)]

    def refuse(eqn: Any) -> None:
        found = {kind for jaxpr in inner(eqn) for _, one, _ in equations(jaxpr) for kind in kinds_of(one)}
        if found - {"bounds", "layout", "nested", "pair", "self"}:
            fail(
                StrategyError,
                f"an op inside a `{eqn.primitive.name}` might be computed wrongly by XLA, or not compile",
                why=f"shardfn does not rewrite what is inside a `{eqn.primitive.name}`",
                fix="leave the dimensions along which the op works unsharded, or take it out",
            )

    return rebind(function, lambda eqn, number: is_rotation(eqn) or bool(kinds_of(eqn)), bind, static_argnums, refuse)


def rotations_apart(
    function: Callable[..., Any], mesh: Any, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function` for a place inside another program, whose shardings may spread into it: each array that it rotates is a value
    of its own there. On a mesh of several axes XLA may take the resharded rows of a rotation for those of the whole array, which
    does not compile."""

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        return bind_one(eqn, [_constrained(mesh, inputs[0]), *inputs[1:]])

    return rebind(function, lambda eqn, number: is_rotation(eqn), bind, static_argnums)


def _clamped(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a `dynamic_slice` or `dynamic_update_slice` with its place within the array."""
    count = len(inputs) - np.ndim(inputs[0])
    sizes = np.shape(inputs[1]) if count == 2 else eqn.params["slice_sizes"]
    last = [n - rows for n, rows in zip(np.shape(inputs[0]), sizes, strict=True)]
    with inserted():
        return [*inputs[:count], *(jnp.clip(start, 0, most) for start, most in zip(inputs[count:], last, strict=True))]


def _unsharded(mesh: Any, x: Any, dims: Sequence[int]) -> Any:
    """An array with a constraint that unshards some of its dimensions; a scalar as it is."""
    return _constrained(mesh, x, dims) if dims and np.ndim(x) else x


def _constrained(mesh: Any, x: Any, dims: Sequence[int] = ()) -> Any:
    """An array as another value, with a constraint that leaves its sharding open but for dimensions that are unsharded."""
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for dim in dims:
        spec[dim] = None
    with inserted():
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _reduced(eqn: Any) -> tuple[int, ...]:
    """The dims that an equation reduces, if XLA may have no all-reduce for it."""
    name = eqn.primitive.name
    if name not in _REDUCTIONS or len(eqn.outvars) > 1:
        return ()
    is_known = name in ("reduce_and", "reduce_or") and eqn.invars[0].aval.dtype == bool
    return () if is_known else tuple(eqn.params[_REDUCTIONS[name]])


def _gathered(eqn: Any, kinds: Collection[str]) -> list[Sequence[int]]:
    """By operand and result of an equation of some kinds of wrong ops, the dimensions to gather."""
    name, params, values = eqn.primitive.name, eqn.params, (*eqn.invars, *eqn.outvars)
    if "padding" in kinds:
        return [_padded(eqn)] * len(values)
    if "product" in kinds:
        return [(), (), range(len(params["dimension_numbers"][1][0]))]
    if "reduction" in kinds:
        return [*[_reduced(eqn)] * len(eqn.invars), ()]
    if name == _POOLING:
        return [[d for d, size in enumerate(params["window_dimensions"]) if size > 1]] * len(values)
    if name == _TRANSFORM:
        return [_transformed_dims(eqn)] * len(values)
    if "window" in kinds and max(map(params.__getitem__, _GROUPS)) > 1:
        return [range(len(v.aval.shape)) for v in values]
    if "window" in kinds:
        numbers = params["dimension_numbers"]
        kernel = (eqn.invars[1].aval.shape[d] for d in numbers.rhs_spec[2:])
        if max((*kernel, *itertools.chain.from_iterable(params[step] for step in _STEPS)), default=1) > 1:
            return [spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)]
    return [()] * len(values)


def _transformed_dims(eqn: Any) -> range:
    """The dimensions of a Fourier transform."""
    rank = len(eqn.outvars[0].aval.shape)
    return range(rank - len(eqn.params["fft_lengths"]), rank)


def _transformed(eqn: Any, x: Any) -> Any:
    """A Fourier transform of an array with one dimension more, which XLA on CPU does not hand over transposed."""
    before = _transformed_dims(eqn).start
    with inserted():
        x = jnp.expand_dims(x, before)
    (transformed,) = bind_one(eqn, [x])
    with inserted():
        return jnp.squeeze(transformed, before)


def _padded(eqn: Any) -> list[int]:
    """The dimensions that a pad or the padding of windows fills between elements, crops in front, or moves backwards."""
    if eqn.primitive.name == "pad":
        config = list(eqn.params["padding_config"])
    elif eqn.primitive.name in WINDOWS:
        config = _window_padding(eqn)
    else:
        return []
    return [d for d, (low, high, holes) in enumerate(config) if holes > 0 or low < 0 or low > 0 > high]


def _window_padding(eqn: Any) -> list[tuple[int, int, int]]:
    """The padding of windows in front, behind and between elements; that behind without what strides leave unread."""
    names = ("window_dimensions", "window_dilation", "window_strides", "padding", "base_dilation")
    found = []
    for n, size, apart, stride, (low, high), base in zip(
        eqn.invars[0].aval.shape, *map(eqn.params.get, names), strict=True
    ):
        last = (n - 1) * base + low + high - (size - 1) * apart  # where the last window could begin
        found.append((low, high - last % stride, base - 1))
    return found


def _updates_window(eqn: Any) -> bool:
    """Whether an equation is a scatter of one window."""
    return eqn.primitive.name in ("scatter", *NEUTRAL) and math.prod(eqn.invars[1].aval.shape[:-1]) == 1


_POOLING = "select_and_scatter_add"
_TRANSFORM = "fft"
_STEPS = ("window_strides", "lhs_dilation", "rhs_dilation")
_GROUPS = ("feature_group_count", "batch_group_count")
_REDUCTIONS = {"reduce": "dimensions", "reduce_xor": "axes", "reduce_and": "axes", "reduce_or": "axes"}
"""With the name of the parameter that holds the dims."""

_IS_ONE: dict[str, Callable[[Any], Any]] = {
    "window": lambda eqn: eqn.primitive.name in ("conv_general_dilated", _POOLING),
    "transform": lambda eqn: eqn.primitive.name == _TRANSFORM,
    "layout": lambda eqn: eqn.primitive.name == _TRANSFORM,
    "pair": lambda eqn: eqn.primitive.name in ("reduce_window", "select_and_gather_add") and len(eqn.invars) > 1,
    "padding": _padded,
    "scatter": lambda eqn: eqn.primitive.name in NEUTRAL,
    "update": _updates_window,
    "places": lambda eqn: eqn.primitive.name in ("gather", "scatter", *NEUTRAL),
    "reduction": _reduced,
    "product": lambda eqn: eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0]),
}
"""Whether an equation may be a wrong op of a kind; of a movement and of places its shapes tell."""
