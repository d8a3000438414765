"""Reuse: equal blocks become one scanned body; results stay the same, and what does not fold is explained."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardfn import train
from shardfn.errors import StrategyError, StrategyTypeError
from shardfn.train.scan_layers.scan import scan_layers, scan_limit
from tests.marks import some_slow

RNG = np.random.default_rng(0)
D = 8
X = RNG.normal(size=(8, D)).astype(np.float32)


def layer(seed, width=2 * D):
    r = np.random.default_rng(seed)
    draw = lambda *shape: (r.normal(size=shape) * 0.3).astype(np.float32)  # noqa: E731
    return {"w1": draw(D, width), "b1": draw(width), "w2": draw(width, D)}


def params_of(count):
    return {"embed": np.eye(D, dtype=np.float32), "layers": [layer(i) for i in range(count)]}


def block(p, x):
    return x + jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"]


def chain(params, x, apply=block):
    x = x @ params["embed"]
    for p in params["layers"]:
        x = apply(p, x)
    return jnp.mean((x @ params["embed"].T) ** 2)  # the embedding is read outside, twice


def scans(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("scan[")


def same_as_unrolled(loss, params, *batch, **options):
    made = scan_layers(loss, params, *batch, **options)
    value, grads = jax.jit(jax.value_and_grad(made.loss))(made.stack(params), *batch)
    expected, wanted = jax.jit(jax.value_and_grad(loss))(params, *batch)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), made.unstack(grads), wanted)
    return made


def cast_first(params, x):  # what is done to a parameter alone stands where it is used
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32) * 2.0, params)
    return chain(half, x)


def jitted(params, x):
    return jax.jit(chain)(params, x)


def collected(params, x):  # each block gives something that is read at the end
    seen = []
    for p in params["layers"]:
        x = block(p, x)
        seen.append(jnp.mean(x))
    return jnp.mean(x**2) + sum(seen[i] * (i + 1) for i in range(len(seen)))


def two_kinds(params, x):  # blocks of two layers that differ
    for i, p in enumerate(params["layers"]):
        x = block(p, x) if i % 2 else jnp.tanh(block(p, x))
    return jnp.mean(x**2)


def dropout(params, x):  # each block with its own random numbers, and a number of its own
    keys = jax.random.split(jax.random.key(0), len(params["layers"]))
    for i, (p, key) in enumerate(zip(params["layers"], keys, strict=True)):
        x = block(p, x) * (1.0 + 0.1 * i) * jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.mean(x**2)


def skipped(params, x):  # all blocks read the same array from before
    y = x
    for p in params["layers"]:
        y = block(p, y) + jnp.sin(x)
    return jnp.mean(y**2)


def remat(params, x):
    return chain(params, x, train.recompute(block))


def jit_block(params, x):
    return chain(params, x, jax.jit(block))


FOLDING = {
    "chain": (chain, 6), "cast first": (cast_first, 6), "all in a jit": (jitted, 6), "collected": (collected, 6),
    "two kinds": (two_kinds, 3), "dropout": (dropout, 6), "skipped": (skipped, 6), "checkpoint": (remat, 6),
    "jit inside": (jit_block, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow([*FOLDING], ["dropout", "two kinds"]))
def test_folds_and_gives_the_same(name):
    loss, count = FOLDING[name]
    made = same_as_unrolled(loss, params_of(6), X)
    assert [one.count for one in made.runs] == [count], made.explain()
    assert scans(made.loss, made.stack(params_of(6)), X) == 1


def test_names_and_shapes():
    made = scan_layers(chain, params_of(6), X)
    assert {k: v.shape for k, v in made.stack(params_of(6)).items()} == {
        "embed": (D, D), "layers/*/b1": (6, 2 * D), "layers/*/w1": (6, D, 2 * D), "layers/*/w2": (6, 2 * D, D),
    }  # fmt: skip
    assert made.explain().startswith("6 blocks of ")
    jax.tree.map(np.testing.assert_array_equal, made.unstack(made.stack(params_of(6))), params_of(6))


@pytest.mark.parametrize(("limit", "expected"), [(1000, 1), (6, 1), pytest.param(4, 2, marks=pytest.mark.slow), (2, 3)])
def test_limit(limit, expected):
    made = same_as_unrolled(chain, params_of(6), X, limit=limit)
    assert scans(made.loss, made.stack(params_of(6)), X) == expected


@pytest.mark.slow
def test_other_batches_and_recompute():
    made = same_as_unrolled(chain, params_of(4), X, recomputed=3)
    assert made.loss(made.stack(params_of(4)), X[:2]).shape == ()
    assert scans(made.loss, made.stack(params_of(4)), X) == 2  # three that are recomputed, and one that is not


def test_two_stacks():
    def loss(params, x):
        for p in params["encoder"]:
            x = block(p, x)
        x = jnp.cumsum(x, 0)
        for p in params["decoder"]:
            x = jnp.tanh(block(p, x))
        return jnp.mean(x**2)

    params = {"encoder": [layer(i) for i in range(3)], "decoder": [layer(9 + i) for i in range(4)]}
    made = same_as_unrolled(loss, params, X)
    assert [one.count for one in made.runs] == [3, 4]


def scaled(scale):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (g * scale,))
    return identity


def own_rules(params, x):  # equal forward; each block's derivative has a number of its own
    for i, p in enumerate(params["layers"]):
        x = scaled(float(i + 1))(block(p, x))
    return jnp.mean(x**2)


def activations(params, x):
    for i, p in enumerate(params["layers"]):
        x = (jnp.tanh, jnp.sin, jnp.cos, jnp.exp)[i](x @ p["w1"] @ p["w1"].T)
    return jnp.mean(x**2)


def from_two_before(params, x):
    seen = [x, x]
    for p in params["layers"]:
        seen.append(block(p, seen[-1]) + seen[-2])
    return jnp.mean(seen[-1] ** 2)


@pytest.mark.parametrize(
    ("loss", "params", "text"),
    [
        (activations, params_of(4), r"layers/* is not scanned: block 0 has `tanh float32[8,8] (test_scan_layers.py:"),
        (chain, {"embed": np.eye(D, dtype=np.float32), "layers": [layer(0, 16), layer(1, 24)]},
         "layers/*/b1 is not scanned: layers/1/b1 is float32[24], layers/0/b1 float32[16]"),
    ],
)  # fmt: skip
def test_why_not(loss, params, text):
    made = same_as_unrolled(loss, params, X)
    assert made.runs == () and text in made.explain(), made.explain()


@pytest.mark.parametrize("loss", [own_rules, from_two_before])
def test_what_must_not_be_taken_for_equal(loss):
    same_as_unrolled(loss, params_of(4), X)


@pytest.mark.slow
@hypothesis.settings(max_examples=8)
@hypothesis.given(st.lists(st.sampled_from("abc"), min_size=2, max_size=6))
def test_any_order_of_blocks(kinds):
    apply = {"a": block, "b": lambda p, x: jnp.tanh(block(p, x)), "c": lambda p, x: x * 0.5 + block(p, x)[:, ::-1]}

    def loss(params, x):
        for kind, p in zip(kinds, params["layers"], strict=True):
            x = apply[kind](p, x)
        return jnp.mean(x**2)

    same_as_unrolled(loss, params_of(len(kinds)), X)


# ---- in a training step

Y = RNG.normal(size=(8, D)).astype(np.float32)
ADAM = optax.adam(1e-2)


def squared(params, x, y):
    return jnp.mean((functools.reduce(lambda x, p: block(p, x), params["layers"], x) - y) ** 2)


@functools.cache
def after(options):
    step = train.step(squared, ADAM, mode="data_parallel", **dict(options))
    state = step.init({"layers": params_of(4)["layers"]}, X, Y)
    text = step.lower(state, X, Y).as_text()
    for _ in range(2):
        state, value = step(state, X, Y)
    return step, step.model(state), float(value), text.count('"stablehlo.all_reduce"')


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(reuse="auto"), dict(recompute=2), dict(recompute="auto", memory_limit="17.8kB")]
)
def test_a_step(options):
    _, expected, loss, collectives = after(())
    step, model, value, few = after(tuple(options.items()))
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), model, expected)
    assert (collectives, few) == (13, 4)  # of each parameter one, and of the loss
    if "recompute" in options:
        assert 0 < step.recomputed.blocks <= 4 and step.recomputed.flops_again > 0
        assert "blocks are rematerialised: activations take" in str(step.recomputed)


def test_an_optimizer_that_sees_whole_leaves_is_not_given_stacked_ones():
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    for optimizer in (optax.lamb(1e-2), optax.adamw(1e-2, weight_decay=0.1, mask=mask)):
        step = train.step(squared, optimizer, mode="data_parallel", reuse="auto")
        with pytest.warns(
            UserWarning, match="`reuse` has no effect: no layers are scanned\nthe optimizer depends on each"
        ):
            step.init({"layers": params_of(3)["layers"]}, X, Y)
        assert step.scanned_layers.groups == ()
        assert "the optimizer depends on each parameter as one array" in step.scanned_layers.explain()


class Normed(nnx.Module):
    """Layers that keep statistics of the batch."""

    def __init__(self, norms):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])
        self.norms = nnx.List([nnx.BatchNorm(D, rngs=rngs) if norms else jnp.tanh for _ in range(3)])

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return x


def of_module(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def test_a_module():
    step = train.step(of_module, ADAM, mode="data_parallel", reuse="auto")
    state = step.init(Normed(False), X, Y)
    assert step.scanned_layers.explain() == "3 blocks of 4 equations are scanned: layers/*/kernel, layers/*/bias"
    state, _ = step(state, X, Y)
    assert isinstance(step.model(state), Normed)


def test_statistics_of_the_batch_are_refused():
    step = train.step(of_module, ADAM, mode="data_parallel", reuse="auto")
    with pytest.warns(UserWarning, match="no effect: no layers are scanned\nthe loss changes the model's state"):
        state = step.init(Normed(True), X, Y)
    step(state, X, Y)  # as without `reuse`
    step = train.step(of_module, ADAM, mode="data_parallel", recompute=2)
    with pytest.raises(StrategyError, match=r"no equal blocks to recompute[\s\S]*the loss changes the model's state"):
        step.init(Normed(True), X, Y)


def test_shapes_will_do():
    """`init` may be traced, though it tries the optimizer out."""
    step = train.step(squared, ADAM, mode="data_parallel", reuse="auto")
    layers = {"layers": params_of(3)["layers"]}
    state = jax.eval_shape(lambda: step.init(layers, X, Y))
    assert state.params["layers/*/w1"].shape == (3, D, 2 * D)
    assert step.lower(state, X, Y).as_text().count('"stablehlo.all_reduce"') == 4


def test_the_fix_of_an_entry_for_one_layer_puts_the_layers_in_front():
    options = {"mode": "semi_auto_parallel", "reuse": True, "parameter_plan": {"layers/*/w1": (1, 4)}}
    with pytest.raises(StrategyError, match=r"one int for each dimension: \(1, 1, 4\)"):
        train.step(squared, ADAM, **options).init({"layers": params_of(3)["layers"]}, X, Y)


def test_the_loss_is_traced_once_for_a_kind_of_call():
    calls = []

    def counted(params, x, y):
        calls.append(x.shape)
        return squared(params, x, y)

    made = scan_layers(counted, {"layers": params_of(3)["layers"]}, X, Y)
    stacked = made.stack({"layers": params_of(3)["layers"]})
    for _ in range(2):
        jax.make_jaxpr(jax.grad(made.loss))(stacked, X, Y)
    assert len(calls) == 1
    made.loss(stacked, X[:4], Y[:4])
    assert len(calls) == 2

    weights = jnp.linspace(0.0, 1.0, D)
    masked = lambda p, x, y: jnp.mean(weights * (squared(p, x, y) + x))  # noqa: E731
    same_as_unrolled(masked, {"layers": params_of(3)["layers"]}, X, Y)  # what it closes over stays

    @jax.jit
    def closes_over_a_traced_value(stacked, scale):
        inside = scan_layers(lambda p, x, y: scale * squared(p, x, y), {"layers": params_of(3)["layers"]}, X, Y)
        return inside.loss(stacked, X, Y) + inside.loss(stacked, X, Y)

    value = closes_over_a_traced_value(stacked, 3.0)
    np.testing.assert_allclose(value, 6 * squared({"layers": params_of(3)["layers"]}, X, Y), rtol=1e-5)


# ---- with all that a step may be asked beside it

ZERO = {"parallel_optimizer_threshold": 0}
GRID = dict(mode="semi_auto_parallel", in_strategy=((4, 1), (4, 1)),
            parameter_plan={"layers/*/w1": (1, 1, 2), "layers/*/b1": (1, 2), "layers/*/w2": (1, 2, 1)})  # fmt: skip
BESIDE = {  # options: (all-reduces, all-gathers, reduce-scatters) of the compiled module; four blocks of three arrays
    "one each": (dict(comm_fusion={"openstate": False}), (3, 0, 0)),
    "numbers": (dict(fusion={"layers/*/w?": 1}, micro_batches=2), (2, 0, 0)),
    "level 2": (
        dict(recompute=2, micro_batches=2, comm_fusion={}, parallel_optimizer_config={**ZERO, "optimizer_level": "level2"}),
        (1, 1, 1),
    ),
    "level 2, one each": (
        dict(micro_batches=2, comm_fusion={"openstate": False}, parallel_optimizer_config={**ZERO, "optimizer_level": "level2"}),
        (1, 3, 3),
    ),
    "level 3": (dict(recompute=3, comm_fusion={}, parallel_optimizer_config={**ZERO, "optimizer_level": "level3"}), (1, 1, 1)),
    # of each of two scans one forwards and one backwards, and the bucket
    "tensor parallel": (dict(recompute=2, micro_batches=2, comm_fusion={}, cross_batch=True, **GRID), (5, 0, 0)),
}  # fmt: skip
LONG = [np.concatenate([X, -X]), np.concatenate([Y, Y])]


@functools.cache
def beside(name):
    options = dict(mode="stand_alone") if name == "one device" else {"reuse": "auto", **BESIDE[name][0]}
    step = train.step(squared, ADAM, **{"mode": "data_parallel", **options})
    state = step.init({"layers": params_of(4)["layers"]}, *LONG)
    text = step.lower(state, *LONG).compile().as_text()
    for _ in range(2):
        state, value = step(state, *LONG)
    return text, step.model(state), value


@pytest.mark.parametrize("name", some_slow([*BESIDE], {"one each", "numbers", "level 2", "level 3"}))
def test_with_all_the_rest(name):
    text, model, value = beside(name)
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    assert tuple(len(re.findall(rf"[ )}}]{kind}(?:-start)?\(", text)) for kind in kinds) == BESIDE[name][1]
    _, expected, wanted = beside("one device")
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), model, expected)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: train.step(squared, ADAM, reuse=0), StrategyError, "`reuse` cannot be 0"),
        (lambda: train.step(squared, ADAM, reuse="-3", recompute=-1), StrategyError, "2 problems"),
        (lambda: scan_limit("0"), StrategyError, "`reuse` cannot be 0"),
        (lambda: scan_limit(0), StrategyError, "`reuse` cannot be 0"),
        (lambda: scan_limit("yes"), StrategyError, "`reuse` cannot be 'yes'"),
        (lambda: scan_limit(1.5), StrategyTypeError, "`reuse` cannot be 1.5"),
        (lambda: train.step(squared, ADAM, recompute="auto"), StrategyError, '`recompute="auto"` needs a memory limit'),
        (lambda: train.step(squared, ADAM, recompute=-1), StrategyError, "`recompute` cannot be -1"),
        (lambda: train.step(squared, ADAM, reuse="auto").init(params_of(2)), StrategyError, "need a batch"),
        (lambda: train.step(squared, ADAM, mode="data_parallel", recompute="auto", memory_limit=100).init(params_of(3), X, Y),
         StrategyError, "does not fit into memory with every block recomputed"),
        (lambda: train.step(squared, ADAM, mode="data_parallel", recompute=4).init(params_of(3), X, Y),
         StrategyError, "there are 3 equal blocks, not 4"),
    ],
)  # fmt: skip
def test_errors(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)
