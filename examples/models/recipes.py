"""The recipes of `layouts/` held against small models of their families; run as a module it writes their README."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from examples.models import abstract, llama, llama_nnx, named
from shardfn import Plan
from shardfn.layoutfile.check import checked
from shardfn.layoutfile.files import folder, read, recipes

DEVICES = 8
MODELS: dict[str, Callable[[], Any]] = {
    "dlrm": named.dlrm,
    "gpt2": named.gpt2,
    "large-image": named.large_image,
    "llama": lambda: llama.make(llama_nnx.SIZES),
    "llama-nnx": llama_nnx.make,
    "mixtral": named.mixtral,
    "resnet": named.resnet,
    "t5": named.t5,
    "vit": named.vit,
}
"""For each folder of `layouts/` a training step and its arguments."""

HEAD = """# Layouts

Layout files for the model families that people run, by the names that their parameters have. Each is used by its name,
`shard(step, layout="llama/fsdp-tp")`, and is a start for one of your own: copy it, change it, give its path.
`read("llama/fsdp-tp").with_grid(model=8)` (in `shardfn.layoutfile.files`) changes the size of an axis. `[activations]` speaks
of what a model tags: `shardfn.tag(x, "block")`.

The table is written by `python -m examples.models.recipes`, from the small models of `examples/models` on {devices} devices: what
one training step is predicted to communicate and to hold. A test holds it against what is predicted now.

| layout | grid | collectives, on each device | B sent | B at the peak |
|---|---|---|---|---|
"""


def planned(name: str) -> Plan:
    """The plan of a recipe for the small model of its family."""
    fn, args = abstract(MODELS[name.split("/")[0]])
    problems, made = checked(name, fn, args, device=f"cpu:{DEVICES}")
    assert made is not None and not problems, "\n".join(map(str, problems))
    return made


def row(name: str) -> str:
    """One line of the table."""
    made = planned(name)
    counts: dict[str, int] = {}
    for c in made.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + c.trips
    grid = " x ".join(f"{axis}={size}" for axis, size in made.axes)
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    return f"| {name} | {grid} | {said} | {made.cost.bytes_sent:,} | {made.cost.memory.peak:,} |"


def readme() -> str:
    """The text of `layouts/README.md`."""
    lines = [HEAD.format(devices=DEVICES).rstrip("\n"), *map(row, recipes()), "", "What each is:", ""]
    return "\n".join([*lines, *(f"- `{name}`: {read(name).about}" for name in recipes())]) + "\n"


if __name__ == "__main__":
    pathlib.Path(folder() / "README.md").write_text(readme(), encoding="utf-8")
