"""Options of `shard` that have no effect on a call."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from shardfn import AUTO, shard

X, W = jnp.ones((16, 8)), jnp.eye(8)
GIVEN = {"in_strategy": ((8, 1), (1, 1))}
PROPAGATED = {"in_strategy": ((8, 1), AUTO), "search_mode": "sharding_propagation"}


def product(x, w):
    return x @ w


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (GIVEN | {"budget": "fast"}, "every sharding is given, and nothing is searched"),
        (GIVEN | {"tolerance": 0.01}, "every sharding is given"),
        (GIVEN | {"time_limit": 1}, "every sharding is given"),
        (GIVEN | {"compile_candidates": 2}, "every sharding is given"),
        (GIVEN | {"rehearse_candidates": 2}, "every sharding is given"),
        (PROPAGATED | {"budget": "fast"}, "does not search"),
        (PROPAGATED | {"tolerance": 0.01}, "does not search"),
        ({"closed_over": "argument"}, "it closes over no array"),
        ({"assumed_trips": 5}, "the trips of all loops are known"),
    ],
)
def test_option_without_an_effect_warns_once(options, why):
    name = list(options)[-1]
    sharded = shard(product, **options)
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect on `product`: .*{why}") as found:
        sharded.plan(X, W)
        sharded.plan(X, W)
    assert len(found) == 1


def test_options_with_an_effect_and_those_for_several_devices_on_one_do_not_warn():
    def closing(x):
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c @ W + 1, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(product, budget="fast", tolerance=0.1, time_limit=60).plan(X, W)
        shard(product, PROPAGATED["in_strategy"], budget="fast").plan(X, W)
        shard(product, **GIVEN).plan(X, W)
        shard(product, ((1, 1), (1, 1)), budget="fast", device="cpu:1").plan(X, W)
        shard(closing, closed_over="argument", assumed_trips=3).plan(X)
