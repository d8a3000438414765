"""How far are modelled time and memory from measured ones, for one step of every kind of program?

The steps of `kind_steps.py` are planned for one device of a card on which they were measured (`measured/CARD.json`: milliseconds,
and MiB of the program that XLA compiled there), at the rates of such a card. A second table has one shard of eight, which was
measured on one card too (`rehearse.py`). No GPU is needed.
Run: python benchmarks/kinds.py [--card h100] [--only conv3d ...] [--presets] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import shardfn
from benchmarks import harness, rehearse
from benchmarks.kind_steps import STEPS
from shardfn.cost.devices.chips import CHIPS, Chip
from shardfn.cost.estimate import Cost

MEASURED = pathlib.Path(__file__).parent / "measured"


def measured(card: str = "h100") -> dict[str, Any]:
    """What was measured on a card."""
    return json.loads((MEASURED / f"{card}.json").read_text(encoding="utf-8"))


def calibrated(found: Mapping[str, Any]) -> Chip:
    """The chip at the rates that were measured on the card."""
    chip, rates = CHIPS[found["chip"]], found["rates"]
    return dataclasses.replace(
        chip,
        flops=rates["flops"],
        dtype_flops=tuple(
            (dict(chip.dtype_flops) | {"f32": rates["f32"], "f32 highest": rates["vector_flops"]}).items()
        ),
        weight_gradient_efficiency=(("f32", rates["f32_gradients"]),),
        vector_flops=rates["vector_flops"],
        memory_bytes_s=rates["memory_bytes_s"],
        launch_s=rates["launch_s"],
        kind_rates=tuple(rates["kinds"].items()),
        source=f"measured on {found['card']}",
    )


def plan(name: str, chip: Chip) -> shardfn.Plan:
    """The plan of a step at full size for one device."""
    step = STEPS[name](False)
    with mock.patch(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    ):  # JAX asks this machine
        return shardfn.plan(step.function, *step.shapes, device=chip.pod(1), donate_argnums=step.donated)


def row(name: str, chip: Chip, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is modelled of a step beside what was measured."""
    return beside(name, plan(name, chip).cost, found["steps"][name])


def shard(name: str, chip: Chip, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is modelled of the compute of one shard of eight beside what was measured."""
    return beside(name, rehearse.plan(rehearse.CASES[name], chip, tiny=False).cost, found["shards"][name])


def beside(name: str, cost: Cost, found: Mapping[str, float]) -> dict[str, Any]:
    """The modelled compute and memory of a program beside the measured ones."""
    ms, mib = found["measured_ms"], found["compiled_MiB"]
    modelled_ms, predicted_mib = 1e3 * cost.compute_s, cost.memory.peak / 2**20
    return {
        "step": name,
        "modelled ms": modelled_ms,
        "measured ms": ms,
        "measured / modelled": ms / modelled_ms,
        "predicted MiB": predicted_mib,
        "compiled MiB": mib,
        "predicted / compiled": predicted_mib / mib,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many rows are near."""
    time = sum(abs(r["measured / modelled"] - 1) <= 0.15 for r in rows)
    memory = sum(abs(r["predicted / compiled"] - 1) <= 0.1 for r in rows)
    return f"time within 15 %: {time} of {len(rows)}; memory within 10 %: {memory} of {len(rows)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--card", default="h100")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=[])
    parser.add_argument("--presets", action="store_true", help="model at the preset's rates")
    options = harness.parse(parser, devices=1)
    found = measured(options.card)
    chip = CHIPS[found["chip"]] if options.presets else calibrated(found)
    rows = [row(name, chip, found) for name in options.only or STEPS]
    harness.show(rows)
    print(summary(rows))
    shards = [shard(name, chip, found) for name in found["shards"] if name in rehearse.CASES and not options.only]
    if shards:
        harness.show(shards, "one shard of eight")
    harness.save(options.json, {"steps": rows, "shards": shards})


if __name__ == "__main__":
    main()
