"""A training script that goes on from its last checkpoint: `recovering.py DIRECTORY STEP`; process 1 is killed once, at STEP."""
# ruff: noqa: E402

import json
import os
import pathlib
import signal
import sys

from shardfn import cluster

cluster.init()

import jax.numpy as jnp
import numpy as np
import optax

from shardfn import checkpoint, data, train

folder, killed_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
batches = iter(data.load((x, x.sum(1)), "data_parallel", batch_size=16, shuffle=True, seed=1, epochs=None))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


step = train.step(loss, optax.adam(0.1), mode="data_parallel", enable_parallel_optimizer=True)
state = step.init({"w": np.ones((4, 8), "float32"), "v": np.ones(8, "float32")})
place = lambda n: folder / f"data-{n}.json"  # noqa: E731
saved = checkpoint.steps(folder / "states") if (folder / "states").exists() else ()
if saved:
    state = checkpoint.restore(folder / "states", like=state)
    batches.set_state(json.loads(place(saved[-1]).read_text()))
for i in range(saved[-1] if saved else 0, 9):
    state, value = step(state, *next(batches))
    if cluster.rank() == 0:
        print(f"step {i} loss {float(value)!r}")
    if i == killed_at and not saved and cluster.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if (i + 1) % 3 == 0:
        if cluster.rank() == 0:
            place(i + 1).write_text(json.dumps(batches.get_state()))
        checkpoint.save(folder / "states", state, step=i + 1)
