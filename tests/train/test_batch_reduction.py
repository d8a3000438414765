"""Which losses are sums or means over the batch, however they are spelled: a mean is never taken for a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn.train.batch_reduction import batch_reduction
from shardfn.train.pipelines.trace_loss import trace_loss

KEY = jax.random.key(0)
SUMS = {
    "with a factor": lambda p, x: jnp.sum(each(p, x)) * 0.5,
    "a dot with ones": lambda p, x: jnp.dot(jnp.ones(len(x)), each(p, x)),
    "with a mask": lambda p, x: jnp.sum(each(p, x) * (x[:, 0] > 0)),
    "with dropout": lambda p, x: jnp.sum(each(p, x) * jax.random.bernoulli(KEY, 0.5, (len(x),)) / 0.5),
    "of chosen elements": lambda p, x: jnp.sum((x @ p)[jnp.arange(len(x)), x[:, 0].astype(int)]),
    "of means of examples": lambda p, x: jnp.sum(jnp.mean((x @ p) ** 2, 1)),
}
MEANS = {
    "divided by the size": lambda p, x: jnp.sum(each(p, x)) / jnp.float32(len(x)),
    "of a vmap": lambda p, x: jnp.mean(jax.vmap(lambda row: jnp.sum((row @ p) ** 2))(x)),
    "of examples, then of columns": lambda p, x: jnp.mean(jnp.mean((x @ p) ** 2, 0)),
    "of variances, which have a NaN": lambda p, x: jnp.mean(jnp.var(x @ p, 1)),
    "with dropout": lambda p, x: jnp.mean(each(p, x) * jax.random.bernoulli(KEY, 0.5, (len(x),)) / 0.5),
}
UNKNOWN = {
    "weights that are a constant": lambda p, x: jnp.dot(each(p, x), np.full(len(x), 1 / len(x), np.float32)),
    "weights of an average": lambda p, x: jnp.average(each(p, x), weights=jnp.ones(len(x))),
    "a counted size": lambda p, x: jnp.sum(each(p, x)) / jnp.sum(jnp.ones(len(x), int)),
    "the size of an array": lambda p, x: jnp.sum(each(p, x)) / jnp.array(x.shape)[0],
    "the last index": lambda p, x: jnp.sum(each(p, x)) / (1 + jnp.arange(len(x))[-1]),
    "weights by position": lambda p, x: jnp.sum(each(p, x) * 0.9 ** jnp.arange(len(x))),
    "weights that add up to one": lambda p, x: jnp.sum(each(p, x) * x[:, 0] / jnp.sum(x[:, 0])),
    "weights of a softmax": lambda p, x: jnp.sum(each(p, x) * jax.nn.softmax(x[:, 0])),
    "a masked mean": lambda p, x: jnp.mean(each(p, x), where=x[:, 0] > 0),
    "no batch": lambda p, x: 1.0 * jnp.sum(p),
}


def each(p, x):
    return jnp.sum((x @ p) ** 2, 1)


def found(loss):
    return batch_reduction(*(trace_loss(loss, jnp.ones((4, 3)), (jnp.ones((n, 4)),)) for n in (8, 16)))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(f, kind) for losses, kind in ((SUMS, "sum"), (MEANS, "mean"), (UNKNOWN, None)) for f in losses.values()],
    ids=[f"{kind} {name}" for losses, kind in ((SUMS, "sum"), (MEANS, "mean"), (UNKNOWN, "?")) for name in losses],
)
def test_the_reduction_of_a_loss(loss, expected):
    assert found(loss) == expected


def test_what_is_returned_beside_a_loss_does_not_count():
    assert found(lambda p, x: (jnp.sum(each(p, x)), jnp.mean(x))[0]) == "sum"
