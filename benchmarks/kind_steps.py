"""One step of each kind of program that the time model is held against: transformers, convolutions, sorts, solvers, stencils, …

A row of `STEPS` is a function from `tiny` to a `Step`: at full size what was measured on a card (`benchmarks/measured/`), at
tiny size what runs anywhere in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Step:
    """A function, what makes its arguments, and the positions of those that it gives back changed."""

    function: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = (0,)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The arguments as shapes and dtypes."""
        return jax.eval_shape(self.make)


def normal(*shape: int, dtype: Any = jnp.float32, scale: float = 0.02) -> jax.Array:
    """Normal numbers of a shape."""
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype) * scale


def indices(below: int, *shape: int) -> jax.Array:
    """Random indices of a shape."""
    return jnp.asarray(np.random.default_rng(0).integers(0, below, shape), jnp.int32)


def _trained(loss: Callable[..., jax.Array], make: Callable[[], tuple[Any, ...]]) -> Step:
    """An AdamW step; `make` makes the parameters and the batch."""
    adam = optax.adamw(1e-4)

    def step(p: Any, o: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(p, *batch)
        updates, o = adam.update(gradients, o, p)
        return optax.apply_updates(p, updates), o, value

    def arguments() -> tuple[Any, ...]:
        p, *batch = make()
        return p, adam.init(p), *batch

    return Step(step, arguments, (0, 1))


def _block(width: int) -> dict[str, tuple[int, int]]:
    """The shapes of a transformer block's matrices."""
    return {"qkv": (width, 3 * width), "o": (width, width), "u": (width, 4 * width), "d": (4 * width, width)}


def _gpt(tiny: bool, dtype: Any = jnp.bfloat16, remat: bool = False, attention: Any = None, layers: int = 12) -> Step:
    width, heads, layers, words, batch, length = (64, 4, 2, 512, 2, 64) if tiny else (1024, 16, layers, 50304, 8, 1024)

    def norm(x: jax.Array, g: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        qkv = (norm(x, w["g1"]) @ w["qkv"]).reshape(batch, length, heads, 3 * width // heads)
        q, k, v = jnp.split(qkv, 3, -1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + attended.reshape(batch, length, width) @ w["o"]
        return x + jax.nn.gelu(norm(x, w["g2"]) @ w["u"]) @ w["d"], None

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = (p["e"][tokens] + p["pos"]).astype(dtype)
        x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, p["b"])
        logits = (x @ p["e"].T.astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def make() -> tuple[Any, ...]:
        blocks = {name: normal(layers, *shape) for name, shape in _block(width).items()}
        blocks |= {"g1": jnp.ones((layers, width)), "g2": jnp.ones((layers, width))}
        p = {"e": normal(words, width), "pos": normal(length, width), "b": blocks}
        return p, jnp.ones((batch, length), jnp.int32)

    return _trained(loss, make)


def _conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    names = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NDHWC", "DHWIO", "NDHWC")
    return jax.lax.conv_general_dilated(x, w.astype(x.dtype), (stride,) * (x.ndim - 2), "SAME", dimension_numbers=names)


def _unet(tiny: bool) -> Step:
    batch, side, widths = (1, 16, (4, 8)) if tiny else (8, 256, (64, 128, 256, 512))

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean((1, 2), keepdims=True)) * jax.lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x, skips = x.astype(jnp.bfloat16), []
        for k, w in enumerate(p["d"]):
            x = jax.nn.silu(norm(_conv(x, w, 1 if k == 0 else 2)))
            skips.append(x)
        for w, skip in zip(p["u"], skips[:-1][::-1], strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = jax.nn.silu(norm(_conv(jnp.concatenate([x, skip], -1), w)))
        return ((_conv(x, p["out"]) - y) ** 2).mean()

    def make() -> tuple[Any, ...]:
        down = [normal(3, 3, i, o) for i, o in zip((3, *widths[:-1]), widths, strict=True)]
        up = [normal(3, 3, b + a, a) for a, b in zip(widths[:-1][::-1], widths[1:][::-1], strict=True)]
        image = normal(batch, side, side, 3)
        return {"d": down, "u": up, "out": normal(1, 1, widths[0], 3)}, image, image

    return _trained(loss, make)


def _conv3d(tiny: bool) -> Step:
    batch, side, width = (1, 8, 4) if tiny else (2, 96, 32)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in p[:-1]:
            x = jax.nn.relu(_conv(x, w))
        return ((_conv(x, p[-1]) - y) ** 2).mean()

    def make() -> tuple[Any, ...]:
        p = [*(normal(3, 3, 3, width if i else 1, width) for i in range(4)), normal(1, 1, 1, width, 1)]
        return p, normal(batch, side, side, side, 1), normal(batch, side, side, side, 1)

    return _trained(loss, make)


def _lstm(tiny: bool) -> Step:
    batch, length, width = (4, 8, 16) if tiny else (256, 256, 1024)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], xt: jax.Array) -> Any:
            h, s = carry
            i, f, g, o = jnp.split(jnp.concatenate([xt, h], -1) @ p["w"] + p["b"], 4, -1)
            s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(s)
            return (h, s), h

        zero = jnp.zeros((batch, width))
        _, hs = jax.lax.scan(cell, (zero, zero), x.swapaxes(0, 1))
        return (hs**2).mean()

    def make() -> tuple[Any, ...]:
        return {"w": normal(2 * width, 4 * width), "b": jnp.zeros(4 * width)}, normal(batch, length, width)

    return _trained(loss, make)


def _ssm(tiny: bool) -> Step:
    batch, length, width, states = (2, 16, 8, 4) if tiny else (8, 1024, 1024, 16)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.silu(x @ p["i"])
        da = jnp.exp(-jnp.einsum("btd,dn->btdn", jax.nn.softplus(h), jnp.exp(p["a"])))
        bx = jnp.einsum("btd,dn->btdn", h, p["b"])
        _, s = jax.lax.associative_scan(lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1]), (da, bx), axis=1)
        return ((x + jnp.einsum("btdn,dn->btd", s, p["c"]) @ p["o"] - y) ** 2).mean()

    def make() -> tuple[Any, ...]:
        wide = 2 * width
        p = {"i": normal(width, wide), **{name: normal(wide, states) for name in "abc"}, "o": normal(wide, width)}
        return p, normal(batch, length, width), normal(batch, length, width)

    return _trained(loss, make)


def _graph_net(tiny: bool) -> Step:
    nodes, edges, width = (64, 256, 8) if tiny else (131072, 2097152, 128)

    def loss(p: Any, x: jax.Array, source: jax.Array, target: jax.Array, y: jax.Array) -> jax.Array:
        for layer in p:
            m = jax.nn.relu(jnp.concatenate([x[source], x[target]], -1) @ layer["m"])
            a = jax.ops.segment_sum(m, target, nodes)
            x = x + jax.nn.relu(jnp.concatenate([x, a], -1) @ layer["u"])
        return ((x - y) ** 2).mean()

    def make() -> tuple[Any, ...]:
        p = [{"m": normal(2 * width, width), "u": normal(2 * width, width)} for _ in range(3)]
        source, target = indices(nodes, 2, edges)
        return p, normal(nodes, width), source, target, normal(nodes, width)

    return _trained(loss, make)


def _decode(tiny: bool) -> Step:
    batch, length, width, heads, layers = (2, 16, 32, 4, 2) if tiny else (64, 4096, 4096, 32, 4)

    def step(cache: Any, p: Any, x: jax.Array, position: jax.Array) -> Any:
        new = []
        for layer, (k, v) in zip(p, cache, strict=True):
            q, kn, vn = jnp.split((x @ layer["qkv"]).reshape(batch, 1, heads, -1), 3, -1)
            k = jax.lax.dynamic_update_slice(k, kn, (0, position, 0, 0))
            v = jax.lax.dynamic_update_slice(v, vn, (0, position, 0, 0))
            a = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
            a = jnp.where(jnp.arange(length) <= position, a, -1e9).astype(jnp.float32)
            a = jax.nn.softmax(a, -1).astype(x.dtype)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(batch, width) @ layer["o"]
            x = x + jax.nn.gelu(x @ layer["u"]) @ layer["d"]
            new.append((k, v))
        return new, x

    def make() -> tuple[Any, ...]:
        p = [{name: normal(*s, dtype=jnp.bfloat16) for name, s in _block(width).items()} for _ in range(layers)]
        rows = batch, length, heads, width // heads
        cache = [tuple(jnp.zeros(rows, jnp.bfloat16) for _ in "kv") for _ in range(layers)]
        return cache, p, normal(batch, width, dtype=jnp.bfloat16), jnp.int32(7)

    return Step(step, make)


def _embedding_bag(tiny: bool) -> Step:
    words, width, batch, fields = (100, 8, 16, 3) if tiny else (4000000, 64, 65536, 26)

    def step(p: Any, ids: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return ((jax.nn.relu(p["t"][ids].reshape(batch, -1) @ p["w"]) @ p["o"] - y) ** 2).mean()

        return jax.tree.map(lambda a, g: a - 0.01 * g, p, jax.grad(loss)(p)), y.sum()

    def make() -> tuple[Any, ...]:
        p = {"t": normal(words, width), "w": normal(fields * width, 512), "o": normal(512, 1)}
        return p, indices(words, batch, fields), normal(batch, 1)

    return Step(step, make)


def _poisson(tiny: bool) -> Step:
    side = 16 if tiny else 384

    def step(u: jax.Array, f: jax.Array) -> Any:
        k = jnp.fft.fftfreq(side)
        k2 = k[:, None, None] ** 2 + k[None, :, None] ** 2 + k[None, None, :] ** 2
        h = jnp.fft.fftn(f + u)
        solved = jnp.fft.ifftn(jnp.where(k2 > 0, h / jnp.maximum(k2, 1e-9), 0)).real
        return solved.astype(jnp.float32) * 1e-3, f.sum()

    return Step(step, lambda: (normal(side, side, side), normal(side, side, side)))


def _stencil(tiny: bool) -> Step:
    side, repeats = (32, 3) if tiny else (4096, 50)

    def step(u: jax.Array, c: jax.Array) -> Any:
        def one(_: Any, u: jax.Array) -> jax.Array:
            beside = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
            return u + c * (beside - 4 * u)

        return jax.lax.fori_loop(0, repeats, one, u), c.sum()

    return Step(step, lambda: (normal(side, side), normal(side, side)))


def _nbody(tiny: bool) -> Step:
    bodies = 64 if tiny else 16384

    def step(x: jax.Array, v: jax.Array) -> Any:
        d = x[None] - x[:, None]
        r = jax.lax.rsqrt((d**2).sum(-1) + 1e-3)
        v = v + 1e-3 * (d * (r**3)[..., None]).sum(1)
        return x + 1e-3 * v, v

    return Step(step, lambda: (normal(bodies, 3, scale=1.0), normal(bodies, 3)))


def _cholesky(tiny: bool) -> Step:
    points, width = (32, 4) if tiny else (8192, 16)

    def step(y: jax.Array, x: jax.Array, _: jax.Array) -> Any:
        k = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / width) + 0.1 * jnp.eye(points)
        factor = jnp.linalg.cholesky(k)
        solved = jax.scipy.linalg.cho_solve((factor, True), y)
        return solved, jnp.log(jnp.diag(factor)).sum()

    return Step(step, lambda: (normal(points, 1), normal(points, width, scale=1.0), normal(points)))


def _sorts(tiny: bool) -> Step:
    rows, long = (4, 64) if tiny else (512, 262144)

    def step(x: jax.Array, w: jax.Array) -> Any:
        values, places = jax.lax.top_k(x, 64)
        return x + w * jnp.sort(x, -1), values.sum() + places.sum()

    return Step(step, lambda: (normal(rows, long), normal(rows, long)))


def _ragged(tiny: bool) -> Step:
    tokens, width, inner, experts = (32, 8, 16, 4) if tiny else (16384, 1024, 4096, 16)

    def step(x: jax.Array, p: Any) -> Any:
        expert = jnp.argmax(x.astype(jnp.float32) @ p["r"], -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=experts).astype(jnp.int32)
        h = jax.nn.silu(jax.lax.ragged_dot(x[order], p["u"], sizes))
        return x.at[order].add(jax.lax.ragged_dot(h, p["d"], sizes)), sizes.sum()

    def make() -> tuple[Any, ...]:
        half = jnp.bfloat16
        p = {"r": normal(width, experts), "u": normal(experts, width, inner, dtype=half)}
        p["d"] = normal(experts, inner, width, dtype=half)
        return normal(tokens, width, dtype=half, scale=1.0), p

    return Step(step, make)


STEPS: dict[str, Callable[[bool], Step]] = {
    "gpt_bf16_scan": _gpt,
    "gpt_bf16_remat": lambda tiny: _gpt(tiny, remat=True),
    "gpt_bf16_cudnn_attention": lambda tiny: _gpt(tiny, attention=None if tiny else "cudnn"),
    "gpt_f32": lambda tiny: _gpt(tiny, jnp.float32, layers=6),
    "unet_bf16": _unet,
    "conv3d": _conv3d,
    "lstm": _lstm,
    "ssm_associative": _ssm,
    "graph_net": _graph_net,
    "decode_cache": _decode,
    "embedding_bag": _embedding_bag,
    "poisson_fft": _poisson,
    "stencil_loop": _stencil,
    "nbody": _nbody,
    "cholesky_gp": _cholesky,
    "topk_sort": _sorts,
    "moe_ragged": _ragged,
}
