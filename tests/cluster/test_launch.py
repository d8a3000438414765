"""The launcher, with processes that do not use JAX: what it starts, shows, ends and returns."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from shardfn.cli.main import main
from shardfn.cluster import launch, local_job
from shardfn.errors import ClusterError
from tests.marks import some_slow
from tests.processes import ROOT, bare_environment

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def run(code, logs, processes=2, **options):
    out = io.StringIO()
    begun = time.monotonic()
    outcome = launch([sys.executable, "-c", code], local_job(processes), logs, out=out, **options)
    assert time.monotonic() - begun < 30
    return outcome, out.getvalue()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_launch_merges_the_streams_and_keeps_a_log_for_each(tmp_path):
    code = "import os, sys; print('out', os.environ['RANK_ID']); print('err', file=sys.stderr)"
    outcome, out = run(code, tmp_path)
    assert outcome.status == 0 and outcome.rank is None
    assert sorted(out.splitlines()) == ["[0] err", "[0] out 0", "[1] err", "[1] out 1"]
    assert (tmp_path / "attempt-1" / "process-1.log").read_text() == "out 1\nerr\n"


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)])
def test_launch_ends_all_with_the_first_failure(tmp_path, end, status):
    child = f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])"
    code = (
        "import os, subprocess, sys, time, pathlib\n"
        f"ready = pathlib.Path({str(tmp_path)!r}, 'ready')\n"
        "if os.environ['RANK_ID'] == '0':\n"
        f"    child = {child}\n    ready.write_text(str(child.pid)); {STUBBORN}\n"
        "while not ready.exists() or not ready.read_text(): time.sleep(0.01)\n"
        f"print('the last words', flush=True)\n{end}"
    )
    outcome, _ = run(code, tmp_path, grace_s=0.3)
    assert (outcome.status, outcome.rank) == (status, 1)
    assert "the last words" in outcome.last_lines and "process 1 ended first" in str(outcome)
    deadline = time.monotonic() + 5
    while is_alive(int((tmp_path / "ready").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int((tmp_path / "ready").read_text())), "children of a process end with it"


def test_launch_with_retries_starts_the_job_again(tmp_path):
    code = (
        "import pathlib, os, sys\n"
        f"file = pathlib.Path({str(tmp_path)!r}, os.environ['RANK_ID'])\n"
        "n = len(file.read_text()) if file.exists() else 0\n"
        "file.write_text('x' * (n + 1))\nsys.exit(n < 2)"
    )
    outcome, out = run(code, tmp_path / "logs", processes=1, retries=3)
    assert (outcome.status, outcome.attempts) == (0, 3) and "attempt 3 of 4" in out
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["attempt-1", "attempt-2", "attempt-3"]
    outcome, _ = run("raise SystemExit(5)", tmp_path / "more", processes=1, retries=1)
    assert (outcome.status, outcome.attempts) == (5, 2)


def test_launch_with_a_least_number_leaves_out_the_process_that_failed(tmp_path):
    code = (
        "import os, sys\n"
        "print('devices', os.environ['JAX_LOCAL_DEVICE_IDS'], 'of', os.environ['RANK_SIZE'])\n"
        "sys.exit(os.environ['RANK_ID'] == '1')"
    )
    outcome, out = run(code, tmp_path, processes=3, retries=3, min_processes=2)
    assert (outcome.status, outcome.attempts) == (1, 4)
    assert "attempt 2 of 4, processes: 2" in out and "attempt 3 of 4, processes: 2" in out, "no less than two"
    assert (tmp_path / "attempt-2" / "process-1.log").read_text() == "devices 2 of 2\n", "with the devices it had"


def test_launch_with_heartbeats_ends_a_job_whose_process_falls_silent(tmp_path):
    code = (
        "import os, time\n"
        "from shardfn.cluster.heartbeat import beat\n"
        "for i in range(1000 if os.environ['RANK_ID'] == '0' else 3):\n"
        "    beat(); time.sleep(0.02)\n"
        "time.sleep(60)"
    )
    (tmp_path / "attempt-1" / "heartbeats").mkdir(parents=True)
    (tmp_path / "attempt-1" / "heartbeats" / "0").touch()
    os.utime(tmp_path / "attempt-1" / "heartbeats" / "0", (0, 0))  # of an earlier job with the same logs
    outcome, _ = run(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", tmp_path, heartbeat_s=0.8, grace_s=0.5)
    assert (outcome.status, outcome.rank) == (124, 1) and "process 1 was silent, and" in str(outcome)


def test_launch_with_heartbeats_ends_a_job_whose_process_hangs_before_its_first_step(tmp_path):
    """Such as in an import. Process 0 takes long to start too, but comes to its first step."""
    code = (
        "import os, pathlib, time\n"
        "time.sleep(1 if os.environ['RANK_ID'] == '0' else 60)\n"
        "while True: pathlib.Path(os.environ['SHARDFN_HEARTBEATS'], '0').touch(); time.sleep(0.02)"  # as beat() does
    )
    outcome, _ = run(code, tmp_path, heartbeat_s=0.8, first_heartbeat_s=2.5, grace_s=0.5)
    assert (outcome.status, outcome.rank, outcome.has_begun) == (124, 1, False)
    assert "process 1 was silent before its first step, and the job was ended" in str(outcome)


@pytest.mark.parametrize(
    "number", some_slow([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], {signal.SIGINT, signal.SIGHUP})
)
def test_launch_that_is_ended_ends_its_processes(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(f"import os\nprint(os.getpid(), flush=True)\n{STUBBORN}\n")
    command = [sys.executable, "-m", "shardfn", "launch", "--processes", "1", "--grace", "0.2", str(script)]
    launcher = subprocess.Popen(command, env=bare_environment() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        pid = int(launcher.stdout.readline().removeprefix("[0] "))
        assert launcher.stdout.readline() == "[0] ready\n"
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number and "interrupted" in err
    assert not is_alive(pid)


def test_launch_at_the_port_of_another_job_starts_nothing(tmp_path):
    """JAX's coordinators share a port: the processes of one job would join, and end, the other one."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} is in use"):
            run(f"open({str(tmp_path / 'started')!r}, 'w')", tmp_path / "logs", port=port)
    assert not (tmp_path / "started").exists()
    assert run("", tmp_path / "logs", port=port)[0].status == 0


@pytest.mark.parametrize("options", [{"job": ()}, {"job": local_job(2), "host": "10.0.0.9"}])
def test_launch_of_a_job_without_a_process_here_says_so(tmp_path, options):
    with pytest.raises(ClusterError, match="no process of the job is on"):
        launch([sys.executable, "-c", ""], logs=tmp_path, **options)


def test_launch_that_fails_itself_ends_its_processes(tmp_path):
    """Such as where the heartbeats cannot be read."""
    ready = tmp_path / "ready"
    code = f"import os, pathlib; pathlib.Path({str(ready)!r}).write_text(str(os.getpid())); {STUBBORN}"

    def fails(*_):
        while not ready.exists() or not ready.read_text():
            time.sleep(0.01)
        raise OSError("no answer of the disk")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no answer"):
        patch.setattr(sys.modules["shardfn.cluster.launch"], "silent", fails)
        run(code, tmp_path, processes=1, heartbeat_s=0.1)
    assert not is_alive(int(ready.read_text()))


def test_launch_that_is_told_to_end_while_it_ends_an_attempt_starts_no_other_one(tmp_path):
    """Process 0 fails, process 1 ends slowly, and SIGTERM comes in between."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        f"ready = pathlib.Path({str(tmp_path)!r}, 'ready')\n"
        "if os.environ['RANK_ID'] == '0':\n"
        "    while not ready.exists(): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        f"signal.signal(signal.SIGTERM, lambda *_: os.kill({os.getpid()}, signal.SIGTERM))\n"  # during the grace period
        "ready.touch()\n"
        "while True: time.sleep(0.01)"
    )
    outcome, _ = run(code, tmp_path / "logs", retries=3, grace_s=5.0)
    assert (outcome.status, outcome.rank, outcome.attempts) == (143, None, 1) and str(outcome) == "interrupted"


def test_a_process_that_rests_is_not_silent(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import time\n"
        "from shardfn.cluster.heartbeat import beat, rest\n"
        "beat(); rest(); time.sleep(2)"
    )
    assert run(code, tmp_path / "rests", processes=1, heartbeat_s=0.8)[0].status == 0
    assert run(code + "; beat(); time.sleep(60)", tmp_path / "again", processes=1, heartbeat_s=0.8)[0].is_silent
    outcome, _ = run("raise SystemExit(124)", tmp_path / "own", processes=1, heartbeat_s=0.4)
    assert outcome.status == 124 and "ended first, with exit status 124" in str(outcome), "its own exit status"


def test_command_line_prints_the_command_of_each_host(tmp_path, capsys):
    assert main(["launch", "--processes", "2", "--hosts", "a, b", "train.py", "--steps", "3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == ("python -m shardfn launch --host a --processes 2 --devices-per-process 1 --hosts a,b --port 8476 "
                     "--retries 0 train.py --steps 3")  # fmt: skip
    assert second == first.replace("--host a", "--host b")
    assert main(["launch", "--processes", "2", "--hosts", "10.0.0.1", "train.py"]) == 0
    assert "--host 10.0.0.1 " in capsys.readouterr().out, "also of one host, which may be another machine"
    options = ["--heartbeat", "60", "--first-heartbeat", "600", "--grace", "20", "--logs", "/shared/logs"]
    assert main(["launch", "--processes", "2", "--hosts", "a,b", *options, "train.py"]) == 0
    assert f"{' '.join(options)} train.py" in capsys.readouterr().out, "every option is passed on"
    table = tmp_path / "table.json"
    servers = [{"server_id": h, "device": [{"device_id": "0", "rank_id": str(i)}]} for i, h in enumerate("ab")]
    table.write_text(json.dumps({"server_list": servers}))
    assert main(["launch", "--ranktable", str(table), "train.py"]) == 0
    assert f"--host b --ranktable {table}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--processes", "0", "x.py"], "--processes 0"),
        (["--processes", "2", "no.py"], "there is no script no.py"),
        (["--processes", "2", "--hosts", "a,b", "--host", "c", "x.py"], "c is not a host of the job"),
        (["--ranktable", "no.json", "x.py"], "no.json"),
        (["--processes", "2", "--min-processes", "3", __file__], "--min-processes 3"),
        (["--processes", "2", "--port", "0", __file__], "`port` cannot be 0"),
        (
            [
                "--processes",
                "2",
                "--port",
                "70000",
                "--retries",
                "-1",
                "--heartbeat",
                "nan",
                "--first-heartbeat",
                "0",
                "--grace",
                "-1",
                __file__,
            ],
            "5 problems",
        ),
        (["--processes", "2", "--hosts", "a,,b", "x.py"], "not the hosts of a job"),
        (["--processes", "2", "--logs", __file__, __file__], "attempt-1 cannot be made"),
        (["--processes", "2", "--hosts", "a,a", "x.py"], "not the hosts of a job"),
    ],
)
def test_command_line_says_what_is_wrong(arguments, text, capsys):
    assert main(["launch", *arguments]) == 2
    assert text in capsys.readouterr().err
