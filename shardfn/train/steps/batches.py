"""Batches in parts: over the devices, and into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem
from shardfn.frontend.paths import join


def part_problems(batch: tuple[Any, ...], devices: int, micro_batches: int) -> Iterator[Problem]:
    """What of a batch cannot be cut along dim 0 into `micro_batches` for each of so many devices. Scalars go to all."""
    need = devices * micro_batches
    if need == 1:
        return
    over = f"{micro_batches} micro-batches" if micro_batches > 1 else ""
    over += (" on each of " if over else "") + (f"{devices} devices" if devices > 1 else "")
    sizes: dict[int, str] = {}
    for key, x in tree_util.tree_flatten_with_path(batch)[0]:
        path, shape = join("batch", key), jnp.shape(x)
        if not shape:
            continue
        sizes.setdefault(shape[0], f"`{path}`: {x.dtype}{list(shape)}")
        if shape[0] % need:
            yield Problem(f"argument {key[0].idx + 1} `{path}` cannot be cut into {need} parts", f"{x.dtype}{list(shape)}",
                          f"{shape[0]} is not divisible by {need}: {over}",
                          f"use a batch of {max(shape[0] // need, 1) * need}, or pad it")  # fmt: skip
    if len(sizes) > 1:
        yield Problem("the arrays of the batch differ in dim 0", ", ".join(sizes.values()),
                      f"dim 0 of every array is the batch, and is cut into {need} parts: {over}",
                      "close over what all parts share, or put it into the parameters and name it in `frozen`; "
                      "reshape what belongs to the batch, so that dim 0 is as long as the others'")  # fmt: skip
