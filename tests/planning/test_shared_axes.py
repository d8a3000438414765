"""Integers of two dimension groups that share a part of the mesh: the headline says so, and how many devices they need."""

import re

import jax
import pytest

import shardfn

S = jax.ShapeDtypeStruct
ARGS = S((24, 48), "float32"), S((48, 96), "float32"), S((96, 48), "float32")


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def entries(strategy, devices):
    return shardfn.plan(mlp, *ARGS, in_strategy=strategy, device=f"h100:{devices}").entries


@pytest.mark.parametrize(
    ("strategy", "devices", "text"),
    [
        (((2, 1), (1, 8), (8, 1)), 8, "side by side, 2 x 8 shards need a multiple of 16 devices"),
        (((2, 1), (1, 4), (4, 1)), 12, "side by side, 2 x 4 shards need a multiple of 8 devices"),
    ],
)
def test_what_does_not_fit_side_by_side(strategy, devices, text):
    found = entries(strategy, devices)
    assert re.match("dimension 0 of `x` and dimension 1 of `w1` share the mesh axis [ab]: ", found) and text in found


@pytest.mark.parametrize("strategy", [((2, 1), (1, 4), (4, 1)), ((8, 1), (8, 1), (8, 1))])
def test_nothing_is_said_where_they_fit_or_share_all_of_it(strategy):
    assert "side by side" not in entries(strategy, 8)
