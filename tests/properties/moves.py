"""Ops of random programs that move data: other shapes, and access by index."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.properties.builder import Builder, Drawn, drawn

# Other shapes


def transpose(x, *, order):
    return jnp.transpose(x, order)


@drawn
def draw_transpose(b: Builder) -> Drawn:
    x = b.value()
    return transpose, [x], {"order": b.order(range(len(x.shape)))}, x.most


def reshape(x, *, shape):
    return x.reshape(shape)


@drawn
def draw_merge(b: Builder) -> Drawn:
    x = b.value(least=2)
    at = b.ints(0, len(x.shape) - 2)
    end = b.ints(at + 2, len(x.shape))
    return reshape, [x], {"shape": (*x.shape[:at], math.prod(x.shape[at:end]), *x.shape[end:])}, x.most


@drawn
def draw_split(b: Builder) -> Drawn:
    x = b.value(most=3)
    at = b.axis(x)
    outer = b.one(d for d in range(1, x.shape[at] + 1) if x.shape[at] % d == 0)
    return reshape, [x], {"shape": (*x.shape[:at], outer, x.shape[at] // outer, *x.shape[at + 1 :])}, x.most


def broadcast(x, *, shape, dims):
    return lax.broadcast_in_dim(x, shape, dims)


@drawn
def draw_broadcast(b: Builder) -> Drawn:
    x = b.value(least=0, most=2)
    rank = len(x.shape) + 1
    at = b.ints(0, rank - 1)
    dims = tuple(d for d in range(rank) if d != at)
    return broadcast, [x], {"shape": (*x.shape[:at], b.size(), *x.shape[at:]), "dims": dims}, x.most


def concatenate(x, y, *, axis):
    return jnp.concatenate([x, y], axis=axis)


@drawn
def draw_concatenate(b: Builder) -> Drawn:
    x = b.value()
    axis = b.axis(x)
    y = b.other((*x.shape[:axis], b.size(), *x.shape[axis + 1 :]))
    return concatenate, b.one(([x, y], [x, x], [y, x])), {"axis": axis}, max(x.most, y.most)


def cut(x, *, pieces):
    return x[tuple(slice(*p) for p in pieces)]


@drawn
def draw_cut(b: Builder) -> Drawn:
    x = b.value()
    pieces = []
    for n in x.shape:
        start = b.ints(0, n - 1)
        pieces.append((start, b.ints(start + 1, n)))
    return cut, [x], {"pieces": tuple(pieces)}, x.most


def pad(x, *, config):
    return lax.pad(x, jnp.float32(1), config)


@drawn
def draw_pad(b: Builder) -> Drawn:
    x = b.value()
    config = tuple((b.ints(-1, 2), b.ints(0, 2), 0) for _ in x.shape)
    return pad, [x], {"config": config}, x.most + 1


def roll(x, *, shift, axis):
    return jnp.roll(x, shift, axis)


@drawn
def draw_roll(b: Builder) -> Drawn:
    x = b.value()
    return roll, [x], {"shift": b.ints(-2, 3), "axis": b.axis(x)}, x.most


def flip(x, *, axis):
    return jnp.flip(x, axis)


@drawn
def draw_flip(b: Builder) -> Drawn:
    x = b.value()
    return flip, [x], {"axis": b.axis(x)}, x.most


def tile(x, *, times):
    return jnp.tile(x, times)


@drawn
def draw_tile(b: Builder) -> Drawn:
    x = b.value(most=3)
    return tile, [x], {"times": tuple(b.ints(1, 2) for _ in x.shape)}, x.most


def diagonal(x, *, mask):
    return jnp.tril(x) if mask else jnp.diagonal(x, axis1=-2, axis2=-1)


@drawn
def draw_diagonal(b: Builder) -> Drawn:
    x = b.value(least=2, most=3)
    return diagonal, [x], {"mask": b.coin()}, x.most


# By index


def take(x, i, *, axis):
    return jnp.take(x, i, axis=axis)


@drawn
def draw_take(b: Builder) -> Drawn:
    x = b.value(most=3)
    axis = b.axis(x)
    return take, [x, b.index(b.shape(b.ints(0, 2)), x.shape[axis])], {"axis": axis}, x.most


def take_along(x, i, *, axis):
    return jnp.take_along_axis(x, i, axis=axis)


@drawn
def draw_take_along(b: Builder) -> Drawn:
    x = b.value(most=3)
    axis = b.axis(x)
    i = b.index((*x.shape[:axis], b.size(), *x.shape[axis + 1 :]), x.shape[axis])
    return take_along, [x, i], {"axis": axis}, x.most


def scatter_add(x, i, y):
    return x.at[i].add(y)


@drawn
def draw_scatter_add(b: Builder) -> Drawn:
    x = b.value(most=3)
    count = b.size()
    i = b.index((count,), x.shape[0])
    y = b.other((count, *x.shape[1:]))
    return scatter_add, [x, i, y], {}, x.most + y.most * count


def segment_sum(x, i, *, segments):
    return jax.ops.segment_sum(x, i, segments)


@drawn
def draw_segment_sum(b: Builder) -> Drawn:
    x = b.value(most=3)
    segments = b.size()
    return segment_sum, [x, b.index(x.shape[:1], segments)], {"segments": segments}, x.most * x.shape[0]


def one_hot(i, *, classes):
    return jax.nn.one_hot(i, classes)


@drawn
def draw_one_hot(b: Builder) -> Drawn:
    classes = b.size()
    fit = [v for v in reversed(b.values) if v.dtype == "int32" and len(v.shape) < 3]
    i = fit[0] if fit else b.index(b.shape(b.ints(0, 2)), classes)
    return one_hot, [i], {"classes": classes}, 1.0


def update(x, y, i, *, axis):
    return lax.dynamic_update_slice_in_dim(x, y, i, axis)


@drawn
def draw_update(b: Builder) -> Drawn:
    x = b.value()
    axis = b.axis(x)
    length = b.ints(1, x.shape[axis])
    y = b.other((*x.shape[:axis], length, *x.shape[axis + 1 :]))
    return update, [x, y, b.index((), x.shape[axis])], {"axis": axis}, max(x.most, y.most)


def fetch(x, i, *, length, axis):
    return lax.dynamic_slice_in_dim(x, i, length, axis)


@drawn
def draw_fetch(b: Builder) -> Drawn:
    x = b.value()
    axis = b.axis(x)
    return fetch, [x, b.index((), x.shape[axis])], {"length": b.ints(1, x.shape[axis]), "axis": axis}, x.most
