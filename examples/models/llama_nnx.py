"""A Llama-like decoder as a Flax NNX module: a `kernel` is [in, out]."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.models.llama import Config, rotate
from examples.models.training import cross_entropy
from shardfn import tag


class Attention(nnx.Module):
    """Causal grouped-query attention."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        head = cfg.d_model // cfg.heads
        self.heads, self.kv_heads = cfg.heads, cfg.kv_heads
        self.q_proj = _linear(cfg.d_model, cfg.heads * head, rngs)
        self.k_proj = _linear(cfg.d_model, cfg.kv_heads * head, rngs)
        self.v_proj = _linear(cfg.d_model, cfg.kv_heads * head, rngs)
        self.o_proj = _linear(cfg.heads * head, cfg.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, _ = x.shape
        q, k, v = (f(x) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(q.reshape(batch, seq, self.heads, -1)).reshape(
            batch, seq, self.kv_heads, self.heads // self.kv_heads, -1
        )
        k = rotate(k.reshape(batch, seq, self.kv_heads, -1))
        v = v.reshape(batch, seq, self.kv_heads, -1)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9), axis=-1)
        return self.o_proj(jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, seq, -1))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.gate_proj = _linear(cfg.d_model, cfg.d_hidden, rngs)
        self.up_proj = _linear(cfg.d_model, cfg.d_hidden, rngs)
        self.down_proj = _linear(cfg.d_hidden, cfg.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each with its norm."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(cfg.d_model, rngs=rngs)
        self.self_attn = Attention(cfg, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(cfg.d_model, rngs=rngs)
        self.mlp = MLP(cfg, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = tag(x + self.self_attn(self.input_layernorm(x)), "block")
        return tag(x + self.mlp(self.post_attention_layernorm(x)), "block")


class Llama(nnx.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, cfg: Config, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(cfg.vocab, cfg.d_model, rngs=rngs)
        self.layers = nnx.List([Layer(cfg, rngs) for _ in range(cfg.layers)])
        self.norm = nnx.RMSNorm(cfg.d_model, rngs=rngs)
        self.lm_head = _linear(cfg.d_model, cfg.vocab, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = tag(self.embed_tokens(tokens), "embedding")
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def _linear(into: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(into, out, use_bias=False, rngs=rngs)


SIZES = dataclasses.replace(Config(), layers=1, batch=16)


def make(cfg: Config = SIZES):
    """A step of gradient descent on (params, tokens); `params` is the module's `nnx.State`."""
    graph, params = nnx.split(Llama(cfg, nnx.Rngs(0)))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])

    def train_step(params: Any, tokens: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step, (params, jnp.zeros((cfg.batch, cfg.context + 1), jnp.int32))
