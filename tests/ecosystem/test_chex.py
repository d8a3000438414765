"""chex: dataclasses as containers."""

import chex
import jax
import jax.numpy as jnp

from tests.ecosystem.rows import Row, check, normal, table


@chex.dataclass
class State:
    weights: jax.Array
    bias: jax.Array


def dataclass():
    return Row(
        lambda s, x: jnp.tanh(x @ s.weights + s.bias),
        (State(weights=normal(32, 64), bias=normal(64)), normal(64, 32)),
        batch=(1,),
    )


def changed():
    return Row(
        lambda s: s.replace(bias=s.bias + s.weights.sum(0)), (State(weights=normal(32, 64), bias=normal(64)),), batch=()
    )


ROWS = {"dataclass": dataclass, "replace": changed}


@table(__name__, ROWS)
def test_chex_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
