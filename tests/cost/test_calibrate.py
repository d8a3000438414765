"""Measuring the devices of this machine: figures make sense, and the command writes what plans then use."""

import dataclasses
import json
import math

import jax
import pytest

import shardfn
from shardfn.cli.main import main
from shardfn.cost.backends.library_call import KINDS
from shardfn.cost.collectives import COLLECTIVE_KINDS
from shardfn.cost.compute import work
from shardfn.cost.devices import calibrate as module
from shardfn.cost.devices.calibrate import calibrate
from shardfn.cost.devices.chips import CHIPS, load_chip, save_chip
from shardfn.cost.devices.hardware import chip_file, chip_of


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_figures_are_those_of_a_machine(count, monkeypatch):
    small = dataclasses.replace(CHIPS["cpu"], memory_bytes=1e8)  # small arrays
    monkeypatch.setattr(module, "preset_of", lambda *of: small)
    found = calibrate(jax.devices()[:count], seconds=0.01)
    chip = found.chip
    assert 1e7 < chip.vector_flops < 1e13 and 1e7 < chip.flops < 1e13
    assert 1e6 < chip.memory_bytes_s < 1e16 and 1e5 < chip.link_bytes_s < 1e13
    assert 0 < chip.latency_s < 1 and 0 <= chip.launch_s < 0.1
    assert (
        f"{count} cpu devices" in chip.source
        and CHIPS["cpu"].source in chip.source
        and (chip.name, chip.platform) == ("cpu", "cpu")
    )
    assert [c.kind for c in found.collectives] == [k for k in COLLECTIVE_KINDS for _ in range(2) if count > 1]
    assert "GFLOP/s" in str(found) and ("all-to-all" in str(found)) is ("sent over a link" in str(found)) is (count > 1)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Nothing runs, and each collective takes a millisecond."""
    monkeypatch.setattr(module, "_random", lambda *of: None)
    monkeypatch.setattr(module, "_one_more", lambda *of: 1e-4)
    monkeypatch.setattr(module, "_fastest", lambda measure, most, seconds: 1e12)
    monkeypatch.setattr(module, "_collective", lambda *of: 1e-3)


@pytest.mark.usefixtures("nothing_runs")
def test_the_rate_and_the_latency_of_the_links_explain_all_collectives_together(monkeypatch):
    took = {4 * 4: 2e-5}  # seconds of a small collective; large ones take 1 ms more
    monkeypatch.setattr(module, "_collective", lambda mesh, kind, n, seconds: took.get(4 * n, 2e-5 + 1e-3))
    found = calibrate(jax.devices()[:4])
    assert found.chip.latency_s == pytest.approx(2e-5)
    large = [c for c in found.collectives if c.operand_bytes > 16]
    assert sum(c.modelled_s for c in large) == pytest.approx(sum(c.seconds for c in large))
    assert all(c.modelled_s == pytest.approx(2e-5, rel=0.01) for c in found.collectives if c.operand_bytes == 16)


def test_a_larger_array_counts_while_it_gains_a_tenth():
    tried, took = [], {2**18: 0.4, 2**20: 0.2, 2**22: 0.19, 2**24: 0.01}

    def measure(elements, seconds):
        tried.append(elements)
        return 1.0, took[elements]

    assert module._fastest(measure, 2**30, 1.0) == pytest.approx(1 / 0.19) and tried == [2**18, 2**20, 2**22]
    tried.clear()
    assert module._fastest(measure, 2**30, 0.3) == pytest.approx(2.5) and tried == [
        2**18
    ]  # one run took longer than all may
    tried.clear()
    assert module._fastest(measure, 2**21, 1.0) == pytest.approx(5) and tried == [2**18, 2**20]  # it would not fit


@pytest.mark.usefixtures("nothing_runs")
def test_the_command_saves_what_plans_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHARDFN_CHIPS", str(tmp_path / "chips"))
    assert main(["calibrate", "--device", "cpu", "--devices", "4", "--save"]) == 0
    printed, path = capsys.readouterr().out, tmp_path / "chips" / "cpu.json"
    assert "matmuls, f32" in printed and f"{path}; plans for cpu devices use it" in printed
    assert json.loads(path.read_text())["chip"]["name"] == "cpu"
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardfn.plan(jax.numpy.matmul, x, x, in_strategy=((8, 1), (1, 1)))
    assert plan.hardware.chip == load_chip(path) != CHIPS["cpu"]
    other = tmp_path / "other.json"
    assert main(["calibrate", "--devices", "4", "--save", str(other)]) == 0
    assert (
        capsys.readouterr().out.endswith(f"saved: {other}\n")
        and load_chip(other).latency_s == load_chip(path).latency_s == 1e-3
    )


@pytest.mark.usefixtures("nothing_runs")
def test_no_directory_to_save_to(monkeypatch, capsys):
    monkeypatch.setenv("SHARDFN_CHIPS", "")
    assert chip_file("cpu") == "" and main(["calibrate", "--devices", "4", "--save"]) == 2
    assert "fix:" in capsys.readouterr().err


def test_measured_figures_are_those_of_their_kind_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFN_CHIPS", str(tmp_path))
    kind = "NVIDIA H100 80GB HBM3"
    module_path = tmp_path / "nvidia-h100-80gb-hbm3.json"
    save_chip(CHIPS["b200"], module_path)
    assert chip_file(kind) == str(module_path)
    assert chip_of("gpu", kind) == CHIPS["b200"] and chip_of("gpu", "NVIDIA H200") is CHIPS["h200"]


def test_where_figures_are_saved_by_default(monkeypatch):
    monkeypatch.delenv("SHARDFN_CHIPS")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert chip_file("cpu") == "/settings/shardfn/chips/cpu.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert chip_file("cpu") == "/home/me/.config/shardfn/chips/cpu.json"


def test_each_kernel_adds_its_launch():
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardfn.plan(lambda x: jax.numpy.sin(x @ x) @ x, x, device="h100:1")
    with_launch = work(plan.partitioned, dataclasses.replace(CHIPS["h100"], launch_s=1.0))
    kernels = with_launch.seconds - work(plan.partitioned, CHIPS["h100"]).seconds
    assert math.isclose(kernels, round(kernels), abs_tol=1e-3) and kernels >= 2


def test_each_iteration_of_a_loop_adds_the_launches_of_its_kernels():
    """XLA counts on the GPU: one H100 took 1.3 µs for the counter's kernel in each iteration, and less than 0.5 µs beside the
    kernels (50 iterations of a stencil)."""
    x = jax.ShapeDtypeStruct((1024,), "float32")
    function = lambda x: jax.lax.fori_loop(0, 10, lambda _, x: jax.numpy.tanh(x) + 1, x)  # noqa: E731
    loop = shardfn.plan(function, x, in_strategy=((8,),), device="h100:8")
    assert loop.cost.compute_s == pytest.approx(
        10 * 2 * CHIPS["h100"].launch_s, rel=1e-3
    )  # the body's and the counter's


@pytest.mark.parametrize(
    "arguments", [["--devices", "0"], ["--devices", "-3"], ["--devices", "99999"], ["--device", "h100:8"]]
)
def test_devices_that_are_not_there(arguments, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert "fix:" in capsys.readouterr().err


def test_kinds_of_kernels_are_measured_where_the_preset_has_them(monkeypatch):
    small = dataclasses.replace(CHIPS["cpu"], memory_bytes=1e8, kind_rates=CHIPS["h100"].kind_rates)
    monkeypatch.setattr(module, "preset_of", lambda *of: small)
    found = calibrate(jax.devices()[:1], seconds=0.01)
    assert set(found.kinds) == set(KINDS) - {"memory", "matmul"} == set(dict(found.chip.kind_rates))
    assert all(0 < rate < 1e4 for _, rate in found.chip.kind_rates)
    assert "3D weight gradient" in str(found)
    assert "not measured, from the preset: the size of memory, links" in str(found)


def test_rates_of_kinds_that_are_not_measured_stay_what_they_are(monkeypatch):
    h100 = CHIPS["h100"]
    slower = dataclasses.replace(h100, memory_bytes_s=h100.memory_bytes_s / 2)
    found = dict(module._rescaled(h100, slower))
    assert found["sort"] == pytest.approx(2 * 0.545)
    assert found["cholesky"] == pytest.approx(0.344)
