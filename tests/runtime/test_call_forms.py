"""What Python and JAX do with functions: decorators in other orders, pickles, devices, layouts of another function."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn

X = jnp.arange(64.0).reshape(8, 8)


@shardfn.shard
def decorated(x):
    return 2 * x


def plain(x):
    return 3 * x


class Model:
    factor = 2.0

    @classmethod
    @shardfn.shard
    def scaled(cls, x):
        return cls.factor * x

    @staticmethod
    @shardfn.shard
    def doubled(x):
        return 2 * x


class Other(Model):
    factor = 3.0


def test_decorated_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    undecorated = shardfn.shard(plain, ((8, 1),))
    np.testing.assert_allclose(pickle.loads(pickle.dumps(undecorated))(X), 3 * X)


def test_class_and_static_methods_over_shard():
    for _ in range(2):
        assert Model.scaled(X)[0, 1] == 2 and Other.scaled(X)[0, 1] == 3 and Model().scaled(X)[0, 1] == 2
    assert Model.doubled(X)[0, 1] == 2
    Model.factor = 5.0
    try:
        assert Model.scaled(X)[0, 1] == 5 and Other.scaled(X)[0, 1] == 3
    finally:
        Model.factor = 2.0


@pytest.mark.parametrize(
    ("kind", "fix"), [(classmethod, "write @classmethod above @shard"), (property, "from the property")]
)
def test_shard_over_a_descriptor_names_the_right_order(kind, fix):
    with pytest.raises(shardfn.ShardError, match=fix):
        shardfn.shard(kind(lambda self: X))


def test_one_device():
    device = jax.devices()[3]
    assert shardfn.shard(lambda x: 2 * x, device=device)(X).sharding.device_set == {device}


def test_plan_of_a_training_step_shards_the_parameters_of_an_evaluation(tmp_path):
    def step(params, moments, batch):
        return {k: p - moments[k] for k, p in params.items()}, (params["w"] * batch).sum()

    def evaluate(params, batch):
        return (params["w"] * batch).sum(1), {"last": batch[-1]}

    trees = {"w": X}, {"w": X}, X
    entries = {"params/w": (2, 4), "batch": (8, 1)}
    plan = shardfn.plan(step, *trees, parameter_plan=entries)
    plan.save(tmp_path / "step.toml")
    for layout in (plan, tmp_path / "step.toml"):
        found = shardfn.shard(evaluate, layout=layout)
        made = found.plan({"w": X}, X)
        assert {d.path: d.strategy for d in made.inputs} == {"params/w": (2, 4), "batch": (8, 1)}
        (note,) = [text for text in made.diagnostics if "matches no array" in text]
        assert "moments/w" in note
        np.testing.assert_allclose(found({"w": X}, X)[0], (X * X).sum(1))
