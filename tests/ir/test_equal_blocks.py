"""The program with fewer of its equal blocks, and what stands for what of the whole one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn.ir.equal_blocks import KEPT, fewer_blocks
from shardfn.movement import with_shifts

S = jax.ShapeDtypeStruct


def deep(x, layers):
    for layer in layers:
        x = x + jnp.tanh(x @ layer["w1"] + layer["b"]) @ layer["w2"]
    return x


def step(params, momentum, x, y):
    """A training step whose gradients are scaled by the norm of all of them, which ties the layers."""

    def loss(params):
        return jnp.mean((deep(x @ params["in"], params["layers"]) @ params["out"] - y) ** 2)

    grads = jax.grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g / norm, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum


def parameters(count):
    layer = {"w1": S((16, 32), jnp.float32), "b": S((32,), jnp.float32), "w2": S((32, 16), jnp.float32)}
    return {"in": S((8, 16), jnp.float32), "layers": [layer] * count, "out": S((16, 4), jnp.float32)}


def arguments(count):
    return parameters(count), parameters(count), S((64, 8), jnp.float32), S((64, 4), jnp.float32)


def fewer(count, function=step):
    args = arguments(count)
    state = len(jax.tree.leaves(args[:2]))
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return jaxpr, fewer_blocks(jaxpr, {i: i for i in range(state)}), jax.tree_util.tree_leaves_with_path(args)


def types(values):
    return [(v.shape, v.dtype) for v in values]


@pytest.mark.parametrize("count", [4, 7])
def test_training_step_with_fewer_blocks_has_the_types_of_one_with_fewer_layers(count):
    _, found, _ = fewer(count)
    assert found.count == count and found.kept == KEPT
    few = arguments(KEPT)
    jaxpr = jax.make_jaxpr(found.run)(*jax.tree.leaves(few)).jaxpr
    written = jax.make_jaxpr(step)(*few).jaxpr
    assert types(v.aval for v in jaxpr.outvars) == types(v.aval for v in written.outvars)
    matmuls = [sum(eqn.primitive.name == "dot_general" for eqn in each.eqns) for each in (jaxpr, written)]
    assert matmuls[0] == matmuls[1]


def test_array_of_an_inner_layer_stands_for_the_same_of_the_others():
    _, found, leaves = fewer(7)
    text = [jax.tree_util.keystr(path) for path, _ in leaves]
    for i, of in enumerate(found.input_of):
        inner = functools.reduce(lambda t, n: t.replace(f"['layers'][{n}]", "['layers'][1]"), range(2, 6), text[i])
        assert text[found.inputs[of]] == inner
    assert found.input_of[: len(found.output_of)] == found.output_of


def test_equation_stands_for_equal_ones_alone():
    jaxpr, found, _ = fewer(7)
    assert found.stands_for
    for i, alike in found.stands_for.items():
        assert i in found.equations and i in alike and len(alike) == 7 - KEPT + 1
        assert {jaxpr.eqns[n].primitive.name for n in alike} == {jaxpr.eqns[i].primitive.name}
        assert len({tuple(types(v.aval for v in jaxpr.eqns[n].outvars)) for n in alike}) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_program_of_few_blocks_stays(count):
    assert fewer(count)[1] is None


def test_program_of_different_blocks_stays():
    def funnel(params, x):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x)

    sizes = [64, 48, 32, 24, 16, 8]
    weights = [S(shape, jnp.float32) for shape in itertools.pairwise(sizes)]
    assert fewer_blocks(jax.make_jaxpr(funnel)(weights, S((4, 64), jnp.float32)).jaxpr, {}) is None


def test_program_that_prints_stays():
    def noisy(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        jax.debug.print("{}", x[0, 0])
        return x

    args = S((4, 8), jnp.float32), [S((8, 8), jnp.float32)] * 6
    assert fewer_blocks(jax.make_jaxpr(noisy)(*args).jaxpr, {}) is None


MASK = np.tril(np.ones((8, 8), bool))


def rotating(weights, x):
    """A training step of layers that turn their rows and read a constant."""

    def layer(x, w):
        first, second = jnp.split(x @ w, 2, -1)
        turned = jnp.concatenate([-second, first], -1)
        return x + jnp.where(MASK, turned @ x.T, 0) @ x

    grads = jax.grad(lambda ws: jnp.sum(functools.reduce(layer, ws, x) ** 2))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


@pytest.mark.parametrize("form", [lambda f: f, with_shifts], ids=["written", "shifted"])
def test_constants_that_the_first_layer_makes_for_all_are_of_no_layer(form):
    args = [S((16, 16), jnp.float32)] * 7, S((8, 16), jnp.float32)
    closed = jax.make_jaxpr(form(rotating))(*args)
    found = fewer_blocks(closed.jaxpr, {i: i for i in range(7)}, consts=closed.consts)
    assert found.count == 7 and found.input_of == (0, 1, 1, 1, 1, 1, 2, 3)
    few = jax.make_jaxpr(found.run)(*[args[0][0]] * KEPT, args[1])
    assert len(few.jaxpr.eqns) == len(found.equations) < len(closed.jaxpr.eqns) / 2
    assert types(v.aval for v in few.jaxpr.outvars) == [((16, 16), jnp.float32)] * KEPT


def test_blocks_may_read_constants_that_are_made_otherwise():
    def scaled(ws, x):
        for i, w in enumerate(ws):
            x = jnp.tanh(x @ w) * (jnp.arange(16.0) if i % 2 else jnp.full((16,), 2.0))
        return x

    args = [S((16, 16), jnp.float32)] * 7, S((8, 16), jnp.float32)
    closed = jax.make_jaxpr(scaled)(*args)
    found = fewer_blocks(closed.jaxpr, {}, consts=closed.consts)
    assert found.count == 7
    for i, alike in found.stands_for.items():
        assert {closed.eqns[n].primitive for n in alike} == {closed.eqns[i].primitive}
