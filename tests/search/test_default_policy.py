"""The first policy: open arguments follow the cuts that are there, or one dim class is cut."""

import jax
import jax.numpy as jnp
import pytest

import shardfn


@pytest.mark.parametrize("entry", [None, (6, 1)], ids=str)
def test_a_result_keeps_its_cut_where_the_arguments_are_open(entry):
    """6 devices cut the result; the argument divides by 3, and a grid of its own would change what 6 means."""
    x = jax.ShapeDtypeStruct((3, 1), jnp.float32)
    made = shardfn.plan(lambda x: jnp.concatenate([x, x]), x, out_strategy=(entry,), device="cpu:6")
    assert (made.outputs[0].strategy, made.outputs[0].source) == ((6, 1), "you")
    assert made.mesh.axis_sizes == (6,)
