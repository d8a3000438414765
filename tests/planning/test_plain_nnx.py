"""`plan.code()` of functions and methods of Flax NNX objects: it runs without shardfn and changes the objects as the call does."""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 32)), jnp.float32)


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.drop(self.norm(x))

    def scaled(self, x, *, by):
        return by * self.layers[0](x)


def optimized():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model, optimizer, x):
    loss, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, gradient)
    return loss


def scaled(model, x, *, by):
    return by * model(x)


def both(pair, x, n):
    return n * pair["a"](x) + pair["b"][0](x), pair["scale"] * 2


def pair():
    return {"a": Model(), "b": [nnx.Linear(32, 32, rngs=nnx.Rngs(1))], "scale": jnp.ones(())}


def method(model, x, *, by):
    return model.scaled(x, by=by)


CASES = {
    "an argument": (lambda model, x: model(x), lambda: (Model(), X), {}, {"style": "fsdp"}),
    "a keyword": (scaled, lambda: (Model(), X), {"by": jnp.ones(()) * 3}, {}),
    "an optimizer": (step, lambda: (*optimized(), X), {}, {"style": "zero1"}),
    "donated": (step, lambda: (*optimized(), X), {}, {"style": "fsdp", "donate_argnums": (0, 1)}),
    "in a dict, with a static argument": (both, lambda: (pair(), X, 2), {}, {"style": "fsdp", "static_argnums": 2}),
}


def run(plan, name, function, args):
    """The results of the code of a plan."""
    code = plan.code()
    assert "import shardfn" not in code and max(map(len, code.splitlines())) <= 140
    space: dict[str, Any] = {name: function, "f": function}
    exec(code, space)
    return space["sharded"](*args)


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        if len(other.devices()) > 1:  # shardfn moves the arrays that it changes alone
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize(("function", "make", "kwargs", "options"), CASES.values(), ids=CASES)
def test_the_code_gives_results_and_changes_objects_as_the_call_does(function, make, kwargs, options):
    sharded: Any = shardfn.shard(function, **options)
    mine, theirs = make(), make()
    plan = sharded.plan(*theirs, **kwargs)
    found = run(plan, function.__name__, function, (*mine, *kwargs.values()))
    same(found, sharded(*theirs, **kwargs))
    same(nnx.state(mine[:2]), nnx.state(theirs[:2]))


@pytest.mark.parametrize(
    ("of", "kwargs"), [(lambda m: m, {}), (lambda m: m.scaled, {"by": jnp.ones(()) * 3})], ids=["a module", "a method"]
)
def test_the_code_of_a_module_takes_it_first(of, kwargs):
    mine, theirs = Model(), Model()
    sharded: Any = shardfn.shard(of(theirs), style="fsdp")
    found = run(sharded.plan(X, **kwargs), "unused", None, (mine, X, *kwargs.values()))
    same(found, sharded(X, **kwargs))
    same(nnx.state(mine.layers), nnx.state(theirs.layers))


def test_objects_that_share_variables_are_told_to_be_dicts():
    model = Model()
    plan = shardfn.plan(lambda a, b, x: a(x) + b(x), model, model.layers[0], X, style="fsdp")
    code = plan.code()
    assert "in the place of the objects a, b" in code and "nnx.jit" not in code
    compile(code, "code", "exec")


def test_options_that_nnx_does_not_take_are_told():
    plan = shardfn.plan(scaled, Model(), X, by=jnp.ones(()), compiler_options={"xla_cpu_enable_fast_math": True})
    assert "in XLA_FLAGS: {'xla_cpu_enable_fast_math': True}" in plan.code() and "compiler_options=" not in plan.code()
