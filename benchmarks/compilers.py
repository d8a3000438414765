"""How true is the prediction for each compiler? Training steps of model families in shardings by hand, for CPU, TPU and GPU.

Each step is planned for a target and compiled by its own compiler, for TPUs libtpu and for GPUs JAX's CUDA plugin, which needs no
device: the small sizes of `examples/models/families.py` with one layer. A line is one family on one target. Ratios are predicted
over compiled: the bytes that one device sends, its peak memory, and its FLOPs of matmuls and convolutions.
Run: python benchmarks/compilers.py [--families NAME ...] [--targets cpu:8 tpu-v5e:2x4 h100:8] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax

import shardfn
from benchmarks import harness
from benchmarks.plan_quality import WITHIN, ratio
from examples.models.families import FAMILIES, with_layers
from shardfn.compiled.comparison import compare
from shardfn.runtime.verify import compile_plan

DEVICES = 8
HERE = "cpu:8"
TARGETS = (HERE, "tpu-v5e:2x4", "h100:8")
NAMES = tuple(name for name in FAMILIES if not name.startswith("mindspore"))

Ratios = dict[str, float]


def measure(name: str, target: str) -> tuple[dict[str, Ratios], dict[str, str]]:
    """By sharding the ratios, or why its step does not compile."""
    family = FAMILIES[name]
    size = with_layers(family.small, 1)
    step, arguments = family.on_paper(size)
    device = None if target == HERE else target
    found, refused = dict[str, Ratios](), dict[str, str]()
    for layout, expert in family.hand_written(size, DEVICES).items():
        options = {"device": device, "donate_argnums": family.donated, "in_strategy": expert.in_strategy}
        try:
            found[layout] = ratios(shardfn.plan(expert.written(step), *arguments, **options))
        except (shardfn.ShardError, jax.errors.JaxRuntimeError) as error:
            refused[layout] = str(error).splitlines()[0]
    return found, refused


def ratios(plan: shardfn.Plan) -> Ratios:
    """What is predicted over what is compiled; 1 where both are 0."""
    found = compare(plan, made := compile_plan(plan))
    peak = dict(found.memory)["together"]
    sent, compiled = (sum(c.total_bytes for c in side) for side in (plan.collectives, made.collectives))
    pairs = {
        "bytes": (sent, compiled),
        "peak": (peak.predicted, peak.compiled),
        "flops": (found.matrix_flops.predicted, found.matrix_flops.compiled),
    }
    return {what: ratio(float(one or 0), float(other or 0)) for what, (one, other) in pairs.items()}


def line(name: str, target: str, found: Sequence[Ratios], refused: int = 0) -> dict[str, Any]:
    """The ratios of a family's shardings in a line.

    >>> line("mlp", "cpu:8", [{"bytes": 1.0, "peak": 0.8, "flops": 1.0}, {"bytes": 1.1, "peak": 1.0, "flops": 1.0}])["bytes"]
    '1.000 to 1.100'
    """
    row: dict[str, Any] = {"target": target, "family": name, "shardings": len(found), "refused": refused}
    for what, near in WITHIN.items():
        of = [each[what] for each in found]
        least, most = (f"{end(of):.3f}" if of else "-" for end in (min, max))
        row[what] = least if least == most else f"{least} to {most}"
        row[f"{what} within {near:.0%}"] = sum(abs(one - 1) <= near for one in of)
    return row


def main() -> None:
    """Plan, compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, metavar="TARGET")
    options = harness.parse(parser, devices=DEVICES)
    rows, shardings = list[dict[str, Any]](), list[dict[str, Any]]()
    for target in options.targets:
        every, missing = list[Ratios](), 0
        for name in options.families:  # each in a process of its own: what compilers keep of their programs grows
            found, refused = harness.in_own_process(measure, name, target, backend=options.platform, devices=DEVICES)
            every += found.values()
            missing += len(refused)
            rows.append(line(name, target, list(found.values()), len(refused)))
            shardings += [{"target": target, "family": name, "sharding": layout, **of} for layout, of in found.items()]
            harness.show(rows[-1:])
            for layout, why in refused.items():
                print(f"  {layout}: {why}")
        rows.append(line("all", target, every, missing))
    harness.show(rows)
    harness.save(options.json, {"families": rows, "shardings": shardings})


if __name__ == "__main__":
    main()
