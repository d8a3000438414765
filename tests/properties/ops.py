"""The ops that random programs are made of: how each runs, and how its operands and parameters are drawn.

Inputs hold small integers, as float32. What is made of them by additions and products stays exact, whatever the order
of the sums, so that an op that decides (sort, argmax, a comparison) decides the same on one device and on eight. A value
knows the largest magnitude it can have; one that is not exact any more is rounded before such an op.

Left out is what XLA's partitioner cannot do, with hand-written shardings too (JAX 0.10 to 0.12), and ends the process
over: an fft along a cut dim, a convolution in groups, and a pad with holes inside, which is also what the gradients of
strided slices and of sum pools with strides are. Where it gives wrong values instead, `test_programs` finds that out.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardfn

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MOST_INPUTS = 3
MOST_ELEMENTS = 1536
EXACT = 2.0**20
ROUGH = math.inf


class NoFit(Exception):
    """The op drawn cannot follow on the values at hand."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value while a program is drawn; `most` is its largest magnitude, infinite if not exact."""

    name: str
    shape: tuple[int, ...]
    most: float
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument: integers from -2 to 2 as float32, or indices below `below`."""

    name: str
    shape: tuple[int, ...]
    below: int = 0

    def data(self) -> np.ndarray:
        rng = np.random.default_rng([ord(self.name[0]), int(self.name[1:]), *self.shape])
        if self.below:
            return rng.integers(0, self.below, self.shape, dtype=np.int32)
        return rng.integers(-2, 3, self.shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Step:
    """`name = run(*operands, **params)`."""

    name: str
    run: Callable[..., Any]
    operands: tuple[str, ...]
    params: dict[str, Any]

    def __str__(self) -> str:
        params = [f"{k}={v!r}" for k, v in self.params.items()]
        return f"{self.name} = {self.run.__name__.rstrip('_')}({', '.join([*self.operands, *params])})"


class Builder:
    """A program while it is drawn: its inputs, steps and values so far."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.devices: tuple[int, ...] = ()
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []

    def one(self, choices: Iterable[Any]) -> Any:
        return self.rng.choice(tuple(choices))

    def coin(self) -> bool:
        return self.rng.random() < 0.5

    def ints(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)

    def some(self, choices: Iterable[Any], least: int = 0, most: int | None = None) -> tuple[Any, ...]:
        """`least` to `most` (all) of the choices, in any order."""
        choices = tuple(choices)
        return tuple(self.rng.sample(choices, self.ints(least, len(choices) if most is None else most)))

    def order(self, choices: Iterable[Any]) -> tuple[Any, ...]:
        choices = tuple(choices)
        return tuple(self.rng.sample(choices, len(choices)))

    def size(self, most: int = SIZES[-1]) -> int:
        return self.one(s for s in SIZES if s <= most)

    def shape(self, rank: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for _ in range(rank):
            shape += (self.size(max(1, MOST_ELEMENTS // math.prod(shape))),)
        return shape

    def cuts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Cuts that divide the shape, with a product that divides the device count."""
        cuts = [1] * len(shape)
        left = len(self.devices)
        for dim in self.order(range(len(shape))):
            cuts[dim] = self.one(c for c in range(1, left + 1) if left % c == 0 == shape[dim] % c)
            left //= cuts[dim]
        return tuple(cuts)

    def axis(self, x: Value) -> int:
        return self.ints(0, len(x.shape) - 1)

    # ---- operands

    def input(self, shape: tuple[int, ...], below: int = 0) -> Value:
        if len(self.inputs) == MOST_INPUTS:
            raise NoFit
        made = Input(f"x{len(self.inputs)}", shape, below)
        self.inputs.append(made)
        return self.keep(Value(made.name, shape, below or 2.0, "int32" if below else "float32"))

    def keep(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def value(self, least: int = 1, most: int = 4, exact: bool = False) -> Value:
        """A float of that rank; the last one three times in four."""
        fit = [v for v in reversed(self.values) if v.dtype == "float32" and least <= len(v.shape) <= most]
        if not fit:
            fit = [self.input(self.shape(self.ints(max(least, 1), min(most, 3))))]
        found = self.one((fit[0], fit[0], *fit))
        return self.exact(found) if exact else found

    def exact(self, x: Value) -> Value:
        return x if x.most < EXACT else self.step(rounded, [x], {}, 64.0)

    def other(self, shape: tuple[int, ...], exact: bool = False) -> Value:
        """A float of that shape: one that is there, a new input, or a constant where there are enough inputs."""
        fit: list[Any] = [v for v in reversed(self.values) if v.dtype == "float32" and v.shape == shape]
        if math.prod(shape) > MOST_ELEMENTS:
            raise NoFit
        found = self.one([None, *fit])
        if found is None and len(self.inputs) < MOST_INPUTS:
            return self.input(shape)
        if found is None:
            return self.step(ramp, [], {"shape": shape}, 2.0)
        return self.exact(found) if exact else found

    def index(self, shape: tuple[int, ...], below: int) -> Value:
        """Indices below `below`: an input, or constants."""
        fit = [v for v in self.values if v.dtype == "int32" and v.shape == shape and v.most <= below]
        if fit:
            return self.one(fit)
        if len(self.inputs) < MOST_INPUTS:
            return self.input(shape, below)
        return self.step(indices, [], {"shape": shape, "below": below}, below)

    # ---- steps

    def step(self, run: Callable[..., Any], operands: Sequence[Value], params: dict[str, Any], most: float) -> Value:
        step = Step(f"v{len(self.steps)}", run, tuple(v.name for v in operands), params)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        out = jax.eval_shape(lambda *args: run(*args, **without_strategy(params)), *shapes)
        if not 1 <= math.prod(out.shape) <= MOST_ELEMENTS:
            raise NoFit
        self.steps.append(step)
        return self.keep(Value(step.name, out.shape, most if most < EXACT else ROUGH, str(out.dtype)))

    def grow(self) -> None:
        """One random op more; where it does not fit, an elementwise one."""
        kept = len(self.inputs), len(self.steps), len(self.values)
        try:
            self.step(*DRAWN[self.one(DRAWN)](self))
        except NoFit:
            del self.inputs[kept[0] :], self.steps[kept[1] :], self.values[kept[2] :]
            self.step(*DRAWN["unary"](self))


def without_strategy(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a step as it runs unsharded: only `nested` has any of the kind."""
    return {k: v for k, v in params.items() if k != "cuts"}


Drawn = tuple[Callable[..., Any], Sequence[Value], dict[str, Any], float]
DRAWN: dict[str, Callable[[Builder], Drawn]] = {}
"""The ops by name: each draws its operands and parameters."""


def drawn(draw: Callable[[Builder], Drawn]) -> Callable[[Builder], Drawn]:
    DRAWN[draw.__name__.removeprefix("draw_")] = draw
    return draw


# Constants, and what makes a rough value exact. The odd offset keeps round numbers away from the steps.


def ramp(*, shape):
    return (jnp.arange(math.prod(shape)) % 5 - 2).astype(jnp.float32).reshape(shape)


def indices(*, shape, below):
    return ((jnp.arange(math.prod(shape)) * 7 + 3) % below).astype(jnp.int32).reshape(shape)


def rounded(x):
    return jnp.clip(jnp.round(x * 2 + 0.3137), -64, 64)


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


# Programs inside programs


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
