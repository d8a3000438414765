"""What job.toml runs: it goes on from the last checkpoint. On this machine, with the processes and devices of one pod each:

shardfn launch --processes 2 --devices-per-process 4 examples/kubernetes/train.py /tmp/checkpoints 100
"""
# ruff: noqa: E402

import sys

from shardfn import cluster

cluster.init()  # reads the variables that the manifests set

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import data, train

folder, last = sys.argv[1], int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(1024, 16)).astype("float32")


def make_step(devices):
    step = train.step(
        lambda p, x, y: jnp.mean((x @ p["w"] - y) ** 2), optax.adam(0.05), mode="data_parallel", device=devices
    )
    return step, {"w": jnp.zeros(16)}


def batches(devices):
    return data.load((x, x.sum(1)), "data_parallel", batch_size=64, shuffle=True, seed=1, epochs=None, device=devices)


begun = []


def tell(i, loss):
    if cluster.rank() == 0 and not begun:
        begun.append(i)
        print(f"{cluster.size()} processes, {jax.device_count()} devices, from step {i - 1}")
    if cluster.rank() == 0 and i % 10 == 0:
        print(f"step {i}: loss {float(loss):.4f}")


cluster.run(make_step, batches, folder, steps=last, every=10, after_step=tell)
