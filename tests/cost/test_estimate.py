"""Work, bytes and times of small flows, against figures worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.compute import op_flops, work
from shardfn.cost.devices.chips import Chip
from shardfn.cost.devices.hardware import CHIPS, resolve
from shardfn.cost.devices.links import link_over
from shardfn.cost.estimate import collective_s, estimate_cost
from shardfn.cost.schedule import combine_collectives

from .programs import array

ONE = Chip("one", "cpu", 1.0, 1e30, 1e12, 1.0, 1e-30)
"""FLOPs are seconds, bytes take no time."""
SLOW = Chip("slow", "cpu", 1e30, 1.0, 1e12, 1.0, 1e-30)
"""Bytes moved are seconds."""


def partitioned(fn, *args, entries=None, device="cpu:8"):
    return shardfn.plan(fn, *args, in_strategy=entries, device=device).partitioned


def moved(fn, *args, entries=None):
    return work(partitioned(fn, *args, entries=entries, device="cpu:1"), SLOW).bytes_moved


N = 64 * 64
F = 4


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda x: jnp.tanh(x * 2.0 + 1.0), (array(64, 64),), 2 * N * F),
        (lambda x, y: x @ y, (array(64, 64), array(64, 64)), 3 * N * F),
        (lambda x, y: jnp.tanh(x @ y), (array(64, 64), array(64, 64)), 5 * N * F),
        # The product reads the sum from memory; it is no part of it.
        (lambda x, y: (x + y) @ y, (array(64, 64), array(64, 64)), 6 * N * F),
        (lambda x: jnp.sum(x * x, axis=1), (array(64, 64),), N * F + 64 * F),
        # A gather reads the rows it takes, not the table; an update writes those it changes.
        (lambda t, i: t[i], (array(10000, 64), array(4, dtype=jnp.int32)), 2 * 4 * 64 * F + 4 * 4),
        (lambda x, u: jax.lax.dynamic_update_slice(x, u, (0, 0)), (array(10000, 64), array(2, 64)), 3 * 2 * 64 * F),
        (lambda x: x.reshape(32, 128), (array(64, 64),), 0),
    ],
)
def test_bytes_moved(fn, args, expected):
    assert moved(fn, *args) == expected


def test_loops_multiply():
    def once(x, w):
        return jnp.tanh(x @ w)

    def often(x, w):
        return jax.lax.fori_loop(0, 10, lambda _, x: once(x, w), x)

    args = (array(64, 64), array(64, 64))
    one, ten = (work(partitioned(fn, *args, device="cpu:1"), ONE) for fn in (once, often))
    assert ten.flops == pytest.approx(10 * one.flops, rel=0.01)
    assert one.flops == 2 * 64**3 + 64**2


def test_time_is_the_larger_of_operations_and_bytes():
    matmul = partitioned(jnp.matmul, array(512, 512), array(512, 512), device="h100:1")
    chip = CHIPS["h100"]
    computing_s, moving_s = 2 * 512**3 / 494e12, 3 * 512 * 512 * 4 / 3.35e12
    assert work(matmul, chip).seconds == pytest.approx(chip.launch_s + max(computing_s, moving_s))
    tall = partitioned(jnp.matmul, array(8192, 8192), array(8192, 8192), device="h100:1")
    assert work(tall, chip).seconds == pytest.approx(chip.launch_s + 2 * 8192**3 / 494e12)


@pytest.mark.parametrize(
    ("target", "dtype", "rate"),
    [
        ("h100:1", jnp.float32, 494e12),
        ("h100:1", jnp.bfloat16, 989e12),
        ("h100:1", jnp.int8, 1978e12),
        ("a100:1", jnp.float32, 156e12),
        ("tpu-v5e:1", jnp.float32, 197e12),
        ("tpu-v5e:1", jnp.int8, 393e12),
    ],
)
def test_products_run_at_the_rate_of_their_type(target, dtype, rate):
    big = array(8192, 8192, dtype=dtype)
    hardware = resolve(target)
    assert estimate_cost(partitioned(jnp.matmul, big, big, device=target), hardware).compute_s == pytest.approx(
        hardware.chip.launch_s + 2 * 8192**3 / rate
    )


def test_local_shapes_are_priced():
    args = (array(4096, 4096), array(4096, 4096))
    unsharded = estimate_cost(partitioned(jnp.matmul, *args, device="h100:1"), resolve("h100:1"))
    sharded = estimate_cost(
        partitioned(jnp.matmul, *args, entries=((8, 1), (1, 1)), device="h100:8"), resolve("h100:8")
    )
    launch_s = CHIPS["h100"].launch_s
    assert sharded.flops == unsharded.flops / 8
    assert sharded.compute_s - launch_s == pytest.approx((unsharded.compute_s - launch_s) / 8)
    assert sharded.communication_s == 0


def test_a_collective_takes_its_bytes_over_its_axes():
    hardware = resolve("h100:64")
    x, w = array(1024, 8192), array(8192, 1024)
    for entries, sent, rate in (
        (((1, 64), (64, 1)), 2 * 63 / 64, 400e9),
        (((8, 8), (8, 1)), 2 * 7 / 8 / 8, 450e9),
    ):
        plan = shardfn.plan(jnp.matmul, x, w, in_strategy=entries, device="h100:64")
        found = estimate_cost(plan.partitioned, hardware)
        bytes_sent = sent * 1024 * 1024 * 4
        assert found.bytes_sent == pytest.approx(bytes_sent)
        latency = link_over(hardware, plan.axes, plan.collectives[0].axes).latency_s
        assert found.communication_s == pytest.approx(bytes_sent / rate + latency)
        assert sum(collective_s(c, hardware, plan.axes) for c in plan.collectives) == pytest.approx(
            found.communication_s
        )


def test_all_reduces_that_run_as_one_cost_one_latency():
    def grads(ws, x):
        return jax.grad(lambda ws: sum(jnp.sum(jnp.square(x @ w)) for w in ws))(ws)

    plan = shardfn.plan(
        grads, [array(64, 64)] * 5, array(64, 64), in_strategy=(None, (8, 1)), device="h100:8",
        parameter_plan={"ws/*": (1, 1)},
    )  # fmt: skip
    hardware = resolve("h100:8")
    sent = sum(c.bytes_sent for c in plan.collectives)
    assert len(plan.collectives) == 5
    assert estimate_cost(plan.partitioned, hardware).communication_s == pytest.approx(
        sent / 450e9 + hardware.chip.latency_s
    )
    shared = sum(collective_s(c, hardware, plan.axes) for c in plan.collectives)
    assert shared == pytest.approx(estimate_cost(plan.partitioned, hardware).communication_s)
    assert len(set(combine_collectives(plan.partitioned).groups.values())) == 1


def test_all_reduces_that_need_each_other_stay_apart():
    def layers(ws, x):
        for a, b in ws:
            x = jnp.tanh(x @ a) @ b
        return x

    ws = [(array(64, 64), array(64, 64))] * 3
    plan = shardfn.plan(layers, ws, array(16, 64), in_strategy=(None, (1, 1)), device="h100:8",
                        parameter_plan={"ws/*/0": (1, 8), "ws/*/1": (8, 1)})  # fmt: skip
    assert len(plan.collectives) == 3
    assert len(set(combine_collectives(plan.partitioned).groups.values())) == 3


def test_an_op_without_a_rule_is_listed_and_charged():
    program = partitioned(lambda x: jnp.linalg.qr(x)[0], array(64, 64), device="cpu:1")
    found = work(program, SLOW)
    assert any(name.startswith("custom_call lapack_sgeqrf") for name in found.unmodelled_ops)
    assert found.seconds >= 2 * N * F
    assert estimate_cost(program, resolve("cpu:1")).unmodelled_ops == found.unmodelled_ops


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.sort(x, axis=1),
        lambda x: jax.lax.top_k(x, 4)[0],
        lambda x: jnp.cumsum(x, axis=0),
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)),
        lambda x: jnp.where(x > 0, x, jnp.roll(x, 1, axis=0)),
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"),
    ],
)
def test_common_ops_have_a_rule_and_cost_something(fn):
    found = work(partitioned(fn, array(64, 64), device="cpu:1"), CHIPS["cpu"])
    assert found.unmodelled_ops == () and found.seconds > 0


def test_flops_of_library_ops():
    sorting = partitioned(lambda x: jnp.sort(x, axis=1), array(64, 1024), device="cpu:1")
    [op] = [op for op in sorting.graph.ops if op.name == "sort"]
    assert op_flops(sorting, op) == 64 * 1024 * 10


@pytest.mark.parametrize(
    ("device", "times"),
    [("h100:1", {"high": 1, "highest": 494 / 67}), ("tpu-v5e:1", {"high": 3, "highest": 6}), ("cpu:1", {"highest": 1})],
)
def test_matmuls_of_a_higher_precision_take_longer(device, times):
    """Not as TF32 on a GPU, and in more passes on a TPU."""

    def product(precision):
        return shardfn.plan(lambda x, y: jnp.matmul(x, y, precision=precision), *[array(8192, 8192)] * 2, device=device)

    default = product("default").cost.compute_s
    assert {name: product(name).cost.compute_s / default for name in times} == pytest.approx(times, rel=1e-3)


def test_operands_of_a_matmul_of_the_highest_precision_are_gathered_as_they_are():
    def sent(precision):
        def chain(x, y):
            return jnp.tanh(jnp.matmul(x, y, precision=precision))

        args = [array(256, 256)] * 2
        return shardfn.plan(chain, *args, in_strategy=((8, 1), (8, 1)), device="tpu-v5e:8").cost.bytes_sent

    assert sent("highest") == 2 * sent("default") > 0


def test_a_rounding_to_fewer_bits_is_an_op_on_elements():
    """`jax.checkpoint` with a policy rounds what it keeps in bfloat16."""
    shape = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    plan = shardfn.plan(lambda x: jax.lax.reduce_precision(x, 8, 7), shape, in_strategy=((8,),), device="h100:8")
    assert plan.cost.unmodelled_ops == () and plan.cost.bytes_sent == 0 and plan.cost.time_s > 0
