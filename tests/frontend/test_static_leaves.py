"""Any registered pytree is a container, of arrays and of entries; its leaves that are no arrays are static."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util

from shardfn import AUTO, REPLICATED, explain, plan, shard
from shardfn.errors import StrategyTypeError
from shardfn.frontend.static_leaves import hide_static, holds_static, restore_static

X = np.arange(128, dtype=np.float32).reshape(16, 8) / 128


@tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    b: Any
    activation: Callable[..., Any] | None = None

    def __call__(self, x):
        assert self.activation is not None
        return self.activation(x @ self.w + self.b)


def _layer(activation=jnp.tanh):
    return Layer(jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones(8), activation)


def _two(layers, x):
    return layers[1](layers[0](x))


ENTRIES = {
    "none": None,
    "one entry": ((REPLICATED, REPLICATED), (8, 1)),
    "objects": ((Layer((1, 8), (8,)), Layer((8, 1), (1,))), (1, 1)),
    "open": ((Layer(AUTO, (AUTO,)), Layer((8, 1), AUTO)), AUTO),
    "functions left in": ((_layer(), Layer((8, 1), (1,), jnp.tanh)), (1, 1)),
}
ENTRIES["functions left in"] = (
    tuple(jax.tree.map(lambda leaf: (1,) * leaf.ndim if hasattr(leaf, "ndim") else leaf, _layer()) for _ in "ab"),
    (8, 1),
)


def test_moments_of_a_module_with_functions_replace_those_of_the_argument():
    def update(layer, moments, x):
        def loss(weights):
            return jnp.mean(dataclasses.replace(layer, w=weights.w, b=weights.b)(x) ** 2)

        weights = dataclasses.replace(layer, activation=None)  # as `eqx.filter` leaves it
        gradient = jax.grad(loss)(weights)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
        return dataclasses.replace(layer, w=layer.w - moments.w, b=layer.b - moments.b), moments

    moments = dataclasses.replace(_layer(), activation=None)
    made = plan(update, _layer(), moments, X, style="zero1")
    assert made.kind == "ZeRO-1 over 8 devices"
    assert made.decision("moments/w").strategy == (8, 1) == made.decision("result/1/w").strategy


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
def test_tuple_of_objects_with_functions_takes_entries_of_its_structure(entries):
    layers = (_layer(), _layer(jax.nn.relu))
    sharded = shard(_two, entries)
    for _ in range(2):
        np.testing.assert_allclose(sharded(layers, X), _two(layers, X), rtol=1e-5, atol=1e-5)
    made = sharded.plan(layers, X)
    assert [d.path for d in made.inputs] == ["layers/0/w", "layers/0/b", "layers/1/w", "layers/1/b", "x"]
    if entries is ENTRIES["objects"]:
        assert [d.strategy for d in made.inputs] == [(1, 8), (8,), (8, 1), (1,), (1, 1)]
    jax.device_put(jax.tree.map(lambda x: x if hasattr(x, "shape") else None, layers), made.in_shardings[0])
    assert explain(sharded, layers, X).to_dict()["arguments"][2]["path"] == "layers/1/w"


def test_another_function_in_an_object_is_another_call():
    sharded = shard(lambda layer, x: layer(x))
    for activation in (jnp.tanh, jax.nn.relu, jnp.tanh):
        layer = _layer(activation)
        np.testing.assert_allclose(sharded(layer, X), layer(X), rtol=1e-5, atol=1e-5)
    assert len(sharded._calls.entries) == 2


@pytest.mark.slow
def test_object_with_functions_comes_back_as_result_and_through_derivatives():
    def update(layer, x):
        gradient = jax.grad(lambda arrays: Layer(*arrays, layer.activation)(x).sum())((layer.w, layer.b))
        return Layer(layer.w - gradient[0], layer.b - gradient[1], layer.activation)

    layer, sharded = _layer(), shard(update)
    for _ in range(2):
        found, expected = sharded(layer, X), update(layer, X)
        assert found.activation is layer.activation
        np.testing.assert_allclose(found.w, expected.w, rtol=1e-4, atol=1e-4)
    assert sharded.eval_shape(layer, X).activation is layer.activation
    np.testing.assert_allclose(
        sharded.plan(layer, X).apply(update)(layer, X).w, update(layer, X).w, rtol=1e-4, atol=1e-4
    )

    def loss(f):
        return lambda w: f(Layer(w, layer.b, layer.activation), X).sum()

    inner = shard(lambda layer, x: layer(x))
    gradients = [jax.grad(loss(f))(layer.w) for f in (inner, lambda layer, x: layer(x))]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


def test_function_in_a_plain_container_is_static_and_text_there_is_refused():
    sharded = shard(lambda d, x: d["f"](x) @ d["w"])
    np.testing.assert_allclose(sharded({"f": jnp.tanh, "w": jnp.eye(8)}, X), jnp.tanh(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(StrategyTypeError, match="holds a str at `d/f`"):
        sharded({"f": "tanh", "w": jnp.eye(8)}, X)


def test_text_in_a_registered_class_is_static():
    sharded = shard(lambda layer, x: x * {"twice": 2, "thrice": 3}[layer.b] * layer.w)
    for name, times in (("twice", 2), ("thrice", 3)):
        np.testing.assert_allclose(sharded(Layer(jnp.ones(()), name), X), times * X)


def test_functions_run_on_one_device_after_a_call_without_them():
    sharded = shard(lambda d, x: x * d["w"] if "f" not in d else d["f"](x), device=jax.devices()[:1])
    sharded({"w": jnp.ones(())}, X)
    np.testing.assert_allclose(sharded({"f": jnp.tanh}, X), jnp.tanh(X), rtol=1e-5)


def test_numbers_of_registered_classes_stay_traced():
    counter = Layer(jnp.ones(()), 3)
    sharded = shard(lambda state, x: (state.b + 1, x * state.w))
    assert int(sharded(counter, X)[0]) == 4
    sharded(Layer(jnp.ones(()), 4), X)
    assert len(sharded._calls.entries) == 1


def test_held_trees_are_released_and_equal_by_value():
    tree = {"layer": _layer(), "n": 1, "none": None}
    assert holds_static(hide_static(tree)) and not holds_static(tree)
    assert (
        restore_static(hide_static(tree))["layer"].activation is jnp.tanh
        and restore_static(hide_static(tree))["none"] is None
    )
    assert jax.tree.structure(hide_static(tree)) == jax.tree.structure(hide_static(tree))
    arrays = {"w": X}
    assert hide_static(arrays) is arrays


@pytest.mark.slow
def test_equinox_modules_are_arguments_as_in_filter_jit():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Linear(8, 32, key=keys[0]), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.5, inference=True)]
    model = eqx.nn.Sequential([*layers, eqx.nn.Linear(32, 8, key=keys[1])])

    def forward(model, x):
        return jax.vmap(model)(x)

    entries = jax.tree.map(lambda _: AUTO, eqx.filter(model, eqx.is_array))
    entries = eqx.tree_at(lambda m: m.layers[0].weight, entries, (4, 1))
    sharded = shard(forward, (entries, (2, 1)))
    np.testing.assert_allclose(sharded(model, X), forward(model, X), rtol=1e-4, atol=1e-5)
    assert sharded.plan(model, X).inputs[0].strategy == (4, 1)
    step = shard(lambda model, x: eqx.apply_updates(model, eqx.filter_grad(lambda m: forward(m, x).sum())(model)))
    found, expected = step(model, X), step.fn(model, X)
    assert eqx.tree_equal(found, expected, rtol=1e-4, atol=1e-4) and found.layers[2].inference is True
    outer = eqx.filter_grad(lambda m, f: f(m, X).sum())
    assert eqx.tree_equal(outer(model, sharded), outer(model, forward), rtol=1e-4, atol=1e-4)


def test_chex_dataclasses_hold_entries():
    chex = pytest.importorskip("chex")

    @chex.dataclass
    class Params:
        w: Any
        b: Any

    params = (Params(w=jnp.ones((8, 8)), b=jnp.ones(8)), Params(w=jnp.eye(8), b=jnp.ones(8)))
    entries = (Params(w=(1, 8), b=(8,)), Params(w=(8, 1), b=(1,)))

    def apply(params, x):
        return (x @ params[0].w + params[0].b) @ params[1].w + params[1].b

    np.testing.assert_allclose(shard(apply, (entries, (1, 1)))(params, X), apply(params, X), rtol=1e-5)
