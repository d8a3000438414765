"""One device's part of a plan, measured by another process. Without a GPU a platform of the tests stands in: there the other
process has all devices of the plan, and runs the whole program on CPUs."""

import dataclasses
import json
import pickle
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardfn
from benchmarks import rehearse as benchmark
from shardfn.cli.main import main
from shardfn.compiled import targets
from shardfn.compiled.executable import instruction_lines
from shardfn.cost.devices.chips import Chip
from shardfn.cost.devices.hardware import preset_of
from shardfn.cost.rehearsal import Kernel, Rehearsal
from shardfn.ir.index_bounds import index_bounds
from shardfn.planning.plan import answered_call
from shardfn.runtime.other_process import Answer, ask, environment, program_of
from shardfn.runtime.rehearsal import child, rehearse
from shardfn.runtime.rehearsal.arguments import UNKNOWN, made_up
from shardfn.runtime.rehearsal.job import Job, Measured, Refused
from shardfn.runtime.rehearsal.platforms import CUDA, PLATFORMS, RehearsalPlatform
from tests.messages import refusal, told

COUNT = 2
VIRTUAL = RehearsalPlatform("CPU", lambda: {"JAX_NUM_CPU_DEVICES": str(COUNT)}, profiled=CUDA.profiled)
CPU = Chip("mine", "cpu", flops=1e9, memory_bytes_s=1e9, memory_bytes=1e9, link_bytes_s=1e9, latency_s=1e-5)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def step(params, tokens, key):
    def loss(p):
        x = p["table"][tokens] + 0.01 * jax.random.normal(key, (*tokens.shape, 16))
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0]
        return (x @ p["table"].T).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


ARGS = (
    {"table": array(64, 16), "layers": array(3, 16, 16)},
    array(8, 4, dtype="int32"),
    jax.eval_shape(lambda: jax.random.key(0)),
)


def planned(device, **options):
    return shardfn.plan(step, *ARGS, device=device, donate_argnums=0, style="fsdp", **options)


@pytest.fixture(scope="module")
def rehearsed():
    with mock.patch.dict(PLATFORMS, cpu=VIRTUAL):
        return planned(CPU.pod(COUNT)).rehearse(steps=2, time_limit=300)


def test_rehearse_measures_compute_memory_and_kernels(rehearsed):
    found, cost = rehearsed.rehearsal, rehearsed.cost
    assert len(found.rounds_s) == child.ROUNDS and min(found.rounds_s) > 0
    assert (found.target, found.count, found.jax) == ("mine:2", COUNT, jax.__version__)
    assert (found.compute_s, found.communication_s) == (cost.compute_s, cost.communication_s)
    assert found.predicted_bytes == cost.memory.peak and found.compiled_bytes >= cost.memory.arguments - 64
    assert found.none_s == pytest.approx(found.measured_s + cost.communication_s)
    assert found.notes == ()  # donated arguments are fed back, and no loop is uncounted
    assert found.kernels and any(__file__ in kernel.where for kernel in found.kernels)
    assert found.kernels_s >= max(kernel.seconds for kernel in found.kernels) > 0


def test_rehearse_changes_nothing_but_the_rehearsal(rehearsed):
    assert rehearsed == planned(CPU.pod(COUNT))
    assert pickle.loads(pickle.dumps(rehearsed)).rehearsal == rehearsed.rehearsal


# ---- errors


@pytest.mark.parametrize("device", ["cpu:4", "tpu-v5e:2x4"])
def test_only_gpus_can_rehearse(device):
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device=device)
    error = refusal(plan.rehearse)
    assert told(error) == "NotAvailableError: device" and "a GPU" in str(error)
    assert told(refusal(lambda: shardfn.explain(plan, rehearse=True))) == "NotAvailableError: device"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU is here")
def test_explain_of_a_function_rehearses_too():
    function = shardfn.shard(jnp.sin, ((4,),), device="tpu-v5e:2x2")
    assert told(refusal(lambda: function.explain(array(8), rehearse=True))) == "NotAvailableError: device"
    again = refusal(lambda: shardfn.explain(jnp.sin, array(8), device="tpu-v5e:2x2", rehearse=True))
    assert told(again) == "NotAvailableError: device"


def test_rehearse_without_a_gpu_says_so():
    error = refusal(shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4").rehearse)
    assert told(error) == "DeviceError: device" and "no GPU here" in str(error)


@pytest.mark.parametrize(
    ("options", "name"), [({"steps": 0}, "steps"), ({"steps": 2.5}, "steps"), ({"time_limit": "long"}, "time_limit")]
)
def test_rehearse_with_a_wrong_option_is_refused(options, name):
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4")
    error = refusal(lambda: plan.rehearse(**options))
    assert f"`{name}`" in str(error) and error.problems[0].where.startswith(f"rehearse({name}=")


def job(plan, **changes):
    bounds = index_bounds(answered_call(plan).posed.call.traced.jaxpr)
    chip, count = plan.hardware.chip, plan.hardware.count
    return dataclasses.replace(Job(program_of(plan), chip, count, bounds, 1, (), ()), **changes)


def missing(name, value):
    raise AttributeError(name)


def test_the_process_that_measures_says_why_it_does_not():
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((8,),), device="cpu:8")

    def reason(set_option=lambda name, value: None, **changes):
        found = child.measure(job(plan, **changes), lambda stage: None, set_option)
        assert isinstance(found, Refused) and found.reason in rehearse.ERRORS
        return found.reason, found.said

    assert reason(missing, options=(("mock", 8),)) == ("option", "mock")
    assert reason(chip=dataclasses.replace(CPU, platform="gpu")) == ("device", "there are CPU devices alone")
    assert reason(chip=dataclasses.replace(CPU, device_kinds=("Other",)))[0] == "kind"
    assert reason(count=64) == ("count", "JAX has 8 devices")


class TooLarge:
    """A program for which no device has room, as XLA says it."""

    def on(self, devices):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96.00GiB.\n[more]")


@pytest.mark.parametrize(
    ("program", "reason"),
    [(TooLarge(), "memory"), (mock.Mock(**{"on.side_effect": RuntimeError("no such op")}), "compiler")],
)
def test_what_xla_refuses_is_told_apart(program, reason):
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((8,),), device="cpu:8")
    found = child.measure(job(plan, program=program), lambda stage: None, lambda name, value: None)
    assert isinstance(found, Refused) and found.reason == reason and "[more]" not in found.said


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_arguments_that_are_donated_for_nothing_are_there_for_each_call():
    plan = shardfn.plan(jnp.sum, array(64), in_strategy=((8,),), device="cpu:8", donate_argnums=0)
    found = child.measure(job(plan), lambda stage: None, lambda name, value: None)
    assert isinstance(found, Measured) and len(found.rounds_s) == child.ROUNDS


@pytest.mark.parametrize("reason", rehearse.ERRORS)
def test_every_refusal_is_an_error_with_a_fix(reason):
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4")
    error = refusal(rehearse.rehearsal_of, plan, Answer(Refused(reason, "what XLA said"), "", "", 0), 60)
    assert error.problems[0].where == "device = 'h100:4'" and "what XLA said" in str(error)


def test_a_process_that_is_ended_or_ends_itself_is_an_error_with_its_last_words():
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4")
    late = refusal(rehearse.rehearsal_of, plan, Answer(None, "", "compiling", None), 60)
    assert told(late) == "DeviceError: time_limit" and "compiling" in str(late)
    dead = refusal(rehearse.rehearsal_of, plan, Answer(None, "Killed", "", -9), 60)
    assert "status -9" in str(dead) and "Killed" in str(dead)


def test_loops_that_depend_on_values_are_noted():
    plan = shardfn.plan(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x),
        array(8),
        in_strategy=((4,),),
        device="h100:4",
    )
    measured = Measured("NVIDIA H100", "0.12.0", (1e-3,), None, None, (), 0.0, ())
    (note,) = rehearse.rehearsal_of(plan, Answer(measured, "", "", 0), 60).notes
    assert "how often the loop" in note and "test_rehearsal.py" in note


# ---- candidates


def test_rehearse_candidates_takes_the_best_measured_plan():
    def layer(x, w):
        return jnp.tanh(x @ w)

    args = array(64, 32), array(32, 32)
    with mock.patch.dict(PLATFORMS, cpu=VIRTUAL):
        plan = shardfn.plan(layer, *args, device=CPU.pod(COUNT), level="time", rehearse_candidates=2)
    (note,) = (text for text in plan.diagnostics if text.startswith("rehearsed 2 plans"))
    times = [float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) µs", note)]
    taken = next(
        i for i, name in enumerate(re.findall(r"(?:device: |; )([^;:]+?), mesh", note)) if f"Best: {name};" in note
    )
    assert plan.rehearsal is not None and times[taken] == min(times)
    assert times[taken] == pytest.approx(1e6 * plan.rehearsal.none_s, abs=0.06)


@pytest.mark.parametrize("options", [{"rehearse_candidates": -1}, {"rehearse_candidates": "all"}, {"rehearse_candidates": True},
                                     {"rehearse_candidates": 2, "compile_candidates": 2}])  # fmt: skip
def test_rehearse_candidates_that_is_no_count_is_refused(options):
    error = refusal(lambda: shardfn.shard(jnp.sin, **options))
    assert "rehearse_candidates" in str(error)


def test_rehearse_candidates_for_cpus_are_refused():
    error = refusal(lambda: shardfn.plan(jnp.matmul, array(8, 8), array(8, 8), device="cpu:4", rehearse_candidates=2))
    assert told(error) == "NotAvailableError: device"


# ---- the command line

REHEARSE = ["rehearse", "jax.numpy:matmul", "--shapes", "f32[64,32]", "f32[32,32]", "--level", "time"]


def test_the_command_says_what_is_missing(capsys):
    assert main([*REHEARSE, "--device", "tpu-v5e:4"]) == 2
    assert "NotAvailableError: one shard of a plan for tpu-v5e:4 cannot be rehearsed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_and_writes_what_was_measured(capsys, tmp_path):
    files = {end: tmp_path / f"plan.{end}" for end in ("toml", "json", "html")}
    with mock.patch.dict(PLATFORMS, cpu=VIRTUAL):
        assert main([*REHEARSE, "--device", f"cpu:{COUNT}", "--steps", "1", "--save", str(files["toml"]),
                     "--json", str(files["json"]), "--html", str(files["html"])]) == 0  # fmt: skip
    assert f"one device of cpu:{COUNT}" in capsys.readouterr().out
    measured = shardfn.load_layout(files["toml"]).rehearsal
    assert measured is not None
    assert json.loads(files["json"].read_text())["rehearsal"]["rounds_s"] == [*measured.rounds_s]
    assert "Rehearsed on" in files["html"].read_text()


@pytest.mark.slow
def test_the_benchmark_has_a_row_for_each_program():
    virtual = dataclasses.replace(VIRTUAL, environment=lambda: {"JAX_NUM_CPU_DEVICES": "8"})
    with mock.patch.dict(PLATFORMS, cpu=virtual):
        row = benchmark.row("gpt tp", CPU, tiny=True, steps=1, limit=300)
    assert row["measured / modelled"] > 0 and row["compiled MiB"] > 0 and row["device"] == "cpu"
    assert "error" in benchmark.row("gpt tp", CPU, tiny=True, steps=1, limit=300)


# ---- the other process

CHILD = "import sys; from shardfn.runtime.other_process import Desk; d = Desk.at(sys.argv[1]); "


def test_ask_gives_the_result_and_its_stage():
    found = ask(CHILD + "d.say('adding'); d.hand_back(d.job + 1)", 2, environment())
    assert (found.result, found.stage, found.status) == (3, "adding", 0)


def test_ask_of_a_process_that_fails_or_is_late_gives_no_result():
    failed = ask("import sys; print('bad luck'); sys.exit(3)", None, environment())
    assert failed == Answer(None, "bad luck", "", 3)
    late = ask("import time; time.sleep(600)", None, environment(), seconds=0.3)
    assert late == Answer(None, "", "", None)


# ---- GPUs, here or not

COMPILE = (
    CHILD
    + """
from shardfn.compiled.targets import devices
target, program, options = d.job
function, shapes = program.on(devices(target))
lowered = function.lower(*shapes)
d.hand_back([lowered.compile(given).as_text() for given in (None, options)])
"""
)


@pytest.mark.gpu
@pytest.mark.skipif(not targets.has_gpu_compiler(), reason="JAX's CUDA plugin is not installed")
def test_a_gpu_program_compiles_alike_for_the_profiler():
    plan = planned("h100:8")
    job = targets.target(plan.hardware), program_of(plan), dict(CUDA.profiled)
    answer = ask(COMPILE, job, environment(flags=CUDA.flags))
    assert answer.result is not None, answer.said
    plain, profiled = answer.result
    assert instruction_lines(plain) == instruction_lines(profiled)
    for text in (plain, profiled):
        assert child.fed_back(text, 4) == {0: 0, 1: 1}  # the donated parameters
        assert any(__file__ in line for line in instruction_lines(text).values())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU is here")
def test_rehearse_on_the_gpu_that_is_here():
    plan = planned(preset_of("gpu", jax.devices()[0].device_kind).pod(8))
    found = plan.rehearse(time_limit=300).rehearsal
    assert found is not None and found.device == jax.devices()[0].device_kind and found.measured_s > 0
    assert found.peak_bytes and found.compiled_bytes and found.notes == ()
    assert any(__file__ in kernel.where for kernel in found.kernels)


# ---- arguments


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "complex64", "int32", "uint8", "int4", "bool"]
)
def test_made_up_arguments_have_shape_dtype_and_sharding(dtype):
    mesh = jax.make_mesh((8,), ("a",))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    made = made_up(jax.ShapeDtypeStruct((16, 40), dtype, sharding=sharding), None, 3)
    assert (made.shape, made.dtype, made.sharding) == ((16, 40), jnp.dtype(dtype), sharding)
    values = abs(np.asarray(made).astype("complex64" if dtype == "complex64" else "float32"))
    assert (values < UNKNOWN).all() and (values != values[0, 0]).any()


def test_made_up_integers_stay_below_what_they_index():
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec())
    made = made_up(jax.ShapeDtypeStruct((10_000,), "int32", sharding=sharding), 50, 0)
    assert (int(made.min()), int(made.max())) == (0, 49)
    assert int(made_up(jax.ShapeDtypeStruct((4,), "int8", sharding=sharding), 50_000, 0).min()) >= 0


def test_made_up_keys_are_keys():
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl="rbg")).dtype
    keys = made_up(jax.ShapeDtypeStruct((8,), dtype, sharding=sharding), None, 0)
    assert (keys.shape, keys.dtype) == ((8,), dtype)


# ---- what shows and keeps it

KERNELS = (
    Kernel("fusion.3", "loop_fusion_3", "/home/me/model.py:12", 12.0, 0.006),
    Kernel("sort.1", "radix", "", 6.0, 0.002),
)
MEASURED = Rehearsal(
    "h100:4", 4, "NVIDIA H100", "0.12.0", (0.0163, 0.0162, 0.0165), 0.0117, 0.004, 1024, 2048, None, KERNELS, 0.016,
    ("a note",),
)  # fmt: skip


def with_rehearsal():
    plan = shardfn.plan(jnp.sin, array(8), in_strategy=((4,),), device="h100:4")
    return dataclasses.replace(plan, rehearsal=MEASURED)


def test_reports_show_a_rehearsal():
    plan = with_rehearsal()
    report = shardfn.explain(plan)
    text, data, page = report.to_text(), report.to_dict()["rehearsal"], report.to_html()
    assert (
        "rehearsed: compute 16.3 ms, peak memory 2 KiB, measured on one NVIDIA H100; a call takes 16.3 ms to 20.3 ms"
        in text
    )
    assert "rehearsed: compute 16.3 ms" in str(plan)
    assert "Rehearsed on NVIDIA H100: one device of h100:4" in text and "a note" in text
    assert "model.py:12" in text and "/home/me" not in text and "38%" in text
    assert (data["measured_s"], data["kernels"][0]["op"], data["count"]) == (0.0163, "fusion.3", 4)
    assert (
        "Rehearsed on NVIDIA H100" in page
        and "what one device measured" in page
        and "All figures are estimates" not in page
    )
    assert shardfn.explain(shardfn.plan(jnp.sin, array(8), device="h100:4")).to_dict()["rehearsal"] is None


def test_a_layout_file_keeps_a_rehearsal(tmp_path):
    plan, path = with_rehearsal(), tmp_path / "layout.toml"
    plan.save(path)
    layout = shardfn.load_layout(path)
    without = [dataclasses.replace(kernel, where=kernel.where.rpartition("/")[2]) for kernel in KERNELS]
    assert layout.rehearsal == dataclasses.replace(MEASURED, kernels=tuple(without))
    assert layout == plan
    again = tmp_path / "again.toml"
    shardfn.layoutfile.write_layout(layout, again)
    assert shardfn.load_layout(again).rehearsal == layout.rehearsal


@pytest.mark.parametrize(
    "wrong",
    ["rounds_s = []", "rounds_s = [nan]", 'jax = 3', "kernels = [[1, 2]]", "more = 1", 'kernels = [["a", "b", "c", 1.0, -1.0]]'],
)  # fmt: skip
def test_a_damaged_table_is_refused(wrong, tmp_path):
    path = tmp_path / "layout.toml"
    with_rehearsal().save(path)
    name = wrong.partition(" =")[0]
    head, _, table = path.read_text().partition("[rehearsal]")
    kept = [
        line for line in table.partition("kernels = [")[0].splitlines() if line and not line.startswith(f"{name} =")
    ]
    path.write_text("\n".join([head, "[rehearsal]", *kept, wrong]))
    error = refusal(shardfn.load_layout, path)
    assert "[rehearsal]" in str(error)
