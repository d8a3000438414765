"""Flax NNX objects as arguments: what a call changes in them is kept, as by `nnx.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
from shardfn import AUTO, shard
from shardfn.errors import StrategyError

nnx = pytest.importorskip("flax.nnx")

FOLLOW = {"search_mode": "sharding_propagation"}
"""For tests that look at what a call changes, not at the layout that a search would find."""
X = jax.random.normal(jax.random.key(1), (16, 4))
Y = jnp.ones((16, 2))


class Net(nnx.Module):
    """A layer with running statistics, one with random numbers, and one that stands at two places."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 2, rngs=rngs)
        self.again = self.up

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.again(x)))))


def make():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def train_step(model, optimizer, x, y):
    loss, gradient = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradient)
    return loss


def arrays(*nodes):
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(nodes)))
    return [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in leaves]


def run(step, steps=4):
    model, optimizer = make()
    losses = [float(step(model, optimizer, X, Y)) for _ in range(steps)]
    return losses, arrays(model, optimizer)


@pytest.fixture(scope="module")
def expected():
    return run(nnx.jit(train_step))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"in_strategy": (AUTO, AUTO, (4, 1), (4, 1)), "parameter_plan": {"model/again/kernel": (1, 2)}},
            marks=pytest.mark.slow,
        ),
        {"donate_argnums": (0, 1), **FOLLOW},
        {"in_strategy": ({"again": AUTO, "norm": AUTO, "drop": AUTO, "down": (2, 1)}, AUTO, AUTO, AUTO), **FOLLOW},
    ],
    ids=["open", "plan", "donated", "entries of a subtree"],
)
def test_shard_of_a_training_step_keeps_what_it_changes_in_its_arguments(options, expected):
    if "in_strategy" in options and isinstance(options["in_strategy"][0], dict):
        entry = {**options["in_strategy"][0], "down": {"kernel": (2, 1), "bias": AUTO}}
        options = {**options, "in_strategy": (entry, *options["in_strategy"][1:])}
    losses, after = run(shard(train_step, **options))
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    for mine, theirs in zip(after, expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


def test_donated_argument_keeps_the_arrays_that_the_call_does_not_change():
    model, optimizer = make()
    model.table = nnx.Variable(jnp.arange(8.0))
    step = shard(train_step, donate_argnums=(0, 1), **FOLLOW)
    assert "state/model/table" in [d.path for d in step.plan(model, optimizer, X, Y).outputs]
    for _ in range(3):
        step(model, optimizer, X, Y)
    np.testing.assert_allclose(model.table[...], jnp.arange(8.0))
    kept = shardfn.plan(train_step, model, optimizer, X, Y, **FOLLOW)
    assert "state/model/table" not in [d.path for d in kept.outputs]


def test_arrays_of_a_changed_argument_have_the_planned_shardings():
    model, optimizer = make()
    step = shard(train_step, (AUTO, AUTO, (4, 1), AUTO), parameter_plan={"model/down/kernel": (4, 1)}, **FOLLOW)
    step(model, optimizer, X, Y)
    assert model.down.kernel[...].sharding.shard_shape((8, 2)) == (2, 2)
    assert model.up is model.again


def test_plan_of_an_abstract_module_names_its_arrays_by_the_argument():
    model, optimizer = nnx.eval_shape(make)
    plan = shardfn.plan(train_step, model, optimizer, X, Y, **FOLLOW)
    assert "model/down/kernel" in [d.path for d in plan.inputs]
    assert "model/up/kernel" not in [d.path for d in plan.inputs], "a shared variable stands once"


@pytest.mark.parametrize(
    "wrap", [lambda m: {"net": m}, lambda m: (m, 3), lambda m: [X, m]], ids=["dict", "tuple", "list"]
)
def test_module_inside_a_container_keeps_its_changes(wrap):
    model, _ = make()

    def call(held, x):
        net = next(
            part for part in jax.tree.leaves(held, is_leaf=lambda n: isinstance(n, Net)) if isinstance(part, Net)
        )
        return net(x)

    before = np.asarray(model.norm.mean[...])
    shard(call, **FOLLOW)(wrap(model), X)
    assert not np.allclose(before, model.norm.mean[...])


class Total(nnx.Module):
    """A variable that holds several arrays."""

    def __init__(self):
        self.kept = nnx.Variable({"sum": jnp.zeros((16, 4)), "scale": jnp.ones(4)})

    def __call__(self, x):
        kept = self.kept.get_value()
        self.kept.set_value({**kept, "sum": kept["sum"] + x})
        return x * kept["scale"]


@pytest.mark.parametrize("sharded", [lambda m: shard(lambda net, x: net(x)), lambda m: lambda net, x: shard(m)(x)],
                         ids=["argument", "owner"])  # fmt: skip
def test_variable_that_holds_several_arrays_keeps_the_change_of_one(sharded):
    total = Total()
    call = sharded(total)
    np.testing.assert_allclose(call(total, X), X)
    call(total, X)
    np.testing.assert_allclose(total.kept.get_value()["sum"], 2 * X)
    np.testing.assert_allclose(total.kept.get_value()["scale"], np.ones(4))


@pytest.mark.slow
def test_array_beside_a_module_in_one_argument_is_passed_on():
    model, _ = make()
    result = shard(lambda held, x: held[1] + held[0](x).sum())((model, jnp.float32(1e6)), X)
    assert result.shape == () and float(result) > 9e5


def test_random_streams_and_keyword_modules_advance():
    sample = shard(lambda rngs, *, scale: rngs.normal((8, 4)) * scale["value"][...])
    rngs, scale = nnx.Rngs(3), {"value": nnx.Variable(jnp.float32(2.0))}
    first, second = sample(rngs, scale=scale), sample(rngs, scale=scale)
    expected = nnx.Rngs(3)
    np.testing.assert_allclose(first, expected.normal((8, 4)) * 2.0, rtol=1e-6)
    np.testing.assert_allclose(second, expected.normal((8, 4)) * 2.0, rtol=1e-6)


def test_modules_in_variadic_arguments_keep_their_changes():
    counters = [nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.int32(5))]

    def count(x, *parts):
        for part in parts:
            part[...] += 1
        return x + sum(part[...] for part in parts)

    add = shard(count)
    np.testing.assert_allclose(add(jnp.zeros(8), *counters), 7.0)
    assert [int(c[...]) for c in counters] == [1, 6]


def test_a_switch_to_evaluation_is_another_plan():
    model, _ = make()
    predict = shard(lambda m, x: m(x))
    predict(model, X)
    model.eval()
    np.testing.assert_allclose(predict(model, X), model(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predict(model, X), predict(model, X))


@pytest.mark.slow
def test_changes_are_kept_inside_an_outer_transformation():
    model, _ = make()
    inner = shard(lambda m, x: m(x).sum())
    gradient = nnx.jit(nnx.grad(lambda m, x: inner(m, x)))(model, X)
    expected = nnx.jit(nnx.grad(lambda m, x: m(x).sum()))(make()[0], X)
    for mine, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert float(abs(model.norm.mean[...]).max()) > 0


def test_method_with_a_module_as_argument_changes_both(expected):
    class Trainer(nnx.Module):
        def __init__(self):
            self.steps = nnx.Variable(jnp.int32(0))

        def step(self, model, optimizer, x, y):
            self.steps[...] += 1
            return train_step(model, optimizer, x, y)

    trainer, (model, optimizer) = Trainer(), make()
    step = shard(trainer.step, **FOLLOW)
    losses = [float(step(model, optimizer, X, Y)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected[0][:3], rtol=1e-4)
    assert int(trainer.steps[...]) == 3


def test_variable_shared_by_a_method_s_module_and_an_argument_is_refused():
    class Trainer(nnx.Module):
        def __init__(self, model):
            self.model = model

        def step(self, model, x):
            return model(x)

    model, _ = make()
    with pytest.raises(StrategyError, match="shares variables"):
        shard(Trainer(model).step)(model, X)


def test_state_as_argument_is_plain_data():
    model, _ = make()
    state = nnx.state(model, nnx.Param)
    doubled = shard(lambda s: jax.tree.map(lambda a: 2 * a, s))(state)
    np.testing.assert_allclose(doubled["down"]["kernel"][...], 2 * model.down.kernel[...])


@jax.tree_util.register_pytree_node_class
class Counter:
    """A pytree that can be changed in place."""

    def __init__(self, count):
        self.count = count

    def tree_flatten(self):
        return (self.count,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_change_of_another_object_in_an_argument_is_refused():
    def call(held, x):
        held["counter"].count = held["counter"].count + 1
        return x + held["counter"].count

    with pytest.raises(StrategyError, match="`held`, and the change would be lost"):
        shard(call)({"counter": Counter(jnp.zeros(8))}, jnp.ones(8))


def test_object_that_a_call_only_reads_and_a_list_that_it_changes_are_accepted():
    def call(counter, parts, x):
        parts.append(x)
        return counter.count + sum(parts)

    np.testing.assert_allclose(shard(call)(Counter(jnp.ones(8)), [jnp.ones(8)], jnp.ones(8)), 3.0)


class Configured(nnx.Module):
    def __init__(self):
        self.a, self.b, self.config, self.count = nnx.Param(jnp.ones(8)), nnx.Param(jnp.zeros(8)), {"scale": 3}, 0
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x * self.config["scale"] + self.a[...]

    def counted(self, x):
        self.count += 1
        return x


def set_config(m, x):
    m.config["scale"] = 4
    return x


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m, x: m.counted(x), "m/count"),
        (lambda m, x: (m.eval(), x)[1], "m/drop/deterministic"),
        (lambda m, x: (delattr(m, "b"), x)[1], "m/b"),
        (lambda m, x: (setattr(m, "b", m.a), x)[1], "m/b"),
        (set_config, "m/config/scale"),
    ],
    ids=["a number", "evaluation", "a deleted array", "a tied array", "a dictionary"],
)
def test_change_of_what_is_no_array_of_a_module_is_refused(change, where):
    with pytest.raises(StrategyError, match="no array") as error:
        shard(change)(Configured(), jnp.ones((16, 8)))
    assert error.value.problems[0].where == where


def test_change_of_what_is_no_array_of_a_method_s_module_is_refused():
    with pytest.raises(StrategyError, match="no array") as error:
        shard(Configured().counted)(jnp.ones((16, 8)))
    assert error.value.problems[0].where == "count"


def test_module_with_an_attribute_that_cannot_be_hashed_is_planned_anew_when_it_changes():
    module, x = Configured(), jnp.ones((16, 8))
    for sharded in (shard(lambda m, x: m(x)), lambda m, x: shard(m)(x)):
        np.testing.assert_allclose(sharded(module, x), module(x))
        module.config["scale"] += 1
        np.testing.assert_allclose(sharded(module, x), module(x))


def test_state_that_merge_makes_a_module_of_is_plain_data():
    definition, state = nnx.split(Total())

    def step(state, x):
        module = nnx.merge(definition, state)
        return module(x), nnx.state(module)

    found, wanted = shard(step)(state, X), jax.jit(step)(state, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


class Raw(nnx.Module):
    """An array that is no variable."""

    def __init__(self):
        self.sum = nnx.data(jnp.zeros(4))

    def __call__(self, x):
        self.sum = self.sum + x.sum(0)
        return x + self.sum


@pytest.mark.parametrize("sharded", [lambda m: shard(lambda net, x: net(x)), lambda m: lambda net, x: shard(m)(x)],
                         ids=["argument", "owner"])  # fmt: skip
def test_array_that_is_no_variable_keeps_its_changes(sharded):
    module, twin = Raw(), Raw()
    step, plain = sharded(module), nnx.jit(lambda net, x: net(x))
    for _ in range(2):
        np.testing.assert_allclose(step(module, X), plain(twin, X), rtol=1e-5)
    np.testing.assert_allclose(module.sum, twin.sum, rtol=1e-5)
