"""The model programs of examples/ compute what they say: each is held against a second way to the same result."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.models import NAMES, abstract, attention, cholesky, decoder, gpt2, moe
from tests.marks import some_slow

TINY = gpt2.Config(d_model=16, heads=2, vocab=32, context=8, batch=4)


@pytest.mark.parametrize("name", some_slow(NAMES, ["gpt2"]))
def test_runs_and_has_the_shapes_it_promises(name):
    make = importlib.import_module(f"examples.models.{name}").make
    fn, shapes = abstract(make)
    promised = jax.eval_shape(fn, *shapes)
    out = jax.jit(fn)(*jax.jit(lambda: make()[1])())  # jitted: op by op it takes seconds
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), out, promised)))


@pytest.mark.parametrize("name", ["mlp", "convnet", "embedding"])
def test_training_lowers_the_loss(name):
    step, (params, *batch) = importlib.import_module(f"examples.models.{name}").make(train=True)
    step = jax.jit(step)
    losses = []
    for _ in range(5):
        params, value = step(params, *batch)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)


def test_gpt2_small_has_its_124_million_parameters():
    _, (params, *_) = abstract(gpt2.make, gpt2.SMALL)
    padding = (50304 - 50257) * 768
    attention_biases = 12 * 4 * 768  # this program's projections have none
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == 124_439_808 + padding - attention_biases


def stack(trees: list) -> dict:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.slow
def test_gpt2_scanned_is_gpt2_unrolled():
    unrolled, (params, state, tokens) = gpt2.make(TINY)
    scanned = functools.partial(gpt2.train_step, cfg=dataclasses.replace(TINY, scan=True, remat=True))
    stacked = params | {"blocks": stack(params["blocks"])}
    new, _, loss = jax.jit(unrolled)(params, state, tokens)
    new_stacked, _, scanned_loss = jax.jit(scanned)(stacked, gpt2.ADAMW.init(stacked), tokens)
    assert loss == pytest.approx(math.log(TINY.vocab), rel=0.05)
    np.testing.assert_allclose(loss, scanned_loss, rtol=1e-5)
    new["blocks"] = stack(new["blocks"])
    # Adam's first step is close to the sign of the gradient: where that is near zero, rounding decides it.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=7e-4), new, new_stacked)


@pytest.mark.slow
def test_decoding_step_by_step_is_attention_over_the_whole():
    step, (params, cache, _) = decoder.make(batch=2, length=8)
    step = jax.jit(step)
    tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 64)
    logits = []
    for i in range(tokens.shape[1]):
        out, cache = step(params, cache, tokens[:, i])
        logits.append(out)
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = attention.forward(layer, x)
    np.testing.assert_allclose(jnp.stack(logits, axis=1), x @ params["embedding"].T, rtol=1e-4, atol=1e-4)


def test_generate_feeds_back_its_best_token():
    step, (params, cache, token) = decoder.make(batch=2, length=8)
    step = jax.jit(step)
    generated = decoder.generate(params, cache, token, steps=4)
    for i in range(4):
        logits, cache = step(params, cache, token)
        token = jnp.argmax(logits, axis=-1)
        assert (generated[:, i] == token).all()


@pytest.mark.slow
def test_moe_with_room_is_the_weighted_sum_of_two_experts():
    fn, (params, x) = moe.make(groups=2, tokens=6, experts=4, capacity=12)
    probabilities = jax.nn.softmax(x @ params["gate"])
    best, choice = jax.lax.top_k(probabilities, 2)
    weight = best / best.sum(-1, keepdims=True)
    every = jnp.stack([jax.nn.gelu(x @ params["w1"][e]) @ params["w2"][e] for e in range(4)], axis=2)
    wanted = (jnp.take_along_axis(every, choice[..., None], axis=2) * weight[..., None]).sum(2)
    np.testing.assert_allclose(jax.jit(fn)(params, x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [0, 3])
def test_cholesky_solves(batch):
    fn, (a, b) = cholesky.make(batch=batch)
    np.testing.assert_allclose(fn(a, b), np.linalg.solve(a, b), rtol=1e-4, atol=1e-4)
