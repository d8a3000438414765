"""The fix of a convolution that is gathered is code that works: another sharding, and `halo.conv`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import shardfn
from shardfn import halo

NHWC = ("NHWC", "HWIO", "NHWC")
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 32, 4)), jnp.float32)
K = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 4, 8)), jnp.float32)


def strided(x, k):
    return lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=NHWC)


def dense(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC)


def grouped(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=4)


def fix_of(plan):
    (said,) = [text for text in plan.diagnostics if "shardfn gathers" in text]
    return said.partition("; fix: ")[2]


CASES = {
    "strides": (strided, K, ((1, 2, 4, 1), (1, 1, 1, 1)), "(8, 1, 1, 1)"),
    "one dimension with strides": (strided, K, ((1, 8, 1, 1), (1, 1, 1, 1)), "(8, 1, 1, 1)"),
    "half of the devices": (dense, K, ((1, 4, 1, 1), (1, 1, 1, 1)), "(8, 1, 1, 1)"),
    "groups": (grouped, K[:, :, :1], ((2, 1, 1, 1), (1, 1, 1, 1)), "(8, 1, 1, 1)"),
}


@pytest.mark.parametrize(("function", "kernel", "strategy", "better"), CASES.values(), ids=CASES)
def test_the_sharding_in_the_fix_gathers_nothing(function, kernel, strategy, better):
    fix = fix_of(shardfn.plan(function, X, kernel, in_strategy=strategy))
    found = re.match(r"parameter_plan=(\{.*?\}) \(now (.*?\))\)", fix)
    assert found and found[1] == f"{{'x': {better}}}" and found[2] == str(strategy[0])
    made = shardfn.plan(function, X, kernel, in_strategy=(None, strategy[1]), parameter_plan=eval(found[1]))
    assert not [text for text in made.diagnostics if "shardfn gathers" in text]


@pytest.mark.parametrize("name", ["strides", "one dimension with strides", "half of the devices"])
def test_the_layout_in_the_fix_computes_the_convolution_sharded(name):
    function, kernel, strategy, _ = CASES[name]
    fix = fix_of(shardfn.plan(function, X, kernel, in_strategy=strategy))
    layout = eval(fix.rpartition(" and layout=")[2])
    strides = (1, 1) if function is dense else (2, 2)
    sharded = shardfn.shard(
        lambda x, k: halo.conv(x, k, strides, "SAME", dimension_numbers=NHWC, layout=layout), in_strategy=strategy
    )
    plan = sharded.plan(X, kernel)
    assert not [text for text in plan.diagnostics if "shardfn gathers" in text or "mesh of their own" in text]
    assert plan.outputs[0].strategy == strategy[0]
    np.testing.assert_allclose(sharded(X, kernel), function(X, kernel), rtol=1e-3, atol=1e-3)


def test_the_mesh_in_the_fix_is_the_users():
    mesh = jax.make_mesh((2, 4), ("row", "column"), axis_types=(AxisType.Auto,) * 2)
    fix = fix_of(shardfn.plan(strided, X, K, in_strategy=((1, 2, 4, 1), None), device=mesh))
    assert fix.endswith("layout=jax.NamedSharding(mesh, jax.P(None, 'row', 'column', None))")


def test_an_image_of_several_arguments_has_a_fix_in_words():
    plan = shardfn.plan(lambda x, y, k: strided(x * y, k), X, X, K, in_strategy=((1, 2, 4, 1), (1, 2, 4, 1), None))
    assert fix_of(plan).startswith("shard the batch over all devices, and leave the spatial dimensions unsharded; or ")
