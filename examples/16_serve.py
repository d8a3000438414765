"""Train a small GPT on eight devices, every array sharded; serve it on four, sharded by heads, the cache too."""

import collections
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import checkpoint, shard, train
from shardfn.compiled import read
from shardfn.mindspore import infer_predict_layout, load_distributed_checkpoint

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

layers, d_model, heads, head_dim, vocab, context = 2, 64, 8, 8, 64, 32
prompt_length, length, batch = 4, 24, 2


def init(key):
    kt, kp, *keys = jax.random.split(key, 2 + layers)
    shapes = {"wq": (d_model, heads, head_dim), "wk": (d_model, heads, head_dim), "wv": (d_model, heads, head_dim),
              "wo": (heads, head_dim, d_model), "w1": (d_model, 4 * d_model), "w2": (4 * d_model, d_model)}  # fmt: skip
    block = lambda key: {n: jax.random.normal(jax.random.fold_in(key, i), shapes[n]) / 16 for i, n in enumerate(shapes)}  # noqa: E731
    return {"tokens": jax.random.normal(kt, (vocab, d_model)) / 8, "positions": jax.random.normal(kp, (context, d_model)) / 8,
            "blocks": [block(key) for key in keys]}  # fmt: skip


def empty_cache():
    """Keys and values of every layer: of fixed size, filled token by token."""
    shape = (batch, context, heads, head_dim)
    return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(layers)]


def norm(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def gpt(params, tokens, cache=None, position=0):
    """Tokens [batch, t], the first at `position`, to logits [batch, t, vocab] and the cache with their keys and values."""
    at, after = position + jnp.arange(tokens.shape[1]), []
    x = params["tokens"][tokens] + params["positions"][at]
    for i, p in enumerate(params["blocks"]):
        q, k, v = (jnp.einsum("btm,mhd->bthd", norm(x), p[name]) for name in ("wq", "wk", "wv"))
        if cache is not None:
            k = jax.lax.dynamic_update_slice_in_dim(cache[i]["k"], k, position, 1)
            v = jax.lax.dynamic_update_slice_in_dim(cache[i]["v"], v, position, 1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / head_dim**0.5
        scores = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) <= at[:, None], scores, -1e9))
        x = x + jnp.einsum("bthd,hdm->btm", jnp.einsum("bhts,bshd->bthd", scores, v), p["wo"])
        x = x + jax.nn.gelu(norm(x) @ p["w1"]) @ p["w2"]
        after.append({"k": k, "v": v})
    return norm(x) @ params["tokens"].T, after


def loss(params, tokens):
    logits, _ = gpt(params, tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def serve(params, cache, tokens, position):
    """The likeliest next token of each sequence, and the cache."""
    logits, cache = gpt(params, tokens[:, None], cache, position)
    return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache


def greedy(step, params, cache, prompt):
    """Token by token: those of the prompt as given, then the likeliest."""
    tokens = [prompt[:, 0]]
    for position in range(length - 1):
        likeliest, cache = step(params, cache, tokens[-1], jnp.int32(position))
        tokens.append(prompt[:, position + 1] if position + 1 < prompt_length else likeliest)
    return np.stack([np.asarray(t) for t in tokens], axis=1)


@jax.jit
def sequences(key):
    """Counting up by 1, 2 or 3 from anywhere: easy to learn, so that the likeliest token stands out."""
    start, by = jax.random.randint(key, (2, 16, 1), 0, vocab)
    return (start + (by % 3 + 1) * jnp.arange(context + 1)) % vocab


HEADS = """
format = "shardfn-layout"
version = 2
others = "replicated"

[mesh]
model = "left"

[arguments]
"*/w[qkv]" = { dims = ["d_model", "heads", "head_dim"], sharding = [1, "model", 1] }
"*/wo" = { dims = ["heads", "head_dim", "d_model"], sharding = ["model", 1, 1] }
"*/w1" = [1, "model"]
"*/w2" = ["model", 1]
"cache/*" = { dims = ["batch", "context", "heads", "head_dim"], sharding = [1, 1, "model", 1] }
"""

step = train.step(loss, optax.adam(3e-3), mode="data_parallel", parallel_optimizer_config={"optimizer_level": "level3"})
state = step.init(jax.jit(init)(jax.random.key(0)))
for i in range(60):
    state, value = step(state, sequences(jax.random.key(i)))
w1 = state.params["blocks"][0]["w1"]
print(f"trained on {len(w1.sharding.device_set)} devices to a loss of {float(value):.3f}; "
      f"w1 {w1.shape} has shards of {w1.sharding.shard_shape(w1.shape)}")  # fmt: skip

params, cache = jax.eval_shape(lambda: init(jax.random.key(0))), jax.eval_shape(empty_cache)
tokens, position = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
with tempfile.TemporaryDirectory() as folder:
    run, file = pathlib.Path(folder) / "run", pathlib.Path(folder) / "heads.toml"
    checkpoint.save(run, state, step=60)
    file.write_text(HEADS)
    decode = shard(serve, device=jax.devices()[:4], layout=file, donate_argnames="cache")
    layout = infer_predict_layout(decode, params, cache, tokens, position)  # from shapes: nothing runs
    print(f"\n{layout}\n")
    weights = load_distributed_checkpoint(decode, run, layout)
    on_one = load_distributed_checkpoint(serve, run, like=params)  # without a predict_strategy: on one device
    plan = decode.plan(params, cache, tokens, position)
    print(decode.explain(params, cache, tokens, position, compiled=True))

prompt = np.asarray(sequences(jax.random.key(99)))[:batch, :prompt_length]
empty = jax.tree.map(lambda a, sharding: jnp.zeros(a.shape, device=sharding), cache, plan.in_shardings[1])
served = greedy(decode, weights, empty, prompt)
alone = greedy(jax.jit(serve, donate_argnames="cache"), on_one, empty_cache(), prompt)
np.testing.assert_array_equal(served, alone)
assert empty[0]["k"].is_deleted(), "the cache was given to the step"

at_once, _ = jax.jit(gpt)(on_one, alone)  # without a cache
np.testing.assert_array_equal(alone[:, prompt_length:], np.argmax(at_once, axis=-1)[:, prompt_length - 1 : -1])

compiled = decode.lower(params, cache, tokens, position).compile()
kinds = collections.Counter(c.kind for c in read(compiled).collectives)
assert kinds == {"all-reduce": 2 * layers}, kinds  # in each layer one after attention, one after the feed-forward
print(f"\n{served}\nthe tokens of the unsharded model; one decode step has {dict(kinds)}")
