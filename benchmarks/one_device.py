"""Does a training step take the time on one device that the cost model says?

One table: of each family the modelled and the measured milliseconds of a step, their ratio, and the memory that was predicted
and compiled. Nothing is sent between devices, so it is the rates of arithmetic and of memory that are held against the
hardware. The model adds up the ops at the rates that `python -m shardfn calibrate --save` measured on this machine, or else at
the datasheet's, which has a column of its own. An order of layouts needs the ratio to be alike from one program to the next.
Measured: calls one after the other that hand on their state, the last one waited for; the median of the rounds, after two
calls that warm up.
Run: python benchmarks/one_device.py [--platform gpu] [--size large] [--families gpt2 ...] [--rounds 7] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax

import shardfn
from benchmarks import harness
from examples.models.families import FAMILIES
from shardfn.compiled.executable import read
from shardfn.cost.devices.chips import CHIPS
from shardfn.cost.estimate import estimate_cost

ON_ONE: dict[str, dict[str, object]] = {
    "mlp": {"batch": 4096},
    "gpt2": {"batch": 8},
    "gpt2 scanned": {"batch": 8},
    "llama": {"batch": 8},
    "vit": {"batch": 32},
    "resnet": {"batch": 8, "image": 512},
    "moe": {"batch": 4, "layers": 2, "experts": 16},
    "dlrm": {"batch": 16_384, "rows": (1_048_576,) * 8 + (65_536,) * 12},
    "t5": {"batch": 8},
}
"""What makes a family's large size one that a single GPU holds."""


def sized(name: str, size: str):
    """A family's size, of which the large one is brought down to one device."""
    found = getattr(FAMILIES[name], size)
    if size != "large":
        return found
    return found | ON_ONE[name] if isinstance(found, dict) else dataclasses.replace(found, **ON_ONE[name])


def measure(name: str, size: str, platform: str, rounds: int) -> dict[str, object]:
    """A row: the step as it stands on one device, planned and run."""
    function, args = FAMILIES[name].make(sized(name, size))
    donated = FAMILIES[name].donated
    devices = jax.devices(platform)[:1]
    args = jax.device_put(args, devices[0])
    plan = shardfn.plan(function, *args, device=devices, donate_argnums=donated)
    compiled = jax.jit(function, donate_argnums=donated).lower(*args).compile()
    found = read(compiled)
    peak = found.together(plan.hardware.platform)
    state, like = [args[i] for i in donated], jax.tree.structure([args[i] for i in donated])
    rest = {i: arg for i, arg in enumerate(args) if i not in donated}

    def seconds(calls: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(calls):
            given = dict(zip(donated, state, strict=True)) | rest
            out = jax.tree.leaves(compiled(*(given[i] for i in range(len(args)))))
            state = jax.tree.unflatten(like, out[: like.num_leaves])
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / calls

    seconds(2)
    calls = max(1, min(50, int(0.3 / seconds(1))))
    took = statistics.median(seconds(calls) for _ in range(rounds))
    preset = dataclasses.replace(plan.hardware, chip=CHIPS[plan.hardware.chip.name])
    return {
        "family": name,
        "device": plan.hardware.chip.name,
        "ops": len(plan.partitioned.graph.ops),
        "by the datasheet ms": 1e3 * estimate_cost(plan.partitioned, preset).time_s,
        "modelled ms": 1e3 * plan.cost.time_s,
        "measured ms": 1e3 * took,
        "ratio": took / plan.cost.time_s,
        "TFLOP/s": found.flops / took / 1e12,
        "predicted MiB": plan.cost.memory.peak / 2**20,
        "compiled MiB": None if peak is None else peak / 2**20,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=("tiny", "small", "large"), default="small")
    parser.add_argument("--families", nargs="+", choices=list(ON_ONE), default=list(ON_ONE))
    parser.add_argument("--rounds", type=int, default=7)
    options = harness.parse(parser, devices=1)
    rows = [measure(name, options.size, options.platform, options.rounds) for name in options.families]
    harness.show(rows)
    ratios = [row["ratio"] for row in rows]
    print(f"ratio: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    harness.save(options.json, {"steps": rows})


if __name__ == "__main__":
    main()
