"""Random programs as data: inputs with strategies, and steps that are lines of Python.

A program prints as code that runs, is the same for a seed on every machine, and can be shrunk by changing its lines.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz import other_ops, static_ops  # noqa: F401 (they fill the table)
from tests.fuzz.drawing import DTYPES, OPS, Draw, Value, fits, namespace, shape_of

Strategy = tuple[Any, ...] | None
"""The number of shards of each dimension, `"AUTO"` for an open one; None leaves the array to the search."""

SIZES = (8, 12, 16, 24, 32, 48, 64)
MOST_ELEMENTS = 3072
DEVICES = (2, 3, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument and its strategy."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    strategy: Strategy

    def data(self) -> np.ndarray:
        return made_data(self.shape, self.dtype, int(self.name[1:]))


def made_data(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """What an input holds: normal numbers, integers below 20, or coins."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.normal(size=shape) > 0
    if dtype == "int32":
        return rng.integers(0, 20, shape).astype(dtype)
    made = rng.normal(size=shape)
    return (made + 1j * rng.normal(size=shape) if dtype == "complex64" else made).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """`name = text`. The kind is the op's row in the table of ops."""

    name: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} = {self.text}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function: inputs, steps, and the names of its results."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    differentiable: bool = True
    """Whether JAX has gradients of all its steps."""
    results_as: tuple[tuple[str, Strategy], ...] = ()
    """Names of results and their strategies."""

    def source(self, name: str = "f", noise: Iterable[str] = ()) -> str:
        """The function as code; with noise behind steps of these kinds."""
        lines = [f"def {name}({', '.join(x.name for x in self.inputs)}):"]
        for place, step in enumerate(self.steps):
            lines.append(f"    {step}")
            if step.kind in noise:
                lines.append(f"    {step.name} = noise({step.name}, {place})")
        return "\n".join([*lines, f"    return {', '.join(self.results)},", ""])

    def function(self, nested: bool = True, noise: Any = None, noisy: Iterable[str] = ()) -> Callable[..., Any]:
        """The function itself; with `noise` behind the steps of the noisy kinds."""
        names = {**namespace(nested), "noise": noise}
        exec(compile(self.source(noise=noisy), "<program>", "exec"), names)
        return names["f"]

    def plain(self, **more: Any) -> Callable[..., Any]:
        """The function with nothing sharded inside."""
        return self.function(nested=False, **more)

    def arguments(self) -> list[np.ndarray]:
        return [x.data() for x in self.inputs]

    def out_strategy(self) -> tuple[Strategy, ...] | None:
        """A strategy for each result, or None if one has none."""
        given = dict(self.results_as)
        return tuple(given[r] for r in self.results) if all(r in given for r in self.results) else None

    def kinds(self) -> set[str]:
        return {step.kind for step in self.steps}

    def needed(self) -> Program:
        """Without the steps and inputs that no result needs."""
        names, steps = set(self.results), []
        for step in reversed(self.steps):
            if step.name in names:
                steps.append(step)
                names |= names_in(step.text)
        inputs = tuple(x for x in self.inputs if x.name in names) or self.inputs[:1]
        return dataclasses.replace(self, inputs=inputs, steps=tuple(reversed(steps)))


def names_in(text: str) -> set[str]:
    """The values that a line reads."""
    return set(re.findall(r"\b[xv]\d+\b", text))


def draw_program(seed: object, devices: int, names: int = 0) -> Program:
    """A program of 2 to 6 steps over one or two inputs, with a random strategy for each.

    Args:
      seed: two equal seeds make two equal programs.
      devices: the product of a strategy divides it.
      names: the number of the first input, so that programs in one function have different data.
    """
    d = Draw(random.Random(str(seed)))
    d.factors = d.one(*FACTORS[devices])
    static = d.coin()
    inputs = []
    for i in range(d.one(1, 1, 1, 2)):
        shape: tuple[int, ...] = ()
        for _ in range(d.one(1, 1, 2, 2, 2, 3)):
            small = [s for s in SIZES if s * math.prod(shape) <= MOST_ELEMENTS // 2]
            shape += (d.one(*small),) if small else ()
        if i and d.coin():
            shape = inputs[0].shape
        dtype = d.one(*["float32"] * (16 if static else 13), "int32", *["int32"] * (2 * bool(i)), "bool", "complex64")
        strategy = d.strategy(shape)
        d.favourite = d.favourite if i else strategy.index(max(strategy))
        inputs.append(Input(f"x{names + i}", shape, dtype, strategy))
    d.values = [Value(x.name, x.shape, x.dtype) for x in inputs]
    steps: list[Step] = []
    differentiable: bool | None = True
    number = d.one(2, 2, 3, 3, 4, 5, 6)
    for _ in range(60):
        if len(steps) == number:
            break
        x = d.values[-1] if d.coin(0.75) else d.one(*d.values)
        table = [o for o in OPS.values() if fits(o, x) and (o.is_static if static else True)]
        if not table:
            d.values.remove(x)
            continue
        chosen = d.rng.choices(table, [o.weight for o in table])[0]
        text = d.try_draw(chosen, x, d.values)
        made = shape_of(text, d.values) if text else None
        if (
            not made
            or made.dtype not in DTYPES
            or math.prod(made.shape) > MOST_ELEMENTS
            or 0 in made.shape
            or made.rank > 4
        ):
            continue
        name = f"v{names + len(steps)}"
        d.values.append(dataclasses.replace(made, name=name))
        steps.append(Step(name, str(text), chosen.kind))
        differentiable = (
            differentiable
            if chosen.gradient
            else None
            if chosen.gradient is None and differentiable is not False
            else False
        )
    read = set().union(*(names_in(s.text) for s in steps))
    results = tuple(s.name for s in steps if s.name not in read)
    made = Program(tuple(inputs), tuple(steps), results or (inputs[0].name,)).needed()
    if differentiable is None:
        differentiable = has_gradient(made)
    return dataclasses.replace(made, differentiable=differentiable)


FACTORS = {2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2), (2,)], 6: [(6,), (2, 3), (3, 2), (2,), (3,)],
           8: [(8,), (2, 4), (4, 2), (2, 2, 2), (4,), (2,)]}  # fmt: skip


def with_results_as(program: Program, seed: object, devices: int) -> Program:
    """With a random strategy for each result."""
    d = Draw(random.Random(f"results {seed}"))
    d.factors = d.one(*FACTORS[devices])
    made = jax.eval_shape(program.plain(), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs))
    pairs = ((name, d.strategy(y.shape)) for name, y in zip(program.results, made, strict=True))
    return dataclasses.replace(program, results_as=tuple(pairs))


def has_gradient(program: Program) -> bool:
    """Whether JAX differentiates it, unsharded."""
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.inputs]
    floats = [i for i, x in enumerate(program.inputs) if x.dtype in ("float32", "complex64")]
    try:
        jax.eval_shape(jax.grad(loss(program.plain()), floats), *args) if floats else None
        return True
    except Exception:  # NotImplementedError, ValueError, TypeError: each rule says it its own way
        return False


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of sines of all that the function returns and can be differentiated."""

    def total(*args: Any) -> jax.Array:
        results = [y for y in jax.tree.leaves(function(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum((jnp.sum(jnp.sin(jnp.real(y))) for y in results), jnp.float32(0))

    return total
