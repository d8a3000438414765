"""Devices and targets. What is refused is in tests/test_bad_input.py too."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import shardfn
from shardfn.cost.devices.hardware import CHIPS, chip_of, resolve
from shardfn.errors import DeviceError

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES[:6]).reshape(2, 3), ("a", "b"))


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        (None, None, DEVICES),
        (None, 4, DEVICES[:4]),
        ("cpu", None, DEVICES),
        ("CPU", 2, DEVICES[:2]),
        (" Cpu ", None, DEVICES),
        (DEVICES[2:5], None, DEVICES[2:5]),
        (tuple(DEVICES[::-1]), 3, DEVICES[:4:-1]),
        (np.array(DEVICES), None, DEVICES),
        (MESH, None, DEVICES[:6]),
        (MESH, 6, DEVICES[:6]),
        (MESH, 1, DEVICES[:1]),
        ([DEVICES[3]], None, [DEVICES[3]]),
    ],
    ids=str,
)
def test_devices_that_are_here(device, count, expected):
    found = resolve(device, count=count)
    assert (list(found.devices), found.count, found.platform, found.is_here) == (expected, len(expected), "cpu", True)
    assert found.chip is CHIPS["cpu"]
    assert found.mesh is (device if isinstance(device, Mesh) and count != 1 else None)


@pytest.mark.parametrize(
    ("target", "chip", "platform", "count"),
    [
        ("tpu-v5e:16x16", "tpu-v5e", "tpu", 256),
        ("TPU-V5P:4x4x4", "tpu-v5p", "tpu", 64),
        ("h200:64", "h200", "cuda", 64),
        ("a100:1", "a100", "cuda", 1),
        (" cpu:4096 ", "cpu", "cpu", 4096),
    ],
)
def test_targets_are_planned_for_and_not_here(target, chip, platform, count):
    found = resolve(target)
    assert (found.chip.name, found.platform, found.count, found.is_here) == (chip, platform, count, False)
    assert found.name == target.strip().lower()


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_chip_says_where_its_figures_are_from(chip):
    assert chip.source
    figures = (chip.flops, chip.memory_bytes_s, chip.memory_bytes, chip.link_bytes_s, chip.latency_s)
    assert all(f > 0 and math.isfinite(f) for f in figures)
    assert chip.latency_s < 1e-3 < 1e9 < chip.link_bytes_s < chip.flops


@pytest.mark.parametrize(
    ("device", "meant"),
    [
        ("tpu-v6e-8", '"tpu-v6e:8"?'),
        ("h100x8", '"h100:8"?'),
        ("A100 16", '"a100:16"?'),
        ("tpu-v5p-32", '"tpu-v5p:16"'),  # sold by cores, two a chip
        ("tpv", "'TPU'?"),
    ],
)
def test_a_name_that_is_nearly_one_is_told(device, meant):
    with pytest.raises(DeviceError) as caught:
        resolve(device)
    assert caught.value.problems[0].fix.endswith(meant)


@pytest.mark.parametrize(
    ("device", "count", "text"),
    [
        (None, 9, "9 devices are wanted, but 8 cpu"),
        ("cpu", 9, "9 devices are wanted, but 8 cpu"),
        (DEVICES[:4], 8, "8 devices are wanted, but 4 are listed"),
        (MESH, 4, "4 devices are wanted, but the mesh has 6"),
    ],
    ids=str,
)
def test_another_number_than_there_are(device, count, text):
    with pytest.raises(DeviceError, match=text):
        resolve(device, count=count)


def double(x):
    return 2 * x


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_devices_runs(count):
    x = np.arange(count * 4, dtype=np.float32).reshape(count * 2, 2)
    result = shardfn.shard(double, ((count, 1),), device=DEVICES[8 - count :])(x)
    np.testing.assert_array_equal(result, 2 * x)
    assert result.sharding.device_set == set(DEVICES[8 - count :])
    assert result.sharding.shard_shape(x.shape) == (2, 2)


@pytest.mark.parametrize("target", ["cpu:1", "cpu:12", "tpu-v5e:4x8", "h100:24", "tpu-v6e:16x16", "cpu:4096"])
def test_a_plan_needs_no_devices(target):
    count = resolve(target).count
    plan = shardfn.plan(
        double, jax.ShapeDtypeStruct((8192 * 3, 4), np.float32), in_strategy=((count, 1),), device=target
    )
    assert plan.inputs[0].strategy == (count, 1) and plan.hardware.name == target
    assert plan.inputs[0].local_bytes == 8192 * 3 * 4 * 4 // count


def test_a_plan_for_a_target_is_moved_to_devices_of_its_number():
    plan = shardfn.plan(double, np.zeros((8, 2), np.float32), in_strategy=((4, 1),), device="tpu-v5e:2x2")
    here = plan.with_devices(DEVICES[:4])
    assert set(here.mesh.devices.flat) == set(DEVICES[:4])
    with pytest.raises(DeviceError, match="4 devices, not 8"):
        plan.with_devices(DEVICES)


def test_a_target_is_lowered_for_its_own_platform():
    lowered = shardfn.shard(double, ((4, 1),), device="tpu-v5e:2x2").lower(np.zeros((8, 2), np.float32))
    assert '"a"=4' in lowered.as_text() or "sdy.mesh" in lowered.as_text()


@pytest.mark.parametrize(
    ("platform", "kind", "chip"),
    [
        ("tpu", "TPU v4", "tpu-v4"), ("tpu", "TPU v5 lite", "tpu-v5e"), ("tpu", "TPU v5", "tpu-v5p"),
        ("tpu", "TPU v5p", "tpu-v5p"), ("tpu", "TPU v6 lite", "tpu-v6e"), ("tpu", "TPU v6e", "tpu-v6e"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"), ("gpu", "NVIDIA A100-SXM4-40GB", "a100-40gb"), ("gpu", "NVIDIA B200", "b200"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"), ("gpu", "NVIDIA H200", "h200"),
    ],
)  # fmt: skip
def test_devices_that_are_here_have_the_figures_of_their_chip(platform: str, kind: str, chip: str) -> None:
    assert chip_of(platform, kind) is CHIPS[chip]


def test_an_unknown_device_has_another_chips_figures_and_says_so() -> None:
    assert "NVIDIA GH200 480GB" in chip_of("gpu", "NVIDIA GH200 480GB").source


@pytest.mark.parametrize(
    ("target", "instead"),
    [
        ("cpu:8", "leave `device` out for the 8 cpu devices here"),
        ("cpu:4", "device=jax.devices()[:4], or leave it out and set_auto_parallel_context(device_num=4), for 4 of the 8 cpu"),
    ],
)  # fmt: skip
def test_a_target_of_a_platform_that_is_here_says_how_to_run_on_it(target, instead):
    x = np.zeros((8, 2), np.float32)
    sharded = shardfn.shard(double, device=target)
    assert (
        sharded.explain(x).to_text().splitlines()[1].startswith(f"devices: {target} (")
        and "a target), mesh " in sharded.explain(x).to_text()
    )
    for call in (sharded, lambda x: sharded.explain(x, compiled=True)):
        with pytest.raises(shardfn.ShardError) as caught:
            call(x)
        (problem,) = caught.value.problems
        assert problem.what.endswith(f"{target}, which is a target") and instead in problem.fix
