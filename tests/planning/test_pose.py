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


def test_cuts_that_must_share_axes_do_so_where_they_meet_on_the_least():
    """Of 2 x 4 x 4 ways on 8 devices: embedding and hidden dim meet on a weight, the batch meets both on activations."""
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (128, 512), (512, 128))]
    shapes = *weights, jax.ShapeDtypeStruct((16, 64), jnp.int32)
    function = lambda emb, up, down, tokens: jnp.tanh(emb[tokens] @ up) @ down  # noqa: E731
    made = shardfn.plan(function, *shapes, in_strategy=((1, 4), (1, 4), (4, 1), (2, 1)), device="cpu:8")
    assert sorted(size for _, size in made.axes) == [2, 4]
    assert made.cost.flops < 1.01 * 2 * (2 * 16 * 64 * 128 * 512) / 8
