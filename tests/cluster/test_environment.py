"""What a process learns of its group from its environment, and what it says where that is incomplete."""

import json
import socket

import jax
import pytest

from shardfn import cluster
from shardfn.cluster.environment import Membership, membership
from shardfn.cluster.jobs import Process, local_job, read_rank_table, variables
from shardfn.errors import ClusterError

JAX = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
MINDSPORE = {"MS_SCHED_HOST": "h", "MS_SCHED_PORT": "1", "RANK_SIZE": "4", "RANK_ID": "2", "DEVICE_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (JAX, Membership("h:1", 4, 2)),
        (MINDSPORE, Membership("h:1", 4, 2, (3,))),
        ({**MINDSPORE, **JAX, "JAX_PROCESS_ID": "1"}, Membership("h:1", 4, 1)),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, Membership("h:1")),
        ({"RANK_SIZE": "1", "RANK_ID": "0"}, Membership(None, 1, 0)),
        (
            {"MS_WORKER_NUM": "2", "MS_NODE_ID": "a-worker-1", "MS_SCHED_HOST": "h", "MS_SCHED_PORT": "1"},
            Membership("h:1", 2, 1),
        ),
    ],
)
def test_membership_of_an_environment(environment, found):
    assert membership(environment) == found


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK_SIZE": "two", "RANK_ID": "0"}, "RANK_SIZE=two"),
        ({"RANK_SIZE": "2", "RANK_ID": "0"}, "set MS_SCHED_HOST and MS_SCHED_PORT"),
        ({"JAX_NUM_PROCESSES": "2"}, "2 problems"),
        ({**JAX, "JAX_PROCESS_ID": "4"}, "process 4 is not one of 4"),
        ({**MINDSPORE, "MS_ROLE": "MS_SCHED"}, "has the role MS_SCHED"),
    ],
)
def test_membership_of_a_wrong_environment_names_the_variable(environment, text):
    with pytest.raises(ClusterError, match="(?s)" + text):
        membership(environment)


@pytest.mark.parametrize("job", [local_job(2, devices=2), local_job(1, hosts=("a", "b"))])
def test_variables_are_read_back_as_the_same_group(job):
    for process in job:
        found = variables(job, process, 5, {})
        assert membership(found) == Membership(f"{job[0].host}:5", 2, process.rank)
        theirs = {name: value for name, value in found.items() if not name.startswith("JAX")}
        assert membership(theirs) == Membership(f"{job[0].host}:5", 2, process.rank, process.devices[:1])
        assert ("JAX_COORDINATOR_BIND_ADDRESS" in found) == (job[0].host == "127.0.0.1")
        assert int(found["NPROC"]) >= 2 * len(process.devices)


def test_rank_and_size_before_init_are_those_of_the_environment(monkeypatch):
    assert (cluster.rank(), cluster.size()) == (0, 1)
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("RANK_SIZE", "8")
    assert (cluster.rank(), cluster.size()) == (3, 8)


def test_init_after_jax_has_started_says_so(monkeypatch):
    for name, value in MINDSPORE.items():
        monkeypatch.setenv(name, value)
    jax.devices()
    with pytest.raises(ClusterError, match="call init before anything"):
        cluster.init()


def test_init_of_process_0_where_another_job_listens_says_so(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("the other job would be ended"))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ClusterError, match="is in use"):
            cluster.init(f"127.0.0.1:{other.getsockname()[1]}", 2, 0)


def test_init_passes_the_devices_on_to_a_group_that_jax_detects(monkeypatch):
    said = []

    def initialize(**options):
        said.append(options)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    cluster.init(local_devices=[1])
    assert said == [{"initialization_timeout": 300, "local_device_ids": [1]}]


def test_rank_table_gives_each_device_a_process(tmp_path):
    devices = lambda first: [{"device_id": str(i), "device_ip": "1.1.1.1", "rank_id": str(first + i)} for i in range(2)]  # noqa: E731
    servers = [{"server_id": "b", "device": devices(2)}, {"server_id": "a", "device": devices(0)}]
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"version": "1.0", "server_count": "2", "server_list": servers}))
    assert read_rank_table(file) == (Process(0, "a"), Process(1, "a", (1,)), Process(2, "b"), Process(3, "b", (1,)))
    for wrong, text in (("{}", "there is no 'server_list'"), ("no", "is not a rank table"),
                        (json.dumps({"server_list": servers[:1]}), "does not number")):  # fmt: skip
        file.write_text(wrong)
        with pytest.raises(ClusterError, match=text):
            read_rank_table(file)
