"""What does a parameter server on Ray cost and stand: steps per second, drills with killed processes, MB per second?

Training: four workers predict the next character of a text (a small network, Adam). Each step also sleeps as long as an
accelerator would compute, so that the cores of this machine do not matter. Synchronous and asynchronous training beside
all-reduce over four processes with Gloo; then with one worker five times as slow, and with one worker killed halfway. The
killed all-reduce job starts again from its last checkpoint, with `shardfn.cluster.launch`. A step is four gradients. Times
begin when all workers are warm.
Drills: a server, the coordinator, a worker or the driver gets SIGKILL while four workers push one-hot gradients, so the
parameters say how often each push was applied; workers write down each push that was acknowledged.
Bytes: 100 MB pushed and pulled, beside an array that Ray alone sends to an actor and back.
Ray listens on the loopback address only.
Run: python benchmarks/parameter_server.py
     [--steps 100] [--device-ms 20] [--drills 5] [--mb 100] [--only training,drills,bytes] [--json OUT]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray stays on the loopback address

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardfn
from benchmarks import harness
from shardfn import cluster
from shardfn.cluster.parameter_server import ParameterServer, RowGradient, train

ROOT = pathlib.Path(__file__).parent.parent
WORKERS, SLOW, BATCH, CONTEXT, VOCABULARY, WIDTH = 4, 5, 64, 8, 96, 128
CHECKPOINT_EVERY = 25
PUSHES = 400
"""Most pushes of a worker in a drill."""
OPTIMIZER = optax.adam(3e-3)
ONE_HOT = optax.sgd(1.0)


# ---- training


def text() -> np.ndarray:
    letters = np.frombuffer((ROOT / "examples" / "text" / "proverbs.txt").read_bytes(), np.uint8)
    return np.clip(letters.astype(np.int32) - 32, 0, VOCABULARY - 1)


def first_params() -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key, *shape: np.asarray(jax.random.normal(key, shape) / shape[0] ** 0.5)  # noqa: E731
    return {"letters": make(keys[0], VOCABULARY, 32), "hidden": make(keys[1], CONTEXT * 32, WIDTH),
            "out": make(keys[2], WIDTH, VOCABULARY)}  # fmt: skip


def loss(params, x, y):
    h = jnp.tanh(params["letters"][x].reshape(len(x), -1) @ params["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], y).mean()


def batch(letters, worker: int, step: int):
    at = np.random.default_rng([worker, step]).integers(0, len(letters) - CONTEXT, BATCH)
    return letters[at[:, None] + np.arange(CONTEXT)], letters[at + CONTEXT]


def final_loss(params) -> float:
    letters = text()
    at = np.arange(0, len(letters) - CONTEXT, 7)
    return float(jax.jit(loss)(params, letters[at[:, None] + np.arange(CONTEXT)], letters[at + CONTEXT]))


def worker_loop(server, worker: int, steps: int, device_s: float, folder: str, kill_at: int = -1) -> None:
    letters, grad = text(), jax.jit(jax.grad(lambda p, x, y: loss(p, x, y) / WORKERS))

    def gradient(params, step):
        if step == kill_at and not os.path.exists(f"{folder}/killed"):
            pathlib.Path(folder, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(device_s)
        return jax.device_get(grad(params, *batch(letters, worker, step)))

    jax.block_until_ready(grad(first_params(), *batch(letters, worker, 0)))
    pathlib.Path(folder, f"ready-{worker}").touch()
    while len(list(pathlib.Path(folder).glob("ready-*"))) < WORKERS:
        time.sleep(0.01)
    for _ in train(server, worker, gradient, lambda step: step, steps):
        pass


def servers_train(ray, engine, options, synchronous: bool, slow: bool, killed: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        rules = {} if synchronous else {"staleness": 4 * WORKERS * SLOW}
        server = ParameterServer.create(first_params(), OPTIMIZER, folder=f"{folder}/job", servers=2, workers=WORKERS,
                                        synchronous=synchronous, engine=engine, **rules)  # fmt: skip
        remote = ray.remote(num_cpus=0, max_retries=-1)(worker_loop)
        device_s, last = options.device_ms / 1e3, WORKERS - 1
        tasks = [remote.remote(server, w, options.steps, device_s * (SLOW if slow and w == last else 1), folder,
                               options.steps // 2 if killed and w == last else -1) for w in range(WORKERS)]  # fmt: skip
        while len(list(pathlib.Path(folder).glob("ready-*"))) < WORKERS:
            time.sleep(0.01)
        start, waiting = time.perf_counter(), tasks
        # Synchronous training ends for all together. Asynchronous training: the rate while all work.
        ray.wait(waiting, num_returns=WORKERS if synchronous or killed else 1)
        seconds, report = time.perf_counter() - start, server.report()
        ray.get(tasks)
        found = {"steps/s": report.accepted / WORKERS / seconds, "last loss": final_loss(server.pull().values),
                 "largest staleness": server.report().largest_staleness}  # fmt: skip
        server.close()
        return found


def all_reduce_process(folder: str, steps: int, device_s: float, slow: bool, killed: bool) -> None:
    """One of the processes of all-reduce training."""
    cluster.init()
    rank, letters, place = cluster.rank(), text(), pathlib.Path(folder)
    mesh = jax.make_mesh((WORKERS,), ("data",), (jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    same = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(lambda p: loss(p, x, y))(params)
        changes, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    saved = place / "state.npz"
    tree = {"params": first_params(), "state": OPTIMIZER.init(first_params()), "step": np.int32(0)}
    if saved.exists():
        with np.load(saved) as arrays:
            tree = jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in arrays.files])
    first = int(tree["step"])
    params, state = jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), same, lambda i, x=x: np.asarray(x)[i]),
                                 (tree["params"], tree["state"]))  # fmt: skip
    give = lambda x: jax.make_array_from_process_local_data(spread, x)  # noqa: E731
    jax.block_until_ready(step(params, state, *map(give, batch(letters, rank, 0))))
    marks = [time.time()]
    for number in range(first, steps):
        if (
            killed
            and rank == WORKERS - 1
            and number == steps // 2 + CHECKPOINT_EVERY // 2
            and not (place / "killed").exists()
        ):
            (place / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(device_s * (SLOW if slow and rank == WORKERS - 1 else 1))
        params, state = jax.block_until_ready(step(params, state, *map(give, batch(letters, rank, number))))
        if rank == 0 and (number + 1) % CHECKPOINT_EVERY == 0:
            leaves = [
                np.asarray(x) for x in jax.tree.leaves({"params": params, "state": state, "step": np.int32(number + 1)})
            ]
            np.savez(place / "part.npz", *leaves)
            os.replace(place / "part.npz", saved)
    if rank == 0:
        (place / "end").write_text(json.dumps([*marks, time.time(), final_loss(jax.tree.map(np.asarray, params))]))
    if rank == 0 and not (place / "begin").exists():
        (place / "begin").write_text(str(marks[0]))


def all_reduce_train(options, slow: bool, killed: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--all-reduce", folder, "--steps", str(options.steps), "--device-ms",
                   str(options.device_ms), *(["--slow"] if slow else []), *(["--killed"] if killed else [])]  # fmt: skip
        begun = time.time()
        with open(os.devnull, "w") as nothing:
            outcome = cluster.launch(command, cluster.local_job(WORKERS), f"{folder}/logs", retries=2, out=nothing)
        assert outcome.status == 0, outcome
        start, end, last = json.loads(pathlib.Path(folder, "end").read_text())
        # After a restart, the time from the job's start counts, less that to the first step, which a start without a
        # kill has too.
        seconds = end - (begun + options.startup_s) if killed else end - start
        options.startup_s = start - begun if not killed else options.startup_s
        return {"steps/s": options.steps / seconds, "last loss": last, "largest staleness": None}


def training(ray, engines, options) -> list[dict]:
    found = []
    for name, slow, killed in (
        ("all equal", False, False),
        ("one 5x slower", True, False),
        ("one killed", False, True),
    ):
        for way in ("synchronous", "asynchronous", "all-reduce"):
            if way == "all-reduce":
                row = all_reduce_train(options, slow, killed)
            else:
                row = servers_train(ray, engines(), options, way == "synchronous", slow, killed)
            found.append({f"{WORKERS} workers": name, "way": way, **row})
    harness.show(found)
    return found


# ---- drills


def push_loop(server, worker: int, folder: str) -> None:
    pathlib.Path(folder, f"pid-{worker}").write_text(str(os.getpid()))
    stop = pathlib.Path(folder, "stop")
    acks = open(f"{folder}/acks-{worker}", "a", buffering=1)  # noqa: SIM115
    while (step := server.next_step(worker)) < PUSHES and not stop.exists():
        server.pull(ids={"w": [worker * PUSHES + step]})
        server.push({"w": RowGradient([worker * PUSHES + step], [-1.0])}, worker, step)
        acks.write(f"{step} {time.time()}\n")


def drive(engine, folder: str, ray):
    server = ParameterServer.create({"w": np.zeros(WORKERS * PUSHES, "float32")}, ONE_HOT, folder=f"{folder}/job", servers=2,
                                    workers=WORKERS, synchronous=False, staleness=10**6, engine=engine)  # fmt: skip
    remote = ray.remote(num_cpus=0, max_retries=-1)(push_loop)
    return server, [remote.remote(server, worker, folder) for worker in range(WORKERS)]


def acks_of(folder: str) -> list[tuple[int, int, float]]:
    found = []
    for path in pathlib.Path(folder).glob("acks-*"):
        lines = (line.split() for line in path.read_text().splitlines())
        found += [(int(path.name[5:]), int(line[0]), float(line[1])) for line in lines if len(line) == 2]
    return found


def drill(ray, engine, what: str, draw) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        driver = None
        if what == "driver":
            address = ray.get_runtime_context().gcs_address
            command = [sys.executable, __file__, "--drive", folder, "--address", address, "--name", engine.name]
            driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            server, tasks = None, []
        else:
            server, tasks = drive(engine, folder, ray)
        while len(acks_of(folder)) < 20 * WORKERS:
            time.sleep(0.05)
        time.sleep(draw.random())
        victim = int(draw.integers(0, WORKERS))
        if what == "driver":
            pid = driver.pid
        elif what == "worker":
            pid = int(pathlib.Path(folder, f"pid-{victim}").read_text())
        else:
            target = (0, None) if what == "coordinator" else (0, victim % 2)
            pid = engine.process_ids([type(shardfn.cluster.parameter_server.engine.COORDINATOR)(*target)])[0]
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        if driver is not None:
            driver.wait()
            server, tasks = drive(engine, folder, ray)
        back_at = time.time()
        # After the kill of a worker the others go on: what counts is when the killed one does.
        late = lambda after: sorted(t for w, _, t in acks_of(folder) if t > after and (what != "worker" or w == victim))  # noqa: E731
        while len(late(back_at)) < 20:
            time.sleep(0.05)
        times = [killed_at, *late(killed_at)]
        gap = max(b - a for a, b in itertools.pairwise(times))
        pathlib.Path(folder, "stop").touch()
        ray.get(tasks)
        counts = server.pull().values["w"]
        acknowledged = {(worker, step) for worker, step, _ in acks_of(folder)}
        row = {"acknowledged": len(acknowledged), "lost": sum(counts[w * PUSHES + s] < 1 for w, s in acknowledged),
               "doubled": (counts > 1).sum(), "seconds": gap}  # fmt: skip
        server.close()
        return row


def drills(ray, engines, options) -> list[dict]:
    found, draw = [], np.random.default_rng(0)
    for what in ("server", "coordinator", "worker", "driver"):
        rows = [drill(ray, engines(), what, draw) for _ in range(options.drills)]
        seconds = [row["seconds"] for row in rows]
        total = {key: int(sum(row[key] for row in rows)) for key in ("acknowledged", "lost", "doubled")}
        found.append({"killed by SIGKILL": what, "drills": len(rows), **total,
                      "s until training goes on, median": statistics.median(seconds), "most": max(seconds)})  # fmt: skip
    harness.show(found)
    return found


# ---- bytes


class Echo:
    """An actor that takes an array, and gives one."""

    def take(self, array) -> None:
        self.array = array

    def give(self):
        return self.array


def rate(megabytes: int, call) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return megabytes / statistics.median(seconds[1:])


def transfer(ray, engines, options) -> list[dict]:
    rows, found = options.mb * 1000 // 4, []
    array = np.random.default_rng(0).standard_normal((rows, 250), np.float32)
    actor = ray.remote(num_cpus=0)(Echo).remote()

    def show(way: str, push: float, pull: float | None) -> None:
        found.append({f"{options.mb} MB of float32": way, "push, MB/s": push, "pull, MB/s": pull})

    show("Ray alone, to an actor and back", rate(options.mb, lambda: ray.get(actor.take.remote(array))),
         rate(options.mb, lambda: np.array(ray.get(actor.give.remote()))))  # fmt: skip
    ray.kill(actor)
    for name, compress in (("2 servers, with the log on disk", False), ("2 servers, as bfloat16", True)):
        with tempfile.TemporaryDirectory() as folder:
            server = ParameterServer.create({"w": array}, optax.sgd(1e-3), folder=folder, servers=2, engine=engines(),
                                            compress=compress, log_bytes=1 << 40)  # fmt: skip
            pushes = iter(range(100))
            push = rate(options.mb, lambda s=server, p=pushes: s.push({"w": array}, 0, next(p)))
            show(name, push, rate(options.mb, server.pull))
            server.close()
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            file.seek(0)
            file.write(array)
            file.flush()
            os.fsync(file.fileno())

        show("the disk alone, with fsync", rate(options.mb, write), None)
    harness.show(found)
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device-ms", type=float, default=20)
    parser.add_argument("--drills", type=int, default=5)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--only", default="training,drills,bytes")
    for flag in ("--all-reduce", "--drive", "--address", "--name"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    options = harness.parse(parser)
    if options.all_reduce:
        return all_reduce_process(
            options.all_reduce, options.steps, options.device_ms / 1e3, options.slow, options.killed
        )
    try:
        import ray

        import shardfn.cluster.parameter_server.ray_engine as ray_engine
    except ImportError:
        print('this benchmark needs Ray: pip install "shardfn[ray]"')
        return None
    if options.drive:
        ray.init(options.address, log_to_driver=False)
        ray.get(drive(ray_engine.OnRay(options.name), options.drive, ray)[1])
        return None
    options.startup_s = 0.0
    names = (f"job-{number}" for number in range(10**6))
    tables = {"training": training, "drills": drills, "bytes": transfer}
    with tempfile.TemporaryDirectory() as folder:
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            token = pathlib.Path(folder, "token")
            token.write_text(secrets.token_hex(32))
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
                 object_store_memory=1 << 30)  # fmt: skip
        engines = lambda: ray_engine.OnRay(next(names))  # noqa: E731
        found = {name: tables[name](ray, engines, options) for name in options.only.split(",")}
        ray.shutdown()
    harness.save(options.json, found, packages=["ray"])
    return None


if __name__ == "__main__":
    main()
