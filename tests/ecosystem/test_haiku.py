"""Haiku: transformed functions."""

import haiku as hk
import jax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, normal, table

KEY = jax.random.key(0)


def model(forward, x):
    def make():
        pure = hk.without_apply_rng(hk.transform(forward))
        return Row(pure.apply, (pure.init(KEY, x), x), batch=(1,))

    return make


def convnet(x):
    x = jax.nn.relu(hk.Conv2D(16, 3)(x))
    x = hk.AvgPool(2, 2, "SAME")(x)
    return hk.Linear(8)(jnp.mean(x, (1, 2)))


def max_pooled(x):
    return hk.Linear(8)(jnp.mean(hk.MaxPool(2, 2, "SAME")(jax.nn.relu(hk.Conv2D(16, 3)(x))), (1, 2)))


def recurrent(x):
    core = hk.LSTM(32)
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)[0]


def batch_norm():
    def forward(x):
        return hk.BatchNorm(True, True, 0.9)(x, is_training=True)

    pure, x = hk.without_apply_rng(hk.transform_with_state(forward)), normal(64, 32)
    params, state = pure.init(KEY, x)
    return Row(pure.apply, (params, state, x), batch=(2,), gradient=False)


ROWS = {
    "MLP": model(lambda x: hk.nets.MLP([64, 64, 8])(x), normal(64, 32)),
    "ConvNet": model(convnet, normal(16, 16, 16, 4)),
    "max pooling": model(max_pooled, normal(16, 16, 16, 4)),
    "LSTM": model(recurrent, normal(16, 12, 8)),
    "attention": model(lambda x: hk.MultiHeadAttention(4, 8, w_init_scale=1.0)(x, x, x), normal(8, 16, 32)),
    "BatchNorm": batch_norm,
}


@table(__name__, ROWS)
def test_haiku_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
