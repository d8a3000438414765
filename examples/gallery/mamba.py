"""Mamba-2 2.7B: a training step of a selective state-space model on 64 TPU v5e.

Tokens mix by a linear recurrence whose decay and step depend on the token (Dao and Gu 2024). It is computed by
chunks of 256 tokens: within and between chunks it is a masked matmul.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from examples.gallery import Program, shapes, show, training
from examples.gallery.llama3_8b import rms_norm


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 64
    width: int = 2560
    heads: int = 80
    head: int = 64
    state: int = 128
    taps: int = 4
    chunk: int = 256
    vocab: int = 50304
    context: int = 2048
    batch: int = 256
    dtype: str = "bfloat16"


TINY = Config(layers=2, width=32, heads=4, head=8, state=8, chunk=4, vocab=64, context=8, batch=8, dtype="float32")


def parameters(cfg):
    d, inner, n, h = cfg.width, (cfg.heads, cfg.head), (cfg.state,), (cfg.heads,)
    layer = {
        **{"norm": (d,), "gate": (d, *inner), "x": (d, *inner), "b": (d, *n), "c": (d, *n), "step": (d, *h)},
        **{"x_taps": (cfg.taps, *inner), "b_taps": (cfg.taps, *n), "c_taps": (cfg.taps, *n)},
        **{"step_bias": h, "log_decay": h, "skip": h, "out_norm": inner, "out": (*inner, d)},
    }
    rest = shapes(cfg.dtype, {"embed": (cfg.vocab, d), "norm": (d,)})
    return {**rest, "layers": shapes(cfg.dtype, layer, cfg.layers)}


def causal_conv(x, taps):
    """x [batch, time, ...channels], taps [taps, ...channels]: each channel over the last tokens."""
    padded = jnp.pad(x, [(0, 0), (len(taps) - 1, 0), *[(0, 0)] * (x.ndim - 2)])
    return jax.nn.silu(sum(padded[:, i : i + x.shape[1]] * tap for i, tap in enumerate(taps)))


def recur(x, b, c, step, decay):
    """Chunks of x [batch, chunks, time, heads, head], b and c [..., time, state], step [..., time, heads]; decay [heads]."""
    time, count = jnp.arange(x.shape[2]), jnp.arange(x.shape[1])
    until = jnp.einsum("ts,bksh->bkth", jnp.tril(jnp.ones((len(time),) * 2)), step * decay)
    masked = jnp.where((time[:, None] >= time)[..., None], until[:, :, :, None] - until[:, :, None], -1e9)
    weights = jnp.einsum("bktn,bksn->bkts", c, b)[..., None] * jnp.exp(masked) * step[:, :, None]
    y = jnp.einsum("bktsh,bkshp->bkthp", weights.astype(x.dtype), x)
    added = x * (step * jnp.exp(until[:, :, -1:] - until))[..., None].astype(x.dtype)
    states = jnp.einsum("bksn,bkshp->bkhpn", b, added)
    ends = jnp.einsum("kj,bjh->bkh", jnp.tril(jnp.ones((len(count),) * 2)), until[:, :, -1])
    between = (ends - until[:, :, -1])[:, :, None] - ends[:, None]
    kept = jnp.exp(jnp.where((count[:, None] > count)[..., None], between, -1e9)).astype(x.dtype)
    states = jnp.einsum("bkjh,bjhpn->bkhpn", kept, states)
    return y + jnp.einsum("bktn,bkhpn->bkthp", c, states) * jnp.exp(until)[..., None].astype(x.dtype)


def layer(x, p, chunk):
    u = rms_norm(x, p["norm"])
    z = causal_conv(jnp.einsum("btd,dhp->bthp", u, p["x"]), p["x_taps"])
    b, c = causal_conv(u @ p["b"], p["b_taps"]), causal_conv(u @ p["c"], p["c_taps"])
    step = jax.nn.softplus((u @ p["step"] + p["step_bias"]).astype(jnp.float32))
    chunks = [v.reshape(len(v), -1, chunk, *v.shape[2:]) for v in (z, b, c, step)]
    y = recur(*chunks, -jnp.exp(p["log_decay"].astype(jnp.float32))).reshape(z.shape) + z * p["skip"][:, None]
    y = y * jax.nn.silu(jnp.einsum("btd,dhp->bthp", u, p["gate"]))
    y = y * jax.lax.rsqrt(jnp.mean(y.astype(jnp.float32) ** 2, axis=(2, 3), keepdims=True) + 1e-5).astype(y.dtype)
    return x + jnp.einsum("bthp,hpd->btd", y * p["out_norm"], p["out"]), None


def loss(params, tokens, cfg):
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(functools.partial(layer, chunk=cfg.chunk)), x, params["layers"])
    logits = (rms_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    tokens = jax.ShapeDtypeStruct((cfg.batch, cfg.context + 1), jnp.int32)
    device = None if size == "tiny" else "tpu-v5e:8x8"
    return training(functools.partial(loss, cfg=cfg), parameters(cfg), {"tokens": tokens}, device, level="time")


if __name__ == "__main__":
    show(program)
