"""Which fusions are one kernel on a GPU, and what those read and write."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.compute import has_own_time, once, work
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.platforms import fuse, kernels

H100 = CHIPS["h100"]
N = 1024


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kernels_of(function, *args, device="h100:1"):
    """For each kernel with a time of its own the names of its ops, and its bytes in units of a large array, to a tenth."""
    partitioned = shardfn.plan(function, *args, device=device).partitioned
    fusion, ops = fuse(partitioned), partitioned.graph.ops
    found = []
    for kernel in kernels(partitioned, fusion):
        timed = [i for i in kernel if has_own_time(ops[i])]
        if timed:
            names = tuple(ops[i].name for i in timed)
            found.append((names, round(once(partitioned, timed, H100, fusion)[1] / (4 * N * N), 1)))
    return found


def adam(p, m, v, g):
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - m / (jnp.sqrt(v) + 1e-8), m, v


def test_an_optimizers_update_is_one_kernel():
    """It reads four arrays and writes three; three kernels would read seven."""
    X = f32(N, N)
    assert kernels_of(adam, X, X, X, X) == [(("add", "add", "subtract"), 7.0)]
    alone = kernels_of(adam, X, X, X, X, device="tpu-v5e:1")
    assert len(alone) == 3 and sum(size for _, size in alone) == 10.0


def test_reductions_over_the_same_dims_share_what_they_read():
    assert kernels_of(lambda x: (x.sum(1), (x * x).sum(1)), f32(N, N)) == [(("reduce", "reduce"), 1.0)]


def test_reductions_over_other_dims_are_kernels_of_their_own():
    found = kernels_of(lambda x: (x.sum(1), (x * x).sum(0)), f32(N, N))
    assert all(names.count("reduce") <= 1 for names, _ in found) and sum(size for _, size in found) >= 2


def test_what_needs_all_of_a_result_is_another_kernel():
    """Each element needs a sum of its row, which the first kernel has only at its end."""
    assert kernels_of(lambda x: x - x.sum(1, keepdims=True), f32(N, N)) == [(("reduce",), 1.0), (("subtract",), 2.0)]


def test_what_needs_a_result_of_a_kernel_through_another_is_not_in_it():

    def through_a_product(x):
        y = jnp.sin(x)
        return y, x + y @ x

    found = kernels_of(through_a_product, f32(N, N))
    assert [names for names, _ in found] == [("sine",), ("dot_general",), ("add",)]


def test_other_shapes_are_other_kernels():
    found = kernels_of(lambda x, y: (jnp.sin(x), jnp.sin(y)), f32(N, N), f32(N, 2 * N))
    assert found == [(("sine",), 2.0), (("sine",), 4.0)]


def test_a_body_and_what_is_outside_a_loop_are_apart():
    def looped(x):
        last, _ = jax.lax.scan(lambda c, _: (c * 2.0 + x, None), x, None, length=3)
        return last, x * 3.0

    partitioned = shardfn.plan(looped, f32(N, N), device="h100:1").partitioned
    loop_of = partitioned.graph.loop_of
    assert all(len({loop_of[i] for i in kernel}) == 1 for kernel in kernels(partitioned, fuse(partitioned)))


def test_each_op_that_runs_is_in_one_kernel():
    X = f32(N, N)
    partitioned = shardfn.plan(lambda *a: jax.grad(lambda x: adam(x, *a[1:])[0].sum())(a[0] @ a[1]), X, X, X, X,
                               device="h100:1").partitioned  # fmt: skip
    fusion = fuse(partitioned)
    every = [i for kernel in kernels(partitioned, fusion) for i in kernel]
    assert sorted(every) == [i for i, inner in enumerate(fusion.inside) if inner is not None]


def test_any_number_of_readers_make_a_constant_array_again():
    """XLA stores no array that is computed from nothing large, as the mask of an attention in all layers."""

    def layers(x):
        for _ in range(20):
            x = jnp.where(jnp.tril(jnp.ones((N, N), bool)), jnp.tanh(x @ x), -1.0)
        return x

    partitioned = shardfn.plan(layers, f32(N, N), device="h100:1").partitioned
    fusion, ops = fuse(partitioned), partitioned.graph.ops
    own = [ops[i] for i, inner in enumerate(fusion.inside) if inner is not None and has_own_time(ops[i])]
    own = [op for op in own if partitioned.local_shape(op.outputs[0]) == (N, N)]
    assert {op.name for op in own} == {"dot_general", "select"}


@pytest.mark.parametrize(
    ("contracted", "is_weight_gradient"), [((1, 0), False), ((0, 0), True), ((1, 1), False), ((0, 1), False)]
)
def test_f32_matmul_that_contracts_the_rows_of_both_operands_is_slower_on_hopper(contracted, is_weight_gradient):
    """As a weight's gradient does."""
    x, y = contracted
    function = lambda a, b: jax.lax.dot_general(a, b, (((x,), (y,)), ((), ())))  # noqa: E731
    partitioned = shardfn.plan(function, f32(N, N), f32(N, N), device="h100:1").partitioned
    assert [op.name for op in partitioned.graph.ops].count("dot_general") == 1
    even = dataclasses.replace(H100, weight_gradient_efficiency=(), memory_bytes_s=1e18, launch_s=0.0)
    slow = dataclasses.replace(even, weight_gradient_efficiency=(("f32", 0.5),))
    assert work(partitioned, slow).seconds == pytest.approx(
        work(partitioned, even).seconds * (2 if is_weight_gradient else 1)
    )


def test_bf16_weight_gradients_run_at_the_matmul_rate():
    assert H100.rate("bf16", is_weight_gradient=True) == H100.rate("bf16")
    assert H100.rate("f32", is_weight_gradient=True) < H100.rate("f32")
