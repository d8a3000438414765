"""The table of programs that were found wrong: values, and gradients inside and outside, for several strategies, dtypes and devices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardfn
from shardfn import train
from tests.fuzz.cases import CASES, PROGRAMS
from tests.fuzz.packs import script
from tests.fuzz.programs import loss, made_data
from tests.fuzz.workers import Worker, judged_apart


def rows():
    """Cases, each with a strategy, a dtype and a number of devices; what is not the first of its case is slow."""
    for name, case in CASES.items():
        slow = False
        for strategy in case.strategies:
            for devices in case.devices:
                for dtype in case.dtypes:
                    if devices % math.lcm(*(math.prod(s) for s in strategy)):
                        continue
                    shards = ";".join(",".join(map(str, s)) for s in strategy)
                    marks = [pytest.mark.slow] * slow
                    yield pytest.param(
                        case, strategy, dtype, devices, id=f"{name}-{shards}-{dtype}-{devices}", marks=marks
                    )
                    slow = True


@pytest.mark.parametrize(("case", "strategy", "dtype", "devices"), [*rows()])
def test_case_sharded_equals_unsharded(case, strategy, dtype, devices):
    function, devices = case.function, jax.devices()[:devices]
    args = [made_data(shape, dtype, i) for i, shape in enumerate(case.shapes)]
    is_derived = case.gradient and dtype == "float32"
    places = tuple(range(len(args)))

    def everything(f):
        return lambda *args: (f(*args), jax.grad(loss(f), places)(*args) if is_derived else ())

    want = jax.jit(everything(function))(*args)
    sharded = shardfn.shard(function, strategy, device=devices)
    assert_same(sharded(*args), want[0], "values")
    if is_derived:
        inside = shardfn.shard(jax.grad(loss(function), places), strategy, device=devices)(*args)
        outside = jax.jit(jax.grad(loss(sharded), places))(*args)
        assert_same(inside, want[1], "gradient inside")
        assert_same(outside, want[1], "gradient outside")


def assert_same(got, want, what):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=what)


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize(("name", "check"), [(name, check) for name, pack in PROGRAMS.items() for check in pack.checks])
def test_program_sharded_equals_unsharded(worker, name, check):
    pack = dataclasses.replace(PROGRAMS[name], checks=(check,))
    findings = [f for f in judged_apart(worker, pack) if f.check == check]
    assert {f.verdict for f in findings} == {"right"}, f"{findings[0].text}\n{script(pack)}"


@pytest.mark.parametrize(
    "strategy", [(2, 2), pytest.param((1, 2), marks=pytest.mark.slow), pytest.param((4, 2), marks=pytest.mark.slow)]
)
def test_train_step_never_moves_an_embedding_that_no_token_names(strategy):
    tokens = np.random.default_rng(0).integers(1, 50, (8, 64)).astype("int32")

    def make():
        return {
            "e": jax.random.normal(jax.random.key(0), (50, 16)),
            "w": jax.random.normal(jax.random.key(1), (16, 50)),
        }

    def model(p, t):
        logits = jnp.tanh(p["e"][t[:, :-1]]) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, t[:, 1:]).mean()

    step = train.step(model, optax.sgd(1.0), mode="semi_auto_parallel", in_strategy=(strategy,))
    state = step.init(make, tokens)
    for _ in range(3):
        state, _ = step(state, tokens)
    np.testing.assert_array_equal(state.params["e"][0], make()["e"][0])


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("function", [
    lambda x, shift: jnp.pad(x[1:-1, 1:-1] + x[1:-1, 1 + shift : 7 + shift], 1).T,
    lambda x, shift: jnp.roll(x.T, (shift, 1), (0, 1)) * x.T,
])  # fmt: skip
def test_gradient_outside_of_rotations_whose_result_is_sharded_along_another_dimension(function, shift):
    x = made_data((4, 8), "float32", 0)
    plain = functools.partial(function, shift=shift)
    sharded = shardfn.shard(plain, ((2, 1),), ((8, 1),), device=jax.devices()[:8])
    assert_same(jax.jit(jax.grad(loss(sharded)))(x), jax.jit(jax.grad(loss(plain)))(x), "gradient outside")
