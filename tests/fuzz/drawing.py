"""What an op of the table draws with: random choices, the values so far, slices and indices as text."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardfn

DTYPES = {"float32": "f", "int32": "i", "bool": "b", "complex64": "c"}


class NoFit(Exception):
    """The op drawn does not apply to the value drawn."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A name in a program. `str` is the name, so that a value can be put into a line."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def rank(self) -> int:
        return len(self.shape)


def namespace(nested: bool = True) -> dict[str, Any]:
    """What the lines of programs use; `nested=False` leaves sharded functions inside unsharded."""
    inner = shardfn.shard if nested else lambda fn, *_, **__: fn
    return {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "functools": functools, "shard": inner, "AUTO": shardfn.AUTO}


@dataclasses.dataclass(frozen=True)
class Op:
    """A row of the table of ops.

    Attributes:
      kind: its name in reports.
      draw: makes a line for a value, or raises `NoFit`.
      weight: how often it is drawn.
      dtypes: letters of the dtypes it takes (`DTYPES`).
      ranks: the ranks it takes.
      is_static: whether it belongs to the static movements and arithmetic between neighbours.
      rounds: whether its result depends on the order of sums, so that it may differ in the last digits.
      gradient: whether JAX has its gradient; None to ask JAX.
    """

    kind: str
    draw: Callable[[Draw, Value], str]
    weight: float = 1.0
    dtypes: str = "fic"
    ranks: tuple[int, ...] = (1, 2, 3)
    is_static: bool = False
    rounds: bool = False
    gradient: bool | None = True


OPS: dict[str, Op] = {}
"""All ops by kind; `static_ops` and `other_ops` fill it."""


def op(
    weight: float = 1.0, dtypes: str = "fic", ranks: Sequence[int] = (1, 2, 3), **traits: Any
) -> Callable[[Any], Any]:
    """Put a function into the table of ops under its own name."""

    def add(draw: Callable[[Draw, Value], str]) -> Callable[[Draw, Value], str]:
        kind = draw.__name__.rstrip("_")
        OPS[kind] = Op(kind, draw, weight, dtypes, tuple(ranks), **traits)
        return draw

    return add


class Draw:
    """A program while it is drawn: the random choices and the values so far."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.values: list[Value] = []
        self.depth = 0
        self.factors: tuple[int, ...] = ()
        self.favourite = 0

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def int(self, least: int, most: int) -> int:
        if most < least:
            raise NoFit
        return self.rng.randint(least, most)

    def coin(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def axis(self, x: Value) -> int:
        """Three times in five the axis that the first input has most shards of."""
        return self.favourite if self.favourite < x.rank and self.coin(0.6) else self.int(0, x.rank - 1)

    def number(self, x: Value) -> str:
        """A scalar of the value's dtype."""
        if x.dtype == "bool":
            return self.one("True", "False")
        if x.dtype == "int32":
            return str(self.int(0, 9))
        return self.one("0.5", "1.5", "2.0", "7.0", "-1.0", "0.0")

    def cut(self, size: int, plain: bool = False) -> tuple[str, int]:
        """A slice of a dimension, as text, and its length."""
        for _ in range(20):
            start = self.one(0, 0, 1, 1, 2, 3, self.int(0, size - 1))
            stop = self.one(size, size, size - 1, size - 1, size - 2, self.int(1, size))
            stride = 1 if plain else self.one(1, 1, 1, 1, 2, 2, 3, -1, -1, -2)
            if stride < 0:
                start, stop = stop - 1, start - 1
            length = len(range(start, stop, stride))
            if length > 0 and start >= 0:
                first = (
                    "" if start == (size - 1 if stride < 0 else 0) else str(start - size if self.coin(0.2) else start)
                )
                last = "" if stop in (-1, size) else str(stop - size if self.coin() else stop)
                return f"{first}:{last}" + (f":{stride}" if stride != 1 else ""), length
        return ":", size

    def run(self, size: int, length: int) -> str:
        """A slice of that length without stride."""
        start = self.int(0, size - length)
        stop = start + length
        return f"{start or ''}:{stop if stop < size else ''}"

    def other(self, x: Value) -> str:
        """A value of the same shape and dtype: another one, or the same changed a little."""
        fit = [v.name for v in self.values if v.shape == x.shape and v.dtype == x.dtype and v.name != x.name]
        if fit and self.coin(0.7):
            return self.one(*fit)
        if x.dtype == "bool":
            return f"(~{x})"
        return self.one(f"({x} + 1)", f"(2 * {x})", f"jnp.ones_like({x})", f"({x} * {x})", f"{x}")

    def indices(self, size: int, length: int, unique: bool = False, outside: bool = False) -> str:
        """Constant or computed indices of a dimension, as text."""
        if unique:
            step = self.one(*(s for s in (1, 1, 3, 5, 7, 11) if math.gcd(s, size) == 1))
            length = min(length, size)
            return f"(jnp.arange({length}) * {step} + {self.int(0, size - 1)}) % {size}"
        most = size + 3 if outside else size
        ints = [v for v in self.values if v.dtype == "int32" and v.rank == 1 and v.shape[0] <= 64]
        if ints and self.coin(0.5):
            return f"abs({self.one(*ints)}) % {most}"
        if self.coin():
            return f"jnp.arange({length}) * {self.one(1, 2, 3, 5, 7)} % {most}"
        some = [self.int(0, most - 1) for _ in range(min(length, self.one(1, 2, 3, 4, 6)))]
        return f"jnp.array({sorted(some) if self.coin() else some})"

    def strategy(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shards that divide the shape, from factors of the device count."""
        shards = [1] * len(shape)
        order = list(range(len(shape)))
        self.rng.shuffle(order)
        factors = list(self.factors)
        self.rng.shuffle(factors)
        for factor in factors:
            fit = [d for d in order if shape[d] % (shards[d] * factor) == 0]
            if fit and self.coin(0.85):
                shards[fit[0] if self.coin(0.7) else self.one(*fit)] *= factor
        return tuple(shards)

    def body(self, shape: Sequence[int], dtype: str, static: bool | None = None) -> str:
        """An expression in `u` of that shape and dtype, and of a static movement or of anything; for loops and calls."""
        self.depth += 1
        try:
            u = Value("u", tuple(shape), dtype)
            table = [o for o in OPS.values() if fits(o, u) and (o.is_static or (static is False and not nests(o)))]
            for _ in range(40):
                chosen = self.rng.choices(table, [o.weight for o in table])[0]
                text = self.try_draw(chosen, u, [u])
                if text and (made := shape_of(text, [u])) and made.shape == u.shape and made.dtype == u.dtype:
                    return text
            raise NoFit
        finally:
            self.depth -= 1

    def try_draw(self, chosen: Op, x: Value, values: list[Value]) -> str | None:
        before, self.values = self.values, values
        try:
            return chosen.draw(self, x)
        except (NoFit, IndexError, ValueError):
            return None
        finally:
            self.values = before


def fits(chosen: Op, x: Value) -> bool:
    return DTYPES[x.dtype] in chosen.dtypes and x.rank in chosen.ranks and math.prod(x.shape) > 0


def nests(chosen: Op) -> bool:
    return chosen.kind in ("fori_loop", "scan", "while_loop", "cond", "checkpoint", "vmap", "nested_shard", "map_")


def shape_of(text: str, values: Sequence[Value]) -> Value | None:
    """The value that an expression makes of others; None where it does not type-check."""
    used = [v for v in values if re.search(rf"\b{v}\b", text)]
    function = eval(f"lambda {', '.join(v.name for v in used)}: {text}", namespace(nested=False))
    try:
        made = jax.eval_shape(function, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in used))
        return Value("", made.shape, str(made.dtype))
    except Exception:  # whatever JAX raises for a line that means nothing
        return None
