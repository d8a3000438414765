"""What job.toml runs: it goes on from the last checkpoint. On this machine, with the processes and devices of one pod each:

shardfn launch --processes 2 --devices-per-process 4 examples/kubernetes/train.py /tmp/checkpoints 100
"""
# ruff: noqa: E402

import json
import pathlib
import sys

from shardfn import cluster

cluster.init()  # reads the variables that the manifests set

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import checkpoint, data, train

folder, last = pathlib.Path(sys.argv[1]), int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(1024, 16)).astype("float32")
batches = iter(data.load((x, x.sum(1)), "data_parallel", batch_size=64, shuffle=True, seed=1, epochs=None))
step = train.step(lambda p, x, y: jnp.mean((x @ p["w"] - y) ** 2), optax.adam(0.05), mode="data_parallel")
state = step.init(lambda: {"w": jnp.zeros(16)})
begin = max(checkpoint.steps(folder / "states"), default=0) if (folder / "states").exists() else 0
if begin:
    state = checkpoint.restore(folder / "states", like=state)
    batches.set_state(json.loads((folder / f"data-{begin}.json").read_text()))
if cluster.rank() == 0:
    print(f"{cluster.size()} processes, {jax.device_count()} devices, from step {begin}")
for i in range(begin + 1, last + 1):
    state, loss = step(state, *next(batches))
    if i % 10 == 0:
        if cluster.rank() == 0:
            (folder / f"data-{i}.json").write_text(json.dumps(batches.get_state()))
            print(f"step {i}: loss {float(loss):.4f}")
        checkpoint.save(folder / "states", state, step=i, keep=3)
