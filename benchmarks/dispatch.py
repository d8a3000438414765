"""What does a call of a sharded function cost beside a hand-written `jax.jit` with the same shardings?

The two are called in turn, A B A B, in one process for each device count; the table gives medians and the median of the
ratios of neighbours. Run: python benchmarks/dispatch.py [--devices 1 2 8] [--leaves 1 10 200] [--rounds N]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardfn
from benchmarks import harness


def measure(devices: int, leaves: int, rounds: int) -> dict[str, float]:
    """Medians over `rounds` pairs of batches on `devices` devices, for a dict of `leaves` arrays."""

    def f(tree):
        return jax.tree.map(lambda a: a + 1, tree)

    here = jax.devices()[:devices]
    mesh = Mesh(np.array(here), ("a",))
    spec = NamedSharding(mesh, PartitionSpec("a" if devices > 1 else None, None))
    tree = {f"w{i}": jax.device_put(jnp.ones((8, 4)), spec) for i in range(leaves)}
    by_hand = jax.jit(f, in_shardings=({k: spec for k in tree},), out_shardings={k: spec for k in tree})
    sharded = shardfn.shard(f, ((devices, 1),), ((devices, 1),), device=here)

    def batch(function, calls: int) -> float:
        out, start = None, time.perf_counter()
        for _ in range(calls):
            out = function(tree)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls * 1e6

    for function in (by_hand, sharded):
        batch(function, 20)
    calls = max(10, int(20_000 / (batch(by_hand, 20) + 1)))
    pairs = []
    for i in range(rounds):
        order = (by_hand, sharded) if i % 2 == 0 else (sharded, by_hand)
        times = {id(function): batch(function, calls) for function in order}
        pairs.append((times[id(by_hand)], times[id(sharded)]))
    jit, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "devices": devices,
        "leaves": leaves,
        "jit µs": jit,
        "shardfn µs": ours,
        "ratio": statistics.median(b / a for a, b in pairs),
        "difference µs": statistics.median(b - a for a, b in pairs),
    }


def main() -> None:
    """Print the table; each number of devices in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 10, 200])
    parser.add_argument("--rounds", type=int, default=41)
    options = harness.parse(parser, devices=1)
    rows = [
        harness.in_own_process(measure, devices, leaves, options.rounds, backend=options.platform, devices=devices)
        for devices in options.devices
        for leaves in options.leaves
    ]
    harness.show(rows)
    harness.save(options.json, {"calls": rows})


if __name__ == "__main__":
    main()
