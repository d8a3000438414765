"""Flax NNX: modules with state, which a call may change."""

import jax.numpy as jnp
from flax import nnx

from tests.ecosystem.rows import Row, check, normal, table


def model(make, x):
    return lambda: Row(lambda m, x: m(x), (make(nnx.Rngs(0)), x), batch=(1,), gradient=False)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


def gradients():
    model = nnx.Linear(32, 8, rngs=nnx.Rngs(0))

    def grads(model, x, y):
        return nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)

    return Row(grads, (model, normal(64, 32), normal(64, 8)), batch=(1, 2), gradient=False)


def functional():
    graph, state = nnx.split(Block(nnx.Rngs(0)))
    return Row(lambda state, x: nnx.merge(graph, state)(x), (state, normal(8, 16, 32)), batch=(1,))


ROWS = {
    "Linear": model(lambda rngs: nnx.Linear(32, 64, rngs=rngs), normal(64, 32)),
    "Conv": model(lambda rngs: nnx.Conv(4, 16, (3, 3), rngs=rngs), normal(16, 16, 16, 4)),
    "transformer block": model(Block, normal(8, 16, 32)),
    "gradients": gradients,
    "split and merge": functional,
}


@table(__name__, ROWS)
def test_flax_nnx_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
