"""What does the number of buckets cost? A data-parallel step of many small parameters, its gradients in 1 to n all-reduces.

The step does little but add gradients up: the matrix products have eight rows. Medians of the rounds.
Run: python benchmarks/fusion.py [--leaves 64] [--size 256] [--buckets 1 2 4 8 16 32 64] [--rounds N]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from shardfn import train
from shardfn.compiled.executable import read

COLUMNS = ("buckets", "all-reduces", "largest kB", "step ms")


def loss(params, x):
    return sum(jnp.mean((x @ w) ** 2) for w in params)


def measure(leaves: int, size: int, buckets: int, rounds: int) -> dict[str, float]:
    """The median time of a step whose gradients travel in so many buckets."""
    ends = [leaves * (i + 1) // buckets - 1 for i in range(buckets)]
    step = train.step(loss, optax.sgd(1e-3), mode="data_parallel", all_reduce_fusion_config=ends)
    state = step.init([np.ones((size, size), np.float32) for _ in range(leaves)])
    x = np.ones((8, size), np.float32)
    found = read(step.lower(state, x).compile())
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        state, value = step(state, x)
        jax.block_until_ready((state, value))
        times.append(time.perf_counter() - start)
    compiled = sum(c.kind == "all-reduce" for c in found.collectives)
    largest = max(bucket.nbytes for bucket, _ in step.buckets(state, x)) / 1e3
    return dict(zip(COLUMNS, (buckets, compiled, largest, statistics.median(times[2:]) * 1e3), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=10)
    args = harness.parse(parser, devices=8)
    rows = [measure(args.leaves, args.size, n, args.rounds) for n in args.buckets if n <= args.leaves]
    title = f"{args.leaves} gradients of float32[{args.size}, {args.size}], {jax.device_count()} devices"
    harness.show(rows, title)
    harness.save(args.json, {"buckets": rows}, notes=[title])


if __name__ == "__main__":
    main()
