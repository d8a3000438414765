"""What a TPU keeps where, against what libtpu was seen to do; nothing is compiled here but in the test marked so."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from examples.models import abstract, mlp
from shardfn.cost.backends.tpu import row_major_bytes
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.memory.live_memory import live_memory
from shardfn.cost.platforms import fuse
from shardfn.cost.schedule import combine_collectives, schedule_for_memory
from shardfn.partition.tpu_padding import tiled_bytes
from shardfn.runtime.verify import compile_plan

from .programs import WEIGHTS, X, array, step

V5E = "tpu-v5e:2x4"


@pytest.mark.parametrize(
    ("shape", "bits", "laid_out"),
    [
        ((), 32, 512),  # f32[]{:T(128)}
        ((32,), 32, 512),  # f32[32]{0:T(128)}
        ((512,), 32, 2048),  # f32[512]{0:T(512)}
        ((2050,), 32, 3 * 4096),  # T(1024)
        ((512, 2048), 32, 4 << 20),  # {1,0:T(8,128)}
        ((64, 32), 32, 32 * 128 * 4),  # {0,1:T(8,128)}: the long dim along the lanes
        ((32, 8, 32), 32, 32 * 8 * 128 * 4),  # {2,1,0:T(8,128)}
        ((2, 65), 32, 2 * 128 * 4),  # {1,0:T(2,128)}
        ((1024, 256), 16, 512 << 10),  # {1,0:T(8,128)(2,1)}
        ((16, 256), 8, 16 * 256),
        ((40, 256), 8, 64 * 256),  # tiles of 32 rows of bytes
    ],
)
def test_tiles(shape, bits, laid_out):
    assert tiled_bytes(shape, bits) == laid_out


def test_rows_are_padded_to_the_lanes():
    assert row_major_bytes((65536, 64), 32) == 2 * 65536 * 64 * 4
    assert row_major_bytes((100, 256), 32) == 100 * 256 * 4


def partitioned(fn, *args, entries, device=V5E, **options):
    return shardfn.plan(fn, *args, in_strategy=entries, device=device, **options).partitioned


DATA = ({"w1": (1, 1), "w2": (1, 1)}, (8, 1))


def test_products_compute_their_operands_and_are_computed_in_what_reads_them():
    """gelu is no array of its own, the product before it is one; on other platforms both are."""

    def stored(device):
        program = partitioned(
            lambda w, x: jax.nn.gelu(2.0 * (x @ w["w1"])) @ w["w2"], WEIGHTS, X, entries=DATA, device=device
        )
        kept = fuse(program).stored - set(program.graph.inputs) - set(program.graph.outputs)
        return sum(program.local_bytes(v) for v in kept)

    assert stored(V5E) == 2048 // 8 * 1024 * 4
    assert stored("h100:8") == stored("cpu:8") > stored(V5E)


def test_what_products_alone_read_is_kept_as_bf16():
    def bytes_of(fn, device=V5E):
        schedule = schedule_for_memory(combine_collectives(partitioned(fn, WEIGHTS, X, entries=DATA, device=device)))
        return [schedule.partitioned.local_bytes(v) for v in schedule.fusion.narrow]

    def once(w, x):
        return jnp.tanh(jnp.cumsum(x, axis=1)) @ w["w1"], (x - jnp.sort(x, axis=1)) @ w["w1"]

    def also_elsewhere(w, x):
        y = x - jnp.sort(x, axis=1)
        return y @ w["w1"], y

    assert bytes_of(also_elsewhere) == []
    assert bytes_of(once, "cpu:8") == []
    narrow = bytes_of(lambda w, x: ((x @ w["w1"]) @ w["w2"],))
    assert narrow == [2048 // 8 * 1024 * 2]


def test_all_reduces_merge_up_to_120_mib():
    def grads(ws, x):
        return jax.grad(lambda ws: sum(jnp.sum(jnp.square(x @ w)) for w in ws))(ws)

    def groups(rows):
        program = partitioned(grads, [array(rows, 1024)] * 4, array(64, rows), entries=([(1, 1)] * 4, (8, 1)))
        return len(set(combine_collectives(program).groups.values()))

    assert (groups(1024), groups(16 * 1024), groups(64 * 1024)) == (1, 4, 4)
    assert groups(12 * 1024) == 2  # 48 MiB each


# What libtpu 0.0.42 (JAX 0.10.2) assigned for v5e:2x4: bytes of a training step of the MLP, by its sizes and layout.
LARGE = {"batch": 65536, "d_in": 8192, "d_hidden": 8192, "d_out": 8192, "train": True}
MIDDLE = {"batch": 8192, "d_in": 2048, "d_hidden": 8192, "d_out": 2048, "train": True}
PEAKS = [
    (mlp.SMALL, "data parallel", 8_924_160, 0.01),
    (mlp.SMALL, "FSDP", 1_575_424, 0.01),
    (mlp.SMALL, "data x tensor, 2 x 4", 4_199_424, 0.01),
    (MIDDLE, "data parallel", 277_284_352, 0.1),
    (MIDDLE, "tensor parallel", 251_970_000, 0.02),
    (LARGE, "data parallel", 2_013_555_712, 0.01),
    (LARGE, "tensor parallel", 6_912_503_808, 0.01),
    (LARGE, "data x tensor, 4 x 2", 2_416_144_896, 0.01),
]


def planned(sizes, layout):
    fn, args = abstract(lambda s: mlp.make(**s), sizes)
    expert = mlp.experts(8, **sizes)[layout]
    return shardfn.shard(expert.written(fn), expert.in_strategy, device=V5E, donate_argnums=0).plan(*args)


@pytest.mark.parametrize(("sizes", "layout", "peak", "within"), PEAKS)
def test_peaks(sizes, layout, peak, within):
    assert planned(sizes, layout).cost.memory.peak == pytest.approx(peak, rel=within)


def test_without_vector_memory_temporaries_count():
    program = partitioned(step, WEIGHTS, X, entries=DATA)
    bare = dataclasses.replace(CHIPS["tpu-v5e"], fast_bytes=0.0)
    assert live_memory(program, chip=CHIPS["tpu-v5e"]).estimate.temporaries == 0
    assert (
        live_memory(program, chip=bare).estimate.temporaries
        == live_memory(program).estimate.temporaries
        > 2048 // 8 * 1024 * 4
    )


@pytest.mark.tpu
@pytest.mark.parametrize("layout", ["data parallel", "data x tensor, 2 x 4"])
def test_compiled_peaks(layout):
    pytest.importorskip("libtpu")
    plan: Any = planned(mlp.SMALL, layout)
    made = compile_plan(plan)
    assert made.argument_bytes == plan.cost.memory.arguments
    assert plan.cost.memory.peak == pytest.approx(made.together("tpu"), rel=0.1)


# Weights that an all-gather makes in the place of donated ones: shape, the dim that is gathered over 8 devices, and whether
# libtpu 0.0.42 copies the donated ones first. It does where the shards are complete tiles.
UPDATED = [
    ((8192, 8192), 0, True),
    ((8192, 8192), 1, True),
    ((65536, 1024), 1, True),
    ((65536, 512), 1, False),  # 64 lanes
    ((16, 64, 65536), 1, True),
    ((16, 32, 65536), 1, False),  # 4 rows
    ((16, 1024, 4096), 0, True),
]


def updated(shape, dim):
    sharded = tuple(8 if d == dim else 1 for d in range(len(shape)))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 2
    replicated = (1,) * len(shape)
    return shardfn.plan(lambda w, m: w - m * m, *arrays, in_strategy=(replicated, sharded), out_strategy=(replicated,), device=V5E,
                        donate_argnums=0)  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "is_copied"), UPDATED)
def test_donated_weights_are_copied_where_an_all_gather_makes_the_new_ones(shape, dim, is_copied):
    plan = updated(shape, dim)
    assert [c.kind for c in plan.collectives] == ["all-gather"]
    assert plan.cost.memory.temporaries == pytest.approx(2 * math.prod(shape) if is_copied else 0, rel=0.01)


@pytest.mark.tpu
@pytest.mark.parametrize(("shape", "dim", "is_copied"), UPDATED)
def test_compiled_copies_of_donated_weights(shape, dim, is_copied):
    pytest.importorskip("libtpu")
    plan: Any = updated(shape, dim)
    made = compile_plan(plan)
    assert plan.cost.memory.peak == pytest.approx(made.together("tpu"), rel=0.01)


def test_what_is_too_large_is_not_copied_row_by_row():
    """A table that the user shards into columns of 16 elements, whose rows would take eight times that: libtpu updates it in
    place, without temporaries."""

    def step(table, rows):
        loss, grad = jax.value_and_grad(lambda t: jnp.mean(t[rows] ** 2))(table)
        return table - 0.1 * grad, loss

    table, rows = jax.ShapeDtypeStruct((2**22, 128), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    made = shardfn.plan(step, table, rows, device=V5E, level=1, donate_argnums=0, in_strategy=((1, 8), shardfn.AUTO))
    assert made.cost.bytes_sent < 1000 and made.cost.memory.peak < 2.01 * 2**22 * 16 * 4
