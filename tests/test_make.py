"""Making a plan: what is read from the program before and after propagation is matched with care."""

import jax
import jax.numpy as jnp

import shardfn


def test_a_program_whose_ops_propagation_reorders():
    """The gradient of a scan, on JAX 0.12: as many reshapes as before, but not the same ones in the same order."""

    def loss(x):
        last, rows = jax.lax.scan(lambda c, row: (row - c, row - c), jnp.zeros_like(x[0]), x)
        return ((rows + last) * jnp.arange(12.0).reshape(12, 1)).sum()

    made = shardfn.plan(jax.grad(loss), jax.ShapeDtypeStruct((12, 1), jnp.float32), device="cpu:2")
    assert made.outputs[0].shape == (12, 1)
