"""What does a step of `train.step` cost beside the same step written by hand in plain JAX?

One table: seconds of a step of each, as medians, and their ratio. By hand is `jax.jit` with a `NamedSharding` for every
array and the state donated. The two take turns, step by step, in one run, so that what else the machine does falls on both; each
step is waited for. The last column is what a call spends in Python before `jit` has it, timed on its own.
Run: python benchmarks/train.py [--steps 100] [--width 256] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from shardfn import train

LAYERS, BATCH = 4, 512
OPTIMIZER = optax.adamw(1e-3)


def loss(params, x, y):
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


def make(width: int):
    k1, k2 = jax.random.split(jax.random.key(0))
    layer = {
        "up": jax.random.normal(k1, (width, 4 * width)) / width**0.5,
        "bias": jnp.zeros(4 * width),
        "down": jax.random.normal(k2, (4 * width, width)) / width,
    }
    return {"layers": [jax.tree.map(lambda x, i=i: x * (1 + i / 8), layer) for i in range(LAYERS)]}


def by_hand(width: int, mesh, of_params, of_moments, of_batch):
    """A state and a step, as one writes them in plain JAX."""
    named = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    names = lambda specs: {"layers": [{n: named(specs[n]) for n in ("up", "bias", "down")} for _ in range(LAYERS)]}  # noqa: E731
    params, moments = names(of_params), names(of_moments)
    start = jax.jit(lambda: (make(width), OPTIMIZER.init(make(width))))
    adam = jax.eval_shape(start)[1][0]
    states = (adam._replace(count=named(P()), mu=moments, nu=moments), optax.EmptyState(), optax.EmptyState())
    shardings = (params, states)

    def step(state, x, y):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    jitted = jax.jit(
        step,
        in_shardings=(shardings, named(of_batch), named(of_batch)),
        out_shardings=(shardings, named(P())),
        donate_argnums=0,
    )
    return jax.jit(start, out_shardings=shardings)(), jitted, named(of_batch)


def cases(width: int):
    """For each row the options of `train.step` and what is written by hand for them."""
    flat = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = {"up": P(), "bias": P(), "down": P()}
    pieces = {"up": P("data"), "bias": P("data"), "down": P("data")}
    tensor = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
    cuts = {"layers/*/up": (1, 4), "layers/*/bias": (4,), "layers/*/down": (4, 1)}
    zero = {"parallel_optimizer_config": {"optimizer_level": "level1", "parallel_optimizer_threshold": 0}}
    return {
        "data parallel": ({"mode": "data_parallel"}, (flat, whole, whole, P("data"))),
        "tensor x data parallel": (
            {"mode": "semi_auto_parallel", "in_strategy": ((2, 1), (2, 1)), "parameter_plan": cuts},
            (grid, tensor, tensor, P("data")),
        ),
        "optimizer parallel": ({"mode": "data_parallel", **zero}, (flat, whole, pieces, P("data"))),
    }


def row(name: str, options, hand, width: int, steps: int) -> dict[str, object]:
    """Both steps in turns; the losses of the two are held against each other."""
    x, y = np.random.default_rng(0).normal(size=(2, BATCH, width)).astype(np.float32)
    theirs, jitted, where = by_hand(width, *hand)
    step = train.step(loss, OPTIMIZER, **options)
    ours = step.init(lambda: make(width), x, y)
    plan = step.plan(ours, x, y)
    lies = [NamedSharding(plan.mesh, P(*plan.decision(f"batch/{i}").spec)) for i in (0, 1)]
    mine = jax.device_put((x, y), tuple(lies))  # each batch where its step wants it
    x, y = jax.device_put((x, y), where)
    took: tuple[list[float], list[float]] = ([], [])
    for i in range(steps + 5):
        start = time.perf_counter()
        theirs, a = jax.block_until_ready(jitted(theirs, x, y))
        middle = time.perf_counter()
        ours, b = jax.block_until_ready(step(ours, *mine))
        end = time.perf_counter()
        np.testing.assert_allclose(float(b), float(a), rtol=1e-3)
        if i >= 5:
            took[0].append(middle - start)
            took[1].append(end - middle)
    hand_s, step_s = map(statistics.median, took)
    return {
        "layout": name,
        "by hand ms": 1e3 * hand_s,
        "train.step ms": 1e3 * step_s,
        "ratio": step_s / hand_s,
        "median of ratios": statistics.median(b / a for a, b in zip(*took, strict=True)),
        "Python µs": 1e6 * dispatch_s(step, ours, *mine),
    }


def dispatch_s(step, state, *batch, times: int = 200) -> float:
    """Seconds of a call that are not `jit`'s: the same call with an answer in the place of what `jit` compiled."""
    laid = step._for(state, batch)
    kept, laid.function._fast.run = laid.function._fast.run, lambda *args: args
    try:
        found = []
        for _ in range(times):
            start = time.perf_counter()
            step(state, *batch)
            found.append(time.perf_counter() - start)
        return statistics.median(found)
    finally:
        laid.function._fast.run = kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    given = harness.parse(parser, devices=8)
    rows = [row(name, *case, given.width, given.steps) for name, case in cases(given.width).items()]
    title = f"{LAYERS} layers of width {given.width}, batch {BATCH}, AdamW, 8 devices; {given.steps} steps of each"
    harness.show(rows, title)
    harness.save(given.json, {"steps": rows}, notes=[title])


if __name__ == "__main__":
    main()
