"""Rules of a layout file: which arrays each meets, and how it lies them out on a grid. Data, and pure functions of it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any

from shardfn.errors import Problem
from shardfn.frontend.paths import escaped, listed, near, normal, ruled
from shardfn.frontend.strategy import AUTO, Leaf, count
from shardfn.frontend.validation import any_of, check_cuts
from shardfn.ir.model import Axes, Spec
from shardfn.mindspore.layout import Layout
from shardfn.partition.resharding import divisors
from shardfn.planning.decisions import Constraint

Dim = int | str | tuple[str, ...]
"""Of a rule: how many ways a dim is cut (1 is whole), an axis that cuts it, several of them, or `...`."""

SPREAD = "..."
"""In the place of a dim: any number of whole dims."""

WHOLE: tuple[Dim, ...] = (SPREAD,)

MOST = 20
"""Problems of one kind that are told one by one; of the rest, how many there are."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Arrays, by a glob of their paths, and how each is cut; `cut` None leaves them to the search.

    An axis name that ends in `?` cuts its dim where it divides it. `dims` are names for the dims, for people and for
    errors. A rule that is `optional` may meet nothing.
    """

    glob: str
    cut: tuple[Dim, ...] | None
    dims: tuple[str, ...] = ()
    optional: bool = False

    @property
    def has_axes(self) -> bool:
        """Whether it names axes, rather than counting pieces."""
        return any(isinstance(dim, tuple) or (isinstance(dim, str) and dim != SPREAD) for dim in self.cut or ())


@dataclasses.dataclass(frozen=True)
class Source:
    """Who decided on some arrays, and why: `by` as in `Decision.source`, `of` their paths."""

    by: str
    why: str
    of: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutFile:
    """What a layout file says. It equals a plan that decides the same.

    `grid` has the axes in order, row-major, last axis fastest; a size of None is what is left of the devices.
    `others` cuts the arrays that no rule meets, `batch` the arguments of a function in which no rule meets any
    (their leading dims). `function`, `device` and `level` say what it was made for.
    """

    grid: tuple[tuple[str, int | None], ...] = ()
    arguments: tuple[Rule, ...] = ()
    results: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    inside: tuple[Constraint, ...] = ()
    others: tuple[Dim, ...] | None = None
    batch: tuple[Dim, ...] | None = None
    order: tuple[int, ...] | None = None
    about: str = ""
    function: str = ""
    device: str = ""
    level: int | None = None
    sources: tuple[Source, ...] = ()
    name: str = "layout"
    """Where it was read from: for errors and reports."""

    def __eq__(self, other: object) -> bool:
        decided = getattr(other, "decided", None)
        if callable(decided):
            other = decided()
        return self._key() == other._key() if isinstance(other, LayoutFile) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it equals plans, which have hashes of their own

    def _key(self) -> tuple[Any, ...]:
        inside = sorted(self.inside, key=lambda held: (held.number, repr(held)))  # a file has alike ones together
        return (*(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("name", "inside")), inside)

    def with_grid(self, **sizes: int) -> LayoutFile:
        """The same with other sizes of axes.

        >>> LayoutFile(grid=(("data", None), ("model", 4))).with_grid(model=8).grid
        (('data', None), ('model', 8))
        """
        return dataclasses.replace(self, grid=tuple((name, sizes.get(name, size)) for name, size in self.grid))


def axes_on(layout: LayoutFile, devices: int, problems: list[Problem]) -> Axes:
    """The grid with every size known; on one device every axis is 1.

    Args:
      devices: how many there are.
      problems: receives a grid that does not fit them.
    """
    fixed = math.prod(size for _, size in layout.grid if size is not None)
    open_ = [name for name, size in layout.grid if size is None]
    text = " x ".join(f"{name}={size or 'left'}" for name, size in layout.grid)
    if devices == 1:
        return tuple((name, 1) for name, _ in layout.grid)
    if layout.grid and (devices % fixed if open_ else fixed != devices):
        can = any_of(divisors(devices))
        fix = f"use a multiple of {fixed} devices, or sizes whose product is {can}"
        if not open_:
            fix = (f'use {fixed} devices, or change [grid]: sizes with a product of {devices}, or an axis left to the '
                   f'device count, {layout.grid[0][0]} = "left"')  # fmt: skip
        why = f"{devices} is not divisible by {fixed}" if open_ else "the product of the axes is the device count"
        told = Problem(
            f"the grid of {layout.name} has {fixed} devices{' in its fixed axes' if open_ else ''}, but there are {devices}",
            where=f"{layout.name}: [grid] {text}",
            why=why,
            fix=fix,
        )
        if told not in problems:  # arguments and results are asked one after the other
            problems.append(told)
        return tuple((name, size or 1) for name, size in layout.grid)
    return tuple((name, devices // fixed if size is None else size) for name, size in layout.grid)


def matched(
    rules: Sequence[Rule], leaves: Sequence[Leaf], section: str, name: str, problems: list[Problem], strict: bool = True
) -> dict[int, Rule]:
    """For each leaf that a rule meets, by its position, that rule. A path itself goes before a glob.

    Args:
      rules: of one section of a file.
      section: its name, for errors.
      name: the file's.
      problems: receives rules that meet nothing (where `strict`), and leaves that two rules meet.
    """
    full = [normal(leaf.path) for leaf in leaves]
    found = ruled([rule.glob for rule in rules], full, lambda one, two: rules[one].cut == rules[two].cut)
    if strict:
        missing = [rules[i] for i in found.missing if not rules[i].optional]
        problems += _missing(missing, full, section, name)
    told = [_two_rules(leaves[i], rules[one], rules[two], section, name) for i, one, two in found.clashes[:MOST]]
    problems += _several(told, len(found.clashes), "arrays that two rules meet", name)
    return {i: rules[rule] for i, rule in found.rules.items()}


def printable(text: str) -> str:
    """A text of a file without what would move a terminal's cursor.

    >>> printable("a\x1b[2J")
    'a?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _missing(rules: Sequence[Rule], full: Sequence[str], section: str, name: str) -> list[Problem]:
    told = []
    for rule in rules[:MOST]:
        close = near(rule.glob, full)
        mend = f"did you mean {' or '.join(map(repr, close))}?" if close else "correct the path."
        told.append(
            Problem(
                f"a rule of {name} meets no array: `{printable(rule.glob)}`",
                where=f"{name}: [{section}]",
                why=f"the arrays are {listed(full)}",
                fix=f"{mend} Or take the rule out, or say optional = true in it",
            )
        )
    return _several(told, len(rules), "rules that meet no array", name)


def _two_rules(leaf: Leaf, one: Rule, two: Rule, section: str, name: str) -> Problem:
    return Problem(
        f"two rules of {name} meet `{leaf.path}`",
        where=f"{name}: [{section}] {one.glob!r} and {two.glob!r}",
        why="an array has one layout, and no rule comes before the other",
        fix="make one of the globs narrower, or give the path itself a rule: it goes before every glob",
    )


def _several(told: list[Problem], total: int, what: str, name: str) -> list[Problem]:
    if total > len(told):
        told.append(Problem(f"there are {total - len(told)} more {what}", where=name, fix="mend those above first"))
    return told


def no_rule(leaves: Sequence[Leaf], name: str) -> list[Problem]:
    """The problems of arrays that no rule meets."""
    told = [
        Problem(
            f"no rule of {name} meets `{leaf.path}`",
            where=leaf.text,
            why="what a layout file does not speak of is left to the search, and this is asked of the file alone",
            fix=f'give it a rule: "{escaped(leaf.path)}" = [{", ".join("1" for _ in leaf.shape)}], '
            'or say others = "whole" for all of them',
        )
        for leaf in leaves[:MOST]
    ]
    return _several(told, len(leaves), "arrays without a rule", name)


def laid(rule: Rule, leaf: Leaf, axes: Axes, devices: int, where: str, problems: list[Problem]) -> Any:
    """The entry of a leaf, for the placing of a call: a `Layout`, a tuple of cuts, or AUTO.

    Args:
      axes: the grid, sizes known.
      devices: how many there are; on one everything is whole, and only the form of the rule is checked.
      where: the file and the section, for errors.
      problems: receives a rank, an axis or a cut that does not fit.
    """
    if rule.cut is None:
        return AUTO
    told = dataclasses.replace(leaf, entry=_written(rule), where=f"{where} {rule.glob!r}")
    dims = _spread(rule.cut, len(leaf.shape))
    if dims is None or (rule.dims and len(rule.dims) != len(leaf.shape)):
        problems.append(_rank(rule, told))
        return AUTO
    if not rule.has_axes and (not axes or any(isinstance(dim, int) and dim > 1 for dim in dims)):
        cuts = check_cuts(told, tuple(dims), devices, problems)
        return AUTO if cuts is None else cuts
    before = len(problems)
    spec = _spec(dims, told, dict(axes), problems)
    if len(problems) > before or spec is None:
        return AUTO
    if devices == 1:
        return (1,) * len(leaf.shape)
    cuts = tuple(math.prod(dict(axes)[a] for a in dim) for dim in spec)
    if check_cuts(told, cuts, devices, problems) is None:
        return AUTO
    return spec


def _written(rule: Rule) -> Any:
    """A rule's cut as errors show it."""
    return list(rule.cut or ())


def _spread(cut: Sequence[Dim], ndim: int) -> list[Dim] | None:
    """One dim for each of an array's; None where the ranks do not fit."""
    if SPREAD not in cut:
        return list(cut) if len(cut) == ndim else None
    if len(cut) - 1 > ndim:
        return None
    at = list(cut).index(SPREAD)
    return [*cut[:at], *(1,) * (ndim - len(cut) + 1), *cut[at + 1 :]]


def _rank(rule: Rule, leaf: Leaf) -> Problem:
    have = len(rule.dims) if rule.dims else len(rule.cut or ()) - (SPREAD in (rule.cut or ()))
    return Problem(
        f"{leaf.label} has {count(len(leaf.shape), 'dimension', 'dimensions')}, but its rule speaks of {have}",
        where=leaf.source,
        why='a rule has one entry for each dimension; "..." stands for any number of whole ones',
        fix=f"write {len(leaf.shape)} entries, or narrow the glob {rule.glob!r} so that it does not meet this array",
    )


def _spec(dims: Sequence[Dim], leaf: Leaf, sizes: dict[str, int], problems: list[Problem]) -> Spec | None:
    spec: list[tuple[str, ...]] = []
    used: set[str] = set()
    for d, (dim, size) in enumerate(zip(dims, leaf.shape, strict=True)):
        names = dim if isinstance(dim, tuple) else () if isinstance(dim, int) else (dim,)
        kept: list[str] = []
        for written in names:
            name = written.removesuffix("?")
            if name not in sizes:
                close = difflib.get_close_matches(name, list(sizes), 1, 0.5)
                problems.append(
                    Problem(
                        f"{leaf.label} is cut over `{name}`, which is no axis of the grid",
                        where=leaf.source,
                        why=f"the axes are {', '.join(sizes) or 'none'}",
                        fix=f"did you mean {close[0]!r}?" if close else "use one of these axes, or 1 to leave it whole",
                    )
                )
                return None
            if written != name and size % math.prod([sizes[name], *(sizes[a] for a in kept)]):
                continue
            if name in used:
                problems.append(
                    Problem(
                        f"two dimensions of {leaf.label} want the axis `{name}`",
                        where=leaf.source,
                        why="an axis can cut one dimension of an array",
                        fix=f"give dimension {d} another axis, or leave it whole",
                    )
                )
                return None
            used.add(name)
            kept.append(name)
        spec.append(tuple(kept))
    return tuple(spec)


def as_layout(spec: Spec, axes: Axes, order: Sequence[int] | None) -> Layout:
    """A layout of one array on the grid."""
    names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    dims = ("None" if not dim else dim[0] if len(dim) == 1 else dim for dim in spec)
    return Layout(sizes, names, list(order) if order else None)(*dims)
