"""Models that people know, each a short script that says what is planned and for which devices.

`python -m examples.gallery.llama3_8b` plans one at full size, from shapes. `python benchmarks/gallery.py` does so for all,
compares each plan with what XLA compiles, and writes the pages of `docs/gallery/`.

A script has a docstring (the page's title, then two or three sentences) and `program(size)`, which returns a `Program` for
the sizes "full" and "tiny". `SIZES` names further ones besides "tiny"; `NOTES` is text for the end of the page.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardfn

NAMES = tuple(sorted(path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem != "__init__"))
OPTIMIZER = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with the shapes of its arguments, and how it is planned."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct`."""
    device: str | None = None
    """The devices of the plan, such as "tpu-v5p:4x8x8"; None for those that are here."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `shardfn.plan`, such as `level` or `memory_limit`."""
    zeros: tuple[int, ...] = ()
    """Positions of arguments that begin as zeros, such as an optimizer state."""
    draw: Callable[[], tuple[Any, ...]] | None = None
    """Makes the arguments where random numbers will not do."""
    unsharded: Callable[..., Any] | None = None
    """The function without shardings inside, where it has some."""

    def plan(self) -> shardfn.Plan:
        """Plan from shapes: nothing is allocated."""
        return shardfn.plan(self.function, *self.arguments, device=self.device, **self.options)

    def values(self, seed: int = 0) -> tuple[Any, ...]:
        """Arguments to call the function with: small normal numbers, and integers below 8."""
        if self.draw is not None:
            return self.draw()
        rng = np.random.default_rng(seed)

        def random(leaf: Any) -> Any:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
            return jnp.asarray(rng.integers(0, 2 if leaf.dtype == bool else 8, leaf.shape), leaf.dtype)

        def zero(leaf: Any) -> Any:
            return jnp.zeros(leaf.shape, leaf.dtype)

        return tuple(jax.tree.map(zero if i in self.zeros else random, arg) for i, arg in enumerate(self.arguments))


def training(
    loss: Callable[..., jax.Array], params: Any, batch: Mapping[str, Any], device: str | None, **options: Any
) -> Program:
    """A step of AdamW on `loss(params, **batch)`; the state has the parameters' types, and both are donated."""

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, **batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(OPTIMIZER.init, params)
    return Program(train_step, (params, state, batch), device, {"donate_argnums": (0, 1), **options}, zeros=(1,))


def shapes(dtype: Any, tree: Any, *leading: int) -> Any:
    """A tree of shapes as a tree of `jax.ShapeDtypeStruct`, with leading dims before each.

    >>> shapes("float32", {"w": (2, 3)}, 4)
    {'w': ShapeDtypeStruct(shape=(4, 2, 3), dtype=float32)}
    """
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct((*leading, *dims), dtype), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def show(program: Callable[[str], Program]) -> None:
    """Plan the sizes named on the command line, by default the full one, and print the summaries."""
    for size in sys.argv[1:] or ("full",):
        print(program(size).plan())
