"""The batch of a training step: its arrays by position, its entries, and its parts over devices and as micro-batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.errors import Problem, StrategyTypeError, fail
from shardfn.frontend.option_checks import positional
from shardfn.frontend.paths import array_paths, join, met
from shardfn.frontend.strategy import short
from shardfn.ir.divisors import divisors


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


def batch_names(loss_fn: Callable[..., Any]) -> list[str]:
    """The names of a batch's arguments in the loss function, as far as they have some.

    >>> batch_names(lambda params, x, y: x)
    ['x', 'y']
    """
    try:
        return positional(inspect.signature(loss_fn))[1:]
    except (TypeError, ValueError):
        return []


def refuse_other_count(loss_fn: Callable[..., Any], batch: tuple[Any, ...], first: str) -> None:
    """Refuse a batch with fewer or more arrays than the loss function takes after `first`, its model or state.

    Raises:
      StrategyTypeError: the signature does not take the batch.

    >>> refuse_other_count(lambda params, x, y=None: x, (1,), "params")
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # it has none: tracing tells
        return
    try:
        signature.bind(None, *batch)
    except TypeError as error:
        names = batch_names(loss_fn)
        fail(StrategyTypeError, f"the batch does not fit the loss function: {error}",
             where=f"{len(batch)} {'argument' if len(batch) == 1 else 'arguments'} after the {first}",
             why=f"the loss function takes {', '.join(names) or 'none'} after its model",
             fix=f"pass ({', '.join([first, *names])}), arrays, or shapes where nothing runs")  # fmt: skip


def part_shapes(batch: Any, parts: int) -> Any:
    """The shapes of one of `parts` parts of a batch; every part gets the scalars."""
    part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype)  # noqa: E731
    return tree_util.tree_map(part, batch)


def dataset_entries(strategy: tuple[Any, ...] | str | None, batch: tuple[Any, ...], rest: Any) -> tuple[Any, ...]:
    """The entries of a batch by MindSpore's `dataset_strategy`.

    Args:
      strategy: "full_batch", "data_parallel", one entry for each argument, or None.
      batch: the arguments.
      rest: the entry of an argument where it says nothing.

    >>> dataset_entries("full_batch", (jnp.ones((8, 2)),), None), dataset_entries((), (1, 2), None)
    (((1, 1),), (None, None))
    """
    if strategy == "full_batch":
        return tuple(tree_util.tree_map(lambda x: (1,) * jnp.ndim(x), x) for x in batch)
    if strategy == "data_parallel":
        return (None,) * len(batch)
    return strategy if isinstance(strategy, tuple) and strategy else (rest,) * len(batch)


def in_the_batch(glob: str, entry: Any, batch: tuple[Any, ...], names: Sequence[str]) -> Problem | None:
    """The problem of a path or glob in `parameter_plan` that meets arrays of the batch; None where it meets none.

    Args:
      glob: the path or glob.
      entry: its entry.
      batch: arrays or shapes.
      names: the names of the arguments in the loss function.

    >>> in_the_batch("x", (2, 1), (jnp.ones((8, 2)), jnp.ones(8)), ["x", "y"]).fix
    'write in_strategy=((2, 1), (2,))'
    >>> in_the_batch("w", (2, 1), (jnp.ones((8, 2)),), ["x"])
    """
    own = [names[i] if i < len(names) else f"batch/{i}" for i in range(len(batch))]
    paths = [path for name, each in zip(own, batch, strict=True) for path in array_paths(name, each)]
    spelt = [path for i, each in enumerate(batch) for path in array_paths(f"batch/{i}", each)]
    hits = met(glob, paths)[0] or met(glob, spelt)[0]
    if not hits:
        return None
    is_sizes = type(entry) is tuple and entry and all(type(n) is int for n in entry)
    at = [i for i, each in enumerate(batch) for _ in tree_util.tree_leaves(each)]
    if is_sizes and all(hasattr(each, "shape") for each in batch):
        alike = [(entry[0], *(1,) * (len(each.shape) - 1))[: len(each.shape)] for each in batch]
        entries = tuple(entry if i in {at[hit] for hit in hits} else one for i, one in enumerate(alike))
        fix = f"write in_strategy={entries}"
    else:
        fix = f"give it to in_strategy, a tuple with one entry for each argument of the batch: {', '.join(own)}"
    return Problem(f"`parameter_plan` names `{glob}`, which is of the batch", f"parameter_plan[{glob!r}] = {short(entry)}",
                   "it shards the parameters of a step; in_strategy shards the batch", fix)  # fmt: skip


def batch_problems(
    batch: tuple[Any, ...], devices: int, micro_batches: int, names: Sequence[str] = (), option: str = "micro_batches",
    takes_scalars: bool = True,
) -> Iterator[Problem]:  # fmt: skip
    """The arrays of a batch whose dimension 0 `devices` x `micro_batches` does not divide; scalars go to all parts.

    Args:
      batch: arrays or shapes.
      devices: how many share the batch.
      micro_batches: how many parts each device processes.
      names: the names of the arguments in the loss function.
      option: the name of the option that sets `micro_batches`.
      takes_scalars: whether an array may be a scalar.
    """
    parts = devices * micro_batches
    if parts == 1 and takes_scalars:
        return
    over = f"over {devices} devices" if micro_batches == 1 else f"into {micro_batches} micro-batches"
    over += f" on each of {devices} devices" if 1 not in (devices, micro_batches) else ""
    keyed = tree_util.tree_flatten_with_path(batch)[0]
    sizes: dict[int, str] = {}
    for key, x in keyed:
        at, shape = int(key[0].idx), jnp.shape(x)
        path = join("batch", key)
        name = f"`{join(names[at], key[1:]) if at < len(names) else path}`"
        kind = f"{path}: {x.dtype}{list(shape)}"
        if not shape and not takes_scalars:
            yield Problem(f"{name} is a scalar, which has no batch dimension", f"{path}: {short(x)}",
                          "dimension 0 of every array of the batch is split into micro-batches",
                          "give each example its own, jax.random.split(key, size) or jnp.full(size, x); or close over it in the "
                          "loss function, if it never changes")  # fmt: skip
        if not shape:
            continue
        sizes.setdefault(shape[0], kind)
        if shape[0] % parts:
            product = f"{parts} = {micro_batches} x {devices}" if 1 not in (devices, micro_batches) else f"{parts}"
            yield Problem(f"{name} of the batch cannot be split {over}",
                          f"{kind}; {option} = {micro_batches}" if micro_batches > 1 else kind,
                          f"dimension 0 has size {shape[0]}, which is not divisible by {product}",
                          _split_fix(math.gcd(*(jnp.shape(x)[0] for _, x in keyed if jnp.shape(x))), shape[0], devices,
                                     micro_batches, option))  # fmt: skip
    if parts > 1 and len(sizes) > 1:
        yield Problem("the arrays of the batch differ in dimension 0", ", ".join(sizes.values()),
                      f"dimension 0 of every array is the batch, and is split {over}",
                      "close over arrays that all parts share, or make them parameters and name those in `frozen`; "
                      "reshape arrays of the batch so that dimension 0 is equally long")  # fmt: skip


def _split_fix(common: int, size: int, devices: int, micro_batches: int, option: str) -> str:
    """Counts of micro-batches near to the wanted one that divide arrays with `common` as a divisor of all sizes, and sizes of
    the batch near to `size` that the wanted count divides."""
    parts, fits = devices * micro_batches, common // devices if common % devices == 0 else 0
    counts = divisors(fits) if micro_batches > 1 else []
    near = sorted(sorted(counts, key=lambda n: abs(math.log(n / micro_batches)))[:2])
    below = size // parts * parts
    sizes = f"use a batch of {f'{below} or ' if below else ''}{below + parts}, or pad it"
    return f"set {option}={' or '.join(map(str, near))}; or {sizes}" if near else sizes
