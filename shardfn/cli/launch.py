"""`python -m shardfn launch --processes 8 script.py args...`: the processes of a machine, or the commands of several."""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from shardfn.cluster.environment import LOOPBACK
from shardfn.cluster.heartbeat import START_S
from shardfn.cluster.jobs import LOCAL, Process, local_job, read_rank_table
from shardfn.cluster.launch import GRACE_S, launch
from shardfn.errors import ClusterError, fail

PORT = 8476
"""Where process 0 listens if the job has several hosts, which must agree on it."""


def add(commands: Any) -> None:
    """Add `launch` to the commands of the command line."""
    parser = commands.add_parser(
        "launch", help="start several processes of a script on this machine, and end all with the first failure",
        description="Start the processes of a job on this machine. The script calls shardfn.cluster.init() first.\n"
        "With --hosts and without --host, print the command for each.",
        epilog="example: python -m shardfn launch --processes 2 --devices-per-process 4 train.py --steps 100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--processes", type=int, metavar="N", help="how many, on each host")
    where.add_argument("--ranktable", metavar="FILE", help="MindSpore's RANK_TABLE_FILE: a process for each device")
    add = parser.add_argument
    add("--devices-per-process", type=int, default=1, metavar="N", help="virtual CPU devices, or GPUs; 1 if left out")
    add("--hosts", metavar="HOST,…", help="addresses of all hosts; process 0 is on the first")
    add("--host", metavar="HOST", help="which of them this machine is")
    add("--port", type=int, metavar="N", help=f"where process 0 listens; {PORT} with several hosts, else a free one")
    add("--retries", type=int, default=0, metavar="N", help="how many times a failed job starts again")
    add(
        "--min-processes",
        type=int,
        metavar="N",
        help="start again without the process that failed, down to N processes",
    )
    add("--heartbeat", type=float, metavar="S", help="end the job when a process takes no step for S seconds")
    add(
        "--first-heartbeat",
        type=float,
        default=START_S,
        metavar="S",
        help=f"the same before its first step; {START_S:g}",
    )
    add("--logs", metavar="DIR", help="where the log files go; a new temporary directory if left out")
    add("--grace", type=float, default=GRACE_S, metavar="S", help=f"seconds between SIGTERM and SIGKILL; {GRACE_S:g}")
    add("script", metavar="SCRIPT", help="the Python script")
    add("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    parser.set_defaults(command=_launch, platform=None, starts_devices=False)


def _launch(options: argparse.Namespace) -> None:
    if options.ranktable:
        job = read_rank_table(options.ranktable)
    else:
        given = LOCAL if options.hosts is None else options.hosts
        job = local_job(options.processes, options.devices_per_process, [host.strip() for host in given.split(",")])
    hosts = list(dict.fromkeys(process.host for process in job))
    if options.host is None and (len(hosts) > 1 or (options.hosts and not LOOPBACK.fullmatch(hosts[0]))):
        print("\n".join(_commands(options, hosts)))
        return
    host = options.host or hosts[0]
    if host not in hosts:
        fail(ClusterError, f"{host} is not a host of the job", where=f"--host {host}", why=f"they are {', '.join(hosts)}",
             fix=f"write --host {hosts[0]}, or leave it out for the command of each")  # fmt: skip
    if not pathlib.Path(options.script).is_file():
        fail(ClusterError, f"there is no script {options.script}", where=options.script, why="it is run by every process",
             fix="give the path of a Python file; options of launch stand before it")  # fmt: skip
    least = options.min_processes
    if least is not None and (len(hosts) > 1 or not 1 <= least <= len(job)):
        fail(ClusterError, f"a job cannot have {least} processes at least", where=f"--min-processes {least}",
             why=f"it has {len(job)} processes on {len(hosts)} host{'s'[: len(hosts) != 1]}, and a launcher leaves out those of "
                 "its own host", fix=f"write 1 to {len(job)}; leave it out with several hosts")  # fmt: skip
    port = PORT if options.port is None and len(hosts) > 1 else options.port
    logs = options.logs or tempfile.mkdtemp(prefix="shardfn-launch-")
    command = [sys.executable, options.script, *options.arguments]
    outcome = launch(
        command, _as_local(job, hosts), logs, host=LOCAL if len(hosts) == 1 else host, port=port,
        retries=options.retries, min_processes=least, heartbeat_s=options.heartbeat,
        first_heartbeat_s=options.first_heartbeat, grace_s=options.grace,
    )  # fmt: skip
    if outcome.status:
        print(f"{outcome}\nlogs: {outcome.logs}", file=sys.stderr)
        raise SystemExit(outcome.status)


def _as_local(job: Sequence[Process], hosts: Sequence[str]) -> tuple[Process, ...]:
    """A job on this machine alone, by its loopback address."""
    return tuple(Process(p.rank, LOCAL, p.devices) if len(hosts) == 1 else p for p in job)


def _commands(options: argparse.Namespace, hosts: Sequence[str]) -> list[str]:
    """The command to run on each host."""
    said = ["--ranktable", options.ranktable] if options.ranktable else [
        "--processes", str(options.processes), "--devices-per-process", str(options.devices_per_process),
        "--hosts", ",".join(hosts),
    ]  # fmt: skip
    rest = ["--port", str(options.port or PORT), "--retries", str(options.retries)]
    rest += [] if options.heartbeat is None else ["--heartbeat", f"{options.heartbeat:g}"]
    rest += [] if options.first_heartbeat == START_S else ["--first-heartbeat", f"{options.first_heartbeat:g}"]
    rest += [] if options.grace == GRACE_S else ["--grace", f"{options.grace:g}"]
    rest += [] if options.logs is None else ["--logs", options.logs]
    rest += [options.script, *options.arguments]
    return [shlex.join(["python", "-m", "shardfn", "launch", "--host", host, *said, *rest]) for host in hosts]
