"""Two and four processes on this machine, on loopback: what works in one process works in several."""

import pathlib
import time

import pytest

from tests.processes import launched

WORKER = str(pathlib.Path(__file__).with_name("worker.py"))


def run(processes, devices, cases, folder, timeout=150):
    return launched("--processes", str(processes), "--devices-per-process", str(devices), "--logs", str(folder / "logs"),
                    "--grace", "1", WORKER, cases, str(folder), timeout=timeout)  # fmt: skip


def test_two_processes_take_any_argument_agree_on_plans_and_train(tmp_path):
    done = run(2, 2, "essential", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] done on 2 of 4 devices" in done.stdout and "[1] done on 2 of 4 devices" in done.stdout


def test_an_error_of_one_process_ends_the_job_with_that_error(tmp_path):
    begun = time.monotonic()
    done = run(2, 1, "fails", tmp_path)
    assert time.monotonic() - begun < 60, "JAX alone waits five minutes for the process that failed"
    assert done.returncode == 1
    assert "process 1 ended first, with exit status 1; its last lines:" in done.stderr
    assert "ValueError: the error of process 1" in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 1)])
def test_everything_works_in_several_processes(tmp_path, processes, devices):
    done = run(processes, devices, "rest", tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"done on {devices} of {processes * devices} devices") == processes


@pytest.mark.processes
def test_a_job_that_starts_again_after_a_kill_has_the_losses_of_an_uninterrupted_one(tmp_path):
    losses = {}
    for killed_at in (99, 4):
        folder = tmp_path / str(killed_at)
        folder.mkdir()
        done = launched("--processes", "2", "--devices-per-process", "2", "--retries", "1", "--grace", "1",
                        WORKER.replace("worker.py", "recovering.py"), str(folder), str(killed_at), timeout=150)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("attempt 2 of 2" in done.stdout) == (killed_at == 4)
        losses[killed_at] = sorted({line for line in done.stdout.splitlines() if " loss " in line})
    assert len(losses[4]) == 9 and losses[4] == losses[99], "a step that ran twice gave the same loss, bit by bit"
