"""How far is the modelled compute of one shard of many from what one GPU measures? (`Plan.rehearse`)

Each row plans a step for several GPUs of the kind that is here, and rehearses it. It needs one such GPU, none of whose memory is
taken while plans are made. On another machine each row says why nothing was measured.
Run: python benchmarks/rehearse.py [--chip h100] [--rates FILE] [--only "gpt fsdp" ...] [--tiny] [--json OUT]
`shardfn calibrate --device gpu --save FILE` writes the rates.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import shardfn
from benchmarks import harness
from benchmarks.kind_steps import STEPS, Step
from examples.gallery import Program, llama3_8b
from shardfn.cost.devices.chips import CHIPS, Chip, load_chip


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `kind_steps`, or a model of the gallery; a number of GPUs; how it is planned."""

    step: str
    count: int
    style: str = ""


CASES = {
    "gpt dp": Case("gpt_bf16_scan", 8, "data_parallel"),
    "gpt fsdp": Case("gpt_bf16_scan", 8, "fsdp"),
    "gpt tp": Case("gpt_bf16_scan", 8, "tensor_parallel"),
    "gpt f32 dp": Case("gpt_f32", 8, "data_parallel"),
    "gpt f32 fsdp": Case("gpt_f32", 8, "fsdp"),
    "gpt f32 tp": Case("gpt_f32", 8, "tensor_parallel"),
    "unet": Case("unet_bf16", 8, "data_parallel"),
    "mixture": Case("moe_ragged", 8),
    "llama3 8b fsdp": Case("llama3_8b", 64, "fsdp"),
}


def plan(case: Case, chip: Chip, tiny: bool) -> shardfn.Plan:
    """The plan of a case."""
    made: Step | Program
    if case.step == "llama3_8b":
        made = llama3_8b.step(llama3_8b.TINY if tiny else llama3_8b.Config(), None)
        shapes, donated = made.arguments, (0, 1)
    else:
        made = STEPS[case.step](tiny)
        shapes, donated = made.shapes, made.donated
    style = {"style": case.style} if case.style else {}
    return shardfn.plan(
        made.function, *shapes, device=chip.pod(case.count), donate_argnums=donated, level="time", **style
    )


def row(name: str, chip: Chip, tiny: bool, steps: int, limit: float) -> dict[str, Any]:
    """What is modelled of one shard beside what was measured."""
    case = CASES[name]
    try:
        found = plan(case, chip, tiny).rehearse(steps, limit).rehearsal
    except shardfn.ShardError as error:
        return {"program": name, "GPUs": case.count, "error": str(error)}
    assert found is not None
    measured = found.compiled_bytes or 0
    return {
        "program": name,
        "GPUs": case.count,
        "compute modelled ms": 1e3 * found.compute_s,
        "measured ms": 1e3 * found.measured_s,
        "measured / modelled": found.measured_s / found.compute_s,
        "predicted MiB": found.predicted_bytes / 2**20,
        "compiled MiB": measured / 2**20,
        "compiled / predicted": measured / found.predicted_bytes,
        "step ms": f"{1e3 * found.full_s:.1f} to {1e3 * found.none_s:.1f}",
        "costliest kernel": " at ".join(filter(None, (found.kernels[0].op, found.kernels[0].where.rpartition("/")[2])))
        if found.kernels
        else "",
        "device": found.device,
        "measured": found.layers or "all",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chip", default="h100", choices=[c.name for c in CHIPS.values() if c.platform == "gpu"])
    parser.add_argument("--rates", metavar="FILE", help="what `shardfn calibrate --save FILE` wrote; else the preset's")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one program")
    options = harness.parse(parser, devices=1)
    chip = load_chip(options.rates) if options.rates else CHIPS[options.chip]
    rows = [row(name, chip, options.tiny, options.steps, options.limit) for name in options.only]
    if measured := [r for r in rows if "error" not in r]:
        harness.show(measured)
    for failed in (r for r in rows if "error" in r):
        print(f"{failed['program']}: {failed['error']}")
    harness.save(options.json, {"shards": rows})


if __name__ == "__main__":
    main()
