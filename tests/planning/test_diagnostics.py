"""Warnings of a plan: each on a small program that has it and on one that has not, and held against XLA."""

import ast
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from examples.models import moe
from shardfn import AUTO
from shardfn.ir.jax_release import IS_BEFORE_JAX_0_12
from shardfn.mindspore import Layout

ON = Layout((2, 4), ("a", "b"))


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def said(made, text):
    return [f for f in made.diagnostics if text in f]


def suggested(finding):
    """The entry of `fix: parameter_plan={'x': (1, 8)}`, as typed."""
    return ast.literal_eval(re.search(r"fix: parameter_plan=(\{.*?\})", finding)[1])


# ---- a gather in a loop


def layers(ws, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


WS, X = shaped(12, 1024, 1024), shaped(8192, 1024)


def test_a_gather_in_every_round_of_a_loop():
    made = shardfn.plan(layers, WS, X, in_strategy=((1, 8, 1), (8, 1)), device="h100:8")
    (finding,) = said(made, "iterations of a loop")
    assert "all-gather of f32[1024,1024] in each of 12 iterations" in finding
    assert f"{__file__}:" in finding
    assert "100% of the bytes a device sends" in finding
    other = made.what_if(suggested(finding))
    assert other.cost.bytes_sent == 0
    assert not said(other, "loop")


@pytest.mark.parametrize(
    "entries",
    [((1, 1, 1), (8, 1)), ((1, 1, 8), (1, 1))],
    ids=["nothing is sent", "the activations are gathered"],
)
def test_loops_that_gather_no_weights_each_round(entries):
    made = shardfn.plan(
        layers,
        shaped(12, 64, 64),
        shaped(128, 64),
        in_strategy=entries,
        device="h100:8",
    )
    assert not said(made, "iterations of a loop")  # what is gathered is small


def test_layers_that_are_cut_are_all_gathered_in_each_round():
    """So XLA compiles it for GPUs and TPUs; on CPU they are gathered once."""
    args, entries = (shaped(12, 64, 64), shaped(128, 64)), ((4, 1, 1), (1, 1))
    made = shardfn.plan(layers, *args, in_strategy=entries, device="h100:4")
    (finding,) = said(made, "iterations of a loop")
    assert "all-gather of f32[12,64,64] in each of 12 iterations" in finding and "the same array each time" in finding
    assert not said(shardfn.plan(layers, *args, in_strategy=entries, device="cpu:4"), "iterations of a loop")


@pytest.mark.parametrize(("device", "rounds"), [("cpu:8", 1), ("h100:8", 12), ("tpu-v5e:2x4", 12)])
def test_a_weight_that_a_loop_gathers(device, rounds):
    def same(w, x):
        return jax.lax.fori_loop(0, 12, lambda _, h: jnp.tanh(h @ w), x)

    made = shardfn.plan(same, shaped(1024, 1024), X, in_strategy=((8, 1), (8, 1)), device=device)
    assert [c.trips for c in made.collectives] == [rounds]
    assert bool(said(made, "iterations of a loop")) == (rounds > 1)


def test_the_same_array_each_time():
    """XLA on CPU moves it out of the loop, so nothing is said there."""

    def same(w, x):
        return jax.lax.fori_loop(0, 12, lambda _, h: jnp.tanh(h @ jnp.sin(w)), x)

    entries = ((8, 1), (8, 1))
    found = said(
        shardfn.plan(same, shaped(1024, 1024), X, in_strategy=entries, device="h100:8"), "iterations of a loop"
    )
    assert all("the same array each time" in f for f in found)
    here = shardfn.shard(same, entries)
    assert not said(here.plan(jnp.ones((1024, 1024)), jnp.ones((1024, 1024))), "iterations of a loop")
    data = here.explain(jnp.ones((1024, 1024)), jnp.ones((1024, 1024)), compiled=True).to_dict()
    assert sum(c["runs"] for c in data["compiled"]["collectives"] if c["kind"] == "all-gather") == 1


# ---- full rematerialisation


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


MLP = shaped(64, 128), shaped(128, 256), shaped(256, 64)
LAYOUTS = {((1, 4), (2, 2), (8, 1)): True, ((1, 1), (8, 1), (4, 2)): True, ((8, 1), (1, 1), (1, 1)): False}
"""Of the three arguments of `mlp`, and whether XLA knows no way from one layout to another."""

COMPILE = """
import ast, sys
import shardfn
from tests.planning.test_diagnostics import MLP, mlp
for text in sys.argv[1:]:
    print("==", file=sys.stderr, flush=True)
    shardfn.shard(mlp, in_strategy=ast.literal_eval(text)).lower(*MLP).compile()
"""


@pytest.mark.slow
def test_what_xla_calls_full_rematerialisation_is_said():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, LAYOUTS)], capture_output=True, text=True, check=True
    )
    logged = ["Involuntary full rematerialization" in part for part in done.stderr.split("==\n")[1:]]
    found = [said(shardfn.plan(mlp, *MLP, in_strategy=layout), "full rematerialisation") for layout in LAYOUTS]
    assert logged == [bool(texts) for texts in found] == list(LAYOUTS.values())
    for text in (text for texts in found for text in texts):
        assert f"{__file__}:" in text and "for dot_general" in text
        assert "fix: " in text


def test_an_array_that_is_gathered_whole_and_cut_again():
    made = shardfn.plan(lambda x: x * 2, X, in_strategy=((8, 1),), out_strategy=((1, 4),), device="h100:8")
    (finding,) = said(made, "full rematerialisation")
    assert "the array is replicated and sliced again" in finding
    assert "from (8, 1) to (1, 4)" in finding
    assert f"{__file__}:" in finding
    other = made.what_if(suggested(finding))
    assert other.cost.bytes_sent < made.cost.bytes_sent
    assert not said(other, "full rematerialisation")


@pytest.mark.parametrize("after", [(1, 8), (8, 1), (4, 1), (1, 1)])
def test_arrays_that_are_not(after):
    made = shardfn.plan(lambda x: x * 2, X, in_strategy=((8, 1),), out_strategy=(after,), device="h100:8")
    assert not said(made, "full rematerialisation")


def test_a_small_part_of_what_is_sent_is_not_worth_a_word():
    def both(x, y):
        return x * 2, y.sum(0)

    args, strategy = (shaped(64, 64), shaped(64, 65536)), ((8, 1), (8, 1))
    made = shardfn.plan(both, *args, in_strategy=strategy, out_strategy=((1, 4), (1,)), device="h100:8")
    assert any(c.is_last_resort for c in made.partitioned.communications)
    assert made.diagnostics == ()


# ---- memory


TABLE = shaped(65536, 262144, dtype="bfloat16")
ROWS = shaped(64, 65536, dtype="bfloat16")


def test_an_argument_held_whole_that_can_be_cut():
    made = shardfn.plan(lambda w, x: x @ w, TABLE, ROWS, in_strategy=((1, 1), (8, 1)), device="h100:8")
    (finding,) = made.diagnostics
    assert finding.startswith("`w` is replicated on every device, taking 32 GiB, 43% of its memory")
    other = made.what_if(suggested(finding))
    assert other.decision("w").local_bytes == made.decision("w").local_bytes / 8
    assert not said(other, "replicated on every device")


def test_several_arguments_held_whole():
    tables = [shaped(65536, 65536, dtype="bfloat16") for _ in range(4)]
    made = shardfn.plan(
        lambda ws, x: [x @ w for w in ws], tables, ROWS, in_strategy=(((1, 1)), (8, 1)), device="h100:8"
    )
    (finding,) = made.diagnostics
    assert finding.startswith(
        "4 arguments are replicated on every device, taking 32 GiB, 43% of its memory, the largest is `ws/0` with 8 GiB"
    )


@pytest.mark.parametrize(
    ("shape", "entry"),
    [((65536, 262144), (8, 1)), ((65536, 262144), (1, 4)), ((65537, 262147), (1, 1)), ((1024, 65536), (1, 1))],
    ids=["sharded", "sharded in part", "cannot be sharded", "small"],
)
def test_arguments_of_which_nothing_is_said(shape, entry):
    x = shaped(64, shape[0], dtype="bfloat16")
    made = shardfn.plan(
        lambda w, x: x @ w, shaped(*shape, dtype="bfloat16"), x, in_strategy=(entry, AUTO), device="h100:8"
    )
    assert not said(made, "replicated on every device")


def test_what_does_not_fit_and_what_would_free_most():
    w, x = shaped(65536, 262144), shaped(64, 65536)
    made = shardfn.plan(lambda w, x: x @ w, w, x, in_strategy=((1, 1), (2, 1)), device="tpu-v5e:2x4")
    (finding,) = made.diagnostics
    assert finding.startswith("it may not fit: 64 GiB per device at the peak (estimate), 49.1 GiB over the limit")
    assert "largest: `w` (1, 1) 64 GiB" in finding
    other = made.what_if(suggested(finding))
    assert not said(other, "may not fit")
    assert made.cost.memory.peak - other.cost.memory.peak > 50 * 2**30


def test_nothing_left_to_cut():
    made = shardfn.plan(lambda x: x * 2, shaped(2**36), in_strategy=((8,),), device="tpu-v5e:2x4")
    (finding,) = made.diagnostics
    assert finding.startswith("it may not fit: 64 GiB per device")
    assert "fix: use more devices" in finding


def test_a_searched_plan_that_does_not_fit_may_be_searched_for_memory():
    x = shaped(2**19 + 1, 2**18)
    searched, given = (shardfn.plan(lambda x: x * 2, x, in_strategy=(entry,), device="tpu-v5e:2x4", level=2)
                       for entry in (AUTO, (1, 8)))  # fmt: skip
    (open_, held) = (said(made, "may not fit") for made in (searched, given))
    assert ["search with level=1" in f for f in (*open_, *held)] == [True, False]


def test_findings_are_the_same_every_time():
    options = {"in_strategy": ((1, 8, 1), (8, 1)), "device": "h100:8"}
    assert shardfn.plan(layers, WS, X, **options).diagnostics == shardfn.plan(layers, WS, X, **options).diagnostics


def test_one_device_has_none():
    assert shardfn.plan(layers, WS, X, device="h100:1").diagnostics == ()


def test_a_style_that_gathers_its_parameters_is_not_told_so():
    step = jax.grad(lambda ws, x: (layers(ws, x) ** 2).sum())
    shapes = shaped(16, 512, 512), shaped(256, 512)
    assert not said(shardfn.plan(step, *shapes, style="fsdp", device="h100:8"), "iterations of a loop")


def test_what_no_sharding_avoids_is_no_diagnostic():
    def rows(u):  # every row needs all others, whatever the sharding
        return jax.lax.fori_loop(0, 10, lambda i, u: jnp.sort(jnp.sort(u, 0), 1), u)

    made = shardfn.plan(rows, shaped(1024, 1024), in_strategy=((8, 1),), device="h100:8")
    assert made.cost.bytes_sent > 1 << 20
    assert not any("avoids it and sends less" in text and "no other" in text for text in made.diagnostics)


# ---- devices that do the same work


@pytest.mark.parametrize("twice", [False, True], ids=["once", "two at one line"])
def test_an_fft_that_is_replicated_has_a_remedy_of_its_own(twice):
    function = (lambda x: jnp.fft.ifft2(jnp.fft.fft2(x)).real) if twice else lambda x: jnp.abs(jnp.fft.fft2(x))
    made = shardfn.plan(function, shaped(512, 512), device="cpu:8")
    (told,) = [text for text in made.diagnostics if "of the FLOPs instead of" in text]
    assert "in a `jax.shard_map`" in told and "fewer devices" not in told


def test_sizes_that_the_devices_do_not_divide_are_named():
    def solve(u):
        step = lambda u, _: (u + 0.1 * (jnp.roll(u, 1, 0) + jnp.roll(u, 1, 1)), u.max() * jnp.ones(3))  # noqa: E731
        return jax.lax.scan(step, u, None, length=8)

    made = shardfn.plan(solve, shaped(8190, 4095), device="h100:8")
    (told,) = [text for text in made.diagnostics if "of the FLOPs instead of" in text]
    assert told.endswith("pad `u`, of which 8 divides no dimension, from 8190 to 8192, or use 7 devices")
    assert "rows sharded 8 ways" not in made.kind


def test_devices_that_do_what_others_do():
    step = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    odd = shaped(4099, 4099), shaped(16, 4099)  # nothing but the batch can be sharded
    made = shardfn.plan(step, *odd, device="h100:512", level=2)
    (told,) = said(made, "repeat the same work")
    share, alike = re.match(
        r"each of 512 devices computes (.+)% of the FLOPs instead of 0.195%: groups of (\d+) devices repeat", told
    ).groups()
    unsharded = shardfn.plan(step, *odd, device="h100:1").cost.flops
    assert float(share) == pytest.approx(100 * made.cost.flops / unsharded, rel=5e-3)
    assert int(alike) == round(512 * made.cost.flops / unsharded)
    assert told.endswith("pad `w`, of which 512 divides no dimension, from 4099 to 4608")
    product = shardfn.plan(
        lambda x: (x @ x.T)[:1] @ x, shaped(4099, 4099), device="cpu:8", search_mode="sharding_propagation"
    )
    assert not any("batch" in text for text in product.diagnostics)
    even = shaped(4096, 4096), shaped(8192, 4096)
    assert not said(shardfn.plan(step, *even, device="h100:8", level=2), "devices repeat")
    given = shardfn.plan(step, *odd, in_strategy=((1, 1), (1, 1)), device="h100:512")
    assert not said(given, "devices repeat"), "the user said so"


@pytest.mark.slow
def test_what_would_use_the_devices():
    args = shaped(16, 8192), shaped(8192, 8193), shaped(8193, 8192)
    made = shardfn.plan(lambda x, v, w: jax.nn.relu(x @ v) @ w, *args, device="h100:512", level=2)
    (told,) = said(made, "devices repeat a part of their work")  # every mesh axis shards some of it
    assert re.search(
        r"on the mesh [\dx]+ leaves each device [\d.]+%, in [\d,.]+ .?s instead of [\d,.]+ .?s \(modelled\);", told
    )


# ---- a limit that is kept by a hair


@pytest.mark.parametrize(("share", "count"), [(1.05, 1), (3.0, 0)])
def test_a_limit_within_the_models_error(share, count):
    step = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())
    args = shaped(256, 512), shaped(4096, 256)
    options = {"device": "cpu:8", "in_strategy": ((1, 1), (8, 1))}
    peak = shardfn.plan(step, *args, **options).cost.memory.peak
    made = shardfn.plan(step, *args, memory_limit=share * peak, **options)
    told = said(made, "near the memory limit")
    assert len(told) == count
    for text in told:
        assert f"{peak:,} of {share * peak:,.0f} bytes" in text and "compile_candidates=" in text and "verify()" in text


# ---- what calls back into Python, for a platform that is not here


def printing(x, w):
    y = x @ w
    jax.debug.print("{}", y.sum())
    return y


def asking(x, w):
    return jax.pure_callback(lambda a: 2 * a, shaped(*x.shape), x) @ w


@pytest.mark.parametrize("function", [printing, pytest.param(asking, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [pytest.param("tpu-v5e:2x4", marks=pytest.mark.slow), "h100:8"])
def test_a_call_back_into_python_is_planned_for_a_target(function, target):
    args = shaped(64, 64), shaped(64, 64)
    made = shardfn.plan(function, *args, level=2, device=target)
    (told,) = said(made, "calls back into Python")
    assert "lowered for cpu instead" in told
    assert made.cost.flops > 0 and np.prod(made.mesh.axis_sizes) == 8
    here = shardfn.plan(function, *args, level=2, device="cpu:8")
    assert not said(here, "lowered for")
    assert not said(shardfn.plan(jnp.matmul, *args, level=2, device=target), "lowered for")


def test_ragged_dot_that_sends_more_than_its_rows_is_advised_to_dispatch():
    def layer(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((1024, 256), "float32"), ((16, 256, 512), "float32"), ((16,), "int32"))
    ]
    plan = shardfn.plan(layer, *shapes, in_strategy=((8, 1), (8, 1, 1), (1,)), device="cpu:8")
    [note] = [d for d in plan.diagnostics if "experts.dispatch" in d]
    assert note.startswith("ragged_dot at test_diagnostics.py:") and "336 KiB per device" in note


def test_experts_in_einsums_that_send_more_than_their_rows_are_advised_to_dispatch():
    def loss(p, x):
        return (moe.forward(p, x, 32) ** 2).sum()

    p = {"gate": shaped(256, 16), "w1": shaped(16, 256, 512), "w2": shaped(16, 512, 256)}
    by_expert = {"gate": (1, 1), "w1": (8, 1, 1), "w2": (8, 1, 1)}, (8, 1, 1)
    x = shaped(8, 256, 256)
    made = shardfn.plan(jax.grad(loss, (0, 1)), p, x, in_strategy=by_expert, device="cpu:8")
    (note,) = said(made, "experts.dispatch")
    assert note.startswith("einsums of a mixture of experts at moe.py:") and "1.75 MiB per device" in note
    # Without gradients XLA sends no more than the rows, by two all-to-alls.
    assert not said(shardfn.plan(loss, p, x, in_strategy=by_expert, device="cpu:8"), "experts.dispatch")

    def heads(w, x):  # a matrix for each head is no expert
        q = jnp.einsum("btm,mhd->bthd", x, w["q"])
        return jnp.einsum("bthd,hdm->btm", jax.nn.gelu(jnp.einsum("bthd,hde->bthe", q, w["own"])), w["out"]).sum()

    w = {"q": shaped(256, 16, 64), "own": shaped(16, 64, 64), "out": shaped(16, 64, 256)}
    assert not said(
        shardfn.plan(jax.grad(heads), w, x, in_strategy=(None, (8, 1, 1)), device="cpu:8"), "experts.dispatch"
    )


@pytest.mark.parametrize("entry", [(8, 1), (1, 1)])
def test_fields_of_one_table_are_advised_to_be_split(entry):
    offsets = np.array([0, 4000, 9000, 9500, 9600, 9700, 9800, 9900])
    loss = lambda table, ids: (table[ids + offsets] ** 2).sum()  # noqa: E731
    tokens = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731  # the last dimension has positions
    equal = lambda table, ids: (table[ids + jnp.arange(8) * 1250] ** 2).sum()  # noqa: E731
    positions = lambda table, ids: (table[ids + jnp.arange(8)] ** 2).sum()  # noqa: E731
    args = shaped(10_000, 64), shaped(512, 8, dtype="int32")
    for function, count in ((loss, 1), (tokens, 0), (equal, 1), (positions, 0)):
        made = shardfn.plan(jax.grad(function), *args, in_strategy=(entry, (8, 1)), device="cpu:8")
        notes = said(made, "lookup of 8 fields in `table` [10000, 64] at test_diagnostics.py:")
        assert len(notes) == count and made.cost.bytes_sent > 2**20


@pytest.mark.parametrize(
    "function",
    [
        lambda u: jnp.roll(u, 1, 0) * 2,
        lambda u: jnp.fft.fft(u, axis=0),
        lambda u: jnp.sort(u, 0),
        lambda u: u.at[1:-1].set(u[2:] + u[:-2]),
        lambda u: jax.jit(jax.jit(lambda v: jnp.linalg.norm(jnp.roll(v, 3, 0))))(u),
    ],
)
def test_collectives_inside_of_jaxs_functions_have_the_line_that_calls_them(function):
    plan = shardfn.plan(function, jax.ShapeDtypeStruct((64, 64), "float32"), in_strategy=((8, 1),), device="cpu:8")
    line = function.__code__.co_firstlineno
    assert plan.collectives and all(c.where.endswith(f"test_diagnostics.py:{line}") for c in plan.collectives)


@pytest.mark.skipif(not IS_BEFORE_JAX_0_12, reason="XLA transforms shards along their unsharded dimensions")
@pytest.mark.parametrize("strategy", [(8, 1, 1), (1, 8, 1)])
def test_fourier_transforms_of_given_shards_that_every_device_computes_are_said(strategy):
    ensemble = jax.vmap(lambda u: jnp.fft.ifft(jnp.fft.fft(u, axis=1) * 2, axis=1).real)
    plan = shardfn.plan(
        ensemble, jax.ShapeDtypeStruct((8, 64, 64), "float32"), in_strategy=(strategy,), device="h100:8"
    )
    (text,) = [text for text in plan.diagnostics if "XLA gathers the operands of `fft`" in text]
    assert "test_diagnostics.py" in text and "jax.shard_map" in text


@pytest.mark.parametrize("device", ["cpu:8", "h100:8"])
@pytest.mark.parametrize(
    ("function", "said"),
    [(jnp.linalg.eigvalsh, True), (jnp.linalg.inv, True), (jnp.linalg.svd, True), (jax.vmap(jnp.linalg.svd), False)],
)
def test_matrices_of_library_calls_that_every_device_computes_are_said(function, said, device):
    shape, strategy = ((64, 64), (8, 1)) if said else ((8, 64, 64), (8, 1, 1))
    plan = shardfn.plan(
        lambda x: function(x), jax.ShapeDtypeStruct(shape, "float32"), in_strategy=(strategy,), device=device
    )
    assert any("and each device computes all of it" in text for text in plan.diagnostics) == said


def test_a_collective_has_the_line_of_its_own_function_where_another_moved_the_same_rows():
    def together(u):
        return u.at[1:-1].set(u[2:] + u[:-2])

    def apart(u):
        found = u[2:] + u[:-2]
        return u.at[1:-1].set(found)

    for function in (together, apart):
        plan = shardfn.plan(function, jax.ShapeDtypeStruct((64, 64), "float32"), in_strategy=((8, 1),), device="cpu:8")
        line = function.__code__.co_firstlineno + 1
        assert {c.where.rpartition(":")[2] for c in plan.collectives} == {str(line)}
