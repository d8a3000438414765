"""What XLA makes of collectives for GPUs, against what its compiler was seen to do; compiled only in the tests marked so."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from examples.models import abstract, gpt2, llama, mlp
from shardfn.cost.backends.gpu import split_k
from shardfn.cost.devices.chips import CHIPS
from shardfn.runtime.verify import compile_plan

GPUS = "h100:8"


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


def gathered_arguments(table, rows):
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
    "rows added to a product": (gathered_arguments, TABLE, ((8, 1), (8,)), ((8, 1),),
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
    assert dict(kinds(compile_plan(plan).collectives)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "layout"), [(llama, "FSDP"), (gpt2, "ZeRO-1"), (gpt2, "tensor parallel")])
def test_compiled_steps(cuda, model, layout):
    size = dataclasses.replace(model.small(), layers=1)
    fn, args = abstract(model.make, size)
    expert = model.experts(size, 8).get(layout)
    step: Any = shardfn.shard(expert.written(fn), expert.in_strategy, device=GPUS, donate_argnums=(0, 1))
    plan = step.plan(*args)
    made, predicted = kinds(compile_plan(plan).collectives), kinds(plan.collectives)
    for kind in made.keys() | predicted.keys():
        assert abs(predicted[kind] - made[kind]) < 0.05 * made.total(), kind


# Rows, columns, summed, and in how many parts XLA makes the product for an H100 and for an A100.
PARTS = [
    (64, 64, 64, 1, 1), (64, 128, 64, 4, 1), (64, 128, 128, 8, 4), (64, 128, 256, 8, 4), (64, 128, 8192, 64, 32),
    (64, 256, 128, 4, 1), (64, 1024, 256, 4, 1), (128, 256, 1024, 16, 8), (512, 128, 1024, 8, 4),
    (512, 1024, 8192, 4, 4), (1024, 256, 256, 1, 1), (1024, 256, 8192, 8, 8), (1024, 1024, 1024, 1, 1),
    (1024, 1024, 8192, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "summed", "h100", "a100"), PARTS)
def test_small_matmuls_are_split_into_parts(rows, columns, summed, h100, a100):
    assert split_k(1, rows, columns, summed) == h100
    assert split_k(1, rows, columns, summed, CHIPS["a100"].split_k_coarseness) == a100


def peak(fn, *args, entries, device=GPUS, **options):
    return shardfn.plan(fn, *args, in_strategy=entries, device=device, **options).cost.memory


def test_the_parts_of_a_product_lie_in_memory():
    """128 x 256 elements in sixteen parts, added up by what reads them."""
    args, entries = (f32(128, 1024), f32(1024, 256)), ((1, 1), (1, 1))
    assert peak(lambda x, w: jnp.tanh(x @ w), *args, entries=entries).temporaries == 16 * 128 * 256 * 4
    assert peak(lambda x, w: jnp.tanh(x @ w), *args, entries=entries, device="tpu-v5e:8").temporaries == 0


def test_a_sum_takes_its_operand_s_place():
    args, entries = (f32(2048, 8 * 2048), f32(8 * 2048, 2048)), ((1, 8), (8, 1))
    assert peak(jnp.matmul, *args, entries=entries, out_strategy=((1, 1),)).temporaries == 0


X_MIB, W_MIB = f32(4096, 8192), f32(8192, 8192)  # 128 and 256 MiB, 16 and 32 on each device
# Function, arguments, strategies of these and of the result, and MiB of the temporaries. Each was compiled.
IN_ORDER = {
    "rows gathered": (lambda x: x, (X_MIB,), ((8, 1),), (1, 1), 0),
    "columns gathered": (lambda x: x, (X_MIB,), ((1, 8),), (1, 1), 128),
    "columns of computed rows gathered": (jnp.tanh, (X_MIB,), ((1, 8),), (1, 1), 128),
    "behind a dimension of one": (lambda x: x, (f32(1, 4096, 8192),), ((1, 8, 1),), (1, 1, 1), 0),
    "columns gathered for a matmul": (jnp.matmul, (X_MIB, f32(8192, 1024)), ((1, 8), (1, 8)), (1, 8), 144),
    "rows scattered": (jnp.matmul, (X_MIB, W_MIB), ((1, 8), (8, 1)), (8, 1), 128),
    "columns scattered": (jnp.matmul, (X_MIB, W_MIB), ((1, 8), (8, 1)), (1, 8), 144),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_arrives_in_another_order_is_copied(name):
    fn, args, entries, out, mib = IN_ORDER[name]
    assert peak(fn, *args, entries=entries, out_strategy=(out,)).temporaries == mib * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_ORDER)
def test_what_arrives_in_another_order_is_copied_as_compiled(cuda, name):
    fn, args, entries, out, mib = IN_ORDER[name]
    plan = shardfn.plan(fn, *args, in_strategy=entries, out_strategy=(out,), device=GPUS)
    assert compile_plan(plan).temp_bytes == pytest.approx(mib * 2**20, abs=2**12)


def layers(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def merged(size):
    """How many gathers of twelve weights run as one."""
    ws, x = [f32(size, size)] * 12, f32(8 * size, size)
    plan = shardfn.plan(layers, ws, x, in_strategy=([(8, 1)] * 12, (8, 1)), device=GPUS)
    return [c.merged for c in plan.collectives if c.kind == "all-gather"]


def test_gathers_are_merged_up_to_a_size():
    assert merged(256) == [12] * 12  # 3 MiB
    assert merged(1024) == [7] * 7 + [5] * 5  # 4 MiB each, of 30 in all
    assert merged(4096) == [1] * 12


def test_what_comes_from_one_large_array_is_computed_anew():
    """An `exp` with two readers, of a product that stays: on CPU both are stored."""

    def f(x, w):
        z = x @ w
        y = jnp.exp(z)
        return jnp.sum(y, axis=-1), jnp.sum(y * z, axis=-1)

    args, entries = (f32(8192, 2048), f32(2048, 8192)), ((8, 1), (1, 1))
    product = 1024 * 8192 * 4
    assert peak(f, *args, entries=entries).temporaries == product
    assert peak(f, *args, entries=entries, device="cpu:8").temporaries >= 2 * product


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["data parallel", "FSDP", "tensor parallel"])
def test_compiled_memory(cuda, layout):
    fn, args = abstract(mlp.make, **mlp.SMALL)
    expert = mlp.experts(8, **mlp.SMALL)[layout]
    step: Any = shardfn.shard(expert.written(fn), expert.in_strategy, device=GPUS, donate_argnums=(0,))
    plan = step.plan(*args)
    made = compile_plan(plan)
    assert plan.cost.memory.peak == pytest.approx(made.together("cuda"), rel=0.1)
