"""Programs inside random programs: loops, branches, and functions with rules of their own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

import shardfn
from tests.properties.builder import EXACT, ROUGH, Builder, Drawn, NoFit, drawn


def scan(x, *, reverse):
    """An alternating sum along dim 0."""
    last, rows = lax.scan(lambda c, row: (row - c, row - c), jnp.zeros_like(x[0]), x, reverse=reverse)
    return rows + last


@drawn
def draw_scan(b: Builder) -> Drawn:
    x = b.value()
    return scan, [x], {"reverse": b.coin()}, 2 * x.most * x.shape[0]


def layers(x, w):
    """Stacked weights, as a model that scans over its layers has them."""
    return lax.scan(lambda h, one: (jnp.tanh(h @ one / 4), None), x, w)[0]


@drawn
def draw_layers(b: Builder) -> Drawn:
    x = b.value(most=3)
    return layers, [x, b.other((b.one((2, 3, 4)), x.shape[-1], x.shape[-1]))], {}, ROUGH


def fori(x, *, trips, axis):
    return lax.fori_loop(0, trips, lambda i, c: jnp.roll(c, 1, axis) + x, x)


@drawn
def draw_fori(b: Builder) -> Drawn:
    x = b.value()
    trips = b.ints(1, 3)
    return fori, [x], {"trips": trips, "axis": b.axis(x)}, x.most * (trips + 1)


def cond(x, y):
    return lax.cond(jnp.sum(x) > 0, lambda a, b: jnp.flip(a, 0) * 2, lambda a, b: a - b, x, y)


@drawn
def draw_cond(b: Builder) -> Drawn:
    x = b.value(exact=True)
    if x.most * math.prod(x.shape) >= EXACT:
        raise NoFit
    y = b.other(x.shape)
    return cond, [x, y], {}, max(2 * x.most, x.most + y.most)


def checkpoint(x, w):
    return jax.checkpoint(lambda a, b: jnp.sin(a @ b) @ b.T)(x, w)


@drawn
def draw_checkpoint(b: Builder) -> Drawn:
    x = b.value(most=3)
    return checkpoint, [x, b.other((x.shape[-1], b.size()))], {}, ROUGH


@jax.jit
def doubled(x):
    return jnp.cumsum(2 * x, axis=0)


def jit(x):
    """One function called twice, on other dims: it is lowered once."""
    return doubled(jnp.swapaxes(doubled(x), 0, -1))


@drawn
def draw_jit(b: Builder) -> Drawn:
    x = b.value()
    return jit, [x], {}, 4 * x.most * x.shape[0] * x.shape[-1]


def vmap(x, w, *, axis):
    return jax.vmap(lambda row, b: jnp.cumsum(row, -1) * b.sum(), in_axes=(axis, 0), out_axes=axis)(x, w)


@drawn
def draw_vmap(b: Builder) -> Drawn:
    x = b.value(least=2)
    axis = b.axis(x)
    w = b.other((x.shape[axis], b.size(4)))
    return vmap, [x, w], {"axis": axis}, x.most * max(x.shape) * w.most * w.shape[1]


@jax.custom_vjp
def halved_gradient(x):
    return x * 3


halved_gradient.defvjp(lambda x: (x * 3, x), lambda x, g: (g / 2 + x,))


def custom_vjp(x):
    return halved_gradient(x)


@drawn
def draw_custom_vjp(b: Builder) -> Drawn:
    x = b.value(least=0)
    return custom_vjp, [x], {}, 3 * x.most


def nested(x, *, devices, cuts=None):
    """Another `shard` inside, with cuts of its own."""

    def inner(a):
        return jnp.cumsum(a, 0) - a

    if cuts is None:
        return inner(x)
    return shardfn.shard(inner, (cuts,), device=[jax.devices()[d] for d in devices])(x)


@drawn
def draw_nested(b: Builder) -> Drawn:
    x = b.value()
    return nested, [x], {"devices": b.devices, "cuts": b.cuts(x.shape)}, x.most * x.shape[0]
