"""An operator's case as a function of arrays, with its arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.deviations import Ask
from tests.conformance.facts import Case
from tests.conformance.ops import TABLE, Letters, Op


@dataclasses.dataclass(frozen=True)
class Program:
    """A case as a function of arrays. Tensors that the call spells out come last: MindSpore counts them."""

    fn: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    letters: Letters
    strategy: Any
    results: Any
    """The cuts of the results, where MindSpore's strategy tells them."""
    needs: tuple[str, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(a.shape for a in self.args)


NAMES: tuple[tuple[str, Callable[[re.Match[str]], dict[str, Any]]], ...] = (
    # what a name alone says of the constructor or of the call
    (r"\((transpose_[ab])\)", lambda m: {m[1]: True}),
    (r"_t(ab|a|b)$", lambda m: {f"transpose_{side}": True for side in m[1]}),
    (r"\((-?\d+)\)|\(axis(-?\d+)\)|_ax(-?\d+)", lambda m: {"axis": int(m[1] or m[2] or m[3])}),
    (r"_batch(\d+)", lambda m: {"batch_dims": int(m[1])}),
    (r"_keep\b", lambda m: {"keep_dims": True}),
    (r"[ _](\d)x\d[ _](same|valid)", lambda m: {"kernel_size": int(m[1]), "pad_mode": m[2]}),
)


DTYPES = SimpleNamespace(
    float16=jnp.float16, float32=jnp.float32, bfloat16=jnp.bfloat16, int32=jnp.int32, bool_=jnp.bool_
)


@functools.cache
def program(case: Case) -> Program:
    """The function of a case, with data for its arguments.

    >>> case = Case("x", "single_op", "Concat_ax1", True, ctor="ops.Concat(1)", call="op((p[0], p[1]))",
    ...             shapes=((2, 3), (2, 3)), strategy=((2, 1), (2, 1)))
    >>> made = program(case)
    >>> made.fn(*made.args).shape, made.letters
    ((2, 6), ('aB', 'aB'))
    """
    op, said = built(case)
    call = compile(case.call or op.call, case.name, "eval")
    count = len(case.shapes)

    def fn(*args: Any) -> Any:
        scalars = iter(args[count:])
        run = lambda *a: op.run(*a, **said)  # noqa: E731
        return eval(call, {"op": run, "ops": RUN, "p": args[:count], "ms": DTYPES, "Tensor": lambda *_: next(scalars)})

    # the arguments of the call as MindSpore would see them: `dims`, `ids` and `entries` look at their shapes
    seen: list[Any] = []
    scalars: list[np.ndarray] = []

    def note(*args: Any) -> Indexable:
        seen.extend(args)
        return Indexable()

    def tensor(value: Any, dtype: Any) -> np.ndarray:
        scalars.append(np.asarray(value, dtype))
        return scalars[-1]

    blanks = [np.empty(s, np.float32) for s in case.shapes]
    eval(call, {"op": note, "ops": FIRST, "p": blanks, "ms": DTYPES, "Tensor": tensor})

    strategy, results = case.strategy, None
    if isinstance(strategy, tuple) and strategy and all(isinstance(c, tuple) for c in strategy):
        strategy, results = op.entries(strategy, *seen, **said)
    below = {i: bound(*seen, **said) for i, bound in op.ids.items()}
    data = [ints(s, below[i]) if i in below else floats(s, i, op.positive) for i, s in enumerate(case.shapes)]
    return Program(fn, (*data, *scalars), op.dims(*seen, **said), strategy, results, op.needs)


def ask_of(case: Case) -> Ask:
    """What a case asks for."""
    made = program(case)
    out = case.out or made.results
    results = () if out is None else shapes_of_results(made.fn, made.args)
    return Ask(case, made.shapes, made.strategy, made.letters, out, results, made.needs, made.results is not None)


def shapes_of_results(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """The shape of each result that an out_strategy has an entry for."""
    result = jax.eval_shape(fn, *args)
    return tuple(r.shape for r in (result if isinstance(result, tuple) else (result,)))


def built(case: Case) -> tuple[Op, dict[str, Any]]:
    """The operator of a case, and the arguments of its call that only the name tells."""
    if case.ctor is not None:
        return eval(case.ctor, {"ops": SimpleNamespace(**TABLE), "ms": DTYPES}), {}
    row = TABLE[re.split(r"[ _(]", case.op)[0]]
    said: dict[str, Any] = {}
    for pattern, read in NAMES:
        if found := re.search(pattern, case.op):
            said |= read(found)
    ctor = inspect.signature(row).parameters
    if "out_channel" in ctor:
        said["out_channel"] = case.shapes[1][0]
    return row(**{k: v for k, v in said.items() if k in ctor}), {k: v for k, v in said.items() if k not in ctor}


class Indexable:
    """Stands for any result."""

    def __getitem__(self, _: Any) -> Indexable:
        return self


# operators inside a call, beside the one under test: run as they are; and, to look at shapes, their first argument
RUN = SimpleNamespace(**{name: lambda *a, make=make, **k: make(*a, **k).run for name, make in TABLE.items()})
FIRST = SimpleNamespace(**dict.fromkeys(TABLE, lambda *a, **k: lambda x, *_: x))


def ints(shape: tuple[int, ...], below: int) -> np.ndarray:
    """Every value at most once where there are enough: two updates of one place have no order."""
    random, size = np.random.default_rng(0), math.prod(shape)
    values = random.permutation(below)[:size] if size <= below else random.integers(0, below, size)
    return values.reshape(shape).astype(np.int32)


def floats(shape: tuple[int, ...], seed: int, positive: bool) -> np.ndarray:
    """Quarters between -2 and 2, without 0: sums are exact, and some values are equal."""
    random = np.random.default_rng(seed)
    sign = 1 if positive else random.choice([-1, 1], shape)
    return (sign * random.integers(1, 9, shape) / 4).astype(np.float32)
