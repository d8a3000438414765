"""The cuts of an entry held against its array and the device count; every message says what would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import Problem, a
from shardfn.frontend.strategy import ENTRY_KINDS, UNKNOWN, Auto, Leaf, count, fitting
from shardfn.mindspore.layout import Layout
from shardfn.partition.resharding import divisors


def check_all(leaves: Sequence[Leaf], devices: int, problems: list[Problem]) -> None:
    """`check` every leaf that is an array, where the call cannot go on to placement."""
    for leaf in leaves:
        if leaf.dtype != UNKNOWN:
            check(leaf, devices, problems)


def check(leaf: Leaf, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """The cuts of a leaf whose entry is a tuple or None, validated; None for every other entry, or if it is wrong.

    On one device everything is checked but that the product divides the device count.
    """
    entry = leaf.entry
    if entry is None:
        whole = (1,) * len(leaf.shape)
        fits = bool(leaf.shape) and leaf.shape[0] > 0 and leaf.shape[0] % devices == 0
        return (devices, *whole[1:]) if fits else whole
    if isinstance(entry, Auto | Layout | PartitionSpec | NamedSharding):
        return None
    return check_cuts(leaf, entry, devices, problems)


def check_cuts(leaf: Leaf, cuts: Any, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """`cuts` as a tuple of ints where they fit the array and the device count; else None, and `problems` has grown."""
    found = _check_entry(leaf, cuts)
    if not found:
        same_rank = len(cuts) == len(leaf.shape)
        found = [] if same_rank else [_rank_problem(leaf, cuts)]
        for d, cut in enumerate(cuts):
            found += _check_cut(leaf, d, cut, leaf.shape[d] if same_rank else 0, devices)
    found = found or _check_product(leaf, cuts, devices)
    problems.extend(found)
    return None if found else tuple(int(c) for c in cuts)


def _check_entry(leaf: Leaf, cuts: Any) -> list[Problem]:
    if isinstance(cuts, tuple):
        return []
    likely = fitting([cuts] if type(cuts) is int else [], leaf.shape)
    what = f"the entry of {leaf.label} is {a(cuts)}"
    return [
        Problem(what, leaf.source, ENTRY_KINDS, f"write one cut for each dimension, such as {likely}", is_type=True)
    ]


def _check_cut(leaf: Leaf, dim: int, cut: Any, size: int, devices: int) -> list[Problem]:
    """What is wrong with one cut."""
    what, where = f"{leaf.label} cannot be cut {cut} ways along dimension {dim}", leaf.source
    if isinstance(cut, bool | np.bool_) or not isinstance(cut, int | np.integer):
        what = f"{leaf.label} has {a(cut)} as its cut along dimension {dim}"
        why = "a cut is an int: the number of pieces of that dimension"
        return [Problem(what, where, why, f"write {_whole_number(cut)} there", is_type=True)]
    if cut < 1:
        why = "a cut is at least 1, which leaves the dimension whole"
        return [Problem(what, where, why, "write 1 to leave the dimension whole, or AUTO as the entry")]
    if size % cut:
        return [Problem(what, where, f"{size} is not divisible by {cut}", _fix_divides(leaf, size, int(cut), devices))]
    return []


def _rank_problem(leaf: Leaf, cuts: Any) -> Problem:
    likely = fitting([c for c in cuts if type(c) is int], leaf.shape)
    spread = " at `" in leaf.label and "['" not in leaf.where
    if isinstance(leaf.entry, Layout):
        fix = f"call the Layout with one entry for each dimension, {len(leaf.shape)} in all"
    elif isinstance(leaf.entry, PartitionSpec | NamedSharding):
        fix = f"give the PartitionSpec {count(len(leaf.shape), 'entry', 'entries')} at most"
    elif spread:
        fix = f"give that array an entry of its own: parameter_plan={{{leaf.path!r}: {likely}}}"
    else:
        fix = f"write one cut for each dimension: {likely}"
    return Problem(
        f"{leaf.label} has {count(len(leaf.shape), 'dimension', 'dimensions')}, "
        f"but its entry has {count(len(cuts), 'cut', 'cuts')}",
        where=leaf.source,
        why="an entry has one cut for each dimension" + (", in each array it is spread over" if spread else ""),
        fix=fix,
    )


def _whole_number(cut: Any) -> str:
    try:
        number = int(cut)
        return str(number) if number == float(cut) and number > 0 else "1, or a larger whole number,"
    except (TypeError, ValueError, OverflowError):
        return "1, or a larger whole number,"


def _fix_divides(leaf: Leaf, size: int, cut: int, devices: int) -> str:
    """Only what the devices can hold is offered."""
    ways = any_of(divisors(size if devices == 1 else math.gcd(size, devices)))
    drawn = isinstance(leaf.entry, Layout | PartitionSpec | NamedSharding)
    fix = f"cut it over axes of {ways} devices" if drawn else f"use {ways} there"
    return fix + (f", or pad that dimension to {-(-size // cut) * cut}" if devices % cut == 0 or devices == 1 else "")


def _check_product(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    product = math.prod(int(c) for c in cuts)
    if devices == 1 or devices % product == 0:
        return []
    return [
        Problem(
            f"{leaf.label} is cut into {product} pieces, which {devices} devices cannot hold evenly",
            where=leaf.source,
            why=f"the product of the cuts must divide the device count: {devices} is not divisible by {product}",
            fix=f"choose cuts with a product of {any_of([p for p in divisors(devices) if math.prod(leaf.shape) % p == 0])}",
        )
    ]


def any_of(numbers: Sequence[int]) -> str:
    """Numbers as a choice.

    >>> any_of([1, 2, 4])
    '1, 2 or 4'
    """
    if not numbers:
        return "1"
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
