"""A plan compared with what XLA compiles for it: for devices that are here, for CPUs and TPUs that are not."""

import copy
import dataclasses
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util

import shardfn
from examples.models import abstract, gpt2
from shardfn.compiled import targets
from shardfn.cost.devices.hardware import CHIPS, Chip, resolve
from shardfn.errors import DeviceError, StrategyError, with_extra
from shardfn.planning.layout_rules import Constraint
from shardfn.runtime import verify
from tests.messages import refusal, told

S = jax.ShapeDtypeStruct


def array(*shape, dtype="float32"):
    return S(shape, dtype)


@tree_util.register_pytree_node_class
@dataclasses.dataclass
class Weights:
    """A pytree that another process does not know."""

    w1: object
    w2: object

    def tree_flatten(self):
        return (self.w1, self.w2), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def step(rate, weights, x, y, key, unread):
    """A static number, donated weights, a typed key, an argument that nothing reads."""

    def loss(p):
        noisy = x + 0.01 * jax.random.normal(key, x.shape)
        return jnp.mean((jnp.tanh(noisy @ p.w1) @ p.w2 - y) ** 2)

    grads = jax.grad(loss)(weights)
    return jax.tree.map(lambda p, g: p - rate * g, weights, grads)


def step_args(batch=64, d=64, hidden=256):
    key = jax.eval_shape(lambda: jax.random.key(0))
    weights = Weights(array(d, hidden), array(hidden, d))
    return 0.1, weights, array(batch, d), array(batch, d), key, array(8, 8)


STEP = {"static_argnums": 0, "donate_argnums": 1}
DATA = (Weights((1, 1), (1, 1)), (8, 1), (8, 1), (), (1, 1))
SHARDED = (Weights((8, 1), (8, 1)), (8, 1), (8, 1), (), (1, 1))


def compiled_part(report):
    return report.to_dict()["compiled"]


def test_here_it_is_what_explain_shows():
    options = {**STEP, "in_strategy": SHARDED}
    report = shardfn.plan(step, *step_args(), **options).verify()
    assert compiled_part(report) == compiled_part(shardfn.explain(step, *step_args(), compiled=True, **options))
    assert "Compiled: collectives" in str(report)


@pytest.mark.parametrize("strategy", [(2, 1), (1, 2), (2, 2), (8, 1)])
def test_verify_a_gradient_through_branches_has_the_flops_that_are_compiled(strategy):
    """Its result is open: a fixed sharding of it spreads into the branches."""

    def loss(a):
        return jnp.mean((jax.scipy.linalg.expm(a) + a @ a) ** 2)

    report = shardfn.plan(jax.grad(loss), array(16, 16), in_strategy=(strategy,)).verify().to_dict()
    flops = report["compiled"]["matmul_flops"]
    assert flops["predicted"] == flops["compiled"]


def test_a_target_compiles_in_another_process_to_what_compiles_here():
    """Eight CPU devices as a target, and these eight: pytrees, donation, static values, keys, mesh and lines alike."""
    options = {**STEP, "in_strategy": (Weights((1, 4), (4, 1)), (2, 1), (2, 1), (), (1, 1))}
    before = dict(os.environ)
    target = shardfn.plan(step, *step_args(), device="cpu:8", **options)
    assert not target.hardware.is_here
    there, here = (verify.compile_plan(p) for p in (target, target.with_devices(jax.devices())))
    assert sum(c.bytes_sent for c in here.collectives) > 0
    assert [c.kind for c in there.collectives] == [c.kind for c in here.collectives]
    assert [(c.bytes_sent, c.group_size, c.trips) for c in there.collectives] == [
        (c.bytes_sent, c.group_size, c.trips) for c in here.collectives
    ]
    assert {c.where for c in there.collectives} == {c.where for c in here.collectives}
    assert all(__file__ in c.where for c in there.collectives)
    sizes = ("argument_bytes", "output_bytes", "alias_bytes", "flops")
    assert [getattr(there, s) for s in sizes] == [getattr(here, s) for s in sizes]
    assert there.alias_bytes == 2 * 64 * 256 * 4 // 4
    assert there.argument_bytes < target.cost.memory.arguments + 8  # without what nothing reads
    assert dict(os.environ) == before


@pytest.mark.slow
def test_the_line_that_calls_the_library_is_none_of_the_function():
    """The convolution and the transform are replicated, by ops of this library: no line of theirs, rather than that of `plan`."""

    def transformed(w, x):
        h = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
        return jnp.fft.fft(h, axis=1).real.sum(0)

    made = shardfn.plan(
        transformed, array(8, 4, 3, 3), array(8, 4, 64, 64), in_strategy=((1, 1, 1, 1), (1, 1, 8, 1)), device="cpu:8"
    )
    first = transformed.__code__.co_firstlineno
    inside = {"", *(f"{__file__}:{first + i}" for i in range(3))}
    for side in (made.collectives, verify.compile_plan(made).collectives):
        assert side and inside.issuperset(c.where for c in side), side
    assert "test_verify" not in made.verify().to_text().partition("Why they differ")[2]


@pytest.mark.slow
def test_a_search_for_more_devices_than_are_here():
    plan = shardfn.plan(step, *step_args(), device="cpu:16", level=2, **STEP)
    found = compiled_part(plan.verify())
    assert found["matmul_flops"]["compiled"] > 0
    assert all(c["group_size"] <= 16 for c in found["collectives"])


def test_constraints_inside_and_other_plans_of_the_function():
    """A plan changed by hand is compiled as it says, not as the one that it was made from."""
    x, w = array(64, 32), array(32, 16)
    plan = shardfn.plan(jnp.matmul, x, w, in_strategy=((8, 1), (1, 1)), out_strategy=((8, 1),))
    assert compiled_part(plan.verify())["collectives"] == []
    replicated = ((), ())
    moved = dataclasses.replace(plan, outputs=(dataclasses.replace(plan.outputs[0], strategy=(1, 1), spec=replicated),))
    assert [c["kind"] for c in compiled_part(moved.verify())["collectives"]] == ["all-gather"]
    constrained = dataclasses.replace(
        plan, constraints=(Constraint("dot_general", 0, "", (replicated, replicated), (replicated,)),)
    )
    work = compiled_part(constrained.verify())["matmul_flops"]
    assert work["compiled"] == 8 * work["predicted"] == 2 * 64 * 32 * 16


def test_what_if_keeps_the_way_back():
    x, w = array(64, 32), array(32, 16)
    plan = shardfn.plan(jnp.matmul, x, w, in_strategy=((8, 1), (1, 1)))
    other = plan.what_if({plan.inputs[0].path: (1, 8)})
    assert compiled_part(plan.verify())["collectives"] == []
    assert {c["kind"] for c in compiled_part(other.verify())["collectives"]} & {"all-reduce", "all-gather"}


# ---- what cannot be compiled


def small(device, **options):
    return shardfn.plan(lambda x: 2 * x, array(16, 4), device=device, **{"in_strategy": ((4, 1),), **options})


@pytest.mark.parametrize(("device", "extra"), [("tpu-v5e:2x2", "tpu-aot"), ("h100:8", "gpu-aot")])
def test_verify_without_the_compiler_says_what_to_install(device, extra, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if name.startswith("shardfn") else None)
    error = refusal(small(device).verify)
    assert isinstance(error, DeviceError) and error.problems[0].fix == with_extra(extra)
    assert told(error) == "DeviceError: device"


@pytest.mark.parametrize(("name", "size"), [("h100", 8), ("tpu-v5e", "2x2")])
def test_verify_for_a_chip_of_ones_own_names_those_that_the_compiler_knows(name, size):
    chip = dataclasses.replace(CHIPS[name], name="mine", aot_name="")
    error = refusal(small(chip.pod(size)).verify)
    assert isinstance(error, DeviceError) and "the" in error.problems[0].what and "it knows" in error.problems[0].why


def test_verify_of_a_plan_from_another_process_is_refused():
    plan = pickle.loads(pickle.dumps(small("cpu:4")))
    assert "has no function" in str(refusal(plan.verify))
    assert copy.deepcopy(small("cpu:4")).verify()


def test_a_function_that_calls_back():
    def loud(x):
        jax.debug.print("{}", x[0, 0])
        return 2 * x

    plan = shardfn.plan(loud, array(16, 4), in_strategy=((4, 1),), device="cpu:4")
    with pytest.raises(StrategyError, match="cannot be compiled in another process"):
        plan.verify()


def test_a_compiler_that_dies(monkeypatch):
    plan = small("cpu:4")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(StrategyError, match="its process ended with 1"):
        plan.verify()


SAID = [
    ("tpu-v5e:2x2", "RESOURCE_EXHAUSTED: E1000: Oom: Ran out of memory on HBM, 16.00G exceeds 15.75G.",
     "does not fit on tpu-v5e:2x2", "plan with level=1, for more devices, or with a lower memory_limit"),
    ("tpu-v5e:2x2", 'INVALID_ARGUMENT: Topology layout "v5e:1x8" is not divisible',
     "the TPU compiler refuses the topology v5e:2x2", "name a slice that exists"),
    ("tpu-v5e:2x2", "INTERNAL: Mosaic failed to compile", "does not compile for tpu-v5e:2x2",
     f"{with_extra('tpu-aot')}, for the compiler that fits this JAX; else look for the op it names"),
    ("h100:4", "INTERNAL: no such op", "does not compile for h100:4", with_extra("gpu-aot")),
    ("cpu:4", "INTERNAL: no such op", "does not compile for cpu:4", "look for the op it names"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "said", "what", "fix"), SAID)
def test_verify_tells_what_the_compiler_says(device, said, what, fix, tmp_path, monkeypatch):
    """A process that fails as the compiler's does."""
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    plan = small(device)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    error = refusal(plan.verify)
    assert told(error).endswith("Error: device")
    assert what in error.problems[0].what and error.problems[0].fix.startswith(fix)
    assert said.removeprefix("RESOURCE_EXHAUSTED: E1000: Oom: ") in error.problems[0].why


# ---- targets


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.platform != "cpu"])
def test_each_preset_has_a_compiler(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    found = targets.target(CHIPS[name].pod(4))
    assert (found.platform, found.count) == ({"gpu": "cuda"}.get(CHIPS[name].platform, CHIPS[name].platform), 4)


@pytest.mark.parametrize(
    ("device", "name", "config"),
    [
        ("tpu-v5e:4x4", "v5e:4x4", ""),
        ("tpu-v5e:8", "v5e:2x4", ""),
        ("tpu-v6e:16x16", "v6e:16x16", ""),
        ("tpu-v5p:2x2", "v5p:2x2x1", ""),
        ("tpu-v5p:128", "v5p:4x4x8", ""),
        ("tpu-v4:2x2x4", "v4:2x2x4", "megacore"),
        ("h100:4", "1x1x4", None),
        ("a100:64", "1x8x8", None),
        ("h200:12", "1x3x4", None),
    ],
)
def test_names_of_topologies(device, name, config, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    found = targets.target(resolve(device))
    assert (found.name, found.count) == (name, resolve(device).count)
    assert found.config == config or (config is None and "cuda_compute_capability { major: " in found.config)


def test_a_chip_of_ones_own_compiles_as_its_platform():
    mine = Chip("mine", "cpu", flops=1e9, memory_bytes_s=1e9, memory_bytes=1e9, link_bytes_s=1e9, latency_s=1e-5)
    assert targets.target(mine.pod(4)) == targets.Target("cpu", 4)


def test_the_other_process_has_its_own_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=there")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine")
    found = verify._environment(targets.Target("tpu", 16, "v5e:4x4"))
    assert found["XLA_FLAGS"] == "--xla_dump_to=there"
    assert (found["JAX_PLATFORMS"], found["JAX_NUM_CPU_DEVICES"], found["LIBTPU_INIT_ARGS"]) == ("cpu", "1", "--mine")
    assert found["JAX_ENABLE_X64"] == "0"
    with jax.enable_x64(True):
        assert verify._environment(targets.Target("cpu", 16))["JAX_ENABLE_X64"] == "1"


# ---- TPUs that are not here


@pytest.fixture
def libtpu():
    pytest.importorskip("libtpu")


def kinds(report):
    """Of each kind bytes predicted and compiled."""
    found = compiled_part(report)["kinds"].items()
    return {kind: (both["predicted"]["bytes_sent"], both["compiled"]["bytes_sent"]) for kind, both in found}


BIG = step_args(1024, 512, 2048)


@pytest.mark.tpu
@pytest.mark.parametrize("device", ["tpu-v5e:2x4", "tpu-v5p:2x2x2", "tpu-v4:2x2x2", "tpu-v6e:2x4"])
def test_data_parallel_on_tpus(libtpu, device):
    report = shardfn.plan(step, *BIG, in_strategy=DATA, device=device, **STEP).verify()
    assert set(kinds(report)) == {"all-reduce"}
    predicted, compiled = kinds(report)["all-reduce"]
    assert predicted == compiled == 2 * 7 * 2 * 512 * 2048 * 4 // 8
    work = compiled_part(report)["matmul_flops"]
    assert work["compiled"] == work["predicted"]
    arguments = dict(compiled_part(report)["memory"])["arguments"]
    assert arguments["compiled"] == pytest.approx(arguments["predicted"], rel=0.01)


@pytest.mark.tpu
def test_pieces_of_weights_are_reduced_by_scattering(libtpu):
    """Where a CPU all-reduces gradients, a TPU reduce-scatters them."""
    report = shardfn.plan(step, *BIG, in_strategy=SHARDED, device="tpu-v5e:2x4", **STEP).verify()
    found = kinds(report)
    predicted, compiled = found["reduce-scatter"]
    assert predicted == compiled > 0
    assert "all-reduce" not in found


COORDS = """
import sys
from shardfn.cost.devices.hardware import resolve
from shardfn.compiled.targets import devices, target
from shardfn.runtime.verify import compile_plan
for name in sys.argv[1:]:
    print(*(",".join(map(str, device.coords)) for device in devices(target(resolve(name)))))
"""


@pytest.mark.tpu
def test_the_grid_follows_the_torus(libtpu):
    """Device numbers walk the last dim of the torus first, as `cost.devices.links` has it."""
    names = {"tpu-v5e:2x4": (2, 4), "tpu-v5e:4x2": (4, 2), "tpu-v5p:2x2x4": (2, 2, 4), "tpu-v4:2x2x2": (2, 2, 2)}
    done = subprocess.run(
        [sys.executable, "-c", COORDS, *names], env=verify._environment(targets.target(resolve("tpu-v5e:4"))),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line, dims in zip(done.stdout.splitlines(), names.values(), strict=True):
        places = [tuple(map(int, text.split(",")))[: len(dims)] for text in line.split()]
        assert places == list(np.ndindex(*dims))


def holds_for_a_searched_step_of_gpt2(device):
    function, args = abstract(gpt2.make, gpt2.Config(layers=2, scan=True, batch=16))
    plan = shardfn.plan(function, *args, device=device, level=2, donate_argnums=(0, 1))
    found = compiled_part(plan.verify())
    assert found["matmul_flops"]["compiled"] == pytest.approx(found["matmul_flops"]["predicted"], rel=0.02)
    assert not any("unknown number of times" in text for text in found["diagnostics"])


@pytest.mark.tpu
def test_a_searched_step_of_gpt2(libtpu):
    holds_for_a_searched_step_of_gpt2("tpu-v5e:2x4")


@pytest.mark.tpu
def test_what_does_not_fit_and_what_is_no_slice(libtpu):
    w = array(65536, 65536)
    plan = shardfn.plan(jnp.matmul, array(8, 65536), w, in_strategy=((1, 1), (1, 1)), device="tpu-v5e:2x2")
    with pytest.raises(StrategyError, match=r"as compiled, does not fit[\s\S]*Ran out of memory"):
        plan.verify()
    with pytest.raises(DeviceError, match="refuses the topology v5e:1x8"):
        shardfn.plan(jnp.matmul, array(8, 8), array(8, 8), in_strategy=((8, 1), (1, 1)), device="tpu-v5e:1x8").verify()


# ---- GPUs that are not here


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["a100:8", "a100-40gb:8", "h100:16", "h200:12", "b200:8"])
def test_data_parallel_on_gpus(cuda, device):
    count = resolve(device).count
    batch = (Weights((1, 1), (1, 1)), (count, 1), (count, 1), (), (1, 1))
    report = shardfn.plan(step, *step_args(1536, 512, 2048), in_strategy=batch, device=device, **STEP).verify()
    assert set(kinds(report)) == {"all-reduce"}
    predicted, compiled = kinds(report)["all-reduce"]
    assert predicted == compiled == pytest.approx(2 * (count - 1) * 2 * 512 * 2048 * 4 / count, abs=1)
    work = compiled_part(report)["matmul_flops"]
    assert work["compiled"] == work["predicted"]
    arguments = dict(compiled_part(report)["memory"])["arguments"]
    assert arguments["compiled"] == pytest.approx(arguments["predicted"], rel=1e-3)


def attention_of_twelve_heads(x, w, o):
    heads = (x @ w).reshape(*x.shape[:2], 12, 3 * 64)
    q, k, v = jnp.split(heads, 3, -1)
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32), -1).astype(x.dtype)
    return x + jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape) @ o


@pytest.mark.gpu
def test_what_triton_finds_no_tiles_for_is_compiled_without_it(cuda):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 77, 768), (768, 3 * 768), (768, 768))]
    plan = shardfn.plan(attention_of_twelve_heads, *shapes, device="h100:8", style="data_parallel")
    found = verify.compile_plan(plan)
    assert any("xla_gpu_enable_triton_gemm" in note for note in found.diagnostics)
    assert found.flops > 0


@pytest.mark.gpu
def test_pieces_of_weights_on_gpus(cuda):
    found = kinds(shardfn.plan(step, *BIG, in_strategy=SHARDED, device="h100:8", **STEP).verify())
    predicted, compiled = found["reduce-scatter"]
    assert predicted == compiled > 0


@pytest.mark.gpu
def test_a_searched_step_of_gpt2_on_gpus(cuda):
    holds_for_a_searched_step_of_gpt2("h100:8")
