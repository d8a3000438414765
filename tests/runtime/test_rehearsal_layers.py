"""A plan of which one shard does not fit: fewer layers are measured, and scaled."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import shardfn
from shardfn.compiled import targets
from shardfn.cost.devices.chips import Chip
from shardfn.runtime.other_process import Answer, ask, environment, program_of
from shardfn.runtime.rehearsal import rehearse
from shardfn.runtime.rehearsal.job import Measured, Refused
from shardfn.runtime.rehearsal.layers import NoLayers, fewer_layers, scaled
from shardfn.runtime.rehearsal.platforms import CUDA, PLATFORMS, RehearsalPlatform
from tests.messages import refusal, told

COUNT, LAYERS, WIDTH = 2, 16, 64
VIRTUAL = RehearsalPlatform("CPU", lambda: {"JAX_NUM_CPU_DEVICES": str(COUNT)}, profiled=CUDA.profiled)
CPU = Chip("mine", "cpu", flops=1e9, memory_bytes_s=1e9, memory_bytes=1e9, link_bytes_s=1e9, latency_s=1e-5)
ADAMW = optax.adamw(1e-3)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def block(x, w):
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def step(state, tokens):
    params, moments = state

    def loss(p):
        x = p["table"][tokens]
        if isinstance(p["layers"], list):
            for w in p["layers"]:
                x = block(x, w)
        else:
            x = jax.lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), x, p["layers"])[0]
        return (x @ p["table"].T).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = ADAMW.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def planned(device, is_scanned=True, layers=LAYERS, **options):
    one = {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
    params = {"table": array(32, WIDTH), "layers": [one] * layers}
    if is_scanned:
        params["layers"] = jax.tree.map(lambda w: array(layers, *w.shape), one)
    state = params, jax.eval_shape(ADAMW.init, params)
    return shardfn.plan(step, state, array(8, 16, dtype="int32"), device=device, donate_argnums=0, **options)


@pytest.fixture
def virtual():
    with mock.patch.dict(PLATFORMS, cpu=VIRTUAL):
        yield


@pytest.fixture
def too_large(monkeypatch):
    """One shard of a whole program does not fit."""
    ask_of = rehearse._ask

    def asked(plan, platform, steps, end, say, layers):
        if layers is None:
            return Answer(Refused("memory", "RESOURCE_EXHAUSTED"), "", "", 0)
        return ask_of(plan, platform, steps, end, say, layers)

    monkeypatch.setattr(rehearse, "_ask", asked)


@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("style", ["fsdp", "tensor_parallel"])
def test_a_plan_with_fewer_layers_has_the_same_shardings(is_scanned, style):
    plan = planned("cpu:8", is_scanned, style=style)
    small, large = fewer_layers(plan)
    assert (small.count, small.kept, large.kept) == (LAYERS, *((2, 4) if is_scanned else (3, 5)))
    for few in (small, large):
        assert [d.spec for d in few.plan.inputs] == [plan.inputs[i].spec for i in few.inputs]
        program = program_of(few.plan)
        held = [i for i, is_donated in enumerate(program.donated) if is_donated]
        assert len(held) == len(program.donated) - 1  # all but the tokens
        shapes = [aval.shape for aval in program.exported.in_avals]
        of_layers = [shape for shape in shapes if shape[-2:] in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))]
        rows = sum(shape[0] if is_scanned else 1 for shape in of_layers)
        assert rows == few.kept * 2 * 3  # two weights, each with two moments
        assert [aval.shape for aval in program.exported.out_avals[: len(held)]] == [shapes[i] for i in held]


def test_layers_that_are_sharded_are_kept_in_whole_shards():
    plan = planned("cpu:8", in_strategy=None, parameter_plan={"*/layers/*": (2, 1, 4)}, layers=12)
    assert [few.kept for few in fewer_layers(plan)] == [4, 8]


@pytest.mark.parametrize("is_scanned", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "unrolled"])
def test_a_shard_that_does_not_fit_is_measured_by_layers(virtual, request, is_scanned):
    plan = planned(CPU.pod(COUNT), is_scanned, style="fsdp")
    whole = plan.rehearse(steps=1).rehearsal
    request.getfixturevalue("too_large")
    found = plan.rehearse(steps=1).rehearsal
    assert whole is not None and found is not None and whole.layers == ""
    assert found.layers == ("2 and 4 of 16 layers" if is_scanned else "3 and 5 of 16 layers")
    assert found.compiled_bytes == pytest.approx(whole.compiled_bytes, rel=0.05)
    assert found.predicted_bytes == plan.cost.memory.peak and min(found.rounds_s) > 0
    assert f"{found.layers} were measured, and scaled to all" in str(found)
    assert f"{found.layers}, and scaled to all" in found.line()


def test_figures_are_scaled_by_what_a_layer_adds():
    few = Measured("GPU", "0.12.0", (1.0, 2.0), 1000, None, (), 0.9, ())
    more = dataclasses.replace(few, rounds_s=(1.5, 1.9), compiled_bytes=1300)
    found = scaled(few, more, (2, 4), 32)
    assert found.rounds_s == (8.5, 1.9) and (found.compiled_bytes, found.peak_bytes) == (5500, None)


def test_rows_that_every_step_reads_are_no_layers():
    def attend(k, v, weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum() + jax.lax.map(lambda q: jax.nn.softmax(k @ q) @ v, k).sum()

    args = array(512, 16), array(512, 16), [array(16, 16)] * 12, array(64, 16)
    plan = shardfn.plan(attend, *args, device="cpu:8", style="data_parallel")
    assert [few.kept for few in fewer_layers(plan)] == [3, 5]  # those of the loop
    alone = shardfn.plan(lambda k, v: attend(k, v, [], v), *args[:2], device="cpu:8", in_strategy=((1, 1), (1, 1)))
    with pytest.raises(NoLayers, match="512 rows or blocks do not add the same work each"):
        fewer_layers(alone)


def test_without_layers_the_error_is_that_of_the_memory(virtual, too_large):
    plan = shardfn.plan(jnp.matmul, array(64, 64), array(64, 64), in_strategy=((2, 1), (1, 1)), device=CPU.pod(COUNT))
    error = refusal(plan.rehearse)
    assert told(error) == "StrategyError: device" and "fewer layers cannot be measured: no scan takes" in str(error)


def test_the_error_says_why_layers_cannot_be_measured():
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4")
    with pytest.raises(NoLayers) as no_layers:
        fewer_layers(plan)
    answer = Answer(Refused("memory", "RESOURCE_EXHAUSTED"), "", "", 0)
    error = refusal(rehearse.rehearsal_of, plan, answer, 60, str(no_layers.value))
    assert told(error) == "StrategyError: device" and "no scan takes the rows of arguments" in str(error)


def test_a_function_for_one_number_of_layers_is_refused_with_its_own_words():
    def counted(x, w):
        assert w.shape[0] == 12, "twelve layers"
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    plan = shardfn.plan(counted, array(8, 16), array(12, 16, 16), in_strategy=((8, 1), (1, 1, 1)), device="cpu:8")
    with pytest.raises(NoLayers, match="with 2 of 12 layers it raises AssertionError: twelve layers"):
        fewer_layers(plan)


def test_a_module_is_measured_by_layers_too():
    class Net:
        def __init__(self):
            self.w = jnp.ones((12, 16, 16))

        def __call__(self, x):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.w)[0]

    plan = shardfn.plan(Net(), array(8, 16), style="data_parallel", device="cpu:8")
    small, _ = fewer_layers(plan)
    assert [aval.shape for aval in program_of(small.plan).exported.in_avals] == [(2, 16, 16), (8, 16)]


def test_a_layout_file_keeps_which_layers_were_measured(tmp_path):
    plan = planned("cpu:8", style="fsdp")
    found = rehearse.rehearsal_of(plan, Answer(Measured("GPU", "0.12.0", (1e-3,), 8, 9, (), 0.0, ()), "", "", 0), 60)
    plan = dataclasses.replace(plan, rehearsal=dataclasses.replace(found, layers="2 and 4 of 16 layers"))
    plan.save(tmp_path / "layout.toml")
    assert shardfn.load_layout(tmp_path / "layout.toml").rehearsal == plan.rehearsal


# ---- with XLA's compiler for GPUs

COMPILE = """
import sys
from shardfn.compiled.executable import read
from shardfn.compiled.targets import devices
from shardfn.runtime.other_process import Desk
desk = Desk.at(sys.argv[1])
target, programs = desk.job
found = []
for program in programs:
    function, shapes = program.on(devices(target))
    found.append(read(function.lower(*shapes).compile()).together("gpu"))
desk.hand_back(found)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not targets.has_gpu_compiler(), reason="JAX's CUDA plugin is not installed")
@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("style", ["fsdp", "tensor_parallel"])
def test_memory_of_a_gpu_program_is_that_of_its_layers(is_scanned, style):
    plan = planned("h100:8", is_scanned, style=style)
    two = fewer_layers(plan)
    programs = [program_of(one) for one in (plan, *(few.plan for few in two))]
    answer = ask(COMPILE, (targets.target(plan.hardware), programs), environment(flags=CUDA.flags))
    assert answer.result is not None, answer.said
    whole, *both = (Measured("GPU", "", (1.0,), size, None, (), 0.0, ()) for size in answer.result)
    found = scaled(*both, (two[0].kept, two[1].kept), LAYERS)
    assert found.compiled_bytes == pytest.approx(whole.compiled_bytes, rel=0.05)
