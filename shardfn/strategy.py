"""What the user wrote (tuples, None, AUTO, Layouts, specs) matched with the arrays of a call.

A strategy is a pytree prefix: one entry for each positional argument, and for a pytree argument an entry may be a
container with the same keys. Everything wrong is collected, nothing is raised here but by the caller.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import PartitionSpec

from shardfn.errors import Problem
from shardfn.layout import Layout


class Auto:
    """The type of `AUTO`."""

    def __repr__(self) -> str:
        return "AUTO"


AUTO = Auto()
"""An entry that leaves the layout to the search."""

Entry = Any
"""tuple of ints | None | AUTO | Layout | PartitionSpec | NamedSharding"""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a call, or of its result, and what was said about it."""

    path: str
    """`params/layers/0/w1`; the first part is the argument's name."""
    label: str
    """How an error speaks of it: "argument 1 `w1`"."""
    shape: tuple[int, ...]
    dtype: str
    entry: Entry = AUTO
    where: str = ""
    """Where the entry stands: `in_strategy[1]`, `parameter_plan['w1']`."""

    @property
    def text(self) -> str:
        """`w1: float32[30, 64]`."""
        return f"{self.path}: {self.dtype}{list(self.shape)}"

    @property
    def source(self) -> str:
        """Where the entry stands, with the entry and the array."""
        return f"{self.where} = {self.entry!r}, {self.text}" if self.where else self.text


@dataclasses.dataclass(frozen=True)
class Argument:
    """One positional argument: its name, how errors speak of it, and its value (arrays or their shapes)."""

    name: str
    label: str
    value: Any


def shape_of(leaf: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of anything JAX takes as an array; None for what it does not.

    >>> shape_of(np.zeros((2, 3), np.int32)), shape_of(1.0), shape_of("text")
    (((2, 3), 'int32'), ((), 'float32'), None)
    """
    if isinstance(leaf, bool | int | float | complex):
        return (), str(jax.dtypes.canonicalize_dtype(type(leaf)))
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or dtype == np.dtype(object):
        return None
    if isinstance(dtype, np.dtype) and dtype.kind in "USMmV" and not jax.numpy.issubdtype(dtype, np.number):
        return None
    if isinstance(dtype, np.dtype):  # what JAX makes of it: NumPy's float64 arrives as float32 unless x64 is on
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return tuple(int(d) for d in shape), str(dtype)


def leaves_of(argument: Argument, problems: list[Problem]) -> list[Leaf]:
    """The arrays of an argument in pytree order; what is no array becomes a problem."""
    found = []
    for key, value in tree_util.tree_flatten_with_path(argument.value)[0]:
        path = join(argument.name, key)
        shape = shape_of(value)
        if shape is None:
            problems.append(
                Problem(
                    f"{argument.label} holds a {type(value).__name__} at `{path}`, which is not an array",
                    where=f"{path} = {_short(value)}",
                    why="only arrays and numbers can be sharded",
                    fix="pass it as a static argument (static_argnums or static_argnames), or close over it",
                    is_type=True,
                )
            )
            shape = ((), "?")
        label = argument.label if not key else f"{argument.label} at `{path}`"
        found.append(Leaf(path, label, *shape))
    return found


def join(name: str, key: Sequence[Any]) -> str:
    """`name` and a pytree key path as `name/a/0/b`."""
    rest = tree_util.keystr(tuple(key), simple=True, separator="/")
    return "/".join(part for part in (name, rest) if part)


def match(arguments: Sequence[Argument], strategy: Any, name: str, problems: list[Problem]) -> list[Leaf]:
    """Give every array of `arguments` its entry from `strategy` (`in_strategy` or `out_strategy`, called `name`).

    `strategy` None leaves all of them AUTO. The number of entries must be the number of arguments.
    """
    per_argument = [leaves_of(a, problems) for a in arguments]
    if strategy is None:
        return [leaf for leaves in per_argument for leaf in leaves]
    if not isinstance(strategy, tuple) or isinstance(strategy, PartitionSpec):
        problems.append(
            Problem(
                f"`{name}` must be a tuple with one entry for each {_NOUN[name]}, but it is a {type(strategy).__name__}",
                where=f"{name} = {_short(strategy)}",
                fix=f"write {_as_tuple(strategy)}",
                is_type=True,
            )
        )
        return [leaf for leaves in per_argument for leaf in leaves]
    if len(strategy) != len(arguments):
        names = ", ".join(a.name for a in arguments) or "none"
        problems.append(
            Problem(
                f"`{name}` has {_count(len(strategy), 'entry', 'entries')} for "
                f"{_count(len(arguments), _NOUN[name], _NOUN[name] + 's')}",
                where=f"{name} = {_short(strategy)}; {_NOUN[name]}s: {names}",
                why="every " + _NOUN[name] + " has one entry, a pytree as well",
                fix=_fix_count(strategy, arguments, name),
            )
        )
        return [leaf for leaves in per_argument for leaf in leaves]
    found: list[Leaf] = []
    for i, (argument, leaves, entry) in enumerate(zip(arguments, per_argument, strategy, strict=True)):
        entries = _spread(entry, argument.value, f"{name}[{i}]", argument.label, problems)
        found += [dataclasses.replace(leaf, entry=e, where=w) for leaf, (e, w) in zip(leaves, entries, strict=True)]
    return found


_NOUN = {"in_strategy": "argument", "out_strategy": "output"}


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _fix_count(strategy: tuple[Any, ...], arguments: Sequence[Argument], name: str) -> str:
    if is_entry(strategy) and strategy and len(arguments) == 1:
        return f"write {name}=({strategy!r},): the outer tuple counts {_NOUN[name]}s"
    missing = len(arguments) - len(strategy)
    if missing > 0:
        return f"add {_count(missing, 'entry', 'entries')}; AUTO leaves the choice to the library"
    return f"remove {_count(-missing, 'entry', 'entries')}"


def _as_tuple(strategy: Any) -> str:
    if isinstance(strategy, list):
        return repr(tuple(tuple(e) if isinstance(e, list) else e for e in strategy))
    return f"({strategy!r},)"


def is_entry(entry: Any) -> bool:
    """Whether `entry` speaks of one array (and is spread over a subtree), rather than holding entries itself."""
    if entry is None or isinstance(entry, Auto | Layout | PartitionSpec | jax.sharding.Sharding):
        return True
    if isinstance(entry, tuple) and type(entry) is tuple:
        return not any(isinstance(e, tuple | list | dict | Auto | Layout | PartitionSpec | jax.sharding.Sharding)
                       or e is None for e in entry)  # fmt: skip
    return not isinstance(entry, tuple | list | dict) and tree_util.all_leaves([entry])


def _children(tree: Any) -> list[tuple[str, Any]]:
    flat = tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return [(join("", key), child) for key, child in flat]


def _spread(entry: Any, tree: Any, where: str, label: str, problems: list[Problem]) -> list[tuple[Entry, str]]:
    """One (entry, where) for every leaf of `tree`."""
    count = len(tree_util.tree_leaves(tree))
    if is_entry(entry):
        return [(entry, where)] * count
    if tree_util.all_leaves([tree]) and count == 1:
        problems.append(
            Problem(
                f"{label} is one array, but its entry is a {type(entry).__name__} of entries",
                where=f"{where} = {_short(entry)}",
                fix=f"write a tuple of ints: {where} = {_flat_ints(entry)!r}",
                is_type=True,
            )
        )
        return [(AUTO, where)]
    mine, theirs = dict(_children(tree)), dict(_children(entry))
    wrong = [k for k in theirs if k not in mine] + [k for k in mine if k not in theirs]
    if wrong:
        problems.append(
            Problem(
                f"the entry of {label} does not have the structure of that argument",
                where=f"{where} has {', '.join(theirs) or 'nothing'}; the argument has {', '.join(mine) or 'nothing'}",
                why="; ".join(_mismatch(k, mine) for k in wrong[:4]),
                fix="give one entry for the whole argument, or one for each key; AUTO leaves a key open",
            )
        )
        return [(AUTO, where)] * count
    spread: list[tuple[Entry, str]] = []
    for key, child in mine.items():
        spread += _spread(theirs[key], child, f"{where}[{key!r}]", label, problems)
    return spread


def _mismatch(key: str, mine: dict[str, Any]) -> str:
    if key in mine:
        return f"{key!r} has no entry"
    close = difflib.get_close_matches(key, list(mine), 1)
    return f"there is no {key!r}" + (f" (did you mean {close[0]!r}?)" if close else "")


def _flat_ints(entry: Any) -> Any:
    flat = tuple(e for e in tree_util.tree_leaves(entry) if isinstance(e, int))
    return flat or AUTO


def _short(value: Any, limit: int = 100) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def apply_parameter_plan(leaves: Sequence[Leaf], plan: Any, problems: list[Problem]) -> list[Leaf]:
    """Override entries by path glob. `.` and `/` separate alike, a leading `self.` and the argument's name are optional."""
    if plan is None:
        return list(leaves)
    if not isinstance(plan, dict):
        problems.append(
            Problem(
                f"`parameter_plan` must be a dict from path to entry, but it is a {type(plan).__name__}",
                where=f"parameter_plan = {_short(plan)}",
                fix='write {"params/w1": (1, 4)}',
                is_type=True,
            )
        )
        return list(leaves)
    full = [_normal(leaf.path) for leaf in leaves]
    chosen: dict[int, tuple[bool, str]] = {}
    for pattern, entry in plan.items():
        where = f"parameter_plan[{pattern!r}]"
        if not isinstance(pattern, str) or not (is_entry(entry) and not isinstance(entry, str | int | float)):
            problems.append(
                Problem(
                    f"`parameter_plan` maps paths (str) to entries, but {where} is a {type(entry).__name__}",
                    where=f"{where} = {_short(entry)}",
                    fix="use a string as key, and a tuple of ints, None, AUTO, Layout or PartitionSpec as value",
                    is_type=True,
                )
            )
            continue
        glob = _normal(pattern)
        hits = [i for i, path in enumerate(full) if fnmatch.fnmatchcase(path, glob)]
        hits = hits or [i for i, p in enumerate(full) if "/" in p and fnmatch.fnmatchcase(p.split("/", 1)[1], glob)]
        if not hits:
            close = difflib.get_close_matches(glob, [*full, *(p.split("/", 1)[-1] for p in full)], 3, 0.4)
            problems.append(
                Problem(
                    f"`parameter_plan` names `{pattern}`, which is no array of this call",
                    where=f"{where} = {_short(entry)}",
                    why=f"the closest are {', '.join(dict.fromkeys(close))}" if close else f"there are {_short(full)}",
                    fix="use one of the paths of `explain`, or a glob such as `params/*/w1`",
                )
            )
        for i in hits:
            exact = glob in (full[i], full[i].split("/", 1)[-1])
            before = chosen.get(i)
            if before is not None and before[0] == exact and plan[before[1]] != entry:
                problems.append(
                    Problem(
                        f"two rules of `parameter_plan` speak of `{leaves[i].path}`",
                        where=f"parameter_plan[{before[1]!r}] = {_short(plan[before[1]])} and {where} = {_short(entry)}",
                        fix="make one of the globs narrower, or name the path itself",
                    )
                )
            if before is None or exact >= before[0]:
                chosen[i] = (exact, pattern)
    return [
        dataclasses.replace(leaf, entry=plan[chosen[i][1]], where=f"parameter_plan[{chosen[i][1]!r}]")
        if i in chosen
        else leaf
        for i, leaf in enumerate(leaves)
    ]


def _normal(path: str) -> str:
    path = path.replace(".", "/").replace("][", "/").replace("['", "/").replace("']", "").strip("/")
    return path.removeprefix("self/")


def check(leaf: Leaf, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """The cuts of a leaf whose entry is a tuple or None, validated; None for every other entry, or if it is wrong.

    On one device everything is checked but that the product divides the device count.
    """
    entry = leaf.entry
    if entry is None:
        whole = (1,) * len(leaf.shape)
        fits = bool(leaf.shape) and leaf.shape[0] > 0 and leaf.shape[0] % devices == 0
        return (devices, *whole[1:]) if fits else whole
    if isinstance(entry, Auto | Layout | PartitionSpec | jax.sharding.Sharding):
        return None
    return check_cuts(leaf, entry, devices, problems)


def check_cuts(leaf: Leaf, cuts: Any, devices: int, problems: list[Problem]) -> tuple[int, ...] | None:
    """`cuts` as a tuple of ints where they fit the array and the device count; else None, and `problems` has grown."""
    for rule in _CUT_RULES:
        if found := rule(leaf, cuts, devices):
            problems.extend(found)
            return None
    return tuple(int(c) for c in cuts)


def _check_type(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    if not isinstance(cuts, tuple):
        return [
            Problem(
                f"the entry of {leaf.label} is a {type(cuts).__name__}",
                where=leaf.source,
                why="an entry is a tuple of ints, None, AUTO, a Layout, a PartitionSpec or a NamedSharding",
                fix=f"write {tuple([1] * len(leaf.shape))} to leave it whole, or AUTO",
                is_type=True,
            )
        ]
    return [
        Problem(
            f"{leaf.label} has a cut of type {type(c).__name__} along dimension {d}",
            where=leaf.source,
            why="a cut is an int: the number of pieces of that dimension",
            fix=f"write {int(c) if isinstance(c, float) and c == int(c) else 1} there",
            is_type=True,
        )
        for d, c in enumerate(cuts)
        if isinstance(c, bool | np.bool_) or not isinstance(c, int | np.integer)
    ]


def _check_rank(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    if len(cuts) == len(leaf.shape):
        return []
    return [
        Problem(
            f"{leaf.label} has {_count(len(leaf.shape), 'dimension', 'dimensions')}, "
            f"but its entry has {_count(len(cuts), 'cut', 'cuts')}",
            where=leaf.source,
            fix=f"write one cut for each dimension: {(*cuts, *[1] * len(leaf.shape))[: len(leaf.shape)]}",
        )
    ]


def _check_positive(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    return [
        Problem(
            f"{leaf.label} cannot be cut {c} ways along dimension {d}",
            where=leaf.source,
            why="a cut is at least 1, which leaves the dimension whole",
            fix="write 1 to leave the dimension whole, or AUTO as the entry",
        )
        for d, c in enumerate(cuts)
        if c < 1
    ]


def _check_divides(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    return [
        Problem(
            f"{leaf.label} cannot be cut {c} ways along dimension {d}",
            where=leaf.source,
            why=f"{size} is not divisible by {c}",
            fix=f"use {any_of(divisors(size))} there, or pad that dimension to {-(-size // c) * c}",
        )
        for d, (c, size) in enumerate(zip(cuts, leaf.shape, strict=True))
        if size % c
    ]


def _check_product(leaf: Leaf, cuts: Any, devices: int) -> list[Problem]:
    product = math.prod(int(c) for c in cuts)
    if devices == 1 or devices % product == 0:
        return []
    return [
        Problem(
            f"{leaf.label} is cut into {product} pieces, which {devices} devices cannot hold evenly",
            where=leaf.source,
            why=f"the product of the cuts must divide the device count: {devices} is not divisible by {product}",
            fix=f"choose cuts with a product of {any_of(divisors(devices))}",
        )
    ]


_CUT_RULES: tuple[Callable[[Leaf, Any, int], list[Problem]], ...] = (
    _check_type, _check_rank, _check_positive, _check_divides, _check_product,
)  # fmt: skip


def divisors(n: int, most: int = 12) -> list[int]:
    """The divisors of `n`, smallest first, at most `most` of them.

    >>> divisors(30)
    [1, 2, 3, 5, 6, 10, 15, 30]
    """
    small = [d for d in range(1, math.isqrt(max(n, 0)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})[:most]


def any_of(numbers: Sequence[int]) -> str:
    if not numbers:
        return "1"
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
