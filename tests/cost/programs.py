"""Small programs with large arrays, so that weights and activations are what takes memory and time."""

import os

import jax
import jax.numpy as jnp

F32 = jnp.float32
AS_RELEASED = {"xla_cpu_use_fusion_emitters": True} if "use_fusion_emitters=false" in os.environ["XLA_FLAGS"] else None
"""Compiler options where memory is compared: without these emitters, which `conftest.py` leaves out, a few programs hold less."""


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(params, x):
    return jax.nn.gelu(x @ params["w1"]) @ params["w2"]


def loss(params, x):
    return jnp.mean(jnp.square(mlp(params, x)))


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def attention(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, w) for w in (wq, wk, wv))
    weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k) / 4.0)
    return x + jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), wo)


def scanned(layers, x):
    return jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w1"]) @ p["w2"], None), x, layers)[0]


def scanned_step(layers, x):
    value, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(scanned(p, x))))(layers)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads), value


WEIGHTS = {"w1": array(256, 1024), "w2": array(1024, 256)}
LAYERS = {"w1": array(4, 128, 512), "w2": array(4, 512, 128)}
X = array(2048, 256)
HEADS = (array(8, 128, 64), *(array(64, 8, 16),) * 3, array(8, 16, 64))
X_SMALL = array(512, 128)
