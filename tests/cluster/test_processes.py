"""Two and four processes on this machine, on loopback: what works in one process works in several."""

import pathlib
import subprocess
import sys
import time

import pytest

from shardfn.cluster.launch import free_port
from tests.processes import ROOT, bare_environment, launched

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
    done = run(processes, devices, "rest", tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"done on {devices} of {processes * devices} devices") == processes


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_inference_embeddings_experts_and_modules_work_in_several_processes(tmp_path, processes, devices):
    done = launched("--processes", str(processes), "--devices-per-process", str(devices), "--grace", "1",
                    WORKER.replace("worker.py", "libraries.py"), str(tmp_path), timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"done on {devices} of 4 devices") == processes


RECOVERING = WORKER.replace("worker.py", "recovering.py")


def recovered(folder, *failure, devices=2, **options):
    """The lines of losses of a job that fails once, and all that was printed."""
    asked = [
        word for name, value in ({"grace": 1} | options).items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = launched("--processes", "2", "--devices-per-process", str(devices), *asked, RECOVERING,
                    str(folder), *failure, timeout=150)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if " loss " in line], done.stdout


@pytest.mark.processes
def test_a_job_that_starts_again_after_a_kill_has_the_losses_of_an_uninterrupted_one(tmp_path):
    uninterrupted, _ = recovered(tmp_path / "whole")
    losses, printed = recovered(tmp_path / "killed", "kill", "5", retries=1)
    assert (
        "by signal 9" in printed and "goes on from step 3, saved on 4 devices in 2 processes: now 4 devices" in printed
    )
    assert sorted({*losses}) == uninterrupted and len(losses) > 9, (
        "a step that ran twice gave the same loss, bit by bit"
    )


@pytest.mark.processes
def test_a_job_whose_process_hangs_goes_on_without_it(tmp_path):
    losses, printed = recovered(tmp_path, "hang", "5", retries=1, min_processes=1, heartbeat=8)
    assert "process 1 was silent" in printed and "attempt 2 of 2, processes: 1" in printed
    assert "now 2 devices in 1 process" in printed and losses[-1].endswith("on 2 devices")
    by_step = {}
    for line in losses:
        _, _, step, _, loss, *_ = line.split()
        by_step.setdefault(int(step), []).append(float(loss))
    assert list(by_step) == list(range(1, 10)) and len(by_step[4]) == len(by_step[5]) == 2
    assert by_step[4] == pytest.approx([by_step[4][0]] * 2, rel=1e-5)


@pytest.mark.processes
def test_a_job_that_gets_sigterm_saves_in_all_processes_and_ends(tmp_path):
    _, printed = recovered(tmp_path, "term", "4", retries=1, grace=20)
    step = printed.partition("ends with a checkpoint of step ")[2].partition(",")[0]
    assert 4 < int(step) < 9 and f"goes on from step {step}, saved on 4 devices" in printed


@pytest.mark.processes
@pytest.mark.parametrize("launcher", ["slurm", "openmpi"])
def test_init_finds_the_group_that_another_launcher_says(launcher):
    """The variables that `srun` and `mpirun` set; JAX reads them. Neither program runs here."""
    port = free_port()
    said = {"JAX_COORDINATOR_PORT": port, "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}", "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": ROOT}  # fmt: skip
    of_rank = {
        "slurm": lambda rank: {"SLURM_JOB_ID": 7, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2,
                               "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1},
        "openmpi": lambda rank: {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": 2,
                                 "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank},
    }[launcher]  # fmt: skip
    code = "from shardfn import cluster; cluster.init(); import jax; print(cluster.rank(), cluster.size(), jax.device_count())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                         env=bare_environment() | {name: str(value) for name, value in (said | of_rank(rank)).items()})
        for rank in range(2)
    ]  # fmt: skip
    try:
        found = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert found == ["0 2 2", "1 2 2"]
