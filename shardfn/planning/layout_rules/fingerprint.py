"""A short text that tells whether a function is still the one that a layout file was made for.

It has two halves: the arguments (paths and ranks), and the ops. Sizes, shardings and the device count do not count, and neither
does what JAX releases write differently: arithmetic, reshapes, conversions, and the order of ops.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from shardfn.frontend.closed_over import option_for
from shardfn.frontend.strategy import Leaf
from shardfn.ir.op_traits import CHEAP, CONSTRAINABLE, ELEMENTWISE, EXPENSIVE, VIEWS
from shardfn.ir.rewrite import equations
from shardfn.planning.layout_rules.layout_file import LayoutFile

_COUNTED = {p for kind in CONSTRAINABLE.keys() - CHEAP - VIEWS - ELEMENTWISE for p in CONSTRAINABLE[kind]}
"""Primitives that the releases of JAX use alike (measured: 0.10.2 and 0.12.0.1)."""
_FUNCTIONS = {p for kind in CONSTRAINABLE.keys() & ELEMENTWISE & EXPENSIVE for p in CONSTRAINABLE[kind]}
"""Elementwise ones; those of several operands, such as a division, do not count."""

_PARAMETERS = ("dimension_numbers", "axes", "window_strides", "padding")
"""Parameters of equations that count."""


def fingerprint(arrays: Iterable[tuple[str, Sequence[int]]], jaxpr: Any) -> str:
    """The fingerprint of a function.

    Args:
      arrays: path and shape of each argument array.
      jaxpr: the function's jaxpr.

    >>> import jax, jax.numpy as jnp
    >>> def of(f, *shape):
    ...     return fingerprint([("x", shape)], jax.make_jaxpr(f)(jnp.ones(shape)).jaxpr)
    >>> of(jnp.tanh, 8) == of(jnp.tanh, 16), of(jnp.tanh, 8) == of(jnp.exp, 8), of(jnp.tanh, 8) == of(jnp.tanh, 8, 1)
    (True, False, False)
    """
    counts = collections.Counter(_op(eqn) for _, eqn, _ in equations(jaxpr) if _is_counted(eqn))
    return f"{_of_arguments(arrays)}-{_digest(sorted(counts.items()))}"


def as_it_holds(layout: LayoutFile, name: str, inputs: Sequence[Leaf]) -> LayoutFile:
    """A layout file as it holds for a function. One that was made from a plan of another function, such as the training step of
    an evaluation step, or of a function with other arguments, such as a step with another optimizer, holds for the arrays that
    it names, and its rules need not match.
    """
    if not layout.fingerprint:
        return layout
    if layout.function != name:
        return dataclasses.replace(layout, results=(), every_rule_matches=False)
    is_same = layout.fingerprint.startswith(f"{_of_arguments((leaf.path, leaf.shape) for leaf in inputs)}-")
    lacks_option = any(option_for(rule.glob, [leaf.path for leaf in inputs]) for rule in layout.arguments)
    return layout if is_same or lacks_option else dataclasses.replace(layout, every_rule_matches=False)


def change_since(layout: LayoutFile, name: str, inputs: Sequence[Leaf], jaxpr: Any) -> str:
    """What a warning says of a function that differs from the one that a layout file was made for; empty if it is the same.

    Args:
      layout: the layout file. One that was made for a function of another name is for any function.
      name: the function's name.
      inputs: the arrays of its arguments.
      jaxpr: its jaxpr.
    """
    if layout.function != name or not layout.fingerprint:
        return ""
    found = fingerprint([(leaf.path, leaf.shape) for leaf in inputs], jaxpr)
    halves = zip(("arguments", "ops"), layout.fingerprint.split("-"), found.split("-"), strict=False)
    changed = [half for half, old, new in halves if old != new]
    if not changed:
        return ""
    as_they_are = ", or remove the line `fingerprint` from the file to use its shardings as they are"
    return (
        f"`{name}` has changed since {layout.name} was made: its {' and '.join(changed)} differ; fix: plan it anew and save the "
        f"plan{', as here only the arrays that it names are sharded by it' if 'arguments' in changed else as_they_are}"
    )


def _of_arguments(arrays: Iterable[tuple[str, Sequence[int]]]) -> str:
    return _digest(sorted((path, len(shape)) for path, shape in arrays))


def _is_counted(eqn: Any) -> bool:
    return eqn.primitive.name in _COUNTED or (eqn.primitive.name in _FUNCTIONS and len(eqn.invars) == 1)


def _op(eqn: Any) -> str:
    """An equation as text: its primitive, the ranks of its operands, and along which dimensions it works."""
    ranks = [len(getattr(v.aval, "shape", ())) for v in eqn.invars]
    parameters = [_plain(eqn.params[name]) for name in _PARAMETERS if name in eqn.params]
    return f"{eqn.primitive.name} {ranks} {parameters}"


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else str(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
