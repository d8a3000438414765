"""Apply the recipes of `layouts/` to small models of their families. Run as a module, it writes their README."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from examples.models import abstract, llama, llama_nnx, named
from shardfn import Plan
from shardfn.layoutfile.files import read_layout, recipes, recipes_folder
from shardfn.runtime.layout_check import check_with_plan

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
"""A training step and its arguments for each folder of `layouts/`."""

HEAD = """# Layouts

Layout files for common model families, by the names of their parameters. Use one by its name,
`shard(step, layout="llama/fsdp-tp")`, or copy it, change it and give its path.
`shardfn.load_layout("llama/fsdp-tp").with_mesh(model=8)` changes the size of a mesh axis.
The rules in `[activations]` apply to values that a model tags: `shardfn.tag(x, "block")`.

`python -m examples.models.recipes` writes the table, from the small models of `examples/models` on {devices} devices.
It shows the collectives, the bytes sent and the peak memory of one training step, as estimated for each device.
A test compares it with the current estimates.

| layout | mesh | collectives | bytes sent | peak memory, bytes |
|---|---|---|---|---|
"""


def planned(name: str) -> Plan:
    """The plan of a recipe for the small model of its family."""
    fn, args = abstract(MODELS[name.split("/")[0]])
    problems, made = check_with_plan(name, fn, args, device=f"cpu:{DEVICES}")
    assert made is not None and not problems, "\n".join(map(str, problems))
    return made


def row(name: str) -> str:
    """One line of the table."""
    made = planned(name)
    counts: dict[str, int] = {}
    for c in made.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + c.trips
    mesh = " x ".join(f"{axis}={size}" for axis, size in made.axes)
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"
    return f"| {name} | {mesh} | {said} | {made.cost.bytes_sent:,} | {made.cost.memory.peak:,} |"


def readme() -> str:
    """The text of `layouts/README.md`."""
    lines = [HEAD.format(devices=DEVICES).rstrip("\n"), *map(row, recipes()), "", "What each recipe does:", ""]
    return "\n".join([*lines, *(f"- `{name}`: {read_layout(name).about}" for name in recipes())]) + "\n"


if __name__ == "__main__":
    pathlib.Path(recipes_folder() / "README.md").write_text(readme(), encoding="utf-8")
