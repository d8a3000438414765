"""A node of a Ray cluster that is declared dead, with tables and parameters on it: run by `make ray`."""

import os
import pathlib
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn import embedding
from shardfn.cluster import TableServers
from shardfn.cluster.parameter_server.engine import Target
from tests.embedding.test_table import GRADIENT, ROWS, WIDTH, batches

pytestmark = pytest.mark.ray
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}
FAST = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 4}  # fmt: skip


@pytest.fixture
def nodes(ray_token):
    """A head, which has the driver, and two nodes for servers."""
    import ray
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "_system_config": FAST, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    own = [cluster.add_node(**NODE, resources={"server": 10}, node_ip_address="127.0.0.1") for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray, cluster, own
    ray.shutdown()
    cluster.shutdown()


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_node_that_is_declared_dead_loses_nothing(nodes, tmp_path, end):
    """All its processes are killed; or it answers nobody, while its servers still run and have their folders open."""
    from shardfn.cluster.parameter_server.ray_engine import OnRay

    ray, cluster, own = nodes
    engine = OnRay(f"nodes-{end}", resources={"server": 1})
    servers = TableServers(folder=tmp_path / "job", servers=4, engine=engine, timeout_s=150)
    table = embedding.Table(ROWS, WIDTH, store=servers, optimizer=embedding.adam(0.1), init=0.5)
    host = embedding.Table(ROWS, WIDTH, optimizer=embedding.adam(0.1), init=0.5)

    def step(number):
        for each in (table, host):
            batch = each.fetch(batches(1, seed=number)[0])
            each.update(batch, GRADIENT(batch.values, jnp.asarray(batch.positions)))

    for number in range(5):
        step(number)
    targets = [Target(0, server) for server in range(4)]
    old = dict(zip(targets, engine.process_ids(targets), strict=True))
    lost = next(node for node in own if raylet_of(node) in map(parent_of, old.values()))
    moved = [target for target, pid in old.items() if parent_of(pid) == raylet_of(lost)]
    began = time.monotonic()
    if end == "killed":
        cluster.remove_node(lost, allow_graceful=False)
        while any(map(runs, map(old.get, moved))) and time.monotonic() < began + 60:  # they end soon after their node
            time.sleep(0.05)
    else:
        os.kill(raylet_of(lost), signal.SIGSTOP)
        while any(node["NodeID"] == lost.node_id and node["Alive"] for node in ray.nodes()):
            time.sleep(0.2)
        assert all(parent_of(old[target]) == raylet_of(lost) for target in moved), "the servers still run"
        threading.Timer(3, os.kill, (raylet_of(lost), signal.SIGCONT)).start()
    step(5)
    seconds = time.monotonic() - began
    for number in range(6, 10):
        step(number)
    np.testing.assert_array_equal(table.values(), host.values())
    jax.tree.map(np.testing.assert_array_equal, table.moments(), host.moments())
    assert servers.server.report().accepted == 10
    now = dict(zip(targets, engine.process_ids(targets), strict=True))
    assert moved and all(now[target] != old[target] for target in moved)
    print(f"{end}: {len(moved)} servers went to another node, {seconds:.1f} s")
    servers.server.close()
