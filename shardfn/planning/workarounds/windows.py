"""Windows over one array whose padding XLA may exchange (before JAX 0.12): each gets an array of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.ir.model import Graph
from shardfn.ir.rewrite import barred, bind_one, equations, rebind
from shardfn.planning.workarounds.uneven_movement import WINDOWS


def has_windows(jaxpr: Any) -> bool:
    """Whether a traced function has an op that `separate_windows` would change."""
    return any(eqn.primitive.name in _OVER_WINDOWS for _, eqn, _ in equations(jaxpr))


def windows_clash(graph: Graph) -> bool:
    """Whether several ops read one array through the same window, not all of them convolutions, whose padding is zero: XLA may
    give one the padding of another."""
    readers: dict[object, list[str]] = {}
    for op in graph.ops if IS_BEFORE_JAX_0_12 else ():
        if op.name in _PADDED:
            windows = (
                (t.dim, t.low, t.extent, t.stride, t.spacing) for t in op.window_dims if t.operand == 0 and t.over < 0
            )
            window = frozenset(w for w in windows if w[1:] != (0, 1, 1, 1))
            readers.setdefault((op.inputs[0], window), []).append(op.name)
    return any(len(names) > 1 and set(names) != {"convolution"} for names in readers.values())


def separate_windows(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function` with every window that is no convolution over an array of its own (`windows_clash`): an optimization barrier."""

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        return bind_one(eqn, [barred(inputs[0]), *inputs[1:]])

    return rebind(function, lambda eqn, number: eqn.primitive.name in _OVER_WINDOWS, bind, static_argnums)


_PADDED = frozenset({"reduce_window", "pad", "convolution"})
_OVER_WINDOWS = WINDOWS | {"pad", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
"""Primitives."""
