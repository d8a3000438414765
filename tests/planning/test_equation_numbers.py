"""The number of an equation is the same with workarounds and without: layout files name ops by it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from shardfn import plan
from shardfn.ir.rewrite import equations
from shardfn.planning.plan import answered_call


def S(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def conv(x, k):
    return jax.lax.conv_general_dilated(x, k, (2, 2), "SAME")


def summed(e):
    return jax.ops.segment_sum(jnp.tanh(e[:13]), jnp.arange(13) % 5, 5)


@pytest.mark.parametrize(
    ("function", "args", "strategy", "kind"),
    [
        (conv, (S(8, 8, 16, 16), S(8, 8, 3, 3)), ((1, 1, 4, 1), (1, 1, 1, 1)), "window"),
        (lambda x: jnp.fft.fft(x).real * 2, (S(8, 16),), ((1, 8),), "transform"),
        (summed, (S(16, 4),), ((2, 2),), "scatter"),
    ],
)
def test_workarounds_change_no_number(function, args, strategy, kind):
    guarded = answered_call(plan(function, *args, in_strategy=strategy, device="cpu:8")).posed.call
    assert kind in {op.kind for op in guarded.function.wrong}
    plain = dataclasses.replace(guarded.function, wrong=()).as_jaxpr()
    with_them, without = (
        [(number, eqn.primitive.name) for number, eqn, _ in equations(jaxpr)]
        for jaxpr in (guarded.traced.jaxpr, plain.jaxpr)
    )
    assert with_them == without
