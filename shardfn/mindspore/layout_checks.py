"""The checks of `Layout`: each yields what is wrong, and the caller raises all of it together."""

from __future__ import annotations

import collections
import math
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.errors import Problem
from shardfn.frontend.strategy import count
from shardfn.frontend.validation import any_of
from shardfn.ir.divisors import divisors

INTERLEAVED = "interleaved_parallel"
UNSHARDED = "None"


def axis_names(dim: Any) -> tuple[Any, ...]:
    """The axis names of one dim as typed."""
    return dim if isinstance(dim, tuple) else (dim,)


def call_text(dims: Iterable[Any]) -> str:
    """The arguments of a call of a layout, as typed."""
    return f"({', '.join(map(repr, dims))})"


def real_axes(matrix: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Name and size of each axis that is not virtual."""
    return tuple((name, size) for name, size in zip(names, matrix, strict=True) if name != INTERLEAVED)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


BY_NAME = "a dim is sharded over an axis by its name"
WHY = {
    "device_matrix": "a size counts the devices along an axis",
    "rank_list": "a rank is the index of a device",
    "strategy": "an entry is the number of shards of a dim; 1 leaves it unsharded",
}


def _int_problems(name: str, values: Any, where: str, least: int = 1, kind: type = tuple) -> Iterator[Problem]:
    if not isinstance(values, kind):
        example = kind(values if isinstance(values, tuple | list) else (values if _is_int(values) else 8,))
        what, fix = f"{name} must be a {kind.__name__}, not {type(values).__name__}", f"write it as {example}"
        yield Problem(what, where, WHY[name], fix, is_type=True)
        return
    for i, value in enumerate(values):
        if not _is_int(value):
            what, fix = f"{name}[{i}] must be an int, not {type(value).__name__}", f"write an int, {least} or more"
            yield Problem(what, where, WHY[name], fix, is_type=True)
        elif value < least:
            yield Problem(f"{name}[{i}] is {value}", where, WHY[name], f"use {least} or more")


def matrix_problems(matrix: Any, names: Any) -> Iterator[Problem]:
    """What is wrong with a device matrix and its axis names."""
    where = f"Layout({matrix!r}, {names!r})"
    found = list(_int_problems("device_matrix", matrix, where))
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        what, fix = "alias_name must be a tuple of strings", 'name each axis, as in ("dp", "mp")'
        found.append(Problem(what, where, BY_NAME, fix, is_type=True))
    yield from found
    if any(p.is_type for p in found):
        return
    counts = f"device_matrix has {len(matrix)} entries and alias_name {len(names)}"
    rules = (
        (len(matrix) != len(names), counts, "each axis has a size and a name", "write as many names as sizes"),
        ("" in names, "an axis has an empty name", BY_NAME, "give each axis a name"),
        (UNSHARDED in names, 'an axis is called "None"', 'in a call "None" means an unsharded dim', "rename the axis"),
        (len(set(names)) < len(names), "two axes share a name", BY_NAME, "rename one of them"),
        (
            INTERLEAVED in names[:-1],
            f"axis {INTERLEAVED!r} is not last",
            "it is virtual, no axis of devices",
            "put it last",
        ),
        (not set(names) - {INTERLEAVED}, "no axis has devices", "", 'for one device write Layout((1,), ("dp",))'),
    )
    yield from (Problem(what, where, why, fix) for wrong, what, why, fix in rules if wrong)


def rank_problems(ranks: Any, default: range, virtual: int) -> Iterator[Problem]:
    """What is wrong with a rank list; `virtual` is the size of the matrix with its virtual axis."""
    if ranks is None:
        return
    where = f"rank_list={reprlib.repr(ranks)}"
    found = list(_int_problems("rank_list", ranks, where, least=0, kind=list))
    yield from found
    if found or ranks == list(range(virtual)):  # MindSpore's own default counts the virtual axis
        return
    if len(ranks) != len(default):
        fix = f"list {len(default)} ranks, one for each device of the matrix, or leave rank_list out"
        yield Problem(f"rank_list has {len(ranks)} entries for {len(default)} devices", where, fix=fix)
    rank, times = collections.Counter(ranks).most_common(1)[0] if ranks else (0, 0)
    if times > 1:
        why = "a device has one place in the device matrix"
        yield Problem(f"rank {rank} is listed {times} times", where, why, "list each rank once")


def dim_problems(matrix: tuple[int, ...], names: tuple[str, ...], dims: tuple[Any, ...]) -> Iterator[Problem]:
    """What is wrong with the dims of a call."""
    where = f"Layout({matrix!r}, {names!r}){call_text(dims)}"
    use = "use " + any_of([f'"{name}"' for name in (*names, UNSHARDED) if name != INTERLEAVED])
    seen: dict[str, int] = {}
    for i, axis in ((i, axis) for i, dim in enumerate(dims) for axis in axis_names(dim)):
        if axis is None:
            why, fix = "only the string means an unsharded dim", 'write the string "None" there'
            yield Problem(f"dim {i} is None", where, why, fix)
        elif not isinstance(axis, str):
            why = "a dim is an axis name or a tuple of names"
            yield Problem(f"dim {i} is {axis!r}, which is no axis name", where, why, use, is_type=True)
        elif axis == UNSHARDED:
            continue
        elif axis not in names:
            yield Problem(f"dim {i} cannot be sharded over {axis!r}", where, "the device matrix has no such axis", use)
        elif axis == INTERLEAVED:
            why = "XLA overlaps communication with computation by itself: no array is split again on its device"
            yield Problem(f"dim {i} cannot be sharded over {axis!r}", where, why, f"leave it out of the call: {use}")
        elif axis in seen:
            what = f"axis {axis!r} is used twice" + (f", on dims {seen[axis]} and {i}" if seen[axis] != i else "")
            fix = 'use each axis once, and "None" for an unsharded dim'
            yield Problem(what, where, "an axis shards one dim of an array, once", fix)
        else:
            seen[axis] = i


def strategy_problems(strategy: Any, device_num: Any) -> Iterator[Problem]:
    """What is wrong with a strategy on a number of devices."""
    where = f"strategy {strategy!r} on {device_num!r} devices"
    found = list(_int_problems("strategy", strategy, where))
    if not _is_int(device_num) or device_num < 1:
        what, fix = f"device_num is {device_num!r}", "give the number of devices, an int of 1 or more"
        found.append(Problem(what, where, fix=fix, is_type=not _is_int(device_num)))
    yield from found
    if not found and device_num % math.prod(strategy):
        needed = math.prod(strategy)
        what, why = f"the strategy needs {needed} devices", f"{device_num} is not divisible by {needed}"
        yield Problem(what, where, why, f"choose a strategy whose product is {any_of(divisors(device_num))}")


def map_problems(matrix: tuple[int, ...], tensor_map: Any) -> Iterator[Problem]:
    """What is wrong with a tensor map."""
    where = f"tensor_map {tensor_map!r} of device_matrix {matrix!r}"
    nested = isinstance(tensor_map, tuple | list)
    values = [k for dim in tensor_map for k in (dim if isinstance(dim, tuple | list) else (dim,))] if nested else ()
    if not nested or not all(map(_is_int, values)):
        fix = "write a tuple of ints, or of tuples of ints for a dim that several axes shard"
        yield Problem("a tensor map must be a tuple of ints", where, fix=fix, is_type=True)
    elif any(not -1 <= k < len(matrix) for k in values):
        fix = f"use 0 for the last axis, up to {len(matrix) - 1} for the first, and -1 for an unsharded dim"
        yield Problem("the tensor map names an axis that does not exist", where, fix=fix)


def sharding_problems(sharding: Any, ndim: int) -> Iterator[Problem]:
    """What a layout cannot express of a sharding."""
    where = repr(sharding)
    if not isinstance(sharding, NamedSharding):
        what, fix = f"a layout cannot be read from a {type(sharding).__name__}", "give a jax.sharding.NamedSharding"
        yield Problem(what, where, fix=fix, is_type=True)
        return
    spec, names = sharding.spec, tuple(sharding.mesh.axis_names)
    rules = (
        (len(spec) > ndim, f"the spec has {len(spec)} entries for {ndim} dims", "give at most one entry for each dim"),
        (
            PartitionSpec.UNCONSTRAINED in spec.partitions,
            "the spec leaves a dim unconstrained",
            "say an axis or None for each dim",
        ),
        (bool(spec.unreduced), "the array still has to be summed over an axis", "reduce it first"),
        (INTERLEAVED in names, f"the mesh has an axis called {INTERLEAVED!r}", "rename it: here that axis is virtual"),
    )
    yield from (Problem(what, where, fix=fix) for wrong, what, fix in rules if wrong)


def shape_problems(layout: Any, shape: Any) -> Iterator[Problem]:
    """Why an array of this shape cannot be sharded by a layout."""
    where = f"shape {shape!r} under {layout!r}"
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) for n in shape):
        yield Problem("a shape must be a tuple of ints", where, fix="pass array.shape", is_type=True)
    elif len(shape) != len(layout.strategy):
        what = f"the layout has {len(layout.strategy)} dims and the array has {len(shape)}"
        why = 'each dim has an entry, which is "None" for an unsharded dim'
        yield Problem(
            what, where, why, f"call the layout with {count(len(shape), 'entry', 'entries')}, one for each dim"
        )
    else:
        for i, (n, shards) in enumerate(zip(shape, layout.strategy, strict=True)):
            if n % shards:
                ways = any_of(divisors(math.gcd(int(n), layout.size)))
                other = f"shard it {ways} ways on {layout.size} devices" if ways != "1" else "leave it unsharded"
                fix = f"{other}, or pad it to {-(-n // shards) * shards}"
                why = f"{n} is not divisible by {shards}"
                yield Problem(f"dim {i} cannot be sharded {shards} ways", where, why, fix)
