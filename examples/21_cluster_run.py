"""Train with `cluster.run`: a run that stops goes on from its last checkpoint, on 8 devices, then on 6, then on 8.

Run: python examples/21_cluster_run.py
Several processes, started again when one fails:
  shardfn launch --processes 2 --devices-per-process 4 --retries 3 --heartbeat 60 examples/21_cluster_run.py --folder run
"""

import argparse
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import cluster, data, train

if cluster.size() == 1:  # `shardfn launch` sets these for its processes
    os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

cluster.init()  # the processes that were started become one group; alone, this is a group of one

x = np.random.default_rng(0).normal(size=(480, 32)).astype("float32")
y = np.sin(x[:, :4]).sum(1)


def loss(params, x, y):
    return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"] - y) ** 2)


def make_step(devices):
    """Called at each start, with the devices that are there: the step is planned for them."""
    sharded = {"optimizer_level": "level2", "parallel_optimizer_threshold": 0}
    step = train.step(loss, optax.adam(1e-2), mode="data_parallel", device=devices, parallel_optimizer_config=sharded)
    up, down = jax.random.split(jax.random.key(0))
    return step, {"up": jax.random.normal(up, (32, 96)) / 6, "down": jax.random.normal(down, (96,)) / 10}


def batches(devices):
    return data.load((x, y), "data_parallel", batch_size=24, shuffle=True, epochs=None, device=devices)


def run(folder, steps, devices=None):
    """Train up to `steps`; the losses by step, of the steps that this call took."""
    losses = {}
    done = cluster.run(make_step, batches, folder, steps=steps, every=5, devices=devices, after_step=losses.__setitem__)
    return done, {i: float(value) for i, value in losses.items()}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", help="of the checkpoints, which all processes see")
    parser.add_argument("--steps", type=int, default=60)
    given, _ = parser.parse_known_args()
    if given.folder:
        done, losses = run(given.folder, given.steps)
        if cluster.rank() == 0:
            print(
                f"steps {min(losses, default=0)} to {done.steps} on {jax.device_count()} devices, last loss {done.value}"
            )
        return
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
        _, uninterrupted = run(whole, 60)
        losses = {}
        for until, count in ((20, 8), (40, 6), (60, 8)):  # a batch of 24 is sharded 8 or 6 ways
            done, some = run(folder, until, jax.devices()[:count])
            losses |= some
            held = done.state.opt_state[0].mu["up"].addressable_shards[0].data.shape
            print(f"step {until} on {count} devices: loss {some[until]:.5f}, momentum of `up` held as {list(held)}")
        np.testing.assert_allclose([*losses.values()], [*uninterrupted.values()], rtol=1e-3)
        print("the losses of a run that was never stopped")


if __name__ == "__main__":
    main()
