"""Do pipelines keep to the formula of their bubble, what do they keep in memory, and what do they send?

Three tables. `bubble`: (stages - 1) / (chunks x micro + stages - 1), idle ticks of the schedule, and what the clock says of
a step whose layers sleep, so that cores do not matter: how much longer it takes than its micro-batches do on busy devices,
by the difference that more of them make. `memory`: temporary bytes
per device of the compiled step, micro-batches of one size. `collectives`: of the compiled step of a transformer.
Run: python benchmarks/pipeline.py [--sleep-ms 40] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from shardfn import train
from shardfn.train.pipelines.schedule import schedule

DEVICES = 4
MICRO = (4, 8, 16)
ORDERS = (("gpipe", 1), ("1f1b", 1), ("1f1b", 2))


def sleeping(seconds: float):
    """A layer that takes so long, and its backward twice as long, whatever its device has to do besides."""

    def rest(x, times: int):
        def sleep(x):
            time.sleep(seconds * times)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def layer(w, x):
        return rest(x * w, 1)

    layer.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, g: (jnp.sum(rest(g, 2) * kept[1]), g * kept[0]))
    return layer


def bubble(order: str, chunks: int, sleep_s: float) -> list[dict[str, object]]:
    """The idle part of a step: by schedule, by formula, by the clock."""
    took = {micro: step_s(order, chunks, micro, sleep_s) for micro in MICRO}
    few, many = min(MICRO), max(MICRO)
    each = (took[many] - took[few]) / (many - few)  # one micro-batch more, on devices that are busy
    return [
        {
            "schedule": order,
            "chunks": chunks,
            "micro": micro,
            "formula": (DEVICES - 1) / (chunks * micro + DEVICES - 1),
            "idle ticks": schedule(order, DEVICES, micro, chunks).bubble,
            "by the clock": 1 - micro * each / took[micro],
            "step s": took[micro],
            "inputs kept": schedule(order, DEVICES, micro, chunks).slots,
        }
        for micro in MICRO
    ]


def step_s(order: str, chunks: int, micro: int, sleep_s: float) -> float:
    """Seconds of a step of a pipeline whose layers sleep."""
    layer = sleeping(sleep_s / chunks)
    layers = [layer] * (DEVICES * chunks - 1) + [lambda w, x: jnp.mean(layer(w, x))]
    here = jax.devices()[:DEVICES]
    pipe = train.pipeline(layers, micro, schedule=order, interleave=chunks, pipeline_stages=DEVICES, device=here)
    w, x = [jnp.ones(())] * len(layers), jnp.ones((micro, 4))
    step = jax.jit(jax.value_and_grad(pipe))
    packed = pipe.pack(w, x)
    jax.block_until_ready(step(packed, x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(step(packed, x))
        times.append(time.perf_counter() - start)
    return min(times)


def memory(order: str, chunks: int, micro: int) -> dict[str, object]:
    """Temporary bytes of a step on micro-batches of 32 rows, 8 layers of width 256."""
    n = 2 * DEVICES
    layers = [lambda w, x: jnp.tanh(x @ w)] * (n - 1) + [lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
    w = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * n
    x = jax.ShapeDtypeStruct((32 * micro, 256), jnp.float32)
    pipe = train.pipeline(layers, micro, schedule=order, interleave=chunks, pipeline_stages=DEVICES,
                          device=jax.devices()[:DEVICES])  # fmt: skip
    compiled = jax.jit(jax.value_and_grad(pipe)).lower(pipe.pack(w, x, x), x, x).compile()
    found = compiled.memory_analysis()
    kept = pipe.describe(w, x, x).kept_bytes
    return {"schedule": order, "chunks": chunks, "micro": micro, "temporary B": found.temp_size_in_bytes,
            "inputs kept B": kept}  # fmt: skip


def collectives() -> list[dict[str, object]]:
    """What a compiled step of four layers on 2 stages x 2 data sends, by kind and shape."""
    layers = [lambda w, x: x + jnp.tanh(x @ w)] * 3 + [lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
    w = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    pipe = train.pipeline(layers, 8, pipeline_stages=2, device=jax.devices()[:4])
    text = jax.jit(jax.value_and_grad(pipe)).lower(pipe.pack(w, x, x), x, x).compile().as_text()
    return [{"collective": kind, "operand": shape, "between": pairs, "count": n} for (kind, shape, pairs), n in
            sorted(sent(text).items())]  # fmt: skip


def sent(text: str) -> Counter:
    """Each collective of an HLO text: kind, shape, and which devices."""
    found: Counter = Counter()
    for line in text.splitlines():
        match = re.search(r"= (.*?) (all-[\w-]+|collective-permute|reduce-scatter)(-start)?\(", line)
        if match:
            groups = re.search(r"(replica_groups|source_target_pairs)=(\{\{.*?\}\}|\S+)", line)
            shape = re.sub(r"\{[^}]*\}", "", match[1])
            found[match[2], shape, groups[2].rstrip(",") if groups else ""] += 1
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sleep-ms", type=float, default=40.0)
    args = harness.parse(parser, devices=DEVICES)
    found = {
        "bubble": [row for o, c in ORDERS for row in bubble(o, c, args.sleep_ms / 1e3)],
        "memory": [memory(o, c, m) for o, c in ORDERS for m in (4, 8, 16, 32)],
        "collectives": collectives(),
    }
    for name, rows in found.items():
        harness.show(rows, name)
    harness.save(args.json, found)


if __name__ == "__main__":
    main()
