"""What Python and JAX do with functions: decorators in other orders, pickles, devices, layouts of another function."""

import dataclasses
import functools
import pickle
import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
from shardfn import train
from shardfn.errors import StrategyError, StrategyTypeError

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


def test_sharding_of_one_device_as_an_entry_is_refused():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    with pytest.raises(StrategyTypeError, match=r"is a SingleDeviceSharding(.|\n)*write device=jax.devices\(\)\[i\]"):
        shardfn.shard(lambda x: 2 * x, (one,)).plan(X)


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        (classmethod, "write @classmethod above @shard"),
        (staticmethod, "write @staticmethod above @shard"),
        (property, "write @property above @shard"),
    ],
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


def squares(params, x):
    return (jnp.tanh(x @ params["up"]) @ params["down"]) ** 2


class Net(nnx.Module):
    def __init__(self):
        self.up, self.down = nnx.Param(X), nnx.Param(X)

    def __call__(self, x):
        return squares({"up": self.up[...], "down": self.down[...]}, x)


EVALUATIONS = {
    "the loss": (lambda params, x: squares(params, x).mean(), lambda state: state.params),
    "another name": (lambda weights, x: squares(weights, x), lambda state: state.params),
    "the state": (lambda state, x: squares(state.params, x), lambda state: state),
    "the state by another name": (lambda trained, x: squares(trained.params, x), lambda state: state),
    "inside a dict": (lambda tree, x: squares(tree["ema"], x), lambda state: {"ema": state.params}),
}


@pytest.mark.parametrize("of_file", [False, True])
def test_plan_of_train_step_shards_the_parameters_of_an_evaluation(tmp_path, of_file):
    plan = {"up": (1, 4), "down": (4, 1)}
    step = train.step(
        lambda params, x: squares(params, x).mean(), optax.adam(1e-2), mode="semi_auto_parallel", parameter_plan=plan
    )
    state = step.init(lambda: {"up": X, "down": X}, X)
    layout = step.plan(state, X)
    if of_file:
        layout.save(tmp_path / "step.toml")
        layout = tmp_path / "step.toml"
    for name, (function, given) in EVALUATIONS.items():
        found = shardfn.shard(function, layout=layout)
        with warnings.catch_warnings(record=True) as warned:
            made = found.plan(given(state), X)
        matched = {d.path.rsplit("/", 1)[-1]: d.strategy for d in made.inputs if "opt_state" not in d.path}
        assert name == "inside a dict" or {key: matched[key] for key in plan} == plan, name
        (note,) = [text for text in made.diagnostics if "no array of this call" in text]
        assert name != "inside a dict" or any("shards no argument" in str(w.message) for w in warned)
        assert ("state/params/up" in note.partition("; the arrays are")[0]) == (name == "inside a dict")
        np.testing.assert_allclose(found(given(state), X), function(given(state), X), rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "options", "missing"),
    [
        (optax.sgd(1e-2), {}, "state/opt_state/0/mu/down"),
        (optax.sgd(1e-2, momentum=0.9), {"mode": "auto_parallel"}, "state/opt_state/0/nu/down"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), {}, "state/opt_state/0/count"),
        (optax.adam(1e-2), {"frozen": ("down",)}, "state/opt_state/0/mu/down"),
    ],
    ids=["no states", "momentum", "states elsewhere", "frozen"],
)
def test_plan_of_train_step_shards_the_parameters_of_a_step_with_another_optimizer(
    optimizer, options, missing, tmp_path
):
    loss = lambda params, x: squares(params, x).mean()  # noqa: E731
    plan = {"up": (1, 4), "down": (4, 1)}
    first = train.step(loss, optax.adam(1e-2), mode="semi_auto_parallel", parameter_plan=plan)
    layout = first.plan(first.init(lambda: {"up": X, "down": X}, X), X)
    layout.save(tmp_path / "step.toml")
    for given in (layout, tmp_path / "step.toml"):
        step = train.step(loss, optimizer, **({"mode": "semi_auto_parallel"} | options), layout=given)
        with pytest.warns(UserWarning, match="`train_step` has changed since .* its arguments") as warned:
            state = step.init(lambda: {"up": X, "down": X}, X)
            made = step.plan(state, X)
        assert len([w for w in warned if "has changed" in str(w.message)]) == 1
        assert {name: made.decision(f"state/params/{name}").strategy for name in plan} == plan
        (note,) = [text for text in made.diagnostics if "no array of this call" in text]
        assert missing in note.partition("; the arrays are")[0]


def test_layout_that_shards_no_array_of_the_call_warns(tmp_path):
    plan = shardfn.plan(squares, {"up": X, "down": X}, X)
    with pytest.warns(
        UserWarning, match="the plan of squares shards no argument of `<lambda>`: .* 3 rules that match no array"
    ):
        shardfn.shard(lambda a, b: a @ b, layout=plan).plan(X, X)
    plan.save(tmp_path / "squares.toml")
    text = (tmp_path / "squares.toml").read_text().replace('"params/up"', '"params/ub"')
    (tmp_path / "squares.toml").write_text(text)
    with pytest.raises(StrategyError, match=r"a rule of .* matches no array: `params/ub`"):  # the function is the same
        shardfn.plan(squares, {"up": X, "down": X}, X, layout=tmp_path / "squares.toml")


def test_plan_of_train_step_shards_the_module_that_it_trained():
    step = train.step(
        lambda model, x: model(x).mean(), optax.sgd(1e-2), mode="semi_auto_parallel", parameter_plan={"*up*": (1, 4)}
    )
    state = step.init(Net, X)
    layout, model = step.plan(state, X), step.model(state)
    for evaluate, args in ((lambda model, x: model(x), (model, X)), (model, (X,))):
        found = shardfn.shard(evaluate, layout=layout)
        assert {d.strategy for d in found.plan(*args).inputs if "up" in d.path} == {(1, 4)}
        np.testing.assert_allclose(found(*args), model(X), rtol=1e-5)


class Dense:
    def __init__(self, w):
        self.w = jnp.asarray(w)
        self.calls = jnp.zeros((), "int32")

    @shardfn.shard(in_strategy=((8, 1),))
    def apply(self, x):
        self.calls = self.calls + 1
        return x @ self.w

    @functools.partial(shardfn.shard, static_argnums=(0, 2))
    def scaled(self, x, factor):
        return x @ self.w * (2 if factor == "two" else 1)

    @functools.partial(shardfn.shard, static_argnums=-1, donate_argnums=1)
    def donating(self, x, factor):
        return x + (2 if factor == "two" else 1)

    @functools.partial(shardfn.shard, static_argnames=("self", "factor"))
    def named(self, x, *, factor="one"):
        return x @ self.w * (2 if factor == "two" else 1)

    @property
    @shardfn.shard
    def gram(self):
        return self.w.T @ self.w

    @functools.cached_property
    @shardfn.shard
    def sums(self):
        return self.w.sum(0)

    @classmethod
    @functools.partial(shardfn.shard, static_argnums=(0, 2))
    def made(cls, x, factor):
        return x * (2 if factor == "two" else 1), cls.__name__ == "Wider"


class Wider(Dense):
    def apply(self, x):
        return Dense.apply(self, x) + super().apply(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    w: jax.Array

    @shardfn.shard(in_strategy=((8, 1),))
    def apply(self, x):
        return x @ self.w


class Module(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(jnp.asarray(w))

    @shardfn.shard(in_strategy=((8, 1),))
    def apply(self, x):
        return x @ self.w[...]


@pytest.mark.parametrize("kind", [Dense, Tree, Module])
def test_a_method_of_the_class_takes_the_instance(kind):
    one, other = kind(X), kind(2 * X)
    for _ in range(2):
        np.testing.assert_allclose(kind.apply(one, X), X @ X, rtol=1e-6)
        np.testing.assert_allclose(kind.apply(other, X), 2 * X @ X, rtol=1e-6)
        np.testing.assert_allclose(kind.apply(one, x=X), X @ X, rtol=1e-6)
        if kind is not Dense:  # which changes itself
            np.testing.assert_allclose(jax.jit(lambda x: kind.apply(one, x))(X), X @ X, rtol=1e-6)
    assert kind.apply.plan(one, X) == one.apply.plan(X) == shardfn.plan(kind.apply, one, X)
    assert kind.apply.eval_shape(one, X).shape == (8, 8)
    assert kind.apply.check(one, X).agrees
    assert str(kind.apply.explain(one, X)) == str(one.apply.explain(X))
    assert kind.apply.lower(one, X).as_text() == one.apply.lower(X).as_text()
    assert str(kind.apply.trace(one, X).jaxpr) == str(one.apply.trace(X).jaxpr)


def test_subclasses_properties_and_what_a_call_changes():
    dense, wider = Dense(X), Wider(X)
    Dense.apply(dense, X)
    dense.apply(X)
    assert dense.calls == 2
    np.testing.assert_allclose(wider.apply(X), 2 * X @ X, rtol=1e-6)
    np.testing.assert_allclose(Dense.apply(wider, X), X @ X, rtol=1e-6)
    assert wider.calls == 3
    for one in (dense, wider):
        np.testing.assert_allclose(one.gram, X.T @ X, rtol=1e-6)
        np.testing.assert_allclose(one.sums, X.sum(0), rtol=1e-6)
    dense.w = 2 * X
    np.testing.assert_allclose(dense.gram, 4 * X.T @ X, rtol=1e-6)
    assert dense.sums[0] == X.sum(0)[0], "a cached property"
    assert Model.doubled(dense.w)[0, 1] == 4, "a static method binds nothing"


@pytest.mark.parametrize("call", [lambda d, *a, **k: d.scaled(*a, **k), lambda d, *a, **k: Dense.scaled(d, *a, **k)])
def test_numbers_of_arguments_of_a_decorated_method_count_the_instance(call):
    dense = Dense(X)
    np.testing.assert_allclose(call(dense, X, "two"), 2 * X @ X, rtol=1e-6)
    np.testing.assert_allclose(call(dense, X, factor="one"), X @ X, rtol=1e-6)
    dense.w = 2 * X
    np.testing.assert_allclose(call(dense, X, "two"), 4 * X @ X, rtol=1e-6)
    x = jax.device_put(X + 0, dense.donating.plan(X, "two").in_shardings[1])
    assert dense.donating(x, "two")[0, 0] == 2 and x.is_deleted()
    np.testing.assert_allclose(dense.named(X, factor="two"), 4 * X @ X, rtol=1e-6)
    np.testing.assert_allclose(Dense.named(dense, X), 2 * X @ X, rtol=1e-6)
    assert shardfn.shard(dense.scaled.fn, static_argnums=1)(X, "two").shape == (8, 8), "of a bound method they do not"
    for kind in (Dense, Wider):
        result, is_wider = kind.made(X, "two")
        assert result[0, 1] == 2 and bool(is_wider) == (kind is Wider)
