"""What libtpu makes of collectives, against what it was seen to do; nothing is compiled here but in the tests marked so."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from examples.models import abstract, gpt2, llama
from shardfn.cost.estimate import estimate_cost
from shardfn.ir.model import OpConstraint
from shardfn.partition.libtpu import MAX_CSE_DISTANCE, makes_reduce_scatter
from shardfn.runtime.verify import compile_plan
from tests.marks import some_slow

V5E, SQUARE = "tpu-v5e:2x4", "tpu-v5e:4x4"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# What libtpu 0.0.42 made of a sum over a torus, from the shape of a shard, the sharded dim, bits of an
# element, and whether it is over all of the torus.
SCATTERED = [
    ((32,), 0, 32, True, (2, 4), False),
    ((8192,), 0, 32, True, (2, 4), False),  # vectors never
    ((8, 256), 0, 32, True, (2, 4), True),
    ((4, 256), 0, 32, True, (2, 4), False),  # half a tile
    ((256, 128), 1, 32, True, (2, 4), True),
    ((256, 128), 1, 16, True, (2, 4), False),  # two elements share the 32 bits of a lane
    ((256, 512), 1, 16, True, (2, 4), True),
    ((256, 64), 1, 32, True, (2, 4), True),  # transposed, it is along the sublanes
    ((32, 8, 32), 0, 32, True, (2, 4), True),
    ((8, 32, 32), 2, 32, True, (2, 4), False),
    ((8, 4, 256), 1, 32, True, (2, 4), False),
    ((128, 16, 64), 0, 32, True, (2, 4), True),
    ((128, 16, 64), 0, 16, True, (2, 4), False),
    ((256, 1024), 0, 32, True, (4, 4), False),  # all of a square
    ((256, 1024), 0, 32, False, (4, 4), True),
    ((256, 1024), 0, 32, True, (4, 8), True),
    ((256, 1024), 0, 32, True, (8, 8), False),
    ((256, 1024), 0, 32, True, (2, 2, 2), False),
    ((256, 1024), 0, 32, False, (2, 2, 2), True),
    ((256, 1024), 0, 32, True, (4, 8, 8), False),  # two of three dims are equal
    ((256, 1024), 0, 32, True, (2, 4, 8), True),
    ((256, 1024), 0, 32, True, (4, 8, 16), True),
]


@pytest.mark.parametrize(("shard", "dim", "bits", "spans_torus", "torus", "expected"), SCATTERED)
def test_which_sums_are_scattered(shard, dim, bits, spans_torus, torus, expected):
    assert makes_reduce_scatter(shard, dim, bits, spans_torus, torus) is expected


# What libtpu 0.0.42 made of an array that is gathered over all chips: its shape, the sharded dim, its dtype,
# the target, and what runs.
GATHERED = [
    ((64, 128), 0, "float32", "tpu-v5p:4x4x4", "all-reduce"),
    ((65536, 1024), 0, "bfloat16", "tpu-v5p:4x4x4", "all-reduce"),
    ((1024, 8192), 1, "bfloat16", "tpu-v4:4x4x4", "all-reduce"),
    ((8192,), 0, "float32", "tpu-v4:4x4x4", "all-reduce"),
    ((8192, 1024), 0, "float32", "tpu-v5p:2x4x8", "all-reduce"),
    ((8192, 1024), 0, "float32", "tpu-v5p:2x2x16", "all-reduce"),
    ((8192, 1024), 0, "float32", "tpu-v5p:2x4x4", "all-gather"),  # 32 chips
    ((8192, 1024), 0, "float32", "tpu-v5e:4x8", "all-gather"),
    ((4096, 1024), 0, "float32", "tpu-v5e:8x8", "all-reduce"),  # 16 MiB
    ((4352, 1024), 0, "float32", "tpu-v5e:8x8", "all-gather"),
    ((8192, 1024), 0, "bfloat16", "tpu-v5e:8x8", "all-reduce"),
    ((4096, 1024), 0, "float32", "tpu-v6e:16x16", "all-reduce"),
    ((40960, 64), 0, "float32", "tpu-v5e:8x8", "all-gather"),  # 10 MiB, in complete tiles 20
    ((512, 3, 3, 512), 0, "float32", "tpu-v5e:8x8", "all-gather"),
    ((3, 3, 512, 512), 2, "float32", "tpu-v5e:8x8", "all-reduce"),
    ((65536, 128), 0, "float32", "tpu-v5p:8x8x1", "all-gather"),  # two dims
]


def gathered(shape, dim, dtype, device):
    """The plan of an array that is sharded along one dim over all devices, and returned replicated."""
    count = math.prod(map(int, device.partition(":")[2].split("x")))
    strategy = tuple(count if d == dim else 1 for d in range(len(shape)))
    args = (jax.ShapeDtypeStruct(shape, dtype),)
    return shardfn.plan(
        lambda x: 2 * x, *args, in_strategy=(strategy,), out_strategy=((1,) * len(shape),), device=device
    )


@pytest.mark.parametrize(("shape", "dim", "dtype", "device", "kind"), GATHERED)
def test_gathers_over_all_chips_are_all_reduced(shape, dim, dtype, device, kind):
    plan = gathered(shape, dim, dtype, device)
    (found,) = plan.collectives
    count, size = plan.hardware.count, math.prod(shape) * jnp.dtype(dtype).itemsize
    assert (found.kind, found.group_size) == (kind, count)
    assert found.bytes_sent == size // count * (count - 1) * (2 if kind == "all-reduce" else 1)


@pytest.mark.tpu
@pytest.mark.parametrize(("shape", "dim", "dtype", "device", "kind"), GATHERED)
def test_compiled_gathers_over_all_chips(shape, dim, dtype, device, kind):
    pytest.importorskip("libtpu")
    plan: Any = gathered(shape, dim, dtype, device)
    made = compile_plan(plan)
    assert [c.kind for c in made.collectives] == [kind]
    assert sum(c.bytes_sent for c in made.collectives) == plan.cost.bytes_sent


def test_gathers_over_some_chips_stay():
    args = (jax.ShapeDtypeStruct((8192, 1024), jnp.float32),)
    plan = shardfn.plan(lambda x: 2 * x, *args, in_strategy=((64, 1),), out_strategy=((2, 1),), device="tpu-v5p:4x4x4")
    assert [(c.kind, c.group_size) for c in plan.collectives] == [("all-gather", 32)]


def test_plan_with_gathers_by_all_reduce_is_fsdp():
    """FSDP is FSDP, and the gathers that are its own are no diagnostic."""

    def step(ws, x):
        loss = lambda ws: (lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2).mean()  # noqa: E731
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    args = f32(8, 4096, 4096), f32(4096, 4096)
    plan = shardfn.plan(step, *args, in_strategy=((1, 64, 1), (64, 1)), device="tpu-v5p:4x4x4")
    assert {c.kind for c in plan.collectives} == {"all-reduce"}
    assert plan.kind == "FSDP over 64 devices"
    assert not plan.diagnostics


def sent(fn, *args, entries, device=V5E, **options):
    """Kinds and shapes of the predicted collectives."""
    plan = shardfn.plan(fn, *args, in_strategy=entries, device=device, **options)
    return collections.Counter((c.kind, c.shape) for c in plan.collectives)


def heads(x, wq, wk, wv, wo):
    """Three matmuls of one array with weights that are sharded along their columns, and the gradient."""
    return jnp.tanh(x @ wq) * jnp.tanh(x @ wk) + jnp.tanh(x @ wv) @ wo.T @ wo


def gradient(x, *ws):
    return jax.grad(lambda x: jnp.sum(heads(x, *ws)))(x)


COLUMNS = ((1, 1), (1, 8), (1, 8), (1, 8), (1, 8))
WEIGHTS = f32(64, 256), *[f32(256, 512)] * 4


def test_the_gradient_of_what_three_products_read_is_one_sum():
    made = sent(gradient, *WEIGHTS, entries=COLUMNS, out_strategy=((1, 1),))
    apart = sent(gradient, *WEIGHTS, entries=COLUMNS, out_strategy=((1, 1),), device="cpu:8")
    assert made["all-reduce", (64, 256)] == apart["all-reduce", (64, 256)] - 2 > 0


@pytest.mark.parametrize("device", [V5E, "h100:8"])
def test_what_is_put_together_is_computed_all_the_same(device):
    """Of three products, two sums put together one after the other."""
    plan, apart = (
        shardfn.plan(gradient, *WEIGHTS, in_strategy=COLUMNS, out_strategy=((1, 1),), device=on)
        for on in (device, "cpu:8")
    )
    products = [sum(op.name == "dot_general" for op in made.partitioned.graph.ops) for made in (plan, apart)]
    assert products[0] == products[1] > 3
    values = {v for op in plan.partitioned.graph.ops for v in op.outputs} | set(plan.partitioned.graph.inputs)
    assert all(v in values for op in plan.partitioned.graph.ops if op.name in ("add", "all_reduce") for v in op.inputs)


@pytest.mark.parametrize("spec", some_slow([(("a",), ()), ((), ("a",))], [((), ("a",))]), ids=str)
def test_sums_held_in_pieces_are_put_together_too(spec):
    """A constraint to the sharding that a sum already has leaves no collective."""
    args = (f32(64, 256), f32(256, 512)) * 3
    function = lambda x, a, y, b, z, c: x @ a + y @ b + z @ c  # noqa: E731
    problem = shardfn.plan(function, *args, device="h100:8")._answered.problem
    read = ((), ("a",)), (("a",), ())
    constraints = {i: OpConstraint(read, (spec,)) for i, op in enumerate(problem.graph.ops) if op.name == "dot_general"}
    partitioned = problem.partition((("a", 8),), read * 3, constraints)
    assert [(c.kind, partitioned.local_shape(c.operand)) for c in partitioned.communications] == [
        ("reduce-scatter", (64, 512))
    ]
    assert estimate_cost(partitioned, problem.hardware).flops == pytest.approx(3 * 2 * 64 * 256 * 512 / 8, rel=0.02)


def test_a_sum_that_is_read_elsewhere_too_stays():
    def two(x, a, y, b):
        one, other = x @ a, y @ b
        return one + other, one

    args, entries = (f32(64, 256), f32(256, 512)) * 2, ((1, 8), (8, 1)) * 2
    assert sent(two, *args, entries=entries, out_strategy=((1, 1), (1, 1)))["all-reduce", (64, 512)] == 2
    alone = sent(lambda *args: two(*args)[0], *args, entries=entries, out_strategy=((1, 1),))
    assert alone["all-reduce", (64, 512)] == 1


def apart(steps):
    """Two products with one weight, so many steps from one to the other."""

    def twice(x, w):
        y = x @ w
        for _ in range(steps):
            y = jnp.tanh(y)
        return y @ w

    return twice


CHAIN = {"in_strategy": ((8, 1), (8, 1)), "out_strategy": ((8, 1),), "device": V5E}
FAR_OR_NEAR = [(MAX_CSE_DISTANCE, 1), (MAX_CSE_DISTANCE + 1, 2)]


@pytest.mark.parametrize(("steps", "gathers"), FAR_OR_NEAR)
def test_a_weight_is_gathered_again_for_a_use_far_away(steps, gathers):
    args = f32(64, 1024), f32(1024, 1024)
    plan = shardfn.plan(apart(steps), *args, **CHAIN)
    assert [c.kind for c in plan.collectives] == ["all-gather"] * gathers
    on_cpu = shardfn.plan(apart(steps), *args, **CHAIN | {"device": "cpu:8"})
    assert [c.kind for c in on_cpu.collectives] == ["all-gather"]


def test_rows_are_added_to_what_they_are_added_to_after():
    """The gradient of a table that is looked up in and multiplied by: what the product gives is gathered for the rows."""

    def gradient(table, rows):
        return jax.grad(lambda t: jnp.sum(jnp.tanh(jax.lax.stop_gradient(t)[rows] @ t.T)) + jnp.sum(t[rows] ** 2))(
            table
        )

    args, entries = (f32(1024, 256), jax.ShapeDtypeStruct((8192,), jnp.int32)), ((8, 1), (8,))
    made = sent(gradient, *args, entries=entries, out_strategy=((8, 1),))
    other = sent(gradient, *args, entries=entries, out_strategy=((8, 1),), device="cpu:8")
    assert made["all-gather", (128, 256)] == other["all-gather", (128, 256)] + 1


def in_groups(groups):
    def convolved(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)

    return convolved


def gradient_in_groups(k, x):
    return jax.grad(lambda k: jnp.mean(in_groups(8)(x, k) ** 2))(k)


def solved(a, b):
    return jax.scipy.linalg.solve_triangular(a, b, lower=True)


IMAGE, KERNEL, MATRICES = f32(8, 16, 16, 64), f32(3, 3, 8, 64), f32(8, 128, 128)
# Function, arguments, layout, and bytes that libtpu 0.0.42 sends.
KEPT = {
    "groups, batch": (in_groups(8), (IMAGE, KERNEL), ((8, 1, 1, 1), (1, 1, 1, 1)), {}),
    "groups, channels": (in_groups(8), (IMAGE, KERNEL), ((1, 1, 1, 8), (1, 1, 1, 8)), {}),
    "groups, both": (in_groups(8), (IMAGE, KERNEL), ((2, 1, 1, 4), (1, 1, 1, 1)), {}),
    "groups, height": (in_groups(8), (IMAGE, KERNEL), ((1, 8, 1, 1), (1, 1, 1, 1)), {"collective-permute": 32768}),
    "groups, gradient": (gradient_in_groups, (KERNEL, IMAGE), ((1, 1, 1, 1), (8, 1, 1, 1)), {"all-reduce": 32256}),
    "groups, gradient, height": (gradient_in_groups, (KERNEL, IMAGE), ((1, 1, 1, 1), (1, 8, 1, 1)),
                                 {"all-gather": 458752, "collective-permute": 32768}),
    "largest of rows": (lambda x: lax.top_k(x, 8), (f32(1024, 512),), ((8, 1),), {}),
    "cholesky": (jnp.linalg.cholesky, (MATRICES,), ((8, 1, 1),), {}),
    "solve, batch": (solved, (MATRICES, f32(8, 128, 64)), ((8, 1, 1), (8, 1, 1)), {}),
    "solve, columns": (solved, (MATRICES, f32(8, 128, 64)), ((2, 1, 1), (2, 1, 4)), {}),
    "fft of rows": (lambda x: jnp.abs(jnp.fft.fft(x)), (f32(1024, 512),), ((8, 1),), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_independent_dims_stay_cut(name):
    fn, args, entries, expected = KEPT[name]
    assert dict(kinds(shardfn.plan(fn, *args, in_strategy=entries, device=V5E).collectives)) == expected


@pytest.mark.parametrize("name", ["groups, batch", "largest of rows"])
def test_on_cpu_they_do_not(name):
    fn, args, entries, _ = KEPT[name]
    assert "all-gather" in kinds(shardfn.plan(fn, *args, in_strategy=entries, device="cpu:8").collectives)


@pytest.mark.tpu
@pytest.mark.parametrize("name", KEPT)
def test_compiled_dims_stay_cut(name):
    pytest.importorskip("libtpu")
    fn, args, entries, expected = KEPT[name]
    plan: Any = shardfn.plan(fn, *args, in_strategy=entries, device=V5E)
    assert dict(kinds(compile_plan(plan).collectives)) == expected


@pytest.mark.tpu
@pytest.mark.parametrize(("steps", "gathers"), FAR_OR_NEAR)
def test_compiled_gathers(steps, gathers):
    pytest.importorskip("libtpu")
    plan: Any = shardfn.plan(apart(steps), f32(64, 1024), f32(1024, 1024), **CHAIN)
    made = compile_plan(plan)
    assert [c.kind for c in made.collectives] == ["all-gather"] * gathers


def kinds(found):
    counts = collections.Counter()
    for c in found:
        counts[c.kind] += c.total_bytes
    return counts


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("model", "layout", "device"),
    [(llama, "FSDP", V5E), (llama, "FSDP", SQUARE), (gpt2, "FSDP", V5E), (gpt2, "ZeRO-1", V5E),
     (gpt2, "tensor parallel", V5E)],
)  # fmt: skip
def test_compiled_steps(model, layout, device):
    """Beyond: GPT-2 on the square torus (benchmarks/RESULTS.md)."""
    pytest.importorskip("libtpu")
    size = dataclasses.replace(model.small(), layers=1)
    (fn, args), count = abstract(model.make, size), 8 if device == V5E else 16
    expert = model.experts(size, count)[layout]
    step: Any = shardfn.shard(expert.written(fn), expert.in_strategy, device=device, donate_argnums=(0, 1))
    plan = step.plan(*args)
    made, predicted = kinds(compile_plan(plan).collectives), kinds(plan.collectives)
    for kind in made.keys() | predicted.keys():
        assert abs(predicted[kind] - made[kind]) < 0.05 * made.total(), kind


def test_gradient_of_a_loop_in_a_loop_is_planned():
    """Once the walk over the ops came back from the inner loop, it never ended."""

    @jax.checkpoint
    def inner(h, x):
        h = jnp.tanh(h @ x)
        return h, h

    @jax.checkpoint
    def outer(x, w):
        h, every = lax.scan(inner, x, jnp.stack([w, 2 * w]))
        return jnp.sin(h + every.sum(0)), None

    def loss(w, x):
        return (lax.scan(outer, x, w)[0] ** 2).sum()

    plan = shardfn.plan(jax.grad(loss), f32(3, 64, 64), f32(64, 64), device="tpu-v5e:2x2", style="data_parallel")
    assert plan.kind == "data parallel over 4 devices"
