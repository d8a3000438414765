"""Ops that XLA's GPU backend leaves to libraries or makes of many kernels: their time, their work buffers, and what is unknown."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.backends.gpu_sorts import is_radix
from shardfn.cost.backends.library_call import KINDS
from shardfn.cost.devices.calibrate import Calibration
from shardfn.cost.devices.chips import CHIPS, load_chip, save_chip
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.runtime.verify import compile_plan

H100 = CHIPS["h100"]


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cost(fn, *args, chip=H100):
    return shardfn.plan(fn, *args, device=chip.pod(1)).cost


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))


def solve(a, b):
    return jax.scipy.linalg.solve_triangular(a, b, lower=True)


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


INTS = jax.ShapeDtypeStruct((2**20,), jnp.int32)
ROWS, EXPERTS = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256, 512), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((8,), jnp.int32)
BYTES = H100.memory_bytes_s

# What a step takes at least, in seconds, by the kernels that XLA runs.
KERNELS = {
    "sort": (lambda x: jnp.sort(x), (f32(64, 65536),), 64 * 65536 * 6 * 20 / (0.545 * BYTES)),
    "argsort": (lambda x: jnp.argsort(x), (f32(64, 65536),), 64 * 65536 * 6 * 28 / (0.545 * BYTES)),
    "one row": (lambda x: jnp.sort(x), (f32(4194304),), 4194304 * 4 * 16 / (0.545 * BYTES)),
    "top_k": (lambda x: jax.lax.top_k(x, 32), (f32(64, 65536),), 64 * 65536 * 6 * 20 / (0.545 * BYTES)),
    "fftn": (lambda x: jnp.fft.fftn(x), (f32(128, 128, 128),), 3 * 2 * 8 * 128**3 / (0.78 * BYTES)),
    "ifft": (lambda x: jnp.fft.ifft(x), (f32(4096, 1024),), 2 * 2 * 8 * 4096 * 1024 / (0.78 * BYTES)),
    "cholesky": (jnp.linalg.cholesky, (f32(4096, 4096),), 4096**3 / 3 / (0.344 * H100.vector_flops)),
    "solve": (solve, (f32(4096, 4096), f32(4096, 1)), 4 * 4096**2 / (0.151 * BYTES)),
    "conv3d": (conv, (f32(2, 32, 32, 32, 32), f32(3, 3, 3, 32, 32)), 3.2e9 / (0.223 * 494e12)),
    "ragged_dot": (jax.lax.ragged_dot, (ROWS, EXPERTS, SIZES), 8 * 2 * 4096 * 256 * 512 / H100.flops),
}


@pytest.mark.parametrize("name", KERNELS)
def test_time_of_a_library_op_is_that_of_its_kernels(name):
    fn, args, least = KERNELS[name]
    found = cost(fn, *args)
    assert least <= found.compute_s <= 2.5 * least
    assert not found.unmodelled_ops


@pytest.mark.parametrize("name", ["sort", "top_k", "fftn", "cholesky", "conv3d"])
def test_an_op_whose_kind_has_no_rate_is_named(name):
    fn, args, _ = KERNELS[name]
    found = cost(fn, *args, chip=dataclasses.replace(H100, kind_rates=()))
    assert found.unmodelled_ops
    assert found.compute_s < cost(fn, *args).compute_s


# Nobody measured these on a GPU.
UNKNOWN = {
    "short rows": (lambda x: jnp.sort(x), (f32(4096, 4096),)),
    "columns": (lambda x: jnp.sort(x, 0), (f32(65536, 64),)),
    "floats with others": (lambda x, y: jax.lax.sort((x, y), num_keys=1), (f32(2**20), f32(2**20))),
    "integers by two keys": (lambda x, y: jax.lax.sort((x, y), num_keys=2), (INTS, INTS)),
    "approximate": (lambda x: jax.lax.approx_max_k(x, 8), (f32(64, 2048),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, 0), (f32(65536, 256),)),
    "pooling's gradient": (jax.grad(lambda x: pool(x).sum()), (f32(8, 224, 224, 64),)),
    "lexsort": (lambda x: jnp.lexsort((x, x)), (f32(64, 65536),)),
    "few of each row": (lambda x: jax.lax.top_k(x, 4), (f32(64, 65536),)),
    "batch of matrices": (jnp.linalg.cholesky, (f32(64, 128, 128),)),
    "qr": (lambda x: jnp.linalg.qr(x)[1], (f32(512, 512),)),
    "many sides": (solve, (f32(512, 512), f32(512, 64))),
    "groups": (lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=8), (f32(2, 8, 32, 32), f32(8, 1, 3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_op_without_a_checked_rule_is_named(name):
    fn, args = UNKNOWN[name]
    assert cost(fn, *args).unmodelled_ops


def test_a_small_sort_is_one_kernel():
    found = cost(lambda x: jnp.sort(x), jax.ShapeDtypeStruct((16384,), jnp.int32))
    assert 2e-5 < found.compute_s < 5e-5  # 31 us on one H100


# By bits of a key, rows and elements of a row: whether JAX 0.10.2 leaves the sort to CUB on an H100.
RADIX = {
    (32, 1, 16384): False, (32, 1, 22001): True, (32, 26, 2**18): False, (32, 27, 2**18): True, (32, 64, 2**16): True,
    (32, 64, 8192): False, (32, 64, 16384): True, (32, 128, 4096): False, (32, 100, 4097): True, (32, 4096, 4096): False,
    (32, 4096, 16384): True, (8, 1, 4096): True, (8, 64, 2**14): True, (8, 256, 2048): True, (16, 1, 4096): True,
    (16, 64, 2**14): True, (16, 256, 2048): False, (32, 256, 2048): False, (32, 8, 128256): False,
}  # fmt: skip


@pytest.mark.parametrize("sizes", RADIX)
def test_the_sorts_that_xla_leaves_to_cub(sizes):
    assert is_radix(*sizes) == RADIX[sizes]


def test_a_transposed_convolution_multiplies_holes_too():
    x, kernel = f32(8, 56, 56, 256), f32(4, 4, 256, 256)
    found = cost(lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"), x, kernel)
    assert found.compute_s >= 0.9 * 2 * 8 * 112 * 112 * 256 * 16 * 256 / (0.496 * 494e12)
    ahead = lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    back = cost(lambda x, w, y: jax.vjp(ahead, x, w)[1](y)[0], f32(8, 112, 112, 256), kernel, x)
    assert back.compute_s < found.compute_s / 2


def test_a_cumulative_sum_reads_its_operand_twice():
    found, small = (cost(lambda x: jnp.cumsum(x, 0), f32(*shape)) for shape in ((65536, 256), (256, 64)))
    if IS_BEFORE_JAX_0_12:
        assert found.compute_s >= 3 * 4 * 65536 * 256 / BYTES
        assert not small.unmodelled_ops  # less than a launch, whatever its rate
    else:  # an op of its own, which has no checked rule
        assert found.unmodelled_ops[0].startswith("scan")


def test_work_buffers_count():
    x = f32(64, 65536)  # 16 MiB
    sort = cost(lambda x: jnp.sort(x), x).memory
    assert sort.temporaries == 4 * 16 * 2**20  # the keys, sorted keys, and as much again as keys and values
    ragged = cost(jax.lax.ragged_dot, ROWS, EXPERTS, SIZES).memory
    assert ragged.temporaries == 8 * 4096 * 256 * 2


def test_ragged_dot_is_only_named_on_tpu():
    found = shardfn.plan(jax.lax.ragged_dot, ROWS, EXPERTS, SIZES, device="tpu-v5e:1").cost
    assert found.unmodelled_ops == ("ragged_dot",)
    assert found.flops == 2 * 4096 * 256 * 512


def test_the_headline_says_at_least_and_names_the_op():
    step = lambda x: jnp.linalg.qr(x)[1] + jnp.sort(x[0])  # noqa: E731
    plan = shardfn.plan(step, f32(256, 256), device="h100:1", level=2)
    (line,) = [line for line in str(plan).splitlines() if line.startswith("time: ")]
    assert plan.cost.is_lower_bound
    assert (
        line.startswith("time: at least ")
        and f"custom_call cusolver_geqrf_ffi at test_gpu_library.py:{step.__code__.co_firstlineno} is not modelled"
        in line
    )
    known = str(shardfn.plan(jnp.matmul, f32(256, 256), f32(256, 256), device="h100:1"))
    assert "at least" not in known and "not modelled" not in known


def test_a_plan_with_an_unknown_op_is_not_proved_in_time():
    def step(x, w):
        return jnp.linalg.cholesky(jnp.einsum("bij,jk->bik", x, w))

    args = f32(64, 128, 128), f32(128, 128)
    assert shardfn.plan(step, *args, device="h100:8", level=2).gap is None
    assert shardfn.plan(jnp.matmul, f32(512, 512), f32(512, 512), device="h100:8", level=2).gap is not None


def test_ragged_dot_on_gpus_is_told_the_cheaper_way():
    def step(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    (note,) = [
        n for n in shardfn.plan(step, ROWS, EXPERTS, SIZES, device="h100:1").diagnostics if n.startswith("ragged_dot")
    ]
    assert (
        "test_gpu_library.py" in note
        and "8.69 µs" in note
        and "1.09 µs" in note
        and "16 MiB" in note
        and "capacity" in note
    )
    assert not [
        n for n in shardfn.plan(step, ROWS, EXPERTS, SIZES, device="tpu-v5e:1").diagnostics if "all experts" in n
    ]


def test_rates_of_kinds_are_saved(tmp_path):
    path = str(tmp_path / "chip.json")
    save_chip(H100, path)
    assert load_chip(path).kind_rates == H100.kind_rates
    assert {kind for kind, _ in H100.kind_rates} < set(KINDS)
    assert all(H100.kind_rate(kind) == 1.0 for kind in ("memory", "matmul", "gather", "scatter"))
    assert str(Calibration(H100, ()))


def stencil(u):
    return jax.lax.fori_loop(0, 10, lambda _, u: 0.5 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0)), u)


def decay(u):
    return jax.lax.fori_loop(0, 10, lambda _, u: 0.5 * u + 1.0, u)


@pytest.mark.parametrize(("fn", "copies"), [(stencil, 1), (decay, 0)])
def test_a_carry_that_is_read_at_several_places_is_copied_in_each_iteration(fn, copies):
    size = 4 * 4096 * 1024
    found = shardfn.plan(fn, f32(4096, 1024), device="h100:1", donate_argnums=0).cost
    assert found.memory.temporaries == copies * size + 4  # and the counter
    passes = 10 * (1 + copies) * 2 * size / BYTES
    assert passes <= found.compute_s <= passes + 10 * 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("fn", "copies"), [(stencil, 1), (decay, 0)])
def test_a_carry_is_copied_as_compiled(cuda, fn, copies):
    plan = shardfn.plan(fn, f32(4096, 1024), device="h100:1", donate_argnums=0)
    compiled = compile_plan(plan).together("cuda")
    assert compiled == pytest.approx((1 + copies) * 4 * 4096 * 1024, rel=0.01)
    assert plan.cost.memory.peak == pytest.approx(compiled, rel=0.01)


def pairs(x):
    d = x[None] - x[:, None]
    r = jax.lax.rsqrt((d**2).sum(-1) + 1e-3)
    return (d * r[..., None]).sum(1)


def test_a_reduction_computes_what_is_made_of_small_arrays():
    found = cost(pairs, f32(4096, 3))
    assert found.memory.temporaries < 1.01 * 4 * 4096**2  # the distances, not the differences


def test_short_rows_of_a_computed_reduction_take_longer():
    rows = cost(lambda x: jnp.exp(x[:, None] - x[None]).sum(-1), f32(4096, 16)).compute_s
    assert rows >= 2 * 4096**2 * 16 / (0.0239 * H100.vector_flops)


def test_rows_gathered_from_a_large_table_are_read_from_memory():
    rows = 2**20
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    large, small = (cost(lambda x, i: x[i], f32(n, 128), ids).compute_s for n in (2**17, 2**12))
    assert large >= 2 * rows * 512 / BYTES
    assert small < 1.2 * rows * 512 / BYTES


def test_a_reduction_over_outer_dims_computes_what_is_made_of_fewer_bytes():
    x = jax.ShapeDtypeStruct((64, 128, 256), jnp.bfloat16)
    assert cost(lambda x: x.astype(jnp.float32).sum(1), x).memory.temporaries == 0
    assert cost(lambda x: (x.astype(jnp.float32) ** 2).sum(0), x).memory.temporaries == 0


def linear(u, v):
    return u[0] * v[0], v[0] * u[1] + v[1]


def scanned(a, b):
    return jax.lax.associative_scan(linear, (a, b), axis=1)[1]


def test_the_levels_of_an_associative_scan_are_stored():
    args = f32(8, 1024, 512), f32(8, 1024, 512)  # 16 MiB each
    found = cost(scanned, *args)
    assert (
        8 * 2**20 < found.memory.temporaries < 16 * 2**20
    )  # both arrays of the level of a quarter, and of those below
    assert found.compute_s > 4 * 16 * 2**20 / BYTES
    assert found.unmodelled_ops[0].startswith("associative_scan (")
    strides = cost(lambda x: x[::2] * x[1::2], f32(4096, 1024))
    assert strides.memory.temporaries == 0 and not strides.unmodelled_ops


@pytest.mark.gpu
def test_the_levels_of_an_associative_scan_are_stored_as_compiled(cuda):
    plan = shardfn.plan(scanned, f32(8, 1024, 512), f32(8, 1024, 512), device="h100:1")
    assert plan.cost.memory.peak == pytest.approx(compile_plan(plan).together("cuda"), rel=0.1)


# What the compiler assigns without work buffers of libraries, which it knows on a card alone.
COMPILED = {
    "three arrays": (lambda a, b, c: jax.lax.sort((a, b, c), num_keys=1), (INTS, f32(2**20), f32(2**20))),
    "columns": (lambda x: jnp.sort(x, 0), (f32(65536, 64),)),
    "lexsort": (lambda a, b: jnp.lexsort((a, b)), (INTS, INTS)),
    "short rows": (lambda x: jnp.median(x, -1), (f32(2048, 2048),)),
    "kept of short rows": (lambda x: jax.lax.top_k(x, 32), (f32(2048, 1000),)),
    "many sides": (solve, (f32(2048, 2048), f32(2048, 512))),
    "one side": (solve, (f32(2048, 2048), f32(2048, 1))),
    "lu": (jnp.linalg.solve, (f32(1024, 1024), f32(1024, 64))),
    "inverse": (jnp.linalg.inv, (f32(1024, 1024),)),
    "qr": (jnp.linalg.qr, (f32(4096, 512),)),
    "svd": (lambda a: jnp.linalg.svd(a, full_matrices=False), (f32(2048, 1024),)),
    "eigh": (jnp.linalg.eigh, (f32(1024, 1024),)),
    "cholesky of a batch": (jnp.linalg.cholesky, (f32(16, 256, 256),)),
    "tridiagonal": (jax.lax.linalg.tridiagonal_solve, (f32(16384), f32(16384), f32(16384), f32(16384, 64))),
    "pooling's gradient": (jax.grad(lambda x: (pool(x) ** 2).sum()), (f32(8, 112, 112, 64),)),
}


MATRICES = f32(4096, 512), f32(8, 512, 2048), f32(8, 2048, 512)


def experts_loss(x, up, down, sizes):
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, up, sizes))
    return (jax.lax.ragged_dot(hidden, down, sizes).astype(jnp.float32) ** 2).sum()


def projected(a, x):
    q, _ = jnp.linalg.qr(a @ x)
    return a.T @ q


def balanced(c, u):
    def step(_, u):
        v = -jax.nn.logsumexp(c + u[:, None], 0)
        return -jax.nn.logsumexp(c + v[None], 1)

    return jax.lax.fori_loop(0, 9, step, u)


def particles(w, x, y):
    def loss(w):
        z = x @ w
        return (jax.nn.softplus(z) - y * z).sum()

    return jax.vmap(jax.grad(loss))(w)


COMPILED |= {
    "product of a batch": (particles, (f32(2048, 256), f32(16384, 256), f32(16384))),
    "transposed for a matmul": (projected, (f32(16384, 1024), f32(1024, 64))),
    "sums of computed columns": (balanced, (f32(4096, 4096), f32(4096))),
    "softmax": (lambda q, k: jax.nn.softmax(q @ k.T) @ k, (f32(4096, 64), f32(4096, 64))),
    "channels first": (lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"), (f32(8, 64, 64, 64), f32(128, 64, 3, 3))),
    "transposed convolution": (lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"), (f32(8, 56, 56, 64), f32(4, 4, 64, 128))),
    "experts": (jax.grad(experts_loss, (1, 2)), (*MATRICES, SIZES)),
    "experts and rows": (jax.grad(experts_loss, (0, 1, 2)), (*MATRICES, SIZES)),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_memory_of_a_library_op_is_as_compiled(cuda, name):
    fn, args = COMPILED[name]
    plan = shardfn.plan(fn, *args, device="h100:1")
    assert plan.cost.memory.peak == pytest.approx(compile_plan(plan).together("cuda"), rel=0.1)
