"""What XLA makes of collectives for GPUs, against what its compiler was seen to do; compiled only in the tests marked so."""

import collections
import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from examples.models import abstract, gpt2, llama
from shardfn import compiled

GPUS = "h100:8"


@pytest.fixture
def cuda():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("JAX's CUDA plugin is not installed")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kinds(found):
    counts = collections.Counter()
    for c in found:
        counts[c.kind] += c.total_bytes
    return counts


def three(x, wq, wk, wv):
    return jnp.tanh(x @ wq) * jnp.tanh(x @ wk) * jnp.tanh(x @ wv)


def gradient(x, *ws):
    return jax.grad(lambda x: jnp.sum(three(x, *ws)))(x)


def looked_up(table, rows):
    def loss(t):
        return jnp.sum(jnp.tanh(lax.stop_gradient(t)[rows] @ t.T)) + jnp.sum(t[rows] ** 2)

    return jax.grad(loss)(table)


def solved(a, b):
    return jax.scipy.linalg.solve_triangular(a, b, lower=True)


X, W, MATRICES = f32(64, 256), f32(256, 512), f32(8, 128, 128)
TABLE = f32(1024, 256), jax.ShapeDtypeStruct((8192,), jnp.int32)
# Function, arguments, layouts of arguments and results, and bytes that are sent. Each was compiled.
SENT = {
    "one sum for three": (gradient, (X, W, W, W), ((1, 1), *[(1, 8)] * 3), ((1, 1),), {"all-reduce": 114688}),
    "rows added to a product": (looked_up, TABLE, ((8, 1), (8,)), ((8, 1),),
                                {"all-gather": 3 * 917504, "reduce-scatter": 2 * 917504}),
    "largest of rows": (lambda x: lax.top_k(x, 8), (f32(1024, 512),), ((8, 1),), None, {}),
    "cholesky": (jnp.linalg.cholesky, (MATRICES,), ((8, 1, 1),), None, {}),
    "solve, batch": (solved, (MATRICES, f32(8, 128, 64)), ((8, 1, 1), (8, 1, 1)), None, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    fn, args, entries, out, expected = SENT[name]
    plan = shardfn.plan(fn, *args, in_strategy=entries, out_strategy=out, device=GPUS)
    assert dict(kinds(plan.collectives)) == expected


@pytest.mark.parametrize("name", ["one sum for three", "rows added to a product", "largest of rows"])
def test_on_cpu_it_is_something_else(name):
    fn, args, entries, out, expected = SENT[name]
    plan = shardfn.plan(fn, *args, in_strategy=entries, out_strategy=out, device="cpu:8")
    assert dict(kinds(plan.collectives)) != expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_compiled(cuda, name):
    fn, args, entries, out, expected = SENT[name]
    plan: Any = shardfn.plan(fn, *args, in_strategy=entries, out_strategy=out, device=GPUS)
    assert dict(kinds(compiled.read(plan.verifier.compiled(plan)).collectives)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "layout"), [(llama, "FSDP"), (gpt2, "ZeRO-1"), (gpt2, "tensor parallel")])
def test_compiled_steps(cuda, model, layout):
    size = dataclasses.replace(model.small(), layers=1)
    fn, args = abstract(model.make, size)
    expert = model.experts(size, 8).get(layout)
    step: Any = shardfn.shard(expert.written(fn), expert.in_strategy, device=GPUS, donate_argnums=(0, 1))
    plan = step.plan(*args)
    made, predicted = kinds(compiled.read(plan.verifier.compiled(plan)).collectives), kinds(plan.collectives)
    for kind in made.keys() | predicted.keys():
        assert abs(predicted[kind] - made[kind]) < 0.05 * made.total(), kind
