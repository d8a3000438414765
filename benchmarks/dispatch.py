"""What does a call of a sharded function cost beside a hand-written `jax.jit` with the same shardings?

The two are called in turn, A B A B, in one process for each device count; the table gives medians and the median of the
ratios of neighbours. Run: python benchmarks/dispatch.py [--devices 1 2 8] [--leaves 1 10 200] [--rounds N] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

COLUMNS = ("devices", "leaves", "jit us", "shardfn us", "ratio", "difference us")


def measure(devices: int, leaves: int, rounds: int) -> dict[str, float]:
    """Medians over `rounds` pairs of batches on `devices` devices, for a dict of `leaves` arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import shardfn

    def f(tree):
        return jax.tree.map(lambda a: a + 1, tree)

    here = jax.devices()[:devices]
    mesh = Mesh(np.array(here), ("a",))
    spec = NamedSharding(mesh, PartitionSpec("a" if devices > 1 else None, None))
    tree = {f"w{i}": jax.device_put(jnp.ones((8, 4)), spec) for i in range(leaves)}
    by_hand = jax.jit(f, in_shardings=({k: spec for k in tree},), out_shardings={k: spec for k in tree})
    sharded = shardfn.shard(f, ((devices, 1),), ((devices, 1),), device=here)

    def batch(function, calls: int) -> float:
        start = time.perf_counter()
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
        "jit us": jit,
        "shardfn us": ours,
        "ratio": statistics.median(b / a for a, b in pairs),
        "difference us": statistics.median(b - a for a, b in pairs),
    }


def main() -> None:
    """Print the table; each device count in a process of its own, since JAX fixes it at start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 10, 200])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--platform", default="cpu", help="cpu (virtual devices) or what JAX has here: gpu, tpu")
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps([measure(options.devices[0], n, options.rounds) for n in options.leaves]))
        return
    rows = []
    print("  ".join(f"{c:>13}" for c in COLUMNS))
    for devices in options.devices:
        environment = {**os.environ, "NPROC": "32"}
        if options.platform == "cpu":
            environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, __file__, "--worker", "--devices", str(devices), "--rounds", str(options.rounds)]
        command += ["--leaves", *map(str, options.leaves)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row)
            print("  ".join(f"{row[c]:>13.3f}" if isinstance(row[c], float) else f"{row[c]:>13}" for c in COLUMNS))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"benchmark": "dispatch", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
