"""Rotations of what is rotated, in one kernel with a normalization on a GPU: kept apart before JAX 0.12, which needs no barrier."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.compiled import targets
from shardfn.cost.devices.hardware import resolve
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.movement import rotated
from shardfn.planning.workarounds.nested_movement import separated

BARRIER = "stablehlo.optimization_barrier"


def minus_mean(y):
    return y - y.mean(-1, keepdims=True)


def rotated_twice(x):
    y = jnp.roll(x, -1, 2) - x
    return minus_mean(y * jnp.roll(2 * y, -1, 2))


def diffused(x):
    for _ in range(2):
        x = x.at[1:-1].add(0.2 * (x[2:] + x[:-2] - 2 * x[1:-1]))
    return minus_mean(x)


def rotated_after_the_mean(x):
    return (y := minus_mean(x)) + jnp.roll(y, 1, 2)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def notes(function, x, strategy, device):
    plan = shardfn.plan(function, x, in_strategy=(strategy,), device=device)
    return [note for note in plan.diagnostics if "optimization barrier" in note]


ROTATED, ROWS = jax.ShapeDtypeStruct((2, 4, 32, 64), "float32"), jax.ShapeDtypeStruct((64, 128), "float32")


@pytest.mark.parametrize(
    ("function", "x", "strategy", "needs_it"),
    [
        (rotated_twice, ROTATED, (1, 1, 4, 1), True),
        (diffused, ROWS, (4, 1), True),
        (jax.grad(lambda x: jnp.sin(jnp.diff(minus_mean(x), axis=0, n=2)).sum()), ROWS, (4, 1), True),
        (lambda x: jnp.diff(jax.nn.softmax(x), axis=0, n=2), ROWS, (4, 1), True),
        (lambda x: jnp.diff(jnp.sin(x), axis=0, n=2), ROWS, (4, 1), False),
        (lambda x: jnp.concatenate([x, jnp.roll(x, 1, 0)]) - x.mean(), ROWS, (4, 1), False),  # one kernel has no mean of rows
        (lambda x: minus_mean(jnp.concatenate([x, jnp.roll(x, 1, 1)], 2)), jax.ShapeDtypeStruct((4, 64, 128), "float32"), (1, 4, 1), True),
        (rotated_twice, ROTATED, (2, 1, 1, 1), True),
        (lambda x: minus_mean(jnp.concatenate([x, jnp.concatenate([x, 2 * x])])), ROWS, (1, 4), False),
        (rotated_after_the_mean, ROTATED, (1, 1, 4, 1), False),
    ],
)  # fmt: skip
def test_what_gets_a_barrier_on_gpus_alone(function, x, strategy, needs_it):
    assert bool(notes(function, x, strategy, "h100:8")) == (needs_it and IS_BEFORE_JAX_0_12)
    assert not notes(function, x, strategy, "cpu:8")
    assert not notes(function, x, strategy, "v5e:8")


def test_values_with_a_barrier_between_rotations_along_two_dimensions():
    x = drawn(4, 6)
    closed = jax.make_jaxpr(lambda x: jnp.roll(x, (1, -2), (0, 1)))(x)
    (eqn,) = closed.jaxpr.eqns
    np.testing.assert_array_equal(separated(eqn, [x])[0], jnp.roll(x, (1, -2), (0, 1)))
    (eqn,) = jax.make_jaxpr(lambda x: rotated(x, 1, 0))(x).jaxpr.eqns
    np.testing.assert_array_equal(separated(eqn, [x])[0], jnp.roll(x, 1, 0))


def nested(hlo):
    """The Triton kernels of compiled HLO in which a concatenation reads another."""
    found = []
    for name, body in re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", hlo, re.M | re.S):
        depth = {}
        for made, op, operands in re.findall(r"^\s*(?:ROOT )?%(\S+) = \S+ ([a-z-]+)\((.*?)\)", body, re.M):
            below = max((depth.get(v, 0) for v in re.findall(r"%([\w.-]+)", operands)), default=0)
            depth[made] = below + (op == "concatenate")
        if max(depth.values(), default=0) > 1 and re.search(rf"calls=%{re.escape(name)}\b.*__triton", hlo):
            found.append(name)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "x", "strategy"), [(rotated_twice, ROTATED, (1, 1, 4, 1)), (diffused, ROWS, (4, 1))]
)
def test_kernels_of_gpus_read_no_nested_concatenation(cuda, function, x, strategy):
    hardware = resolve("h100:8")
    devices = targets.devices(targets.target(hardware))[: hardware.count]
    sharded: Any = shardfn.shard(function, (strategy,), device=devices)
    for own in sharded, jax.grad(lambda x: jnp.sin(sharded(x)).sum()):
        text = jax.jit(own).lower(x).compile().as_text() or ""
        assert "__triton" in text
        assert not nested(text) or not IS_BEFORE_JAX_0_12
