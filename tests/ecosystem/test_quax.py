"""Quax: array-ish types."""

import equinox as eqx
import jax
import quax
import quax.examples.lora as lora

from tests.ecosystem.rows import Row, check, normal, table


def low_rank():
    layer = eqx.nn.Linear(32, 64, key=jax.random.key(0))
    layer = eqx.tree_at(
        lambda m: m.weight, layer, lora.LoraArray(layer.weight, rank=4, stop_gradient=False, key=jax.random.key(1))
    )
    return Row(quax.quaxify(lambda layer, x: jax.vmap(layer)(x)), (layer, normal(64, 32)), batch=(1,))


ROWS = {"LoRA": low_rank}


@table(__name__, ROWS)
def test_quax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
