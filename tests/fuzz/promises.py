"""What plans of random programs promise: a saved plan is the same plan, and another objective's is no better.

`python -m tests.fuzz.promises --programs 500` prints each broken promise with its program.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import shardfn
from shardfn.cost.devices.hardware import resolve
from shardfn.planning.plan import Figures, answered_call
from shardfn.search.problem import is_no_worse, objective
from tests.fuzz.packs import Pack, opened
from tests.fuzz.programs import DEVICES, Program, draw_program

TARGETS = ("cpu:8", "h100:8", "h100:6", "tpu-v5e:2x2", "h100:2", "cpu:4", "h100:64")
NOISE = 1e-6


@dataclasses.dataclass(frozen=True)
class Asked:
    """A random program, its arguments and strategies, a device and a level."""

    function: Any
    program: Program
    strategies: tuple[Any, ...]
    device: str
    level: int

    def plan(self, level: int | None = None, **options: Any) -> shardfn.Plan:
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.program.inputs]
        level = self.level if level is None else level
        return shardfn.plan(self.function, *args, device=self.device, level=level, **options)

    def __str__(self) -> str:
        inputs = [(x.shape, x.dtype) for x in self.program.inputs]
        return f"{self.program.source()}{inputs}, {self.strategies}, {self.device!r}, level {self.level}"


def drawn(seed: int) -> Asked:
    """A random program with some or all shardings open, now and then its gradients too."""
    rng = random.Random(f"promises {seed}")
    device = rng.choice(TARGETS)
    devices = resolve(device).count
    program = draw_program(("promises", seed), devices if devices in DEVICES else 8)
    if rng.random() < 0.5:
        program = dataclasses.replace(
            program, inputs=tuple(dataclasses.replace(x, strategy=None) for x in program.inputs)
        )
    else:
        program = opened(rng, program)
    function = program.plain()
    floats = tuple(i for i, x in enumerate(program.inputs) if x.dtype == "float32")
    if program.differentiable and floats and rng.random() < 0.4:
        function = jax.value_and_grad(_sum_of(function), floats)
    return Asked(function, program, Pack((program,), devices).strategies(), device, rng.choice((0, 1, 2)))


def _sum_of(function: Any) -> Any:
    def total(*args: Any) -> Any:
        leaves = [leaf for leaf in jax.tree.leaves(function(*args)) if leaf.dtype != bool]
        return sum(((abs(leaf) ** 2).astype(jnp.float32).sum() for leaf in leaves), jnp.float32(0))

    return total


def broken(seed: int) -> Iterator[str]:
    """The promises that a plan of a random program breaks, with the figures."""
    asked = drawn(seed)
    try:
        plan = asked.plan(in_strategy=asked.strategies)
    except shardfn.ShardError:
        return
    if plan.candidates and plan.candidates[0].figures != Figures.of(plan.cost):
        yield f"the first candidate is not the plan: {plan.candidates[0].figures}, {Figures.of(plan.cost)}"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path = pathlib.Path(folder) / "layout.toml"
        plan.save(path)
        again = asked.plan(layout=path)
    if told:
        yield f"the plan's own layout file gives a warning: {told[0].message}"
    if again.cost != plan.cost:
        yield f"the plan's own layout file gives another plan: {Figures.of(plan.cost)}, {Figures.of(again.cost)}"
    level = random.Random(seed).choice([level for level in range(3) if level != asked.level])
    other, alone = plan.at(level), asked.plan(level, in_strategy=asked.strategies)
    problem = answered_call(alone).problem
    for name, one in (("the first plan", plan), ("a search from the start", alone)):
        ranks = objective(other.cost, problem), objective(one.cost, problem)
        if not is_no_worse(*ranks, NOISE):
            yield f"`at({level})` is worse than {name}: {ranks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = 0
    for seed in range(options.seed, options.seed + options.programs):
        for text in broken(seed):
            count += 1
            print(f"# seed {seed}: {text}\n{drawn(seed)}\n", flush=True)
    print(f"# {options.programs} programs, {count} broken promises")


if __name__ == "__main__":
    main()
