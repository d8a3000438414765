"""Random programs and random legal strategies for them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import shardfn

# inner, moves and ops fill the table that programs are drawn from.
from tests.properties import inner, moves, ops  # noqa: F401
from tests.properties.builder import Builder, Input, Step, without_strategy

# JAX 0.12 ends the process on a 2 x 3 mesh, where a cut over one axis becomes one over both: jit(x + 1) is enough.
SIX = (6, 6) if jax.__version_info__ < (0, 11) else ()
DEVICE_COUNTS = (2, 8, 3, 4, 8, 4, *SIX, 1)
STEPS = (3, 5)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function as data; its `repr` is its source."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the results."""
    alone: bool
    """One result, returned as it is: else a tuple."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{i.name}: {'int32' if i.below else 'float32'}{list(i.shape)}" for i in self.inputs)
        back = self.results[0] if self.alone else f"({', '.join(self.results)},)"
        return "\n    ".join([f"def f({arguments}):", *map(str, self.steps), f"return {back}"])

    def function(self, nested: bool = True) -> Callable[..., Any]:
        """The function itself; without `nested` its inner `shard`s are left out."""

        def f(*args: Any) -> Any:
            values = dict(zip([i.name for i in self.inputs], args, strict=True))
            for step in self.steps:
                params = step.params if nested else without_strategy(step.params)
                values[step.name] = step.run(*(values[o] for o in step.operands), **params)
            results = tuple(values[r] for r in self.results)
            return results[0] if self.alone else results

        return f

    @property
    def floats(self) -> tuple[int, ...]:
        """Positions of the inputs that have a gradient."""
        return tuple(i for i, x in enumerate(self.inputs) if not x.below)


def scalar(result: Any) -> Any:
    """A weighted sum of all float results: the weights keep symmetric results (a softmax) from summing to a constant."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(result):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            weights = (jnp.arange(leaf.size) % 5 - 1.5).reshape(leaf.shape)
            total += (leaf * weights).sum()
    return total


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked of `shard`: devices by id, and the entries."""

    devices: tuple[int, ...]
    in_strategy: tuple[Any, ...] | None
    out_strategy: tuple[Any, ...] | None

    def options(self) -> dict[str, Any]:
        device = [jax.devices()[d] for d in self.devices]
        return {"in_strategy": self.in_strategy, "out_strategy": self.out_strategy, "device": device}

    def weaker(self) -> Ask:
        """Only the first cut entry is kept."""
        first = next((i for i, e in enumerate(self.in_strategy or ()) if e is not shardfn.AUTO), -1)
        entries = tuple(e if i == first else shardfn.AUTO for i, e in enumerate(self.in_strategy or ()))
        return dataclasses.replace(self, in_strategy=entries or None, out_strategy=None)


def device_ids() -> st.SearchStrategy[tuple[int, ...]]:
    """Some of the eight devices: the first ones, or the last ones backwards."""
    ways = [(tuple(range(n)), tuple(range(8))[: -n - 1 : -1]) for n in DEVICE_COUNTS]
    return st.sampled_from([ids for pair in ways for ids in pair])


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and what is asked of it; `arrive` says what its arguments are, `derive` how gradients are taken."""

    program: Program
    ask: Ask
    arrive: str
    derive: str

    def arguments(self) -> list[Any]:
        data = [i.data() for i in self.program.inputs]
        return [jnp.asarray(d) for d in data] if self.arrive == "on device 0" else list(data)


@st.composite
def cases(draw: Any) -> Case:
    """A seed makes the case, so that hardly two are alike; what shrinks is how many of its steps and entries stay.

    Every draw has choices of its own: Hypothesis makes variants of a case by copying a draw over another that has the
    same choices, and five of six cases would be such variants.
    """
    builder = Builder(random.Random(draw(st.integers(0, 2**48))))

    def stays(what: str) -> bool:
        return draw(st.sampled_from((f"not {what}", *[what] * 24))) == what

    builder.devices = draw(device_ids())
    program = draw_program(builder, stays)
    return Case(
        program,
        draw_ask(builder, program, stays),
        builder.one(("in NumPy", "on device 0")),
        builder.one(("jit of grad", "grad", "shard of grad")),
    )


def draw_program(builder: Builder, stays: Callable[[str], bool]) -> Program:
    """Three to five steps; one that does not stay becomes an input, and what nobody uses goes."""
    builder.input(builder.shape(builder.ints(1, 3)))
    for _ in range(builder.ints(*STEPS)):
        builder.grow()
    made = [v for v in builder.values if v.name.startswith("v")]
    results = [made[-1], *([builder.one(builder.values)] if builder.coin() else [])]
    value = {v.name: v for v in builder.values}
    steps, inputs = [], {i.name: i for i in builder.inputs}
    for step in builder.steps:
        if stays(step.name):
            steps.append(step)
        else:
            v = value[step.name]
            inputs[step.name] = Input(step.name, v.shape, int(v.most) if v.dtype == "int32" else 0)
    used = {r.name for r in results}
    for step in reversed(steps):
        used.update(step.operands if step.name in used else ())
    return Program(
        tuple(i for i in inputs.values() if i.name in used),
        tuple(s for s in steps if s.name in used),
        tuple(r.name for r in results),
        tuple(r.shape for r in results),
        len(results) == 1 and builder.coin(),
    )


def draw_ask(builder: Builder, program: Program, stays: Callable[[str], bool]) -> Ask:
    # A nested `shard` names its devices in their own order, and JAX has one order of devices in a program.
    free = all("cuts" not in step.params for step in program.steps)
    entry = by_layout(builder, free) if builder.ints(0, 2) == 0 else by_integers(builder)

    def entries(kind: str, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...] | None:
        found = [entry(shape) for shape in shapes]
        found = [e if stays(f"{kind} {i}") else shardfn.AUTO for i, e in enumerate(found)]
        return None if builder.ints(0, 5) == 0 else tuple(found)

    return Ask(builder.devices, entries("in", [i.shape for i in program.inputs]), entries("out", program.shapes))


def by_integers(builder: Builder) -> Callable[[tuple[int, ...]], Any]:
    return lambda shape: builder.cuts(shape) if builder.ints(0, 4) else None


def by_layout(builder: Builder, any_order: bool) -> Callable[[tuple[int, ...]], Any]:
    """Layouts on one random device matrix, and what may stand beside them."""
    count = left = len(builder.devices)
    matrix: list[int] = []
    while left > 1:
        matrix.append(builder.one(d for d in range(2, left + 1) if left % d == 0))
        left //= matrix[-1]
    names = tuple("xyz"[: len(matrix)] or "x")
    ranks = list(builder.order(range(count))) if any_order and builder.coin() else None
    layout = shardfn.mindspore.Layout(tuple(matrix) or (1,), names, ranks)
    sizes = dict(layout.axes)

    def entry(shape: tuple[int, ...]) -> Any:
        if builder.ints(0, 4) == 0:
            return builder.one((None, (1,) * len(shape)))
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis in builder.order(names):
            held = [shape[d] // math.prod(sizes[a] for a in dims[d]) for d in range(len(shape))]
            fit = [d for d in range(len(shape)) if held[d] % sizes[axis] == 0]
            if fit and builder.ints(0, 3):
                at = builder.one(fit)
                dims[at] = (*dims[at], axis)
        return layout(*("None" if not d else d[0] if len(d) == 1 else d for d in dims))

    return entry


def asked_cuts(entry: Any, shape: Sequence[int], devices: int) -> tuple[int, ...] | None:
    """What an entry says of a shape, by the documented rule; None where it leaves it open."""
    if entry is shardfn.AUTO:
        return None
    if devices == 1:
        return (1,) * len(shape)
    if isinstance(entry, shardfn.mindspore.Layout):
        return entry.strategy
    if entry is None:
        cut = devices if shape and shape[0] % devices == 0 else 1
        return (cut, *(1,) * (len(shape) - 1)) if shape else ()
    return entry


def assert_near(got: Any, want: Any) -> None:
    """Equal structure and types; integers exactly, floats to what a sum in another order may change."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        w = np.asarray(w)
        if np.issubdtype(w.dtype, np.floating):
            scale = max(1.0, float(np.abs(w).max(initial=0)))
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-4, atol=2e-5 * scale)
        else:
            np.testing.assert_array_equal(np.asarray(g), w)
