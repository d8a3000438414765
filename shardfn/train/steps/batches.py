"""The batch of a training step: its arrays by position, its entries, and its parts over devices and as micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem, StrategyTypeError, fail
from shardfn.frontend.option_checks import positional
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import short


def positional_batch(loss_fn: Callable[..., Any], batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A batch by position, of arrays that are partly given by the loss function's names.

    Raises:
      StrategyTypeError: a name does not exist, or has no position.

    >>> positional_batch(lambda params, x, y, scale=1.0: x, (), {"y": 2, "x": 1})
    (1, 2)
    """
    names = ", ".join(named)
    try:
        signature = inspect.signature(loss_fn)
        bound = signature.bind(None, *batch, **named).arguments
    except (TypeError, ValueError) as error:
        fail(StrategyTypeError, f"the batch does not fit the loss function: {error}", where=f"by name: {names}",
             why=f"it is called as loss_fn(params, *batch), here with {len(batch)} by position",
             fix="give each argument once, by its name in the loss function or by position")  # fmt: skip
    parameters = positional(signature)[1:]
    if len(parameters) < len(batch) or not set(named) <= set(parameters):
        fail(StrategyTypeError, "an array of the batch is given by name, but has no position", where=f"by name: {names}",
             why="the step shards arrays by their position, which *args, **kwargs and keyword-only arguments do not have",
             fix="write loss_fn(params, x, y, ...) with an argument for each")  # fmt: skip
    last = max(i for i, name in enumerate(parameters) if name in bound)
    return tuple(bound.get(name, signature.parameters[name].default) for name in parameters[: last + 1])


def part_shapes(batch: Any, parts: int) -> Any:
    """The shapes of one of `parts` parts of a batch; every part gets the scalars."""
    part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype)  # noqa: E731
    return tree_util.tree_map(part, batch)


def dataset_entries(strategy: str | tuple[Any, ...] | None, batch: tuple[Any, ...], rest: Any) -> tuple[Any, ...]:
    """The entries of a batch by MindSpore's `dataset_strategy`.

    Args:
      strategy: "full_batch", "data_parallel", one entry for each of the first arguments, or None.
      batch: the arguments.
      rest: the entry of an argument for which it says nothing.

    >>> dataset_entries("full_batch", (jnp.ones((8, 2)),), None), dataset_entries(((2, 1),), (1, 2), None)
    (((1, 1),), ((2, 1), None))
    """
    if strategy == "full_batch":
        return tuple(tree_util.tree_map(lambda x: (1,) * jnp.ndim(x), x) for x in batch)
    if strategy == "data_parallel":
        return (None,) * len(batch)
    given = tuple(strategy or ())
    return (*given, *(rest,) * (len(batch) - len(given)))


def batch_problems(
    batch: tuple[Any, ...], devices: int, micro_batches: int, takes_scalars: bool = True
) -> Iterator[Problem]:
    """The arrays of a batch whose dimension 0 `devices` x `micro_batches` does not divide; scalars go to all parts."""
    parts = devices * micro_batches
    if parts == 1 and takes_scalars:
        return
    over = f"{micro_batches} micro-batches" if micro_batches > 1 else ""
    over += (" on each of " if over else "") + (f"{devices} devices" if devices > 1 else "")
    sizes: dict[int, str] = {}
    for key, x in tree_util.tree_flatten_with_path(batch)[0]:
        path, shape = join("batch", key), jnp.shape(x)
        if not shape and not takes_scalars:
            yield Problem(f"`{path}` is a scalar, which has no batch dimension", f"{path}: {short(x)}",
                          "dimension 0 of every array of the batch is split into micro-batches",
                          "close over it in the loss function")  # fmt: skip
        if not shape:
            continue
        sizes.setdefault(shape[0], f"`{path}`: {x.dtype}{list(shape)}")
        if shape[0] % parts:
            yield Problem(f"argument {key[0].idx + 1} `{path}` cannot be split into {parts} parts",
                          f"{x.dtype}{list(shape)}", f"{shape[0]} is not divisible by {parts}: {over}",
                          f"use a batch of {max(shape[0] // parts, 1) * parts}, or pad it")  # fmt: skip
    if parts > 1 and len(sizes) > 1:
        yield Problem("the arrays of the batch differ in dimension 0", ", ".join(sizes.values()),
                      f"dimension 0 of every array is the batch, and is split into {parts} parts: {over}",
                      "close over arrays that all parts share, or make them parameters and name those in `frozen`; "
                      "reshape arrays of the batch so that dimension 0 is equally long")  # fmt: skip
