"""A fixed part of the fuzzer: some sixty programs, values and gradients; and a few that are compiled for devices not here."""

import jax
import numpy as np
import pytest

from shardfn.compiled.targets import target
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import DeviceError
from tests.fuzz import judge
from tests.fuzz.cases import COMPILED, lines
from tests.fuzz.packs import script
from tests.fuzz.workers import Ended, Worker

SEEDS = range(15)
"""Packs of four programs, some of one or two."""


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_sharded_equal_unsharded(worker, seed):
    try:
        findings = worker.call("seed", seed, True)
    except Ended as error:
        pytest.fail(f"{error}: python -m tests.fuzz --seed {seed} --programs 1 finds the program")
    wrong = [f for f in findings if f.verdict in ("wrong", "crashed", "refused")]
    assert not wrong, "\n\n".join(f"{f.verdict}, {f.check}: {f.text}\n{script(f.pack)}" for f in wrong)
    assert all(
        f.verdict in ("right", "unsure", "invalid") for f in findings
    )  # or `jax.jit` on one device rounds otherwise


GPU, TPU = pytest.mark.gpu, pytest.mark.tpu


@pytest.mark.parametrize("device", ["cpu:8", pytest.param("h100:8", marks=GPU), pytest.param("v5e:8", marks=TPU)])
def test_programs_compile_for_devices_that_are_not_here(device):
    try:
        target(resolve(device))
    except DeviceError as error:
        pytest.skip(str(error))
    texts = "jnp.roll(x0, 1, 0)", "v0 - v0.mean(0)"
    compiles, divides_not = (lines((n, 16), (8, 1), *texts, devices=8, device=device) for n in (16, 9))
    worker = Worker(device)
    try:
        findings = worker.call("judge", compiles)
        other, *_ = worker.call("judge", divides_not)
    finally:
        worker.close()
    assert [(f.check, f.verdict) for f in findings] == [("values", "right"), ("inside", "right"), ("outside", "right")]
    assert [f.as_predicted is None for f in findings] == [False, False, True]
    assert other.verdict == "refused" and "9" in other.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_program_compiles(cuda, name):
    worker = Worker(COMPILED[name].device)
    try:
        findings = worker.call("judge", COMPILED[name])
    finally:
        worker.close()
    assert {f.verdict for f in findings} == {"right"}, f"{findings}\n{script(COMPILED[name])}"


def test_judge_holds_a_cancelling_step_against_float64():
    rises = "jnp.log(jnp.diff(jnp.cumsum(jnp.abs(x0) + 0.1, 0), axis=0))"
    pack = lines((24, 24), (2, 1), rises, "v0.T @ (v0 + 1)", "v0 ** 2", devices=2)
    (program,) = pack.programs
    second = judge.target_of(pack, "second", program.plain())
    want = [np.asarray(y) for y in jax.jit(second)(*program.arguments())]
    off = [np.where(np.arange(y.size).reshape(y.shape) == 7, y + 1e3, y) for y in want]
    assert judge.is_as_near_to_float64(pack, "second", want, want)
    assert not judge.is_as_near_to_float64(pack, "second", want, off)
