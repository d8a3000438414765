"""Fused projections: they are found in every way of splitting, and their remedy is what it says."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.frontend.trace import trace
from shardfn.planning.diagnostics.fused_projections import fused_projections

S = jax.ShapeDtypeStruct
BATCH, LENGTH, WIDTH, HEADS = 8, 256, 512, 8
X, FUSED, OUT = S((BATCH, LENGTH, WIDTH), "float32"), S((WIDTH, 3 * WIDTH), "float32"), S((WIDTH, WIDTH), "float32")


def by_heads(a):
    return a.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)


def attention(q, k, v, out):
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    return (weights @ v).transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH) @ out


def split(x, w, out):
    return attention(*map(by_heads, jnp.split(x @ w, 3, -1)), out)


def with_bias(x, w, out, b):
    return attention(*map(by_heads, jnp.split(jax.nn.silu(x @ w + b), 3, -1)), out)


def reshaped(x, w, out):
    qkv = (x @ w).reshape(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
    return attention(*qkv.transpose(2, 0, 3, 1, 4), out)


def indexed(x, w, out):
    qkv = (x @ w).reshape(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
    return attention(*(qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3)), out)


def of_each_head(x, w, out):
    qkv = (x @ w).reshape(BATCH, LENGTH, HEADS, 3 * WIDTH // HEADS).transpose(0, 2, 1, 3)
    return attention(*jnp.split(qkv, 3, -1), out)


def with_own_dimension(x, w, out):
    return attention(*map(by_heads, jnp.einsum("btd,dpe->pbte", x, w)), out)


def grouped(x, w):
    y = jnp.einsum("btd,de->bte", x, w)
    return y[..., :256], y[..., 256:320], y[..., 320:]


def scanned(p, x):
    return jax.lax.scan(lambda x, p: (x + split(x, *p), None), x, p)[0]


def step(p, x):
    value, grads = jax.value_and_grad(lambda p: (scanned(p, x) ** 2).mean())(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def split_batch(x, w):
    y = x @ w
    return y[:4], y[4:]


LAYERS = tuple(S((4, *w.shape), "float32") for w in (FUSED, OUT))


@pytest.mark.parametrize(
    ("function", "args", "found"),
    [
        (split, (X, FUSED, OUT), [(1, 1, (512, 512, 512))]),
        (with_bias, (X, FUSED, OUT, S((3 * WIDTH,), "float32")), [(1, 1, (512, 512, 512))]),
        (reshaped, (X, FUSED, OUT), [(1, 1, (512, 512, 512))]),
        (indexed, (X, FUSED, OUT), [(1, 1, (512, 512, 512))]),
        (grouped, (X, S((WIDTH, 384), "float32")), [(1, 1, (256, 64, 64))]),
        (scanned, (LAYERS, X), [(0, 2, (512, 512, 512))]),
        (step, (LAYERS, X), [(0, 2, (512, 512, 512))]),
        (of_each_head, (X, FUSED, OUT), []),
        (with_own_dimension, (X, S((WIDTH, 3, WIDTH), "float32"), OUT), []),
        (lambda x, w: by_heads(x @ w), (X, OUT), []),
        (lambda x, w: (x @ w)[..., :256], (X, OUT), []),
    ],
)
def test_what_is_split_behind_a_matmul_is_found(function, args, found):
    assert [one[:3] for one in fused_projections(trace(function, args, (), "cpu").graph)] == found


def said(made):
    return [text for text in made.diagnostics if "fused projection" in text]


@pytest.mark.parametrize("function", [split, reshaped, indexed])
def test_a_split_across_shards_is_reported_and_the_remedy_sends_less(function):
    made = shardfn.plan(function, X, FUSED, OUT, device="h100:8", in_strategy=((1, 1, 1), (1, 8), (8, 1)))
    (text,) = said(made)
    assert "`w` [512, 1536] is a fused projection of 3 parts, sharded 8 ways" in text
    assert "at test_fused_projections.py:" in text and "[512, 3, 512] sharded (1, 1, 8)" in text
    parted = S((WIDTH, 3, WIDTH), "float32")
    other = shardfn.plan(
        with_own_dimension, X, parted, OUT, device="h100:8", in_strategy=((1, 1, 1), (1, 1, 8), (8, 1))
    )
    assert not said(other)
    assert other.cost.bytes_sent < made.cost.bytes_sent / 2 and other.cost.time_s < made.cost.time_s


@pytest.mark.parametrize(
    ("function", "args", "strategy", "remedy"),
    [
        (grouped, (X, S((WIDTH, 384), "float32")), ((1, 1, 1), (1, 8)), "fix: give each part a weight of its own"),
        (scanned, (LAYERS, X), (((1, 1, 4), (1, 4, 1)), (2, 1, 1)), "[4, 512, 3, 512] sharded (1, 1, 1, 4)"),
        (step, (LAYERS, X), (((1, 1, 4), (1, 4, 1)), (2, 1, 1)), "[4, 512, 3, 512] sharded (1, 1, 1, 4)"),
    ],
)
def test_the_remedy_fits_the_parts(function, args, strategy, remedy):
    (text,) = said(shardfn.plan(function, *args, in_strategy=strategy, device="h100:8"))
    assert text.endswith(remedy)


@pytest.mark.parametrize(
    ("function", "args", "strategy"),
    [
        (split, (X, FUSED, OUT), ((8, 1, 1), (1, 1), (1, 1))),
        (of_each_head, (X, FUSED, OUT), ((1, 1, 1), (1, 8), (8, 1))),
        (split_batch, (X, OUT), ((8, 1, 1), (1, 1))),
    ],
)
def test_other_splits_are_not_reported(function, args, strategy):
    assert not said(shardfn.plan(function, *args, in_strategy=strategy, device="h100:8"))


def test_equal_layers_are_one_diagnostic():
    def layers(ps, x):
        for w, out in ps:
            x = x + reshaped(x, w, out)
        return x

    entries = {"ps/*/0": (1, 4), "ps/*/1": (4, 1), "x": (2, 1, 1)}
    (text,) = said(shardfn.plan(layers, [(FUSED, OUT)] * 2, X, parameter_plan=entries, device="h100:8"))
    assert text.startswith("`ps/0/0` and 1 like it, [512, 1536], are a fused projection")
