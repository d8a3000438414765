"""Flax Linen: functions of a dictionary of variables."""

import flax.linen as nn
import jax

from tests.ecosystem.rows import Row, check, integers, normal, table

KEY = jax.random.key(0)


def model(module, x, **options):
    def make():
        return Row(lambda v, x: module.apply(v, x, **options), (module.init(KEY, x, **options), x), batch=(1,))

    return make


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            lambda m, x, _: (m(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return layer(nn.Dense(32), x, None)[0]


def batch_norm():
    module, x = nn.BatchNorm(use_running_average=False), normal(64, 32)
    return Row(lambda v, x: module.apply(v, x, mutable=["batch_stats"]), (module.init(KEY, x), x), batch=(1,))


def dropout():
    module, x = nn.Dropout(0.5, deterministic=False), normal(64, 32)
    return Row(lambda x, key: module.apply({}, x, rngs={"dropout": key}), (x, KEY))


def lstm():
    module, x = nn.RNN(nn.OptimizedLSTMCell(32)), normal(16, 12, 8)
    return Row(module.apply, (module.init(KEY, x), x), batch=(1,))


def embed():
    module, x = nn.Embed(128, 32), integers(128, 64, 8)
    return Row(module.apply, (module.init(KEY, x), x), batch=(1,))


ROWS = {
    "Dense": model(nn.Dense(64), normal(64, 32)),
    "Conv": model(nn.Conv(16, (3, 3)), normal(16, 16, 16, 4)),
    "transformer block": model(Block(), normal(8, 16, 32)),
    "scan": model(Scanned(), normal(64, 32)),
    "GroupNorm": model(nn.GroupNorm(4), normal(16, 8, 8, 32)),
    "BatchNorm": batch_norm,
    "Dropout": dropout,
    "LSTM": lstm,
    "Embed": embed,
}


@table(__name__, ROWS)
def test_flax_linen_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
