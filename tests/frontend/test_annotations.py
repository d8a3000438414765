"""Flax's partitioning annotations are entries on the user's mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from shardfn import AUTO, shard
from shardfn.errors import StrategyError

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("flax.linen")

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.ones((16, 32), np.float32)
KERNEL = ((), ("model",))


class Block(nnx.Module):
    def __init__(self, names=(None, "model")):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)
        self.up = nnx.Linear(32, 64, kernel_init=init, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.up(x)


def call(module, x):
    return module(x)


def of_module():
    return shard(Block()), (X,), "up/kernel"


def of_argument():
    return shard(call), (Block(), X), "module/up/kernel"


def of_state():
    definition, state = nnx.split(Block())
    return shard(lambda state, x: nnx.merge(definition, state)(x)), (state, X), "state/up/kernel"


def of_linen():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    module = nn.Dense(64, kernel_init=init)
    variables = module.init(jax.random.key(0), X)
    return shard(lambda variables, x: module.apply(variables, x)), (variables, X), "variables/params/kernel"


@pytest.mark.parametrize("make", [of_module, of_argument, of_state, of_linen])
def test_annotation_on_the_users_mesh_is_an_entry(make):
    f, args, path = make()
    with jax.set_mesh(MESH):
        made = f.plan(*args).decision(path)
        assert (made.spec, made.source, made.reason) == (KERNEL, "you", f"annotation of {path}")
        assert f(*args).shape == (16, 64)


def test_entry_of_the_user_goes_before_an_annotation():
    with jax.set_mesh(MESH):
        given = shard(Block(), parameter_plan={"up/kernel": (2, 1)}).plan(X).decision("up/kernel")
        assert given.spec == (("data",), ())
        assert shard(Block(), parameter_plan={"up/kernel": AUTO}).plan(X).decision("up/kernel").source == "searched"


def test_annotation_without_a_mesh_has_no_effect():
    assert shard(Block()).plan(X).decision("up/kernel").source == "searched"


def test_annotation_with_an_axis_that_the_mesh_lacks_is_an_error():
    with pytest.raises(StrategyError, match="sharded over `modl`, which is not a mesh axis") as error:
        shard(Block((None, "modl")), device=MESH).plan(X)
    assert error.value.problems[0].fix == "did you mean 'model'?"


def test_logical_axes_follow_the_rules():
    box = {"w": nn.LogicallyPartitioned(jnp.ones((32, 64)), names=("embed", "mlp"))}
    product = lambda params, x: x @ params["w"].value  # noqa: E731
    assert shard(product, device=MESH).plan(box, X).inputs[0].source == "searched"
    with nn.logical_axis_rules((("mlp", "model"),)):
        made = shard(product, device=MESH).plan(box, X).inputs[0]
    assert (made.spec, made.source) == (KERNEL, "you")
