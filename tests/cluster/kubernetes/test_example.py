"""examples/kubernetes: its manifests are valid, and its processes train, with the variables that the manifests set."""

import dataclasses
import subprocess
import sys

import pytest

from shardfn.cluster.kubernetes import read_job, render
from shardfn.cluster.launch import free_port
from tests.cluster.kubernetes.schemas import faults
from tests.cluster.kubernetes.test_render import jobset, pod, variables
from tests.processes import ROOT, bare_environment

EXAMPLE = ROOT / "examples" / "kubernetes"


def test_its_manifests_are_valid():
    made = [*render(read_job(EXAMPLE / "job.toml")), *render(read_job(EXAMPLE / "job.toml"), "jobset")]
    assert not [fault for manifest in made for fault in faults(manifest)]


@pytest.mark.processes
def test_its_processes_train_and_go_on(tmp_path):
    """Two attempts, as JobSet makes them: the pods with their variables, and the last checkpoint of the first."""
    job = dataclasses.replace(read_job(EXAMPLE / "job.toml"), processes=2)
    own = pod(jobset(job))["containers"][0]
    for last, begin in ((20, 0), (30, 20)):
        command = [sys.executable, str(EXAMPLE / "train.py"), str(tmp_path), str(last)]
        assert [part.rpartition("/")[2] for part in command[1:2]] == own["command"][1:2]
        address = f"127.0.0.1:{free_port()}"  # in the place of the headless service
        common = bare_environment() | {"PYTHONPATH": str(ROOT)}
        pods = []
        for index in range(2):
            values = common | variables(own, index) | {"JAX_COORDINATOR_ADDRESS": address}
            pods.append(subprocess.Popen(command, env=values, stdout=subprocess.PIPE, text=True))
        said, _ = (process.communicate(timeout=120)[0] for process in pods)
        assert [process.returncode for process in pods] == [0, 0]
        assert f"2 processes, 8 devices, from step {begin}\n" in said and f"step {last}: loss" in said
