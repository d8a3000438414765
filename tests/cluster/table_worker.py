"""A process of a job that trains a table on the servers of a Ray cluster: `table_worker.py ADDRESS FOLDER`."""
# ruff: noqa: E402

import pathlib
import sys
import time

from shardfn import cluster

cluster.init()  # before anything else of JAX

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

from shardfn import ShardError, embedding, train
from shardfn.cluster.parameter_server.ray_engine import OnRay
from tests.processes import raises

ADDRESS, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
ray.init(ADDRESS, log_to_driver=False)


def loss(params, ids, y):
    return jnp.mean((params["items"][ids].sum((1, 2)) * params["scale"] - y) ** 2)


def trained(table, **options):
    step = train.step(loss, optax.adam(1e-2), ids={"items": 0}, **options)
    random = np.random.default_rng(0)
    data = [(np.minimum(random.zipf(1.3, (16, 3)) - 1, 59), np.ones(16, "float32")) for _ in range(5)]
    state, losses = step.init({"items": table, "scale": jnp.ones(())}, *data[0]), []
    for batch in step.feed(data):
        state, value = step(state, batch)
        losses.append(float(value))
    return losses


def made(store, **options):
    return embedding.Table(60, 4, store=store, optimizer=embedding.adam(0.1), init=0.5, **options)


try:
    made(cluster.TableServers())
except ShardError as error:
    assert "servers of a table of several processes are outside them" in str(error)
else:
    raise AssertionError("each process would have servers of its own")
for cache_rows in (0, 48):
    servers = cluster.TableServers(
        folder=FOLDER / f"job-{cache_rows}", servers=2, engine=OnRay(f"processes-{cache_rows}"), timeout_s=60
    )
    table, host = made(servers, cache_rows=cache_rows), made("host", cache_rows=cache_rows)
    assert trained(table, mode="data_parallel") == trained(host, mode="data_parallel")
    np.testing.assert_array_equal(table.values(), host.values())
    assert table.save(FOLDER / f"saves-{cache_rows}") == host.save(FOLDER / f"host-{cache_rows}")
    pushes = 5 if not cache_rows else 0
    assert servers.server.report().accepted == pushes, "the first process alone pushes"
time.sleep(3 * cluster.rank())  # the first process restores, and the other makes its table later
again = made(cluster.TableServers(folder=FOLDER / "again", engine=OnRay("again"), timeout_s=60))
again.restore(FOLDER / f"saves-{cache_rows}")
np.testing.assert_array_equal(again.values(), table.values())
for call, text in (
    (lambda: again.fetch([cluster.rank()]), "process 1 looks up other ids than process 0"),
    (lambda: again.restore(FOLDER / ("saves-0", "nothing")[cluster.rank()]), "process 1 finds 0 saves"),
    (lambda: made(cluster.TableServers(folder=FOLDER / f"of-{cluster.rank()}", engine=OnRay(f"of-{cluster.rank()}"))),
     "process 1 has other servers"),
):  # fmt: skip
    raises(ShardError, text, call)
print(f"done in process {cluster.rank()} of {cluster.size()}, {jax.device_count()} devices")
