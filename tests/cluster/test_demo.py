"""`shardfn demo --cluster`, started as a newcomer starts it."""

import subprocess
import sys

import pytest

from tests.processes import ROOT, bare_environment


@pytest.mark.processes
def test_the_demo_of_a_killed_process():
    done = subprocess.run([sys.executable, "-m", "shardfn", "demo", "--cluster"], cwd=ROOT, env=bare_environment(),
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- SIGKILL to process 1" in done.stdout and "process 1 ended first, by signal 9" in done.stdout
    assert "goes on from step 10, saved on 8 devices in 2 processes: now 4 devices in 1 process" in done.stdout
    assert "now 8 devices in 2 processes" in done.stdout and "3 steps were taken again" in done.stdout
    assert "Its losses on 8, 4 and 8 devices are those" in done.stdout
