"""Train a small GPT on eight devices, every array in pieces; serve it on four, cut by heads, with a cache that is too."""

import collections
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.models import gpt2
from shardfn import checkpoint, compiled, infer_predict_layout, load_distributed_checkpoint, shard, train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can wait for ever with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

cfg = gpt2.Config(layers=2, d_model=64, heads=8, vocab=64, context=32, batch=16)
prompt_length, length, batch = 4, 24, 2

HEADS = """
format = "shardfn-layout"
version = 1
others = "whole"

[grid]
model = "left"

[arguments]
"*/w[qkv]" = { dims = ["d_model", "heads", "head_dim"], cut = [1, "model", 1] }
"*/wo" = { dims = ["heads", "head_dim", "d_model"], cut = ["model", 1, 1] }
"*/w1" = [1, "model"]
"*/b1" = ["model"]
"*/w2" = ["model", 1]
"cache/*" = { dims = ["batch", "context", "heads", "head_dim"], cut = [1, 1, "model", 1] }
"""


def loss(params, tokens):
    return gpt2.loss(params, tokens, cfg)


def serve(params, cache, tokens, position):
    """One more token of each sequence: what comes next, and the cache with it."""
    logits, cache = gpt2.decode(params, cache, tokens, position, cfg)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def greedy(step, params, cache, prompt):
    """Token by token: those of the prompt as given, then the likeliest."""
    tokens = [prompt[:, 0]]
    for position in range(length - 1):
        likeliest, cache = step(params, cache, tokens[-1], jnp.int32(position))
        tokens.append(prompt[:, position + 1] if position + 1 < prompt_length else likeliest)
    return np.stack([np.asarray(t) for t in tokens], axis=1)


def sequences(key):
    """Counting up by 1, 2 or 3 from anywhere: easy to learn, so that the likeliest token stands out."""
    start, by = jax.random.randint(key, (2, cfg.batch, 1), 0, cfg.vocab)
    return (start + (by % 3 + 1) * jnp.arange(cfg.context + 1)) % cfg.vocab


step = train.step(loss, optax.adam(3e-3), mode="data_parallel", parallel_optimizer_config={"optimizer_level": "level3"})
state = step.init(gpt2.init(jax.random.key(0), cfg))
for i in range(60):
    state, value = step(state, sequences(jax.random.key(i)))
w1 = state.params["blocks"][0]["mlp"]["w1"]
print(f"trained on {len(w1.sharding.device_set)} devices to a loss of {float(value):.3f}; "
      f"w1 {w1.shape} lies there in pieces of {w1.sharding.shard_shape(w1.shape)}")  # fmt: skip

params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), cfg))
cache = jax.eval_shape(lambda: gpt2.empty_cache(cfg, batch))
tokens, position = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / "run"
    checkpoint.save(run, state, step=60)
    file = pathlib.Path(folder) / "heads.toml"
    file.write_text(HEADS)
    decode = shard(serve, device=jax.devices()[:4], layout=file, donate_argnames="cache")
    layout = infer_predict_layout(decode, params, cache, tokens, position)  # from shapes: nothing runs
    print(f"\n{layout}\n")
    weights = load_distributed_checkpoint(decode, run, layout)
    on_one = load_distributed_checkpoint(serve, run, like=params)  # without a predict_strategy: on one device
    report = decode.explain(params, cache, tokens, position, compiled=True)
    plan = decode.plan(params, cache, tokens, position)
print(report)

prompt = np.asarray(sequences(jax.random.key(99)))[:batch, :prompt_length]
spread = jax.tree.map(lambda leaf, path: jnp.zeros(leaf.shape, leaf.dtype, device=plan.sharding(path)), cache,
                      [{name: f"cache/{i}/{name}" for name in layer} for i, layer in enumerate(cache)])  # fmt: skip
served = greedy(decode, weights, spread, prompt)
alone = greedy(jax.jit(serve, donate_argnames="cache"), on_one, gpt2.empty_cache(cfg, batch), prompt)
np.testing.assert_array_equal(served, alone)
assert spread[0]["k"].is_deleted(), "the cache was given to the step"

whole = jax.jit(lambda p, t: gpt2.forward(p, t, cfg))(on_one, alone)  # without a cache, all at once
np.testing.assert_array_equal(alone[:, prompt_length:], np.argmax(whole, axis=-1)[:, prompt_length - 1 : -1])

kinds = collections.Counter(
    c.kind for c in compiled.read(decode.lower(params, cache, tokens, position).compile()).collectives
)
assert kinds == {"all-reduce": 2 * cfg.layers}, kinds  # one after attention, one after the feed-forward
print(f"\n{served}\nthe tokens of the unsharded model; one decode step has {dict(kinds)}")
