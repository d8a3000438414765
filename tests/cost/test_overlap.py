"""Time with collectives beside compute, against figures worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.compute import work
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.overlap import _makespan, _Step, overlap

from .programs import LAYERS, WEIGHTS, X_SMALL, X, array, scanned_step, step

DEVICES = ("h100:8", "tpu-v5e:2x4", "cpu:8")


def planned(fn, *args, **options):
    return shardfn.plan(fn, *args, budget="fast", **options)


def steps(*rows):
    """Steps of (seconds, kind, numbers of those before that it reads)."""
    return [_Step(n, s, frozenset(reads), frozenset([n]), kind) for n, (s, kind, reads) in enumerate(rows)]


GATHER = "all-gather"


@pytest.mark.parametrize(
    ("rows", "end"),
    [
        # The second gather runs while the first product does.
        ([(1, GATHER, []), (3, "", [0]), (1, GATHER, []), (3, "", [2])], 7),
        # What needs the gather waits for it.
        ([(1, "", []), (4, GATHER, [0]), (1, "", [1])], 6),
        # A product that waits for nothing goes before one that waits, whatever the order of the program.
        ([(1, "", []), (4, GATHER, [0]), (1, "", [1]), (4, "", [0])], 6),
        # Links and cores each do one thing at a time.
        ([(2, GATHER, []), (2, GATHER, []), (3, "", [])], 4),
        # A kind that is not asynchronous stops the cores.
        ([(2, "all-reduce", []), (3, "", [])], 5),
        # A loop takes links and cores.
        ([(2, GATHER, []), (5, "loop", []), (1, "", [])], 7),
        ([], 0),
    ],
)
def test_the_list_schedule(rows, end):
    assert _makespan(steps(*rows), {GATHER}) == end


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", ["fsdp", "data_parallel"])
@pytest.mark.parametrize(("fn", "args"), [(step, (WEIGHTS, X)), (scanned_step, (LAYERS, X_SMALL))])
def test_the_bounds_of_a_step(fn, args, style, device):
    plan = planned(fn, *args, device=device, style=style)
    cost, times = plan.cost, plan.overlap
    assert times.none_s == pytest.approx(cost.time_s)
    assert max(cost.compute_s, cost.communication_s) <= times.full_s * (1 + 1e-9)
    assert times.full_s <= times.expected_s <= times.none_s
    assert (times.expected_s < times.none_s) == (device == "h100:8" or (device[:3], style) == ("tpu", "fsdp"))


def test_nothing_overlaps_a_chain():
    device = dataclasses.replace(CHIPS["h100"], launch_s=0.0).pod(8)
    plan = planned(lambda x, w: jnp.tanh(x @ w) @ w.T, X, array(256, 256), device=device, in_strategy=((1, 8), (8, 1)))
    times = plan.overlap
    assert plan.collectives and times.full_s == pytest.approx(times.none_s, rel=0.02)


def test_a_loop_counts_once_for_each_iteration():
    def often(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    ends = [
        planned(often, X_SMALL, array(n, 128, 128), device="h100:8", in_strategy=((8, 1), (1, 8, 1))).overlap.expected_s
        for n in (10, 20)
    ]
    assert ends[1] == pytest.approx(2 * ends[0], rel=0.1)


def test_the_report_tells_it_where_xla_overlaps():
    args = WEIGHTS, X
    lines = {device: str(shardfn.explain(planned(step, *args, device=device, style="fsdp"))) for device in DEVICES}
    assert ["overlap: " in lines[device] for device in DEVICES] == [True, True, False]
    assert (
        overlap(
            planned(step, *args, device="h100:1").partitioned, planned(step, *args, device="h100:1").hardware
        ).full_s
        > 0
    )


def test_compute_is_that_of_the_cost_model():
    plan = planned(step, WEIGHTS, X, device="h100:1")
    assert plan.overlap.full_s == pytest.approx(work(plan.partitioned, plan.hardware.chip).seconds, rel=1e-6)


GATHERED = (lambda x, w: x @ w), ((8, 1), (8, 1)), (lambda rows: ((rows, 1024), (1024, 2048)))
SCATTERED = (lambda x, g: x.T @ g), ((8, 1), (8, 1)), (lambda rows: ((rows, 1024), (rows, 2048)))


@pytest.mark.parametrize(("fn", "strategies", "shapes"), [GATHERED, SCATTERED])
@pytest.mark.parametrize("rows", [4096, 16384])
def test_a_collective_matmul_sends_while_it_multiplies(fn, strategies, shapes, rows):
    args = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes(rows))
    plan = shardfn.plan(fn, *args, device="tpu-v5e:2x4", in_strategy=strategies, out_strategy=((8, 1),))
    cost, times = plan.cost, plan.overlap
    (collective,) = plan.collectives
    assert collective.in_matmul == (rows == 16384)
    least = max(cost.compute_s, cost.communication_s) if collective.in_matmul else cost.time_s
    assert times.expected_s == pytest.approx(least, rel=0.05)


def test_a_collective_matmul_overlaps_with_nothing_else():
    """It is a loop: what it sends goes on while it multiplies, not while another matmul does."""
    bf16 = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 1024), (1024, 1024), (1024, 8192))]
    plan = shardfn.plan(lambda x, v, w: (x @ v) @ w, *bf16, device="tpu-v5e:2x4",
                        in_strategy=((8, 1), (1, 1), (8, 1)), out_strategy=((8, 1),))  # fmt: skip
    cost, times = plan.cost, plan.overlap
    first = 2 * 1024**3 / plan.hardware.chip.flops
    assert [c.in_matmul for c in plan.collectives] == [True] and cost.communication_s > cost.compute_s - first
    assert times.expected_s == pytest.approx(first + cost.communication_s, rel=0.05)


def test_what_a_gpu_copies_of_a_loop_is_counted_too():
    def heat(u):
        return jax.lax.fori_loop(0, 10, lambda _, u: u.at[1:-1].add(0.1 * (u[2:] + u[:-2] - 2 * u[1:-1])), u)

    plan = planned(heat, array(4096, 4096), in_strategy=((8, 1),), device="h100:8")
    assert plan.overlap.none_s == pytest.approx(plan.cost.time_s)
    assert plan.overlap.full_s >= plan.cost.compute_s
