"""Collective matmul: gathers and scatters that libtpu runs as permutes while it multiplies; compiled in tests marked so."""

import collections

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.runtime.verify import compile_plan
from tests.search.problems import S

K, N, R = 1024, 2048, 2**15
V5E, SQUARE = "tpu-v5e:2x4", "tpu-v5e:4x4"
PERMUTE = "collective-permute"


def matmul(x, w):
    return x @ w


def weight_gradient(x, g):
    return x.T @ g


def operands(rows=R, k=K, n=N, dtype=jnp.bfloat16):
    return S((rows, k), dtype), S((k, n), dtype)


def gradients(rows=R, dtype=jnp.bfloat16):
    return S((rows, K), dtype), S((rows, N), dtype)


def stacked(x, layers):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


# Function, arguments, device, strategies of arguments and results, and what runs how often, as libtpu 0.0.42 made it.
PROGRAMS = {
    "gather of contracted rows": (matmul, operands(), V5E, ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "gather of columns": (matmul, operands(), V5E, ((8, 1), (1, 8)), ((8, 1),), {PERMUTE: 9}),
    "too few rows": (matmul, operands(4160), V5E, ((8, 1), (8, 1)), ((8, 1),), {"all-gather": 1}),
    "enough rows": (matmul, operands(4224), V5E, ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "more rows of v6e": (matmul, operands(9792), "tpu-v6e:2x4", ((8, 1), (8, 1)), ((8, 1),), {"all-gather": 1}),
    "enough rows of v6e": (matmul, operands(9856), "tpu-v6e:2x4", ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "f32": (matmul, operands(8192, dtype=jnp.float32), V5E, ((8, 1), (8, 1)), ((8, 1),), {"all-gather": 1}),
    "enough rows of f32": (matmul, operands(8704, dtype=jnp.float32), V5E, ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "16 devices": (matmul, operands(), SQUARE, ((16, 1), (16, 1)), ((16, 1),), {PERMUTE: 17}),
    "64 devices": (matmul, operands(), "tpu-v5e:8x8", ((64, 1), (64, 1)), ((64, 1),), {"all-reduce": 1}),
    "4 beside tensor parallel": (matmul, operands(), SQUARE, ((4, 1), (4, 4)), ((4, 4),), {PERMUTE: 3}),
    "2 beside tensor parallel": (matmul, operands(), V5E, ((2, 1), (2, 4)), ((2, 4),), {"all-gather": 1}),
    "rows sharded further": (matmul, operands(), SQUARE, ((16, 1), (4, 1)), ((16, 1),), {"all-gather": 1}),
    "columns sharded twice": (matmul, operands(), SQUARE, ((4, 1), (1, 16)), ((4, 4),), {"all-gather": 1}),
    "two readers": (lambda x, w: (x @ w, jnp.sin(x) @ w), operands(), V5E, ((8, 1), (8, 1)), ((8, 1), None), {"all-gather": 1}),
    "another reader of the shard": (lambda x, w: (x @ w, w * 2), operands(), V5E, ((8, 1), (8, 1)), ((8, 1), None), {PERMUTE: 9}),
    "heads": (lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w), (S((16, R // 16, K), jnp.bfloat16), S((K, 16, 128), jnp.bfloat16)),
              SQUARE, ((4, 1, 1), (4, 4, 1)), ((4, 1, 4, 1),), {PERMUTE: 3}),
    "experts": (lambda x, w: jnp.einsum("ebd,edf->ebf", x, w), (S((8, R // 4, K), jnp.bfloat16), S((8, K, N), jnp.bfloat16)),
                SQUARE, ((4, 4, 1), (4, 4, 1)), ((4, 4, 1),), {PERMUTE: 3}),
    "scatter": (weight_gradient, gradients(), V5E, ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "scatter along columns": (weight_gradient, gradients(), V5E, ((8, 1), (8, 1)), ((1, 8),), {PERMUTE: 9}),
    "scatter of few rows": (weight_gradient, gradients(4096), V5E, ((8, 1), (8, 1)), ((8, 1),), {"reduce-scatter": 1}),
    "scatter beside tensor parallel": (weight_gradient, gradients(), SQUARE, ((4, 1), (4, 4)), ((4, 4),), {PERMUTE: 5}),
    "scatter of experts": (lambda x, g: jnp.einsum("ebd,ebf->edf", x, g), (S((8, R // 4, K), jnp.bfloat16), S((8, R // 4, N), jnp.bfloat16)),
                           SQUARE, ((4, 4, 1), (4, 4, 1)), ((4, 4, 1),), {PERMUTE: 5}),
    "converted for another reader": (lambda x, w: (x @ w.astype(jnp.bfloat16), x.astype(jnp.float32) @ w),
                                     (S((R, K), jnp.bfloat16), S((K, N), jnp.float32)), V5E, ((8, 1), (8, 1)), ((8, 1), (8, 1)),
                                     {PERMUTE: 18}),
    "batch": (lambda x, w: jnp.einsum("ebd,edf->ebf", x, w), (S((8, R, 512), jnp.bfloat16), S((8, 512, N), jnp.bfloat16)),
              V5E, ((1, 8, 1), (8, 1, 1)), ((1, 8, 1),), {PERMUTE: 9}),
    "square of 2 x 2": (matmul, operands(), "tpu-v5e:2x2", ((4, 1), (4, 1)), ((4, 1),), {"all-gather": 1}),
    "scatter in a square": (weight_gradient, gradients(), "tpu-v5e:2x2", ((4, 1), (4, 1)), ((4, 1),), {"reduce-scatter": 1}),
    "square beside tensor parallel": (matmul, operands(), "tpu-v5p:2x2x4", ((4, 1), (4, 4)), ((4, 4),), {"all-gather": 1}),
    "square with gaps": (matmul, operands(), V5E, ((4, 1), (4, 2)), ((4, 2),), {PERMUTE: 3}),
    "vector": (lambda x, w: x @ w, (S((R, K), jnp.bfloat16), S((K,), jnp.bfloat16)), V5E, ((8, 1), (8,)), ((8,),), {"all-gather": 1}),
    "layers": (stacked, (S((R, K), jnp.bfloat16), S((3, K, K), jnp.bfloat16)), V5E, ((8, 1), (1, 8, 1)), ((8, 1),), {PERMUTE: 27}),
    "12 devices": (matmul, operands(12288, 3072, 3072), "tpu-v5p:4x4x12", ((12, 1), (12, 16)), ((12, 16),), {PERMUTE: 13}),
    "32 devices": (matmul, operands(), "tpu-v5e:4x8", ((32, 1), (32, 1)), ((32, 1),), {PERMUTE: 33}),
    "v5p": (matmul, operands(4224), "tpu-v5p:2x2x2", ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "v4": (matmul, operands(6144), "tpu-v4:2x2x2", ((8, 1), (8, 1)), ((8, 1),), {PERMUTE: 9}),
    "too few rows of v4": (matmul, operands(6080), "tpu-v4:2x2x2", ((8, 1), (8, 1)), ((8, 1),), {"all-gather": 1}),
    "scatters that are added": (lambda x, y, g, h: x.T @ g + y.T @ h, (*[S((R, K), jnp.bfloat16)] * 2, *[S((R, N), jnp.bfloat16)] * 2),
                                V5E, ((8, 1),) * 4, ((8, 1),), {PERMUTE: 18}),
}  # fmt: skip


def plan_of(name):
    function, arguments, device, strategies, results, _ = PROGRAMS[name]
    return shardfn.plan(function, *arguments, device=device, in_strategy=strategies, out_strategy=results)


def runs(collectives):
    found = collections.Counter()
    for c in collectives:
        found[c.kind] += c.trips
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_matmuls_contain_the_gathers_and_scatters_that_libtpu_lets_them(name):
    assert runs(plan_of(name).collectives) == PROGRAMS[name][-1]


def test_a_reader_of_the_transposed_array_needs_the_same_gather():
    """libtpu's matmuls read an array and its transpose alike."""
    plan = shardfn.plan(lambda x, w: jnp.sin(x @ w) @ w.T, *operands(n=K), device=V5E, in_strategy=((8, 1), (8, 1)))
    assert PERMUTE not in runs(plan.collectives)


@pytest.mark.tpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_collective_matmuls_compiled(name):
    plan = plan_of(name)
    made = compile_plan(plan)
    assert runs(made.collectives) == runs(plan.collectives)
    assert sum(c.total_bytes for c in made.collectives) == plan.cost.bytes_sent
