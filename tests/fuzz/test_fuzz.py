"""A fixed part of the fuzzer: some sixty programs, values and gradients."""

import pytest

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
    assert all(f.verdict in ("right", "unsure") for f in findings)
