"""A parameter server for a small language model on a real text: four workers, one of them killed, and a server added.

Synchronous training equals one process with the summed gradient, through a crash and a change of the servers. Asynchronous
training comes to a similar loss. Everything runs in this process; the how-to page shows Ray.
Run: python examples/23_parameter_server.py [--steps 30]
"""

import argparse
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn.cluster import ParameterServer
from shardfn.cluster.parameter_server.engine import Target

os.environ["NPROC"] = "32"
jax.config.update("jax_platforms", "cpu")

TEXT = pathlib.Path(__file__).parent / "text" / "proverbs.txt"
WORKERS, BATCH, CONTEXT, LETTERS, WIDTH = 4, 64, 6, 96, 64


@jax.jit
def first_params():
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5  # noqa: E731
    return {
        "letters": draw(keys[0], LETTERS, 16),
        "hidden": draw(keys[1], CONTEXT * 16, WIDTH),
        "out": draw(keys[2], WIDTH, LETTERS),
    }


def loss(params, x, y):
    h = jnp.tanh(params["letters"][x].reshape(len(x), -1) @ params["hidden"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], y).sum() / (BATCH * WORKERS)


value_and_grad = jax.jit(jax.value_and_grad(loss))


def batch(letters, worker, step):
    at = np.random.default_rng([worker, step]).integers(0, len(letters) - CONTEXT, BATCH)
    return letters[at[:, None] + np.arange(CONTEXT)], letters[at + CONTEXT]


def synchronous(letters, folder, steps):
    server = ParameterServer.create(first_params(), optax.adam(0.02), folder=folder, servers=2, workers=WORKERS)
    losses = []
    for step in range(steps):
        if step == steps // 3:
            server.engine.restart(Target(0, 1))  # as if its process had been killed
        if step == steps // 2:
            server.resize(servers=3)
        params, total = server.pull(version=step).values, 0.0
        for worker in range(WORKERS):
            value, grads = value_and_grad(params, *batch(letters, worker, step))
            server.push(grads, worker, step)
            server.push(grads, worker, step)  # a message that comes twice counts once
            total += float(value)
        losses.append(total)
    found = server.pull(version=steps).values
    server.close()
    return losses, found


def asynchronous(letters, folder, steps):
    server = ParameterServer.create(first_params(), optax.adam(0.01), folder=folder, servers=2, workers=WORKERS,
                                    synchronous=False, staleness=WORKERS)  # fmt: skip
    held = [server.pull() for _ in range(WORKERS)]  # each worker computes from what it pulled a turn ago
    for step in range(steps):
        for worker, (params, version) in enumerate(held):
            _, grads = value_and_grad(params, *batch(letters, worker, step))
            server.push(jax.tree.map(lambda g: WORKERS * g, grads), worker, step, version=version)
            held[worker] = server.pull()
    report, found = server.report(), server.pull().values
    server.close()
    return report, found


def alone(letters, steps):
    params, optimizer = first_params(), optax.adam(0.02)
    state = optimizer.init(params)

    @jax.jit
    def updated(params, state, grads):
        changes, state = optimizer.update(jax.tree.map(lambda *each: sum(each), *grads), state, params)
        return optax.apply_updates(params, changes), state

    for step in range(steps):
        grads = [value_and_grad(params, *batch(letters, worker, step))[1] for worker in range(WORKERS)]
        params, state = updated(params, state, grads)
    return params


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=30)
    given, _ = parser.parse_known_args()
    letters = np.clip(np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32) - 32, 0, LETTERS - 1)
    check = [np.concatenate(part) for part in zip(*[batch(letters, 9, i) for i in range(WORKERS)], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        losses, params = synchronous(letters, f"{folder}/synchronous", given.steps)
        report, late = asynchronous(letters, f"{folder}/asynchronous", given.steps)
    print(
        f"synchronous: loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {given.steps} steps of {WORKERS} workers"
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, alone(letters, given.steps))
    print("a killed server, a new server and doubled messages: the parameters equal those of one process")
    found = [float(loss(jax.tree.map(jnp.asarray, p), *check)) for p in (params, late)]
    print(f"asynchronous: {report.updates} updates, largest staleness {report.largest_staleness}; "
          f"loss on other letters {found[1]:.2f}, synchronous {found[0]:.2f}")  # fmt: skip
    assert report.largest_staleness <= WORKERS and losses[-1] < 0.8 * losses[0]


if __name__ == "__main__":
    main()
