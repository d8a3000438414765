"""Two processes on this machine: each reads its devices' part only, and a place in the data fits any number of them."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from shardfn import data
from shardfn.cluster.launch import free_port

WORKER = pathlib.Path(__file__).with_name("worker.py")
spec = importlib.util.spec_from_file_location("data_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


def one_process(state=None, count=None):
    """What this process alone, on its eight devices, sees: the labels of the batches, and the place after `count`."""
    batches = iter(data.load((worker.IMAGES, worker.LABELS), worker.CASES["rows and windows"], **worker.ORDER))
    if state is not None:
        batches.set_state(state)
    seen = []
    while count is None or len(seen) < count:
        batch = next(batches, None)
        if batch is None:
            break
        np.testing.assert_array_equal(batch[0], worker.IMAGES[np.asarray(batch[1])])
        seen.append(np.asarray(batch[1]).tolist())
    return seen, batches.get_state()


@pytest.fixture(scope="module")
def two():
    """What each of two processes says; they begin where this process stands after two batches."""
    _, state = one_process(count=2)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(WORKER.parents[2])
    coordinator = f"127.0.0.1:{free_port()}"
    running = [
        subprocess.Popen([sys.executable, str(WORKER), coordinator, str(i), "2", json.dumps(state)], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=180) for process in running]
    finally:
        for process in running:
            process.kill()  # SIGTERM is caught by JAX's own notifier
    for process, (_, err) in zip(running, done, strict=True):
        assert process.returncode == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_each_process_reads_its_devices_part_and_no_more(two):
    image = 8 * 16 * 4
    share = {"rows and windows": 4 * image / 2, "windows": 4 * image / 2, "columns": 4 * image / 2, "data_parallel": 8 * image / 2,
             "full_batch": 4 * image}  # fmt: skip
    for process, told in enumerate(two):
        for name, read in share.items():
            assert told[name]["bytes"] == told[name]["told"] == read, (process, name)
            assert told[name]["places"] == list(range(4 * process, 4 * process + 4)), "places in the mesh, not ids"
        assert told["image"] == image / 2


def test_the_pieces_are_those_of_one_process(two):
    pieces = {"rows and windows": [2, 4, 8], "windows": [4, 4, 4], "columns": [4, 8, 2], "data_parallel": [1, 8, 16],
              "full_batch": [4, 8, 16]}  # fmt: skip
    assert all(told[name]["piece"] == piece for told in two for name, piece in pieces.items())


def test_one_process_then_two_then_one_is_one_run(two):
    whole, _ = one_process()
    first, second = two
    assert first["state"] == second["state"] and first["rest"] == second["rest"]
    assert first["rest"] == whole[3:], "two processes go on where one stood"
    rest, _ = one_process(first["state"])
    assert rest == whole[3:], "and one where two stood"
