"""The ops that random programs are made of: arithmetic, reductions, and what runs along a dim.

Each op is a function and, below it, how its operands and parameters are drawn.

Left out here and in the files beside it is what XLA's partitioner cannot do, with hand-written shardings too (JAX 0.10
to 0.12), and ends the process over: an fft along a cut dim, a convolution in groups, and a pad with holes inside, which
is also what the gradients of strided slices and of sum pools with strides are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.properties.builder import ROUGH, Builder, Drawn, drawn

# Elementwise


def unary(x, *, kind):
    return UNARY[kind][0](x)


def binary(x, y, *, kind):
    return BINARY[kind][0](x, y)


UNARY = {
    "tanh": (jnp.tanh, lambda a: ROUGH),
    "relu": (jax.nn.relu, lambda a: a),
    "square": (jnp.square, lambda a: a * a),
    "sin": (jnp.sin, lambda a: ROUGH),
    "abs": (jnp.abs, lambda a: a),
}
BINARY = {
    "add": (jnp.add, lambda a, b: a + b),
    "multiply": (jnp.multiply, lambda a, b: a * b),
    "subtract": (jnp.subtract, lambda a, b: a + b),
    "maximum": (jnp.maximum, max),
    "bigger": (lambda x, y: jnp.where(x > y, x, 3 - y), lambda a, b: max(a, b + 3)),
}
DECIDES = {"relu", "abs", "maximum", "bigger"}


@drawn
def draw_unary(b: Builder) -> Drawn:
    kind = b.one(UNARY)
    x = b.value(least=0, exact=kind in DECIDES)
    return unary, [x], {"kind": kind}, UNARY[kind][1](x.most)


@drawn
def draw_binary(b: Builder) -> Drawn:
    kind = b.one(BINARY)
    x = b.value(exact=kind in DECIDES)
    shape = tuple(b.one((n, n, 1)) for n in x.shape)[b.one((0, 0, 1)) :]
    y = b.other(shape, exact=kind in DECIDES)
    operands = [x, y] if b.coin() else [y, x]
    return binary, operands, {"kind": kind}, BINARY[kind][1](x.most, y.most)


def where(x, y, *, axis):
    """A mask from positions, as attention has it."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.where((jnp.arange(x.shape[axis]) % 3 > 0).reshape(shape), x, y)


@drawn
def draw_where(b: Builder) -> Drawn:
    x = b.value()
    y = b.other(x.shape)
    return where, [x, y], {"axis": b.axis(x)}, max(x.most, y.most)


def noise(x):
    return x + jax.random.randint(jax.random.key(3), x.shape, -2, 3)


@drawn
def draw_noise(b: Builder) -> Drawn:
    x = b.value()
    return noise, [x], {}, x.most + 2


# Products


def matmul(x, y):
    return x @ y


@drawn
def draw_matmul(b: Builder) -> Drawn:
    x = b.value(most=3)
    y = b.other((x.shape[-1], b.size()))
    return matmul, [x, y], {}, x.most * y.most * x.shape[-1]


def gram(x):
    return x @ jnp.swapaxes(x, -1, -2)


@drawn
def draw_gram(b: Builder) -> Drawn:
    x = b.value(least=2, most=3)
    return gram, [x], {}, x.most**2 * x.shape[-1]


def einsum(x, y, *, spec):
    return jnp.einsum(spec, x, y)


@drawn
def draw_einsum(b: Builder) -> Drawn:
    x = b.value(least=2, most=3)
    sizes = dict(zip("ijk", x.shape, strict=False))
    mine = "".join(sizes)
    theirs = "".join(b.some(mine, 1))
    if b.coin():
        sizes["z"] = b.size()
        theirs = b.one(("z" + theirs, theirs + "z"))
    kept = "".join(b.some(sizes, 0, min(3, len(sizes))))
    y = b.other(tuple(sizes[c] for c in theirs))
    summed = math.prod(n for c, n in sizes.items() if c not in kept)
    return einsum, [x, y], {"spec": f"{mine},{theirs}->{kept}"}, x.most * y.most * summed


def conv(x, w, *, strides, padding):
    letters = "NHWC"[:1] + "HW"[: x.ndim - 2] + "C"
    kernel = "HW"[: x.ndim - 2] + "IO"
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=(letters, kernel, letters))


@drawn
def draw_conv(b: Builder) -> Drawn:
    x = b.value(least=3, most=4)
    channels = x.shape[-1]
    space = x.shape[1:-1]
    window = tuple(b.ints(1, min(3, n)) for n in space)
    w = b.other((*window, channels, b.size()))
    params = {"strides": tuple(b.ints(1, 2) for _ in space), "padding": b.one(("SAME", "VALID"))}
    return conv, [x, w], params, x.most * w.most * math.prod(window) * channels


# Reductions and what runs along a dim


def reduce_(x, *, kind, axes, keepdims):
    return getattr(jnp, kind)(x, axis=axes, keepdims=keepdims)


@drawn
def draw_reduce(b: Builder) -> Drawn:
    kind = b.one(("sum", "max", "mean", "min"))
    x = b.value(exact=kind in ("max", "min"))
    axes = tuple(sorted(b.some(range(len(x.shape)), 1)))
    most = {"sum": x.most * math.prod(x.shape[a] for a in axes), "mean": ROUGH}.get(kind, x.most)
    return reduce_, [x], {"kind": kind, "axes": axes, "keepdims": b.coin()}, most


def cumulative(x, *, kind, axis, reverse):
    return getattr(lax, kind)(x, axis=axis, reverse=reverse)


@drawn
def draw_cumulative(b: Builder) -> Drawn:
    kind = b.one(("cumsum", "cummax", "cumlogsumexp"))
    x = b.value(exact=kind == "cummax")
    axis = b.axis(x)
    most = {"cumsum": x.most * x.shape[axis], "cummax": x.most}.get(kind, ROUGH)
    return cumulative, [x], {"kind": kind, "axis": axis, "reverse": b.coin()}, most


def softmax(x, *, axis, log):
    return (jax.nn.log_softmax if log else jax.nn.softmax)(x, axis=axis)


@drawn
def draw_softmax(b: Builder) -> Drawn:
    x = b.value()
    return softmax, [x], {"axis": b.axis(x), "log": b.coin()}, ROUGH


def layernorm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1.0) * scale


@drawn
def draw_layernorm(b: Builder) -> Drawn:
    x = b.value()
    return layernorm, [x, b.other(x.shape[-1:])], {}, ROUGH


def sort(x, *, axis):
    return jnp.sort(x, axis=axis)


@drawn
def draw_sort(b: Builder) -> Drawn:
    x = b.value(exact=True)
    return sort, [x], {"axis": b.axis(x)}, x.most


def top_k(x, *, k, indices):
    return lax.top_k(x, k)[indices]


@drawn
def draw_top_k(b: Builder) -> Drawn:
    x = b.value(exact=True)
    indices = b.coin()
    most = x.shape[-1] if indices else x.most
    return top_k, [x], {"k": b.ints(1, x.shape[-1]), "indices": indices}, most


def argmax(x, *, axis):
    return jnp.argmax(x, axis=axis)


@drawn
def draw_argmax(b: Builder) -> Drawn:
    x = b.value(exact=True)
    axis = b.axis(x)
    return argmax, [x], {"axis": axis}, x.shape[axis]


def pool(x, *, kind, window, strides, padding):
    start, combine = {"max": (-jnp.inf, lax.max), "sum": (0.0, lax.add)}[kind]
    if kind == "max":  # no two are equal: which of two gets the gradient is XLA's choice, and changes with the layout
        x += (jnp.arange(x.size) % 251 / 256).reshape(x.shape)
    return lax.reduce_window(x, start, combine, window, strides, padding)


@drawn
def draw_pool(b: Builder) -> Drawn:
    kind = b.one(("max", "sum"))
    x = b.value(exact=kind == "max")
    window = tuple(b.ints(1, min(3, n)) for n in x.shape)
    strides = tuple(b.ints(1, 2 if kind == "max" else 1) for _ in window)
    params = {"window": window, "strides": strides, "padding": b.one(("SAME", "VALID"))}
    return pool, [x], {"kind": kind, **params}, x.most * (math.prod(window) if kind == "sum" else 1)
