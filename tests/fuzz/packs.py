"""Programs that are judged together, and as a script that anybody can run."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import shardfn
from shardfn.cost.devices.hardware import resolve
from tests.fuzz.programs import DEVICES, Input, Program, draw_program, with_results_as

CHECKS = ("values", "inside", "outside", "second")
PACK = 4
"""How many. More save little: most of the time is spent for each program, and a failure costs all of its pack again."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """Programs in one sharded function.

    Attributes:
      programs: the programs, with different names of inputs.
      devices: the number of devices.
      checks: what is compared: "values"; gradients "inside" the sharded function and "outside"; the "second" derivative.
      device: as `shard(device=...)` takes it: what the programs are compiled for and not run on; empty for CPU devices of
        this machine, which run them.
    """

    programs: tuple[Program, ...]
    devices: int
    checks: tuple[str, ...] = CHECKS[:3]
    device: str = ""

    def strategies(self) -> tuple[Any, ...]:
        """One entry for each argument of the function."""
        open_ = {"AUTO": shardfn.AUTO}
        return tuple(
            shardfn.AUTO if x.strategy is None else tuple(open_.get(s, s) for s in x.strategy)
            for program in self.programs
            for x in program.inputs
        )

    def out_strategy(self) -> tuple[Any, ...] | None:
        """One entry for each result of the function, or None if one is left to propagation."""
        given = tuple(program.out_strategy() for program in self.programs)
        return None if None in given else given


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a check: "right", "wrong", "crashed", "refused", "unsure" or "invalid", and the text that says why.

    "unsure" is a difference that noise of a millionth, or the rounding of fusions on one device, explains. "invalid" is a program that does not run unsharded.
    Compiled for a device, a check is "right" if it compiles.
    """

    pack: Pack
    check: str
    verdict: str
    text: str = ""
    as_predicted: bool | None = None
    """Whether the compiled program sends as many bytes as predicted; None where nothing is compared."""


SHARES = {"inside": 0.5, "outside": 0.5, "second": 0.05}
"""How many packs have their gradients compared."""


def draw_pack(seed: int, gradients: bool = True, device: str = "") -> Pack:
    """Four programs on one number of devices, or on those of a name; one or two of them in the few packs that search."""
    rng = random.Random(f"pack {seed}")
    devices = rng.choice((*DEVICES, 4, 8, 8))
    devices = resolve(device).count if device else devices
    searches = rng.random() < 0.06
    programs = []
    for i in range(rng.choice((1, 2)) if searches else PACK):
        program = draw_program((seed, i), devices, names=10 * i)
        programs.append(program)
    checks = ["values"]
    if gradients:
        checks += [c for c, share in SHARES.items() if rng.random() < share]
    if rng.random() < 0.12:
        programs = [with_results_as(p, (seed, i), devices) for i, p in enumerate(programs)]
    if searches:
        programs = [opened(rng, p) for p in programs]
    return Pack(tuple(programs), devices, tuple(checks), device)


def opened(rng: random.Random, program: Program) -> Program:
    """With some entries left to the search."""
    inputs = []
    for x in program.inputs:
        strategy = None if rng.random() < 0.5 else tuple("AUTO" if rng.random() < 0.5 else s for s in x.strategy or ())
        inputs.append(dataclasses.replace(x, strategy=strategy))
    return dataclasses.replace(program, inputs=tuple(inputs))


# ---- as code


def script(pack: Pack) -> str:
    """A script that runs the first check of a pack, sharded and unsharded, and prints whether they agree; or compiles it."""
    check = pack.checks[0]
    inputs = [x for p in pack.programs for x in p.inputs]
    strategies = ", ".join("AUTO" if x.strategy is None else str(x.strategy).replace("'AUTO'", "AUTO") for x in inputs)
    names = ", ".join(x.name for x in inputs)
    lines = ["import jax, jax.numpy as jnp, numpy as np", "from jax import lax", "from shardfn import AUTO, shard", ""]
    lines += ['jax.config.update("jax_num_cpu_devices", 8)', "", ""]
    for i, program in enumerate(pack.programs):
        lines += [program.source("f" if len(pack.programs) == 1 else f"f{i}"), ""]
    if len(pack.programs) > 1:
        calls = [f"f{i}({', '.join(x.name for x in p.inputs)})" for i, p in enumerate(pack.programs)]
        lines += [f"def f({names}):", f"    return {', '.join(calls)},", "", ""]
    if check != "values":
        floats = tuple(i for i, x in enumerate(inputs) if x.dtype in ("float32", "complex64"))
        second = check == "second"
        lines += [LOSS, "", "", "def gradient(f):", f"    first = jax.grad(loss(f), {floats})"]
        lines += [f"    return {f'jax.grad(loss(first), {floats})' if second else 'first'}", "", ""]
    lines += [f"{x.name} = {data_code(x)}" for x in inputs]
    out = pack.out_strategy() if check in ("values", "outside") else None
    out = f", {out[0] if len(pack.programs) == 1 else out}" if out else ""
    function = "gradient(f)" if check in ("inside", "second") else "f"
    device = f'"{pack.device}"' if pack.device else f"jax.devices()[:{pack.devices}]"
    if pack.device and check == "outside":
        lines += ["from shardfn.compiled import targets", "from shardfn.cost.devices.hardware import resolve"]
        lines += [f"devices = targets.devices(targets.target(resolve({device})))"]
        device = "devices"
    made = f"shard({function}, ({strategies},){out}, device={device})"
    made = f"jax.jit(gradient({made}))" if check == "outside" else made
    if pack.device:
        lines += [f"{made}.lower({names}).compile()" if check == "outside" else f"print({made}.plan({names}).verify())"]
    else:
        lines += [f"want, got = jax.jit({'f' if check == 'values' else 'gradient(f)'})({names}), {made}({names})", SAME]
    return with_first_names(re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)) + "\n")


LOSS = """def loss(f):
    def total(*args):
        floats = [y for y in jax.tree.leaves(f(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.sin(jnp.real(y))) for y in floats)

    return total"""

SAME = """for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
    print("right" if np.allclose(a, b, 1e-4, 1e-4, equal_nan=True) else f"WRONG\\n{a}\\n{b}")"""


def with_first_names(code: str) -> str:
    """With inputs named x0, x1, … and values v0, v1, …"""
    names: dict[str, str] = {}
    for name in re.findall(r"\b[xv]\d+\b", code):
        names.setdefault(name, f"{name[0]}{sum(n[0] == name[0] for n in names)}")
    return re.sub(r"\b[xv]\d+\b", lambda found: names[found[0]], code)


def data_code(x: Input) -> str:
    """What `made_data` makes, as code."""
    rng = f"np.random.default_rng({x.name[1:]})"
    if x.dtype == "bool":
        return f"{rng}.normal(size={x.shape}) > 0"
    if x.dtype == "int32":
        return f"{rng}.integers(0, 20, {x.shape}).astype('int32')"
    if x.dtype == "complex64":
        return f"((r := {rng}).normal(size={x.shape}) + 1j * r.normal(size={x.shape})).astype('complex64')"
    return f"{rng}.normal(size={x.shape}).astype('float32')"
