"""Checks each strategy entry against its array and the device count. Every message names values that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardfn.errors import Problem, a
from shardfn.frontend.meant_entries import meant
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.strategy import AUTO, ENTRY_KINDS, UNKNOWN, Leaf, code_in_fix, count, fitting, has_open_dims
from shardfn.ir.divisors import divisors


def check_all(leaves: Sequence[Leaf], devices: int, problems: list[Problem]) -> None:
    """`check` every leaf that is an array, for a call that stops before its mesh is inferred."""
    for leaf in leaves:
        if leaf.dtype != UNKNOWN:
            check(leaf, devices, problems)


def check(leaf: Leaf, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """The strategy of a leaf whose entry is a tuple or None, validated; None if it is open, named by axes, or wrong.

    One device is compatible with every product of shard counts.
    """
    entry = leaf.entry
    if entry is None:
        replicated = (1,) * len(leaf.shape)
        fits = bool(leaf.shape) and leaf.shape[0] > 0 and leaf.shape[0] % devices == 0
        return (devices, *replicated[1:]) if fits else replicated
    if entry is AUTO or isinstance(entry, MeshLayout | PartitionSpec | NamedSharding):
        return None
    return check_strategy(leaf, entry, devices, problems)


def check_strategy(leaf: Leaf, strategy: Any, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """`strategy` as a tuple of ints where it fits the array and the device count.

    Returns:
      The tuple. None if a dimension is AUTO, or if `problems` has grown.
    """
    found = list(_refusals(leaf, strategy, devices))
    problems.extend(found)
    return None if found or has_open_dims(strategy) else tuple(map(int, strategy))


def completions(leaf: Leaf, devices: int) -> Iterator[tuple[int, ...]]:
    """Every strategy that agrees with an entry whose AUTO dimensions are open, the least sharded first.

    Args:
      leaf: a leaf whose entry `has_open_dims` and is valid.
      devices: the device count.

    >>> list(completions(Leaf("x", "x", (8, 6), "float32", (4, AUTO)), 8))
    [(4, 1), (4, 2)]
    """
    choices = [divisors(math.gcd(size, devices)) if ways is AUTO else [int(ways)]
               for size, ways in zip(leaf.shape, leaf.entry, strict=True)]  # fmt: skip
    even = (one for one in itertools.product(*choices) if devices == 1 or devices % math.prod(one) == 0)
    yield from sorted(even, key=lambda one: (math.prod(one), one))


def _refusals(leaf: Leaf, strategy: Any, devices: int) -> Iterator[Problem]:
    """What is wrong with a strategy: its type, or else its rank and its numbers, or else their product."""
    if isinstance(strategy, Format):
        yield Problem(f"the entry of {leaf.label} asks for a layout in memory", leaf.source,
                      "a plan says how arrays are sharded, and XLA how a device stores its shard",
                      "write the sharding of the Format; or use the plan without shardfn: jax.jit(plan.apply(f), "
                      "in_shardings=...) takes Formats of plan.in_shardings, and of plan.out_shardings")  # fmt: skip
        return
    if isinstance(strategy, Sharding):
        yield Problem(f"the entry of {leaf.label} is a {type(strategy).__name__}", leaf.source,
                      "an entry shards an array over the devices of the call, which are given once for all arrays",
                      "write device=jax.devices()[i] for a call on one device, or a NamedSharding or a strategy",
                      is_type=True)  # fmt: skip
        return
    if not isinstance(strategy, tuple):
        likely, code = (
            fitting([strategy] if type(strategy) is int else [], leaf.shape),
            meant(strategy, len(leaf.shape)),
        )
        fix = f"write {leaf.where} = {code_in_fix(code)}" if code else ""
        yield Problem(f"the entry of {leaf.label} is {a(strategy)}", leaf.source, ENTRY_KINDS,
                      fix or f"write one int for each dimension, such as {likely}", is_type=True)  # fmt: skip
        return
    has_rank = len(strategy) == len(leaf.shape)
    found = [] if has_rank else [_rank_problem(leaf, strategy)]
    for dim, ways in enumerate(strategy):
        if ways is not AUTO:
            found += _of_dimension(leaf, dim, ways, leaf.shape[dim] if has_rank else 0, devices)
    yield from found
    if found:
        return
    product = math.prod(int(ways) for ways in strategy if ways is not AUTO)
    if devices > 1 and devices % product:
        fitting_products = [p for p in divisors(devices)[:NAMED_DIVISORS] if math.prod(leaf.shape) % p == 0]
        yield Problem(f"{leaf.label} has {product} shards, which {devices} devices cannot hold evenly", leaf.source,
                      f"the product of the numbers must divide the device count: {devices} is not divisible by {product}",
                      f"choose numbers with a product of {any_of(fitting_products)}")  # fmt: skip


def _of_dimension(leaf: Leaf, dim: int, ways: Any, size: int, devices: int) -> Iterator[Problem]:
    """What is wrong with the number of shards of one dimension."""
    what = f"{leaf.label} cannot be sharded {ways} ways along dimension {dim}"
    if isinstance(ways, bool | np.bool_) or not isinstance(ways, int | np.integer):
        yield Problem(f"{leaf.label} has {a(ways)} as its number of shards along dimension {dim}", leaf.source,
                      "the number of shards is an int, or AUTO", _fix_ways(leaf, ways), is_type=True)  # fmt: skip
    elif ways < 1:
        yield Problem(what, leaf.source, "the number of shards is at least 1",
                      "write 1 to leave the dimension unsharded, or AUTO as the entry")  # fmt: skip
    elif size % ways:
        fix = _fix_divides(leaf, size, int(ways), devices)
        yield Problem(what, leaf.source, f"{size} is not divisible by {ways}", fix)


def _rank_problem(leaf: Leaf, strategy: Any) -> Problem:
    ints = [c for c in strategy if type(c) is int]
    stacked = leaf.path.split("/").count("*")  # layers as rows of one array, in front
    likely = fitting([1] * stacked + ints if stacked + len(ints) == len(leaf.shape) else ints, leaf.shape)
    spread = " at `" in leaf.label and "['" not in leaf.where
    if isinstance(leaf.entry, MeshLayout):
        fix = f"call the Layout with one entry for each dimension, {len(leaf.shape)} in all"
    elif isinstance(leaf.entry, PartitionSpec | NamedSharding):
        fix = f"give the PartitionSpec {count(len(leaf.shape), 'entry', 'entries')} at most"
    elif strategy and all(ways == 1 for ways in strategy):
        fix = "write REPLICATED, which fits any rank"
    elif spread:
        fix = f"give that array an entry of its own: parameter_plan={{{leaf.path!r}: {likely}}}"
    else:
        fix = f"write one int for each dimension: {likely}"
    dimensions, numbers = count(len(leaf.shape), "dimension", "dimensions"), count(len(strategy), "number", "numbers")
    why = "an entry has one number for each dimension" + (", for each array of a subtree" if spread else "")
    return Problem(f"{leaf.label} has {dimensions}, but its entry has {numbers}", leaf.source, why, fix)


def _fix_ways(leaf: Leaf, ways: Any) -> str:
    """What to write for a number of shards that is no int."""
    code = meant(leaf.entry, len(leaf.shape)) if isinstance(ways, str) else ""
    if "AUTO" in code:
        return f"write AUTO without quotes: {leaf.where} = {code}"
    is_named = code.startswith("P(")
    return f"write {leaf.where} = {code_in_fix(code)}" if is_named else f"write {_positive_int(ways)} there"


def _positive_int(ways: Any) -> str:
    try:
        number = int(ways)
        return str(number) if number == float(ways) and number > 0 else "1, or a larger int,"
    except (TypeError, ValueError, OverflowError):
        return "1, or a larger int,"


def _fix_divides(leaf: Leaf, size: int, ways: int, devices: int) -> str:
    """Only what the devices can hold is offered."""
    numbers = any_of(divisors(size if devices == 1 else math.gcd(size, devices))[:NAMED_DIVISORS])
    is_named = isinstance(leaf.entry, MeshLayout | PartitionSpec | NamedSharding)
    fix = f"shard it over mesh axes of {numbers} devices" if is_named else f"use {numbers} there"
    return fix + (
        f", or pad that dimension to {-(-size // ways) * ways}" if devices % ways == 0 or devices == 1 else ""
    )


NAMED_DIVISORS = 12
"""Divisors that an error names."""


def any_of(numbers: Sequence[int | str]) -> str:
    """Numbers or words as a choice.

    >>> any_of([1, 2, 4])
    '1, 2 or 4'
    """
    if not numbers:
        return "1"
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
