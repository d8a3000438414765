"""What XLA's CPU backend leaves to its library, compared with what it compiles: temporaries of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import shardfn
from shardfn import compiled

from .programs import AS_RELEASED, array

ROWS, IMAGES, KERNEL = (8, 1), (8, 1, 1, 1), (1, 1, 1, 1)
PHOTOS, TAPS = array(64, 32, 32, 3), array(3, 3, 3, 64)
SMALL, LARGE = array(8, 2, 2, 64), array(3, 3, 64, 64)


def conv(x, k, strides=(1, 1)):
    return lax.conv_general_dilated(x, k, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x, size=2, stride=2, combine=lax.max, start=-jnp.inf):
    return lax.reduce_window(x, start, combine, (1, size, size, 1), (1, stride, stride, 1), "VALID")


def all_pairs(a, b):
    return jnp.mean(optax.losses.cosine_similarity(a[:, None], b[None]))


def contrastive(a, b):
    scores = optax.losses.cosine_similarity(a[:, None], b[None])
    return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.diag(scores))


def ntxent(x, labels):
    return optax.losses.ntxent(x, labels)


def small(x, k):
    return jax.nn.relu(conv(x, k))


PAIRS = (array(256, 64), array(256, 64))
PROGRAMS = {
    "all pairs": (all_pairs, PAIRS, (ROWS, (1, 1))),
    "all pairs, gradient": (jax.grad(all_pairs, (0, 1)), PAIRS, (ROWS, (1, 1))),
    "contrastive, gradient": (jax.grad(contrastive, (0, 1)), PAIRS, (ROWS, (1, 1))),
    "contrastive, both sharded": (jax.grad(contrastive, (0, 1)), PAIRS, (ROWS, ROWS)),
    "ntxent": (jax.grad(ntxent), (array(256, 64), array(256, dtype=jnp.int32)), (ROWS, (8,))),
    "convolution, pooling": (lambda x, k: pool(jax.nn.relu(conv(x, k))), (PHOTOS, TAPS), (IMAGES, KERNEL)),
    "convolution, average, mean": (
        lambda x, k: jnp.mean(jnp.tanh(pool(jax.nn.relu(conv(x, k)), 2, 2, lax.add, 0.0)), (1, 2)), (PHOTOS, TAPS), (IMAGES, KERNEL),
    ),
    "convolution, mean": (lambda x, k: jnp.mean(conv(x, k, (2, 2)), (1, 2)), (PHOTOS, TAPS), (IMAGES, KERNEL)),
    "overlapping windows": (lambda x, k: pool(jax.nn.relu(conv(x, k)), 3, 2), (PHOTOS, TAPS), (IMAGES, KERNEL)),
    "read twice": (lambda x, k: (pool(conv(x, k)), jnp.mean(conv(x, k), (1, 2))), (PHOTOS, TAPS), (IMAGES, KERNEL)),
    "few channels": (lambda x, k: jnp.mean(conv(x, k), (1, 2)), (PHOTOS, array(3, 3, 3, 8)), (IMAGES, KERNEL)),
    "kernel larger than the image": (small, (SMALL, LARGE), (IMAGES, KERNEL)),
    "its gradient": (jax.grad(lambda x, k: jnp.sum(small(x, k) ** 2), (0, 1)), (SMALL, LARGE), (IMAGES, KERNEL)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_temporaries_of_library_calls_are_those_of_the_compiled_program(name):
    fn, args, entries = PROGRAMS[name]
    function: Any = shardfn.shard(fn, entries, device=jax.devices()[:8])
    predicted = function.plan(*args).cost.memory.temporaries
    real = compiled.read(function.lower(*args).compile(AS_RELEASED)).temp_bytes
    assert predicted == pytest.approx(real, rel=0.15, abs=1024)
