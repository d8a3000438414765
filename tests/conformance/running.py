"""A case on this library: planned always, and run wherever its devices are here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import shardfn
from tests.conformance.deviations import Ask
from tests.conformance.facts import Held, LayoutFact


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a call that was accepted."""

    plan: Any
    received: tuple[tuple[int, ...], ...] | None
    """Shape of each argument's piece as the compiled function takes it; None where the devices are not here."""
    value: Any

    @property
    def planned(self) -> tuple[tuple[int, ...], ...]:
        return tuple(d.local_shape for d in self.plan.inputs)


def entry(said: Any) -> Any:
    """A fact's entry as this library takes it."""
    match said:
        case LayoutFact(map=None):
            return shardfn.mindspore.Layout(said.matrix, said.alias)
        case LayoutFact():
            return shardfn.mindspore.Layout(said.matrix, said.alias)(*said.axes)
    return said


def entries(said: Any) -> Any:
    """A fact's strategy as this library takes it."""
    return tuple(map(entry, said)) if isinstance(said, tuple) else said


def attempt(
    fn: Callable[..., Any], args: Sequence[Any], strategy: Any, out: Any, devices: int,
    context: Mapping[str, Any] | None = None, **options: Any,
) -> Outcome:  # fmt: skip
    """Shard `fn` on `devices` devices and call it; raises what the library raises."""
    here = devices <= len(jax.devices())
    device = jax.devices()[:devices] if here else f"cpu:{devices}"
    with shardfn.mindspore.auto_parallel(**context) if context else contextlib.nullcontext():
        sharded = shardfn.shard(fn, entries(strategy), entries(out), device, **options)
        if not here:
            return Outcome(sharded.plan(*args), None, None)
        plan, compiled = sharded.plan(*args), sharded.lower(*args).compile()
        shardings = jax.tree.leaves(compiled.input_shardings)
        received = tuple(s.shard_shape(d.shape) for s, d in zip(shardings, plan.inputs, strict=True))
        value = sharded(*args) if isinstance(fn, shardfn.mindspore.Cell) else compiled(*args)
        return Outcome(plan, received, value)


def slices_said(ask: Ask) -> tuple[tuple[int, ...] | None, ...]:
    """What a device holds of each argument, as the cuts say; None for an argument that was left open."""
    if ask.case.devices == 1:
        return ask.shapes
    return tuple(
        cuts and tuple(n // c for n, c in zip(shape, cuts, strict=True))
        for shape, cuts in zip(ask.shapes, ask.cuts_here, strict=True)
    )


def starts(plan: Any, decision: Any, rank: int) -> tuple[int, ...]:
    """Where the slice of a rank starts in each dim, in slices."""
    size = dict(plan.axes)
    at = dict(zip(size, np.unravel_index(rank, tuple(size.values())), strict=True))
    return tuple(
        int(np.ravel_multi_index([at[a] for a in axes], [size[a] for a in axes])) if axes else 0
        for axes in decision.spec
    )


def same_ranks(plan: Any, held: Sequence[Held]) -> bool:
    """Whether every rank holds the slices that it holds in MindSpore."""
    return all(
        starts(plan, decision, rank) == h.starts(decision.shape, rank)
        for decision, h in zip(plan.inputs, held, strict=False)
        for rank in range(math.prod(h.matrix))
    )


def assert_same(got: Any, want: Any) -> None:
    """Floats nearly, everything else exactly; structure and types too."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if np.issubdtype(w.dtype, np.floating):
            np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
