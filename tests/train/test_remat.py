"""Recompute: which collectives run again is what the flags say, seen in the compiled module; results stay the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn.errors import StrategyError, StrategyTypeError
from shardfn.mindspore import Cell
from shardfn.train import communicated, recompute, step

RNG = np.random.default_rng(0)
W = RNG.normal(size=(2, 16, 16)).astype(np.float32) * 0.3
X = RNG.normal(size=(8, 16)).astype(np.float32)


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def counts(text):
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return tuple(text.count(f'"stablehlo.{kind}"') for kind in kinds)


def mlp(params, x):  # each device has columns of the first and rows of the second
    h = jnp.tanh(x @ params["a"])
    return jnp.tanh(lax.psum(h @ params["b"], "model"))


def tensor_parallel(block):
    mesh = mesh_of(model=8)

    def loss(params, x):
        return jnp.sum(block(params, block(params, x)) ** 2)

    spec = {"a": P(None, "model"), "b": P("model", None)}
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(spec, P()), out_specs=P())
    return jax.jit(jax.value_and_grad(mapped))


PARAMS = {"a": W[0], "b": W[1]}


@pytest.mark.parametrize(("again", "all_reduces"), [(True, 5), (False, 3)])
def test_collectives_of_the_model_run_again_or_not(again, all_reduces):
    plain = tensor_parallel(mlp)
    assert counts(plain.lower(PARAMS, X).as_text())[0] == 3  # two forward, one backward: the inputs want no gradient
    step = tensor_parallel(recompute(mlp, mp_comm_recompute=again))
    assert counts(step.lower(PARAMS, X).as_text())[0] == all_reduces
    same(step(PARAMS, X), plain(PARAMS, X))


def two(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])


def partitioned(block):
    mesh = mesh_of(data=2, model=4)
    lay = lambda *names: NamedSharding(mesh, P(*names))  # noqa: E731
    shardings = {"a": lay(None, "model"), "b": lay("model", None)}, lay("data", None)
    return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(block(p, block(p, x)) ** 2)), in_shardings=shardings)


def test_collectives_that_the_partitioner_makes():
    cuts = ({"a": (1, 4), "b": (4, 1)}, (2, 1))
    found = {}
    for again in (True, False):
        step = partitioned(recompute(two, mp_comm_recompute=again, in_strategy=cuts))
        compiled = step.lower(PARAMS, X).compile({"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
        found[again] = len(re.findall(r"[ )}]all-reduce(?:-start)?\(", compiled.as_text()))
        same(step(PARAMS, X), partitioned(two)(PARAMS, X))
    assert found[True] == found[False] + 2  # one for each block


def test_what_is_marked_is_kept():
    def block(w, x):
        return jnp.sin(communicated(x @ w))

    held = lambda fn: len(jax.tree.leaves(jax.vjp(fn, W[0], X)[1]))  # noqa: E731
    assert held(recompute(block, mp_comm_recompute=False)) == held(recompute(block)) + 1


def gathered(params, x):
    return jnp.tanh(x @ lax.all_gather(params["a"].astype(jnp.float32), "data", axis=0, tiled=True))


@pytest.mark.parametrize(("again", "gathers"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("model_again", [True, False])
def test_gathers_of_parameters_run_again_or_not(again, model_again, gathers):
    block = recompute(gathered, parallel_optimizer_comm_recompute=again, mp_comm_recompute=model_again)
    mesh = mesh_of(data=8)
    loss = lambda p, x: lax.psum(jnp.sum(jnp.sin(block(p, x)) ** 2), "data")  # noqa: E731
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=({"a": P("data"), "b": P()}, P("data")), out_specs=P())
    text = jax.jit(jax.grad(mapped)).lower(PARAMS, X).as_text()
    assert counts(text)[1] == gathers


def test_activations_are_kept_in_pieces():
    sizes = {}
    for flag in (False, True):
        block = recompute(mlp, recompute_slice_activation=flag)
        same(tensor_parallel(block)(PARAMS, X), tensor_parallel(mlp)(PARAMS, X))

        def kept(params, x, block=block):
            leaves = jax.tree.leaves(jax.vjp(block, params, x)[1])
            return jnp.float32(sum(leaf.size for leaf in leaves if leaf.ndim))

        spec = {"a": P(None, "model"), "b": P("model", None)}
        mapped = jax.shard_map(kept, mesh=mesh_of(model=8), in_specs=(spec, P()), out_specs=P())
        sizes[flag] = int(mapped(PARAMS, X))
    assert sizes[False] - sizes[True] == X.size - X.size // 8
    with jax.set_mesh(mesh_of(model=8)):
        block = recompute(two, recompute_slice_activation=True)
        step = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(block(p, x) ** 2)))
        assert step.lower(PARAMS, X).as_text().count("sdy.sharding_constraint") == 3  # cut, whole, and whole again
        same(step(PARAMS, X), jax.value_and_grad(lambda p, x: jnp.sum(two(p, x) ** 2))(PARAMS, X))


def test_activations_stay_whole_where_nothing_says_that_the_devices_have_the_same():
    """With check_vma=False they may be parts of a batch: pieces of different examples were joined, and gradients were wrong."""
    block = recompute(two, recompute_slice_activation=True)
    mapped = jax.shard_map(block, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    with pytest.raises(StrategyError, match="no activation"):
        mapped(PARAMS, X)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_offloaded_to_the_host(platform):
    block = recompute(two, offload=True)
    step = jax.jit(jax.grad(lambda p, x: jnp.sum(block(p, block(p, x)) ** 2)))
    text = step.trace(PARAMS, X).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("annotate_device_placement") == 4  # each block's input out and back
    same(step(PARAMS, X), jax.grad(lambda p, x: jnp.sum(two(p, two(p, x)) ** 2))(PARAMS, X))


# ---- modules


def blocks(jaxpr):
    return len(re.findall(r"= (?:checkpoint|remat2?)\[", str(jaxpr)))


class Layer(Cell):
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


class Stack(Cell):
    def __init__(self):
        self.layers = [Layer(W[0]), Layer(W[1])]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_cells_by_path():
    plain, model = Stack(), Stack()
    made = recompute(model, paths=["layers/*"])
    assert type(made).__name__ == "Stack" and isinstance(made.layers[0], Layer)
    assert made.parameters_dict().keys() == plain.parameters_dict().keys()
    assert type(model.layers[0]) is Layer, "the model that was given stays as it was"
    loss = lambda of: lambda p, x: jnp.sum(of.with_parameters(p)(x) ** 2)  # noqa: E731
    same(jax.grad(loss(made))(made.parameters_dict(), X), jax.grad(loss(plain))(plain.parameters_dict(), X))
    assert blocks(jax.make_jaxpr(lambda x: made(x))(X)) == 2


def test_equinox():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(16, 16, 64, 2, key=jax.random.key(0))
    made = recompute(mlp, paths=["layers/[01]"])
    assert [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(made)] == [
        jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(mlp)
    ]
    for one in (made, recompute(mlp)):
        loss = lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2)  # noqa: E731
        same(jax.tree.leaves(eqx.filter_grad(loss)(one, X)), jax.tree.leaves(eqx.filter_grad(loss)(mlp, X)))
        assert blocks(eqx.filter_make_jaxpr(loss)(one, X)[0]) == (2 if one is made else 1)


def test_nnx_keeps_its_statistics():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    made = recompute(model)
    made(X)
    plain = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    plain(X)
    np.testing.assert_allclose(made.mean[...], plain.mean[...])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: recompute(two, mp_comm_recompute=1), StrategyTypeError, "`mp_comm_recompute` cannot be 1"),
        (lambda: recompute(3), StrategyTypeError, "`fn` is an int, which cannot be called"),
        (lambda: recompute(Stack(), paths=["blocks/*"]), StrategyError, "paths 'blocks/*' matches no submodule"),
        (lambda: recompute(two, recompute_slice_activation=True)(PARAMS, X), StrategyError, "no activation of `two` can be kept sharded"),
    ],
)  # fmt: skip
def test_errors(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


# ---- the parameters of a training step that lie in pieces


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_a_step_keeps_its_gathered_parameters_or_gathers_them_again(mode):
    """The first layer's weights are not needed in the backward pass: nobody asked for gradients of the batch."""

    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w.T)
        return jnp.mean(x**2)

    params = {"layers": [W[0], W[1], W[0] + W[1]]}
    found, states = {}, []
    for again in (False, True):
        made = step(loss, optax.adam(1e-2), mode=mode, parallel_optimizer_comm_recompute=again,
                    parallel_optimizer_config={"optimizer_level": "level3", "parallel_optimizer_threshold": 0})  # fmt: skip
        state = made.init(params, X)
        text = made.lower(state, X).as_text()
        found[again] = text.count('"stablehlo.all_gather"' if mode == "data_parallel" else "<@mesh, [{}, {}]>")
        for _ in range(2):
            state, value = made(state, X)
        states.append((value, state.params))
    assert found == {False: 3, True: 5}
    same(*states)


def test_submodules_of_a_steps_model_by_path():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
    states = []
    for paths, count in ((None, 0), ("layers/*", 3), (["layers/0", "layers/1"], 2)):
        made = step(loss, optax.sgd(0.1), mode="data_parallel", recompute=paths)
        state = made.init(model)
        assert blocks(eqx.filter_make_jaxpr(made.options.loss_fn)(model, X)[0]) == count
        states.append(made(state, X))
    same(states[1], states[0])
    same(states[2], states[0])
    with pytest.raises(StrategyError, match="has no submodules to recompute"):
        made = step(two_of, optax.sgd(0.1), mode="data_parallel", recompute="layers/*")
        made(made.init(PARAMS), X)


def two_of(params, x):
    return jnp.sum(two(params, x) ** 2)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (dict(parallel_optimizer_comm_recompute=1), "give True or False"),
        (dict(parallel_optimizer_comm_recompute=True), "has nothing to gather again"),
        (dict(parallel_optimizer_comm_recompute=True, parallel_optimizer_config={"optimizer_level": "level2"}),
         "has nothing to gather again"),
    ],
)  # fmt: skip
def test_errors_of_a_step(how, text):
    with pytest.raises((StrategyError, StrategyTypeError)) as error:
        step(two, optax.sgd(0.1), **how)
    assert text in str(error.value) and "fix:" in str(error.value)
