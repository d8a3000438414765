"""A program while it is drawn: values, inputs, steps, and the table of ops to draw from.

Inputs hold small integers, as float32. What is made of them by additions and products stays exact, whatever the order
of the sums, so that an op that decides (sort, argmax, a comparison) decides the same on one device and on eight. A value
knows the largest magnitude it can have; one that is not exact any more is rounded before such an op.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MOST_INPUTS = 3
MOST_ELEMENTS = 1536
EXACT = 2.0**20
ROUGH = math.inf


class NoFit(Exception):
    """The op drawn cannot follow on the values at hand."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value while a program is drawn; `most` is its largest magnitude, infinite if not exact."""

    name: str
    shape: tuple[int, ...]
    most: float
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument: integers from -2 to 2 as float32, or indices below `below`."""

    name: str
    shape: tuple[int, ...]
    below: int = 0

    def data(self) -> np.ndarray:
        rng = np.random.default_rng([ord(self.name[0]), int(self.name[1:]), *self.shape])
        if self.below:
            return rng.integers(0, self.below, self.shape, dtype=np.int32)
        return rng.integers(-2, 3, self.shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Step:
    """`name = run(*operands, **params)`."""

    name: str
    run: Callable[..., Any]
    operands: tuple[str, ...]
    params: dict[str, Any]

    def __str__(self) -> str:
        params = [f"{k}={v!r}" for k, v in self.params.items()]
        return f"{self.name} = {self.run.__name__.rstrip('_')}({', '.join([*self.operands, *params])})"


class Builder:
    """A program while it is drawn: its inputs, steps and values so far."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.devices: tuple[int, ...] = ()
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []

    def one(self, choices: Iterable[Any]) -> Any:
        return self.rng.choice(tuple(choices))

    def coin(self) -> bool:
        return self.rng.random() < 0.5

    def ints(self, least: int, most: int) -> int:
        return self.rng.randint(least, most)

    def some(self, choices: Iterable[Any], least: int = 0, most: int | None = None) -> tuple[Any, ...]:
        """`least` to `most` (all) of the choices, in any order."""
        choices = tuple(choices)
        return tuple(self.rng.sample(choices, self.ints(least, len(choices) if most is None else most)))

    def order(self, choices: Iterable[Any]) -> tuple[Any, ...]:
        choices = tuple(choices)
        return tuple(self.rng.sample(choices, len(choices)))

    def size(self, most: int = SIZES[-1]) -> int:
        return self.one(s for s in SIZES if s <= most)

    def shape(self, rank: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for _ in range(rank):
            shape += (self.size(max(1, MOST_ELEMENTS // math.prod(shape))),)
        return shape

    def cuts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Cuts that divide the shape, with a product that divides the device count."""
        cuts = [1] * len(shape)
        left = len(self.devices)
        for dim in self.order(range(len(shape))):
            cuts[dim] = self.one(c for c in range(1, left + 1) if left % c == 0 == shape[dim] % c)
            left //= cuts[dim]
        return tuple(cuts)

    def axis(self, x: Value) -> int:
        return self.ints(0, len(x.shape) - 1)

    # ---- operands

    def input(self, shape: tuple[int, ...], below: int = 0) -> Value:
        if len(self.inputs) == MOST_INPUTS:
            raise NoFit
        made = Input(f"x{len(self.inputs)}", shape, below)
        self.inputs.append(made)
        return self.keep(Value(made.name, shape, below or 2.0, "int32" if below else "float32"))

    def keep(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def value(self, least: int = 1, most: int = 4, exact: bool = False) -> Value:
        """A float of that rank; the last one three times in four."""
        fit = [v for v in reversed(self.values) if v.dtype == "float32" and least <= len(v.shape) <= most]
        if not fit:
            fit = [self.input(self.shape(self.ints(max(least, 1), min(most, 3))))]
        found = self.one((fit[0], fit[0], *fit))
        return self.exact(found) if exact else found

    def exact(self, x: Value) -> Value:
        return x if x.most < EXACT else self.step(rounded, [x], {}, 64.0)

    def other(self, shape: tuple[int, ...], exact: bool = False) -> Value:
        """A float of that shape: one that is there, a new input, or a constant where there are enough inputs."""
        fit: list[Any] = [v for v in reversed(self.values) if v.dtype == "float32" and v.shape == shape]
        if math.prod(shape) > MOST_ELEMENTS:
            raise NoFit
        found = self.one([None, *fit])
        if found is None and len(self.inputs) < MOST_INPUTS:
            return self.input(shape)
        if found is None:
            return self.step(ramp, [], {"shape": shape}, 2.0)
        return self.exact(found) if exact else found

    def index(self, shape: tuple[int, ...], below: int) -> Value:
        """Indices below `below`: an input, or constants."""
        fit = [v for v in self.values if v.dtype == "int32" and v.shape == shape and v.most <= below]
        if fit:
            return self.one(fit)
        if len(self.inputs) < MOST_INPUTS:
            return self.input(shape, below)
        return self.step(indices, [], {"shape": shape, "below": below}, below)

    # ---- steps

    def step(self, run: Callable[..., Any], operands: Sequence[Value], params: dict[str, Any], most: float) -> Value:
        step = Step(f"v{len(self.steps)}", run, tuple(v.name for v in operands), params)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        out = jax.eval_shape(lambda *args: run(*args, **without_strategy(params)), *shapes)
        if not 1 <= math.prod(out.shape) <= MOST_ELEMENTS:
            raise NoFit
        self.steps.append(step)
        return self.keep(Value(step.name, out.shape, most if most < EXACT else ROUGH, str(out.dtype)))

    def grow(self) -> None:
        """One random op more; where it does not fit, an elementwise one."""
        kept = len(self.inputs), len(self.steps), len(self.values)
        try:
            self.step(*DRAWN[self.one(sorted(DRAWN))](self))
        except NoFit:
            del self.inputs[kept[0] :], self.steps[kept[1] :], self.values[kept[2] :]
            self.step(*DRAWN["unary"](self))


def without_strategy(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a step as it runs unsharded: only `nested` has any of the kind."""
    return {k: v for k, v in params.items() if k != "cuts"}


Drawn = tuple[Callable[..., Any], Sequence[Value], dict[str, Any], float]
DRAWN: dict[str, Callable[[Builder], Drawn]] = {}
"""The ops by name: each draws its operands and parameters."""


def drawn(draw: Callable[[Builder], Drawn]) -> Callable[[Builder], Drawn]:
    DRAWN[draw.__name__.removeprefix("draw_")] = draw
    return draw


# Constants, and what makes a rough value exact. The odd offset keeps round numbers away from the steps.


def ramp(*, shape):
    return (jnp.arange(math.prod(shape)) % 5 - 2).astype(jnp.float32).reshape(shape)


def indices(*, shape, below):
    return ((jnp.arange(math.prod(shape)) * 7 + 3) % below).astype(jnp.int32).reshape(shape)


def rounded(x):
    return jnp.clip(jnp.round(x * 2 + 0.3137), -64, 64)
