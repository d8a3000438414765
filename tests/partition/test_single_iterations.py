"""A loop with one iteration is part of the program around it."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn

SHAPE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SHARDINGS = ((1, 1), (8, 1), (1, 8))


def once(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) + c.sum(), None), x, None, length=1)[0]


@pytest.mark.parametrize("device", ["cpu:8", "h100:8", "tpu-v5e:2x4"])
@pytest.mark.parametrize("entries", list(itertools.product(SHARDINGS, repeat=3)), ids=str)
def test_what_enters_the_loop_is_resharded_before_it_is_read(device, entries):
    *given, out = entries
    plan = shardfn.plan(once, SHAPE, SHAPE, device=device, in_strategy=tuple(given), out_strategy=(out,))
    graph = plan.partitioned.graph
    assert not any(op.seen for op in graph.ops)
    made = set(graph.inputs)
    for op in graph.ops:
        assert made.issuperset(v for v in op.inputs if v in graph.makers)
        made.update(op.outputs)


def once_around_a_loop(x, w):
    def outer(c, _):
        return lax.fori_loop(0, 3, lambda i, d: jnp.tanh(d) @ c, w), None

    return lax.scan(outer, x, None, length=1)[0]


@pytest.mark.parametrize("device", ["cpu:8", "h100:8", "tpu-v5e:2x4"])
@pytest.mark.parametrize("entries", list(itertools.product(SHARDINGS, repeat=3)), ids=str)
def test_what_enters_it_is_resharded_before_a_loop_inside(device, entries):
    *given, out = entries
    plan = shardfn.plan(once_around_a_loop, SHAPE, SHAPE, device=device, in_strategy=tuple(given), out_strategy=(out,))
    graph = plan.partitioned.graph
    assert not [op.name for op, loop in zip(graph.ops, graph.loop_of, strict=True) if loop >= 0 and op.trips == 1]
