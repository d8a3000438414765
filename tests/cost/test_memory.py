"""Peak memory against what XLA's CPU compiler assigns."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import compiled
from shardfn.cost.devices.hardware import resolve
from shardfn.cost.memory.live_memory import live_memory
from shardfn.cost.platforms import fuse

from .programs import (
    AS_RELEASED,
    HEADS,
    LAYERS,
    WEIGHTS,
    X_SMALL,
    X,
    array,
    attention,
    mlp,
    scanned,
    scanned_step,
    step,
)

BATCH, REPLICATED = (8, 1), (1, 1)
COLUMNS = {"w1": (1, 8), "w2": (8, 1)}
HEAD_CUTS = (*((1, 8, 1),) * 3, (8, 1, 1))


def both(fn, args, entries, **options):
    """Predicted memory, and the compiled program's."""
    function = shardfn.shard(fn, entries, device=jax.devices()[:8], **options)
    plan = function.plan(*args)
    donated = options.get("donate_argnums", ())
    leaves = [jax.tree.leaves(a) for a in args]
    firsts = [sum(len(x) for x in leaves[:i]) for i in range(len(args))]
    positions = [firsts[i] + j for i in donated for j in range(len(leaves[i]))]
    return live_memory(plan.partitioned, positions).estimate, compiled.read(function.lower(*args).compile(AS_RELEASED))


@pytest.mark.parametrize(
    ("fn", "args", "entries"),
    [
        (jnp.matmul, (array(512, 256), array(256, 1024)), (BATCH, REPLICATED)),
        (jnp.matmul, (array(512, 256), array(256, 1024)), ((1, 8), (8, 1))),
        (mlp, (WEIGHTS, X), (REPLICATED, BATCH)),
        (mlp, (WEIGHTS, X), (COLUMNS, REPLICATED)),
        (step, (WEIGHTS, X), (REPLICATED, BATCH)),
        (step, (WEIGHTS, X), (COLUMNS, REPLICATED)),
        (scanned, (LAYERS, array(512, 128)), (REPLICATED, BATCH)),
        (scanned_step, (LAYERS, array(4096, 128)), (REPLICATED, BATCH)),
        (attention, HEADS, ((8, 1, 1), *((1, 1, 1),) * 4)),
        (attention, HEADS, ((1, 1, 1), *HEAD_CUTS)),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_peak(fn, args, entries):
    entries = tuple(
        jax.tree.map(lambda leaf, entry=e: (*(1,) * (leaf.ndim - len(entry)), *entry), a)
        if isinstance(e, tuple) and isinstance(a, dict)
        else e
        for e, a in zip(entries, args, strict=True)
    )
    predicted, real = both(fn, args, entries)
    assert predicted.arguments == real.argument_bytes
    peak = real.argument_bytes + real.output_bytes + real.temp_bytes
    assert predicted.peak == pytest.approx(peak, rel=0.15), (predicted, real)


def test_donated_arguments_are_the_places_of_results():
    predicted, real = both(step, (WEIGHTS, X), (COLUMNS, REPLICATED), donate_argnums=(0,))
    kept, _ = both(step, (WEIGHTS, X), (COLUMNS, REPLICATED))
    assert predicted.donated == real.alias_bytes == 2 * 256 * 1024 * 4 // 8
    assert kept.donated == 0
    peak = real.argument_bytes + real.output_bytes + real.temp_bytes - real.alias_bytes
    assert predicted.peak == pytest.approx(peak, rel=0.15), (predicted, real)
    assert predicted.peak < kept.peak


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu:8", "tpu-v5e:2x4", "h100:8"])
@pytest.mark.parametrize(
    ("fn", "args"),
    [(step, (WEIGHTS, X)), (scanned_step, (LAYERS, array(4096, 128)))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_held_at_the_peak_makes_it_up(fn, args, device):
    partitioned, chip = shardfn.plan(fn, *args, device=device).partitioned, resolve(device).chip
    for donated in ((), (0, 1)):
        live = live_memory(partitioned, donated, chip)
        assert sum(size for _, size in live.held_at_peak) == live.estimate.peak


def gathered_arguments(tables, index, w):
    """A step on two tables of which rows are looked up: their gradients start as zeros as large as the tables."""
    grads = jax.grad(lambda ts: jnp.mean(jnp.square(sum(t[index] for t in ts) @ w)))(tables)
    return [t - 0.1 * g for t, g in zip(tables, grads, strict=True)]


def test_what_reads_nothing_is_there_from_the_start():
    """XLA's CPU backend runs what is ready first: the zeros that a gradient is added to wait for it from the start."""
    args = [array(8192, 64), array(4096, 64)], array(4096, dtype=jnp.int32), array(64, 64)
    predicted, real = both(gathered_arguments, args, ([(8, 1)] * 2, (8,), (1, 1)), donate_argnums=(0,))
    assert predicted.temporaries == pytest.approx(real.temp_bytes, rel=0.01), (predicted, real)


def squares(x, w):
    y = x @ w
    y = y - jnp.mean(y, -1, keepdims=True)
    return jnp.sum(jnp.square(y), -1), jnp.tanh(y)


@pytest.mark.parametrize(("rows", "of"), [(512, "cpu:8"), (256, "cpu:8"), (512, "h100:8")])
def test_what_others_read_too_is_stored_for_a_sum_by_the_library(rows, of):
    """From 4,096 elements of one device on, and on CPU alone; what only the sum reads is computed inside it."""
    made = shardfn.plan(squares, array(rows, 64), array(64, 64), in_strategy=((8, 1), (1, 1)), device=of).partitioned
    found = fuse(made).stored
    stored = [op.name for op in made.graph.ops if op.outputs[0] in found]
    shapes = [made.graph.values[op.outputs[0]].shape for op in made.graph.ops if op.name == "subtract"]
    assert shapes == [(rows, 64)]
    assert ("subtract" in stored) == (rows == 512 and of == "cpu:8"), stored
    assert "multiply" not in stored, "the squares are computed inside their sum"


def partitioned(fn, *args, entries=None):
    return shardfn.plan(fn, *args, in_strategy=entries, device="cpu:8").partitioned


def chain(x):
    for _ in range(4):
        x = jnp.tanh(x)
    return x


def test_a_chain_takes_no_memory():
    assert live_memory(partitioned(chain, X)).estimate.temporaries == 0


def test_an_op_writes_over_what_dies():
    """One array beside the result for any number of products with elementwise ops between them."""

    def layers(x, w):
        for _ in range(5):
            x = jnp.tanh(x @ w) * 2.0
        return x

    found = live_memory(partitioned(layers, array(1024, 512), array(512, 512), entries=((8, 1), (1, 1)))).estimate
    assert found.temporaries == 1024 * 512 * 4 // 8


def updated_rows(x, at):
    return x.at[at].add(jnp.sort(x))


def updated_slice(x, at):
    return jax.lax.dynamic_update_slice(x, jnp.sort(x)[1:], (at[0],))


@pytest.mark.parametrize("function", [updated_rows, updated_slice])
def test_an_update_never_writes_over_what_it_writes(function):
    values, at = jax.ShapeDtypeStruct((2**16,), jnp.float32), jax.ShapeDtypeStruct((2**16,), jnp.int32)
    predicted, found = both(function, (values, at), ((1,), (1,)))
    assert predicted.temporaries == found.temp_bytes


@pytest.mark.slow
def test_loops_keep_what_they_carry_in_one_place():
    shallow, deep = (
        live_memory(
            partitioned(scanned, {"w1": array(n, 128, 512), "w2": array(n, 512, 128)}, X_SMALL)
        ).estimate.temporaries
        for n in (2, 64)
    )
    assert shallow == deep


def test_what_a_loop_stacks_grows_with_it():
    def stacked(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x), x), x, length=16)[1].sum()

    assert (
        live_memory(partitioned(stacked, array(256, 128), entries=((8, 1),))).estimate.temporaries
        >= 16 * 256 * 128 * 4 // 8
    )


def test_merged_gradients_are_alive_together():
    """All-reduces that run as one need all their operands at once, and give all their results at once."""

    def step(ws, x):
        grads = jax.grad(lambda ws: sum(jnp.sum(jnp.square(x @ w)) for w in ws))(ws)
        return [w - g for w, g in zip(ws, grads, strict=True)]

    count, size = 6, 512 * 512 * 4
    ws = [array(512, 512) for _ in range(count)]
    plan = shardfn.plan(step, ws, array(64, 512), in_strategy=(None, (8, 1)), device="cpu:8",
                        parameter_plan={"ws/*": (1, 1)})  # fmt: skip
    found = live_memory(plan.partitioned, range(count)).estimate
    assert found.temporaries >= 2 * count * size
