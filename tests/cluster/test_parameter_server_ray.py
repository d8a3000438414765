"""The parameter server on Ray: run by `make ray`, in a network of its own."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import numpy as np
import optax
import pytest

from shardfn import embedding
from shardfn.cluster import TableServers
from shardfn.cluster.parameter_server import ParameterServer, RowGradient, train
from shardfn.cluster.parameter_server.engine import COORDINATOR, Target, targets_of
from shardfn.errors import ClusterError
from tests.embedding.test_table import ROWS, WIDTH, batches, trained
from tests.processes import ROOT, bare_environment, launched

pytestmark = pytest.mark.ray
WORKERS, STEPS = 3, 60


@pytest.fixture(scope="module")
def cluster(ray_token):
    import ray

    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield ray
    ray.shutdown()


def start(folder, name, **options):
    from shardfn.cluster.parameter_server.ray_engine import OnRay

    options = {"servers": 2, "workers": WORKERS, "synchronous": False, "staleness": 1000, "timeout_s": 60, **options}
    return ParameterServer.create(
        np.zeros(WORKERS * STEPS, "float32"), optax.sgd(1.0), folder=folder, engine=OnRay(name), **options
    )


def work(server, worker, pause_s=0.01):
    def gradient(params, at):
        time.sleep(pause_s)
        return RowGradient([at], [-1.0])

    for _ in train(server, worker, gradient, lambda step: worker * STEPS + step, STEPS):
        pass


@pytest.mark.parametrize("synchronous", [True, False])
def test_killed_servers_coordinators_and_workers_lose_and_double_nothing(cluster, tmp_path, synchronous):
    rules = {} if synchronous else {"staleness": 1000}
    server = start(tmp_path, f"kill-{synchronous}", synchronous=synchronous, **{"staleness": None, **rules})
    worker_task = cluster.remote(num_cpus=0, max_retries=-1)(work)
    tasks = [worker_task.remote(server, worker) for worker in range(WORKERS)]
    for round_, target in enumerate([Target(0, 0), COORDINATOR, Target(0, 1), Target(0, 0)]):
        while server.report().accepted < (round_ + 1) * 25:
            time.sleep(0.01)
        os.kill(server.engine.process_ids([target])[0], signal.SIGKILL)
        if round_ == 1:
            cluster.cancel(tasks[0], force=True)
            tasks[0] = worker_task.remote(server, 0)
        if round_ == 2 and not synchronous:
            server.resize(servers=3)
            break
    cluster.get(tasks, timeout=120)
    found = server.pull().values
    np.testing.assert_array_equal(found, 1)
    assert server.report().accepted == WORKERS * STEPS
    server.close()


def resize(server, numbers):
    for servers in numbers:
        wanted = min(server.report().accepted + 5, WORKERS * STEPS)
        while server.report().accepted < wanted:  # others push between two changes
            time.sleep(0.01)
        server.resize(servers=servers)


def test_several_clients_change_the_servers_while_workers_push_and_one_is_killed(cluster, tmp_path):
    server = start(tmp_path, "several")
    tasks = [cluster.remote(num_cpus=0, max_retries=-1)(work).remote(server, worker) for worker in range(WORKERS)]
    mover = cluster.remote(num_cpus=0, max_retries=0)(resize)
    movers = [mover.remote(server, numbers) for numbers in [(3,), (1, 2), (4, 3) * 9]]
    while server.report().accepted < 20:
        time.sleep(0.01)
    cluster.cancel(movers.pop(), force=True)
    cluster.get([*tasks, *movers], timeout=200)
    server.resize(servers=2)
    np.testing.assert_array_equal(server.pull().values, 1)
    deadline = time.monotonic() + 20
    wanted = {"several/coordinator", *(f"several/{target.name}" for target in targets_of(server._place))}
    while wanted != (left := names_of_actors("several/")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == wanted and len(list((tmp_path / "job").glob("epoch-*"))) == 1
    server.close()


def names_of_actors(prefix):
    from ray.util import list_named_actors

    names = (actor["name"] for actor in list_named_actors(all_namespaces=True))
    return {name for name in names if name.startswith(prefix)}


def test_a_job_goes_on_after_its_cluster_is_gone(cluster, tmp_path):
    server = start(tmp_path, "first")
    for step in range(5):
        server.push(RowGradient([step], [-1.0]), 0, step)
    for target in (COORDINATOR, Target(0, 0), Target(0, 1)):
        cluster.kill(server.engine._handle(target))
    again = start(tmp_path, "second")
    assert again.pull().values.sum() == 5 and again.next_step(0) == 5
    again.close()


def test_large_arrays_and_compression_on_ray(cluster, tmp_path):
    from shardfn.cluster.parameter_server.ray_engine import OnRay

    params = {"w": np.zeros((2048, 1024), "float32"), "b": np.zeros(3, "float32")}
    server = ParameterServer.create(params, optax.sgd(1.0), folder=tmp_path, servers=2, engine=OnRay("large"), chunk_bytes=1 << 20,
                                    compress=True, timeout_s=60)  # fmt: skip
    server.push({"w": np.full((2048, 1024), 0.5, "float32"), "b": np.ones(3)}, 0, 0)
    found = server.pull(version=1).values
    assert (found["w"] == -0.5).all() and found["b"].tolist() == [-1, -1, -1]
    server.close()


def test_threads_of_one_client_process(cluster, tmp_path):
    import pickle

    server = start(tmp_path, "threads")
    threads = [
        threading.Thread(target=work, args=(pickle.loads(cluster.cloudpickle.dumps(server)), w, 0))
        for w in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(server.pull().values, 1)
    server.close()


def test_the_same_script_in_every_role_of_mindspore(cluster, tmp_path):
    variables = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "18118", "MS_WORKER_NUM": "2", "MS_SERVER_NUM": "2",
                 "MS_RECOVERY_PATH": str(tmp_path / "job"), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}  # fmt: skip
    roles = [("MS_SCHED", 0), ("MS_PSERVER", 0), ("MS_PSERVER", 1), ("MS_WORKER", 0), ("MS_WORKER", 1)]
    processes = []
    for role, number in roles:
        own = bare_environment() | variables | {"MS_ROLE": role, "MS_NODE_ID": str(number)}
        processes.append(subprocess.Popen([sys.executable, ROOT / "tests/cluster/roles.py"], env=own, stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, text=True))  # fmt: skip
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes[::-1]][::-1]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 5, outputs
    assert [f"MS_WORKER {number} of 2: equal" in output for number, output in enumerate(outputs[3:])] == [True, True]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_servers_and_workers_talk_by_tls_where_the_environment_says_so(ray_token, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-subj",
                    "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)  # fmt: skip
    own = bare_environment() | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RAY_USE_TLS": "1",
                                "RAY_TLS_SERVER_CERT": str(certificate), "RAY_TLS_SERVER_KEY": str(key),
                                "RAY_TLS_CA_CERT": str(certificate)}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests/cluster/tls_driver.py"), str(tmp_path)]
    driver = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watch = threading.Timer(150, driver.kill)
    watch.start()
    try:
        assert driver.stdin and driver.stdout
        line = next((line for line in driver.stdout if line.startswith("pulled")), "")
        assert line.startswith("pulled [0.0, 1.0, 0.0, 0.0] from "), line
        host, port = line.split()[-1].split(":")
        context = ssl.create_default_context(cafile=certificate)
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            assert secured.version() in ("TLSv1.2", "TLSv1.3")
        driver.communicate("end\n", timeout=60)
    finally:
        watch.cancel()
        driver.kill()


def test_a_role_without_authentication_is_refused(ray_token):
    own = {name: value for name, value in bare_environment().items() if not name.startswith("RAY_AUTH")}
    own |= {"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "18118", "MS_WORKER_NUM": "1",
            "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / "tests/cluster/roles.py"], env=own, capture_output=True, text=True, timeout=120
    )
    assert done.returncode and "does not say who may join its cluster" in done.stderr, done.stderr


def test_a_role_that_there_is_not_is_refused(monkeypatch):
    from shardfn.mindspore.roles import take_role

    for name, value in {
        "MS_ROLE": "MS_SHED",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": "1",
        "MS_WORKER_NUM": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match="there is no role MS_SHED"):
        take_role()


@pytest.mark.parametrize("cache_rows", [0, 24])
def test_a_table_whose_servers_are_killed_between_steps_loses_nothing(cluster, tmp_path, cache_rows):
    from shardfn.cluster.parameter_server.ray_engine import OnRay

    servers = TableServers(folder=tmp_path, servers=2, engine=OnRay(f"table-{cache_rows}"), timeout_s=60)
    table, host = (
        embedding.Table(ROWS, WIDTH, store=store, optimizer=embedding.adam(0.1), init=0.5, cache_rows=cache_rows)
        for store in (servers, "host")
    )
    for round_, target in enumerate([Target(0, 0), COORDINATOR, Target(0, 1), Target(0, 0)]):
        for each in (table, host):
            trained(each, batches(4, seed=round_), prefetch=True)
        os.kill(servers.server.engine.process_ids([target])[0], signal.SIGKILL)
    np.testing.assert_array_equal(table.values(), host.values())
    for name, rows in host.moments().items():
        np.testing.assert_array_equal(table.moments()[name], rows)
    servers.server.close()


def test_the_processes_of_a_job_share_a_table_on_servers(cluster, tmp_path):
    """One worker of two processes: both read the rows, and the first one pushes."""
    address = cluster.get_runtime_context().gcs_address
    done = launched("--processes", "2", "--devices-per-process", "2", "--grace", "1", str(ROOT / "tests/cluster/table_worker.py"),
                    address, str(tmp_path), timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2, 4 devices") == 2
