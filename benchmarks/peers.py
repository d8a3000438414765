"""The same training steps by shardfn and by what one would use in its place: what they compile to, what one writes for them.

Steps of an MLP and a GPT on eight devices, in the layouts of `benchmarks/peer_steps`. Each library runs three steps,
whose losses must be those of the unsharded step. Bytes sent and collectives are those of the compiled program for one
device, times the iterations of loops; memory is arguments, results and temporaries. A first step counts from the
unsharded arrays to its end (planning, tracing, compiling), in seconds of the processor. Then all steps of a program run
in turns; times are medians, of the clock and of the processor, which compare computations on virtual devices and no
links. Lines are those between the marks in `peer_steps`, as `ruff format` writes them: for the sharding, and of the
model that the library wants written in its own form. `make peers` installs the
libraries in a virtual environment of its own. One that does not import is left out and named.
Run: python benchmarks/peers.py [--programs mlp gpt2] [--libraries plain ...] [--size small] [--rounds 15]
     [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import collections
import importlib
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import harness, peer_steps
from examples.models.families import FAMILIES
from shardfn.compiled.executable import read

LIBRARIES = {
    "with_shardfn": "shardfn",
    "plain": "jax.jit, NamedSharding",
    "with_scalax": "scalax",
    "with_haliax": "haliax",
    "with_flax": "Flax, logical axis rules",
}
"""The modules of `peer_steps`, and what they are called in the table."""
PACKAGES = ("scalax", "haliax", "flax", "optax", "equinox")
CHECKED = 3
"""Steps whose losses are compared."""


def counted(source: str, kind: str, names: Iterable[str]) -> int:
    """Lines of code between the marks `# KIND: NAME; ...` with one of these names and the next mark.

    >>> counted("# sharding: a; b\\nx = 1\\n\\n# sharding: c\\ny = 2\\n# end\\nz = 3", "sharding", ["b", "c"])
    2
    """
    total, inside, wanted = 0, False, set(names)
    for line in map(str.strip, source.splitlines()):
        if line.startswith(("# sharding: ", "# model: ", "# end")):
            found, _, listed = line.removeprefix("# ").partition(": ")
            inside = found == kind and not wanted.isdisjoint(listed.split("; "))
        elif inside and line and not line.startswith("#"):
            total += 1
    return total


def written(module: Any, program: str, layout: str) -> tuple[int, int]:
    """Lines that a user writes for a step: of the sharding, and of the model."""
    source = pathlib.Path(module.__file__).read_text(encoding="utf-8")
    of_model = counted(source, "model", [program])
    if "constrained" in layout:  # a line of the model for each activation
        model = harness.ROOT / "examples" / "models" / f"{program}.py"
        of_model = sum(" hint(" in line and "import" not in line for line in model.read_text("utf-8").splitlines())
    return counted(source, "sharding", [layout, f"{program}, {layout}"]), of_model


def run(step: peer_steps.Step, state: tuple, times: int) -> tuple[tuple, list[float]]:
    """The state after so many steps, and the losses."""
    losses = []
    for _ in range(times):
        out = step.call(*state, *step.batch)
        state, value = out[: len(state)], out[len(state)]
        losses.append(float(value))
    return state, losses


def unsharded(program: str, size: str) -> tuple[Callable[..., Any], tuple, tuple, list[float]]:
    """A step, its state and batch, and its losses on one device."""
    family = FAMILIES[program]
    function, args = family.make(getattr(family, size))
    count = len(family.donated)
    state, batch = args[:count], args[count:]
    alone = jax.jit(function)
    return function, state, batch, run(peer_steps.Step(alone, alone.lower, state, batch), state, CHECKED)[1]


def measured(program: str, size: str, modules: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """The rows of a program.

    Raises:
      AssertionError: a library's step is another one: its losses differ from those of the unsharded step.
    """
    function, state, batch, expected = unsharded(program, size)
    rows, running = [], []
    for name, module in modules.items():
        for layout in module.LAYOUTS:
            # A function of its own, so that no cache of JAX helps the later rows.
            fresh = lambda *args: function(*args)  # noqa: E731
            own = jax.tree.map(lambda leaf: leaf.copy(), state)
            begin = time.process_time()
            made = module.make(program, layout, fresh, own, batch)
            out = jax.block_until_ready(made.call(*made.state, *made.batch))
            first_s = time.process_time() - begin
            now = out[: len(made.state)]
            compiled = read(made.lower(*now, *made.batch).compile())
            now, losses = run(made, now, CHECKED - 1)
            np.testing.assert_allclose([float(out[len(now)]), *losses], expected, rtol=2e-3, err_msg=f"{name} {layout}")
            kinds = collections.Counter()
            for collective in compiled.collectives:
                kinds[collective.kind] += collective.trips
            of_sharding, of_model = written(module, program, layout)
            peak = compiled.together(jax.default_backend())
            rows.append({
                "program": program, "layout": layout, "library": LIBRARIES[name],
                "KiB sent": sum(c.total_bytes for c in compiled.collectives) / 1024,
                "MiB at the peak": None if peak is None else peak / 2**20,
                "collectives": ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
                "first step CPU s": first_s, "lines": of_sharding, "model lines": of_model,
            })  # fmt: skip
            running.append((made, now, []))
    for i in range(rounds):
        for j in range(len(running)) if i % 2 == 0 else reversed(range(len(running))):
            made, now, times = running[j]
            begin, cpu = time.perf_counter(), time.process_time()
            out = jax.block_until_ready(made.call(*now, *made.batch))
            times.append((time.perf_counter() - begin, time.process_time() - cpu))
            running[j] = made, out[: len(now)], times
    for row, (*_, times) in zip(rows, running, strict=True):
        row["ms"], row["CPU ms"] = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    order = ("open", "open, time", "fsdp", "fsdp, constrained", "tensor")
    return sorted(rows, key=lambda row: order.index(row["layout"]))


def libraries(names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The modules that import, and what the others say."""
    found, notes = {}, []
    for name in names:
        try:
            found[name] = importlib.import_module(f"benchmarks.peer_steps.{name}")
        except ImportError as error:
            notes.append(f"{LIBRARIES[name]} is left out: {error}")
    return found, notes


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=("mlp", "gpt2"), default=["mlp", "gpt2"])
    parser.add_argument("--libraries", nargs="+", choices=tuple(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--size", choices=("tiny", "small", "large"), default="small")
    parser.add_argument("--rounds", type=int, default=15)
    options = harness.parse(parser, devices=peer_steps.DEVICES)
    modules, notes = libraries(options.libraries)
    tables = {name: measured(name, options.size, modules, options.rounds) for name in options.programs}
    for name, rows in tables.items():
        harness.show(rows, name)
    print("\n".join(notes))
    harness.save(options.json, tables, notes=notes, packages=PACKAGES)


if __name__ == "__main__":
    main()
