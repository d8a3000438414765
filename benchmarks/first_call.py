"""How much does this library add to the first call, beside JAX's own tracing and compiling?

A GPT-2 training step with AdamW is called for the first time through `shard` and through a hand-written `jax.jit` with
the same shardings, in turn, each time as a new function. Run: python benchmarks/first_call.py [--layers N] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent


def measure(layers: int, rounds: int) -> dict[str, float]:
    """Seconds of the first calls; `share` is what shardfn adds over the hand-written one's time."""
    import jax

    import shardfn
    from examples.models import gpt2

    config = gpt2.Config(layers=layers, d_model=256, heads=8, vocab=2048, context=128, batch=8)
    step, args = gpt2.make(config)
    plan = {"*/w1": (1, 4), "*/w2": (4, 1)}
    options = {"in_strategy": (shardfn.AUTO, shardfn.AUTO, (2, 1)), "parameter_plan": plan}

    def fresh(suffix):
        def train(params, state, tokens):
            return step(params, state, tokens)

        train.__name__ = f"train_{suffix}"
        return train

    made = shardfn.plan(fresh("plan"), *args, **options)
    ins, outs = made.in_shardings, made.out_shardings
    by_hand, ours, planning = [], [], []
    for i in range(rounds):
        for kind in ("jit", "shardfn") if i % 2 == 0 else ("shardfn", "jit"):
            function = fresh(f"{kind}_{i}")
            start = time.perf_counter()
            if kind == "jit":
                jitted = jax.jit(function, in_shardings=ins, out_shardings=outs)
                jax.block_until_ready(jitted(*args))
                by_hand.append(time.perf_counter() - start)
            else:
                sharded = shardfn.shard(function, **options)
                sharded.plan(*args)
                planning.append(time.perf_counter() - start)
                jax.block_until_ready(sharded(*args))
                ours.append(time.perf_counter() - start)
    return {
        "layers": layers,
        "ops": len(made.partitioned.graph.ops),
        "jit s": statistics.median(by_hand),
        "shardfn s": statistics.median(ours),
        "of it planning s": statistics.median(planning),
        "added": statistics.median(b / a - 1 for a, b in zip(by_hand, ours, strict=True)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.layers[0], options.rounds)))
        return
    rows = []
    for layers in options.layers:
        environment = {**os.environ, "NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
                       "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # fmt: skip
        command = [sys.executable, __file__, "--worker", "--layers", str(layers), "--rounds", str(options.rounds)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print("  ".join(f"{c:>17}" for c in rows[0]))
    for row in rows:
        print("  ".join(f"{v:>17.3f}" if isinstance(v, float) else f"{v:>17}" for v in row.values()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"benchmark": "first_call", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
