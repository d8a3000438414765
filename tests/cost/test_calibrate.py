"""Measuring the machine's virtual devices: figures make sense, and the command writes what plans then use."""

import json

import jax
import pytest

import shardfn
from shardfn.cli.main import main
from shardfn.cost.devices import calibrate as module
from shardfn.cost.devices.calibrate import calibrate, table
from shardfn.cost.devices.chips import CHIPS, load_chip
from shardfn.errors import DeviceError


@pytest.mark.parametrize("count", [1, 4])
def test_figures_are_those_of_a_machine(count):
    chip = calibrate(jax.devices()[:count], seconds=0.01)
    assert 1e7 < chip.vector_flops < 1e13 and 1e7 < chip.flops < 1e13
    assert 1e6 < chip.memory_bytes_s < 1e13 and 1e6 < chip.link_bytes_s < 1e13
    assert 0 < chip.latency_s < 1
    assert f"{count} virtual devices" in chip.source and (chip.name, chip.platform) == ("cpu", "cpu")
    assert "GFLOP/s" in table(chip)


def test_the_command_saves_what_plans_use(tmp_path, monkeypatch, capsys):
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(module, "_seconds", lambda run, at_most: 0.001)
    assert main(["calibrate", "--devices", "4", "--save", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "matmuls, f32" in printed and str(path) in printed
    assert json.loads(path.read_text())["chip"]["name"] == "cpu"
    monkeypatch.setenv("SHARDFN_CPU", str(path))
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = shardfn.plan(jax.numpy.matmul, x, x, in_strategy=((8, 1), (1, 1)))
    assert plan.hardware.chip == load_chip(path) != CHIPS["cpu"]


@pytest.mark.parametrize("arguments", [["--devices", "0"], ["--devices", "-3"], ["--devices", "99999"]])
def test_a_number_of_devices_that_is_not_there(arguments, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert "fix:" in capsys.readouterr().err


def test_a_missing_file_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDFN_CPU", str(tmp_path / "none.json"))
    with pytest.raises(DeviceError, match="shardfn calibrate --save"):
        shardfn.plan(jax.numpy.sin, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((8,),))
