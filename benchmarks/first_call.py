"""How much does this library add to the first call, beside JAX's own tracing and compiling?

A GPT-2 training step with AdamW is called for the first time through `shard` and through a hand-written `jax.jit` with
the same shardings, in turn, each time as a new function. Run: python benchmarks/first_call.py [--layers N ...] [--rounds N]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax

import shardfn
from benchmarks import harness
from examples.models import gpt2


def measure(layers: int, rounds: int) -> dict[str, float]:
    """Seconds of the first calls; `share` is what shardfn adds over the hand-written one's time."""
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
    """Print the table; each number of layers in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=4)
    options = harness.parse(parser, devices=8)
    own = {"backend": options.platform, "devices": 8}
    rows = [harness.in_own_process(measure, layers, options.rounds, **own) for layers in options.layers]
    harness.show(rows)
    harness.save(options.json, {"first calls": rows})


if __name__ == "__main__":
    main()
