"""What does folding equal blocks save? An unrolled GPT as it stands and folded: collectives of a step, time to compile it.

Tensor parallel (columns of the first, rows of the second product of each pair) and data parallel.
Run: python benchmarks/reuse.py [--layers 24] [--width 32] [--modes data_parallel semi_auto_parallel] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import time

os.environ.setdefault("NPROC", "32")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import train

COLUMNS = ("mode", "reuse", "collectives", "plan s", "lower+compile s")
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


def loss(params, tokens):
    x = params["tokens"][tokens] + params["places"]
    for p in params["blocks"]:
        x = block(p, x)
    logits = x @ params["tokens"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def measure(mode: str, reuse: str | None, layers: int, width: int) -> dict[str, object]:
    """One row: a step is planned, lowered and compiled, each collective counted on its own."""
    lead = (1,) if reuse else ()
    cuts = {"blocks/*/up": (*lead, 1, 4), "blocks/*/down": (*lead, 4, 1)}
    options = {} if mode == "data_parallel" else {"parameter_plan": cuts, "in_strategy": ((2, 1),)}
    step = train.step(loss, optax.sgd(1e-2), mode=mode, reuse=reuse, **options)
    tokens = np.zeros((8, 16), np.int32)
    start = time.perf_counter()
    state = step.init(gpt(layers, width), tokens)
    step.plan(state, tokens)
    planned = time.perf_counter() - start
    start = time.perf_counter()
    compiled = step.lower(state, tokens).compile(UNMERGED)
    seconds = time.perf_counter() - start
    found = len(re.findall(rf"[ )}}](?:{KINDS})(?:-start)?\(", compiled.as_text()))
    figures = found, round(planned, 2), round(seconds, 2)
    return dict(zip(COLUMNS, (mode, str(reuse), *figures), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--modes", nargs="+", default=["data_parallel", "semi_auto_parallel"])
    parser.add_argument("--json")
    args = parser.parse_args()
    print(f"{args.layers} layers, width {args.width}, 8 devices")
    print("  ".join(f"{c:>18}" for c in COLUMNS))
    rows = []
    for mode in args.modes:
        for reuse in ("auto", None):
            rows.append(measure(mode, reuse, args.layers, args.width))
            print("  ".join(f"{rows[-1][c]!s:>18}" for c in COLUMNS), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
