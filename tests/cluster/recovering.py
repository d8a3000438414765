"""A training script of 9 steps: `recovering.py DIRECTORY [kill|hang|term STEP]`; process 1 does that once, after STEP."""
# ruff: noqa: E402

import os
import pathlib
import signal
import sys
import time

from shardfn import cluster

cluster.init()

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import checkpoint, data, train

folder, (what, at) = pathlib.Path(sys.argv[1]), sys.argv[2:] or ("", "0")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


def loss(params, x, y, key):
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0) @ params["v"] - y) ** 2)


def make_step(devices):
    sharded = {"parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    step = train.step(loss, optax.adam(0.1), mode="semi_auto_parallel", device=devices, **sharded)
    return step, {"w": np.ones((4, 8), "float32"), "v": np.ones(8, "float32")}


def batches(devices):
    options = {"batch_size": 16, "shuffle": True, "seed": 1, "epochs": None}
    return data.load((x, x.sum(1)), "data_parallel", device=devices, **options)


def after_step(step, value):
    if what == "term":  # the notice goes to all processes by JAX's coordinator
        time.sleep(0.5)
    if cluster.rank() == 0:
        print(f"step {step} loss {float(value)!r} on {jax.device_count()} devices")
    if what and step == int(at) and cluster.rank() == 1 and not (folder / "failed").exists():
        assert checkpoint.steps(folder) == (3,)  # it waits for the save in the background
        (folder / "failed").touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "hang":
            time.sleep(600)


cluster.run(make_step, batches, folder, steps=9, every=3, key=jax.random.key(7), after_step=after_step)
