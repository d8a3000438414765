"""What does folding equal blocks save? A GPT step with AdamW: as a loop, folded by `reuse`, and as a scan written by hand.

Data-parallel, and tensor-parallel (columns of the first, rows of the second product of each pair) beside it. Seconds are
those of the processor, all threads together: another program on the machine changes them little. With --tpu the TPU's
compiler is asked (libtpu; no TPU is needed).
Run: python benchmarks/reuse.py [--layers 6 12 24 48] [--width 32] [--modes data_parallel semi_auto_parallel]
     [--tpu v5e:2x4] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

from benchmarks import harness
from shardfn import train

COLUMNS = ("mode", "layers", "blocks", "collectives", "init s", "lower s", "compile s")
BLOCKS = ("loop", "reuse", "scan")
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
UNMERGED = {"xla_disable_hlo_passes": "all-reduce-combiner,cpu-all-reduce-combiner"}


def gpt(layers: int, width: int) -> dict:
    """Parameters of a GPT of 4 heads."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) * 0.02).astype(np.float32)  # noqa: E731
    blocks = [
        {"qkv": draw(width, 3, width), "out": draw(width, width), "up": draw(width, 4 * width),
         "down": draw(4 * width, width), "scale": np.ones((2, width), np.float32)}
        for _ in range(layers)
    ]  # fmt: skip
    return {"tokens": draw(64, width), "places": draw(16, width), "blocks": blocks}


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(p, x):
    q, k, v = (
        y.reshape(*x.shape[:2], 4, -1)
        for y in jnp.moveaxis(jnp.einsum("btd,dce->btce", norm(x, p["scale"][0]), p["qkv"]), 2, 0)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"]) @ p["down"]


def loop(params, x):
    for p in params["blocks"]:
        x = block(p, x)
    return x


def scan(params, x):
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])[0]


def loss(params, tokens, blocks=loop):
    x = blocks(params, params["tokens"][tokens] + params["places"])
    logits = x @ params["tokens"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def measure(mode: str, layers: int, blocks: str, width: int, devices: list | None) -> dict[str, object]:
    """One row: a step is made, lowered and compiled, each collective counted on its own."""
    params = gpt(layers, width)
    if blocks == "scan":
        params["blocks"] = jax.tree.map(lambda *each: np.stack(each), *params["blocks"])
    name, lead = ("blocks", (1,)) if blocks == "scan" else ("blocks/*", (1,) if blocks == "reuse" else ())
    cuts = {f"{name}/up": (*lead, 1, 4), f"{name}/down": (*lead, 4, 1)}
    options = {} if mode == "data_parallel" else {"parameter_plan": cuts, "in_strategy": ((2, 1),)}
    step = train.step(
        functools.partial(loss, blocks=scan if blocks == "scan" else loop), optax.adamw(1e-3), mode=mode,
        reuse="auto" if blocks == "reuse" else None, device=devices, **options,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    times = [time.process_time()]
    state = jax.eval_shape(lambda: step.init(params, tokens))
    times.append(time.process_time())
    lowered = step.lower(state, tokens)
    times.append(time.process_time())
    on_cpu = not devices and jax.default_backend() == "cpu"
    compiled = lowered.compile(UNMERGED if on_cpu else None)
    times.append(time.process_time())
    found = len(re.findall(rf"[ )}}](?:{KINDS})(?:-start)?\(", compiled.as_text()))
    seconds = (round(b - a, 2) for a, b in itertools.pairwise(times))
    return dict(zip(COLUMNS, (mode, layers, blocks, found, *seconds), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--modes", nargs="+", default=["data_parallel", "semi_auto_parallel"])
    parser.add_argument("--tpu")
    args = harness.parse(parser, devices=8)
    devices = args.tpu and list(topologies.get_topology_desc(platform="tpu", topology_name=args.tpu).devices)
    measure(args.modes[0], 2, "reuse", args.width, devices)  # what is imported and started at the first call
    where = f"TPU {args.tpu}" if args.tpu else f"8 {args.platform} devices"
    rows = [
        measure(mode, layers, blocks, args.width, devices or None)
        for mode in args.modes
        for layers in args.layers
        for blocks in BLOCKS
    ]
    title = f"a GPT of width {args.width} on {where}, seconds of the processor"
    harness.show(rows, title)
    harness.save(args.json, {"blocks": rows}, notes=[title])


if __name__ == "__main__":
    main()
