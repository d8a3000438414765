"""What XLA's CPU backend makes of a partitioned program, compared with what it compiles: copies, reused buffers, simplified ops."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardfn
from shardfn import compiled
from shardfn.cost.backends.cpu import on_cpu
from shardfn.cost.compute import op_flops
from shardfn.cost.platforms import fuse
from shardfn.cost.schedule import combine_collectives
from tests.partition.test_dot_general import STEP, drawn
from tests.partition.test_dot_general import step as mlp_step

from .programs import AS_RELEASED, array


def both(fn, args, entries=None, **options):
    """The plan, and the compiled program."""
    replicated = tuple(jax.tree.map(lambda a: (1,) * a.ndim, arg) for arg in args)
    function = shardfn.shard(fn, entries or replicated, device=jax.devices()[:8], **options)
    return function.plan(*args), compiled.read(function.lower(*args).compile(AS_RELEASED))


def products(plan):
    ops = plan.partitioned.graph.ops
    return sum(op_flops(plan.partitioned, op) * op.trips for op in ops if op.name in ("dot_general", "convolution"))


# ---- products


def product(dims, elementwise=False):
    def fn(a, b):
        return lax.dot_general(jnp.tanh(a) if elementwise else a, b, dims)

    return fn


# shapes of both operands; contracted and batch dims; bytes that are copied
OPERANDS = {
    "as it is read": ((64, 32), (32, 16), ((1,), (0,)), ((), ()), 0),
    "two dims change places": ((32, 64), (16, 32), ((0,), (1,)), ((), ()), 0),
    "also behind batch dims": ((4, 8, 16, 32), (4, 8, 64, 16), ((2,), (3,)), ((0, 1), (0, 1)), 0),
    "a weight's gradient": ((4, 8, 64), (4, 8, 16), ((0, 1), (0, 1)), ((), ()), 4 * 8 * 64 * 4),
    "heads, summed": ((4, 32, 64), (8, 16, 64), ((2,), (2,)), ((), ()), 8 * 16 * 64 * 4),
    "heads, free": ((4, 32, 8, 16), (64, 8, 16), ((2, 3), (1, 2)), ((), ()), 64 * 8 * 16 * 4),
    "batch dims in the middle": ((4, 32, 8, 16), (4, 32, 8, 16), ((3,), (3,)), ((0, 2), (0, 2)), 2 * 4 * 32 * 8 * 16 * 4),
    "a dim of size 1": ((1, 32, 64), (1, 32, 16), ((0, 1), (0, 1)), ((), ()), 32 * 64 * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_stand_the_wrong_way_round_are_copied(name):
    left, right, *dims, copied = OPERANDS[name]
    plan, real = both(product(tuple(dims)), (array(*left), array(*right)))
    assert plan.cost.memory.temporaries == copied
    assert real.temp_bytes == pytest.approx(copied, abs=64)


def test_an_elementwise_op_writes_what_only_a_turned_product_reads():
    plan, real = both(product((((0, 1), (0, 1)), ((), ())), True), (array(4, 8, 64), array(4, 8, 16)))
    assert plan.cost.memory.temporaries == real.temp_bytes == 4 * 8 * 64 * 4


def test_a_transposed_product_has_its_operands_changed_round():
    plan, real = both(lambda a, b: (a @ b).T + 1.0, (array(64, 32), array(32, 128)))
    assert plan.cost.memory.temporaries == real.temp_bytes == 0


def test_products_that_sum_nothing_are_multiplications():
    plan, real = both(lambda a, b, w: (a[:, None] @ b[None]) @ w, (array(64), array(32), array(32, 16)))
    assert products(plan) == real.flops == 2 * 64 * 32 * 16


def same_twice(x, w):
    first = jnp.tanh(x @ w)
    return first.sum(0), (x @ w)[:, 0] * 2.0, jnp.exp(x @ w).sum()


def test_what_is_computed_twice_is_computed_once():
    plan, real = both(same_twice, (array(64, 32), array(32, 16)), ((8, 1), (1, 1)))
    assert products(plan) == real.flops == 2 * 64 * 32 * 16 / 8
    assert sum(op.name == "dot_general" for op in plan.partitioned.graph.ops) == 1


def test_what_is_moved_twice_is_sent_twice():
    plan, real = both(lambda x, w: ((x * x) @ w, (x * x) @ w * 2.0), (array(64, 32), array(32, 16)), ((1, 8), (1, 1)))
    assert plan.cost.bytes_sent == sum(c.total_bytes for c in real.collectives)


def half(*shape):
    return array(*shape, dtype=jnp.bfloat16)


HALVES = {
    "chain": (lambda x, w, v: jnp.tanh(x @ w) @ v, half(64, 128), half(128, 256), half(256, 64)),
    "softmax, and a weight read twice": (lambda x, w: jax.nn.softmax(x @ w) @ w.T, half(64, 128), half(128, 256)),
}


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="products of half precision are made as they are")
@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_matmul_reads_and_makes_single_precision(name, shards):
    fn, *args = HALVES[name]
    plan, real = both(fn, args, ((shards, 1), *((1, 1),) * (len(args) - 1)))
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, abs=64)


# ---- convolutions

CONVOLUTIONS = [
    {"window_strides": (1, 1), "padding": "SAME"},
    {"window_strides": (2, 2), "padding": "SAME"},
    {"window_strides": (1, 1), "padding": "VALID"},
    {"window_strides": (1, 1), "padding": ((3, 0), (1, 2)), "rhs_dilation": (2, 1)},
    {"window_strides": (1, 1), "padding": ((2, 2), (2, 2)), "lhs_dilation": (2, 2)},
]


@pytest.mark.parametrize(
    "entries", [((8, 1, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 8))], ids=["batch", "features"]
)
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_operations_of_convolutions(options, gradient, entries):
    """Windows on padding and between dilated elements are no work."""
    convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
    fn = jax.grad(lambda x, k: jnp.sum(jnp.sin(convolve(x, k))), (0, 1)) if gradient else convolve
    plan, real = both(fn, (array(8, 12, 12, 4), array(3, 3, 4, 8)), entries)
    assert products(plan) == real.flops


def test_images_and_kernels_that_stand_the_wrong_way_round_are_copied():
    convolve = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    plan, real = both(convolve, (array(2, 8, 16, 16), array(4, 8, 3, 3)))  # NCHW, OIHW
    image, made = 4 * 2 * 8 * 16 * 16, 4 * 2 * 4 * 16 * 16
    assert (
        plan.cost.memory.temporaries == real.temp_bytes == image + made
    )  # the kernel's copy is in the result's buffer


# ---- loops that run once


def looped(times, x, ws):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, ws[:times])


@pytest.mark.parametrize("times", [1, 2])
def test_loops_that_run_once_are_none(times):
    plan, real = both(functools.partial(looped, times), (array(64, 64), array(2, 64, 64)), ((8, 1), (1, 1, 1)))
    assert any(op.name == "while" for op in plan.partitioned.graph.ops) == (times > 1)
    assert products(plan) == real.flops


def test_loops_of_unknown_length_stay():
    def fn(x):
        return lax.while_loop(lambda h: h.sum() < 100, lambda h: h * 2.0, x)

    plan, _ = both(fn, (array(64),))
    assert any(op.name == "while" for op in plan.partitioned.graph.ops)


# ---- places


def reads_apart(w, g, x):
    """The product that reads `w` need not be over when the new one is made."""
    return w - g, jnp.tanh(x) @ w


def reads_before(w, g, x):
    y = x @ w
    return w - g * y.sum(), y


@pytest.mark.parametrize(("fn", "copies"), [(reads_apart, 1), (reads_before, 0)])
def test_a_donated_argument_is_copied_where_its_place_could_be_taken_too_early(fn, copies):
    args = array(128, 128), array(128, 128), array(32, 128)
    plan, real = both(fn, args, donate_argnums=(0,))
    assert plan.cost.memory.donated == real.alias_bytes == 128 * 128 * 4
    assert plan.cost.memory.temporaries // (128 * 128 * 4) == real.temp_bytes // (128 * 128 * 4) == copies
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, abs=1024)


def rows_added(table, index, rows, x):
    return jnp.zeros_like(table).at[index].add(rows) + jnp.tanh(x @ x.T)


def test_rows_that_are_added_to_zeros_and_then_to_something_are_added_to_that():
    args = array(256, 256), array(16, dtype=jnp.int32), array(16, 256), array(256, 64)
    plan, real = both(rows_added, args)
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, rel=0.1, abs=2048)
    ops = on_cpu(plan.partitioned).graph.ops
    assert [op.name for op in ops].count("scatter") == 1 and ops[-1].name == "scatter"


@pytest.mark.parametrize("layout", drawn(STEP, 16), ids=str)
def test_layouts_drawn_at_random(layout):
    """Gathered along any dims, exchanged, merged: the peak of a training step comes within 10 %."""
    plan, real = both(mlp_step, STEP, layout)
    assert plan.cost.memory.peak == pytest.approx(real.together("cpu"), rel=0.1)


def test_sums_are_merged_until_one_needs_another():
    """The two gradients' are one, though the products on the way to them are added up over other axes."""
    plan, real = both(mlp_step, STEP, ((2, 1), (1, 2), (4, 2)))
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, rel=0.01)
    groups = combine_collectives(plan.partitioned).groups
    assert len({*groups.values()}) == sum(c.kind == "all-reduce" for c in real.collectives) < len(groups)


# ---- what is computed where it is read


def two_readers(fn, x, y):
    """Of one value, in two shapes: not one op."""
    made = fn(x)
    return made + y, (made * y)[:, ::-1][:48]


READ_TWICE = {
    "anew": [jnp.sin, jnp.floor, jnp.sign, lambda x: x + 1.5, lambda x: x.astype(jnp.int32).astype(jnp.float32)],
    "once": [jnp.exp, jnp.tanh, jnp.sqrt, lambda x: x / (x + 3.0), lambda x: x[jnp.arange(64) * 3 % 64]],
}


@pytest.mark.parametrize(("how", "fn"), [(how, fn) for how, fns in READ_TWICE.items() for fn in fns])
def test_what_is_computed_anew_for_each_reader(how, fn):
    plan, real = both(functools.partial(two_readers, fn), (array(64, 96), array(64, 96)))
    size = 64 * 96 * 4 if how == "once" else 0
    assert plan.cost.memory.temporaries == pytest.approx(size, abs=600)
    assert real.temp_bytes == pytest.approx(size, abs=600)


def centred(x, w):
    y = x @ w
    y = y - y.mean(-1, keepdims=True)
    return jnp.square(y).sum(-1), jnp.tanh(y)[::-1]


def test_what_a_library_reads_from_memory_others_compute_anew():
    plan, real = both(centred, (array(512, 64), array(64, 64)))
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, rel=0.1)
    partitioned = on_cpu(plan.partitioned)
    fusion = fuse(partitioned)
    (i,) = [i for i, op in enumerate(partitioned.graph.ops) if op.name == "subtract"]
    assert partitioned.graph.ops[i].outputs[0] in fusion.stored
    assert any(i in (inner or ()) for inner in fusion.inside)


@pytest.mark.parametrize(("rows", "stored"), [(32, 0), (48, 48 * 64 * 4)])
def test_long_sums_are_made_in_two_steps_from_memory(rows, stored):
    plan, real = both(lambda a, b: (a * b).sum(0), (array(rows, 64), array(rows, 64)))
    assert plan.cost.memory.temporaries == stored
    assert real.temp_bytes == pytest.approx(stored, abs=1024)
