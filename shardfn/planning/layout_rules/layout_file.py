"""The data of a layout file: a `LayoutRule` gives the sharding of every array whose path its glob matches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardfn.cost.rehearsal import Rehearsal
from shardfn.ir.model import Spec

RuleDim = int | str | tuple[str, ...]
"""One dimension in a rule: a number of shards (1: unsharded), a mesh axis, several mesh axes, or `...`."""

ELLIPSIS = "..."
"""Stands for any number of unsharded dimensions."""

UNSHARDED: tuple[RuleDim, ...] = (ELLIPSIS,)


@dataclasses.dataclass(frozen=True)
class LayoutRule:
    """The sharding of all arrays whose path a glob matches.

    Attributes:
      glob: matched against the paths of arrays; an exact path takes precedence over a glob.
      sharding: one entry per dimension; None leaves the arrays to the search. An axis name that ends in `?` shards its
        dimension only where the axis size divides it.
      dims: names of the dimensions, for people and for errors.
      optional: whether the rule may match no array.
      rows: of a padded embedding table, the number of rows of each part; empty for other arrays.
      line: its line in the file, from 1; 0 if unknown.
    """

    glob: str
    sharding: tuple[RuleDim, ...] | None
    dims: tuple[str, ...] = ()
    optional: bool = False
    rows: tuple[int, ...] = ()
    line: int = dataclasses.field(default=0, compare=False, repr=False)

    @property
    def has_axes(self) -> bool:
        """Whether it names mesh axes instead of numbers of shards."""
        return any(isinstance(dim, tuple) or (isinstance(dim, str) and dim != ELLIPSIS) for dim in self.sharding or ())

    @property
    def has_counts(self) -> bool:
        """Whether it shards a dimension by a number of shards."""
        return any(isinstance(dim, int) and dim > 1 for dim in self.sharding or ())

    def where(self, file: str, section: str) -> str:
        """Its place, for errors: `layout.toml:7: [arguments] '*/w'`."""
        return f"{at_line(file, self.line)}: [{section}] {self.glob!r}"


def at_line(file: str, line: int) -> str:
    """`file:line`; the file alone where the line is unknown (0).

    >>> at_line("layout.toml", 7), at_line("layout.toml", 0)
    ('layout.toml:7', 'layout.toml')
    """
    return f"{file}:{line}" if line else file


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A sharding constraint on an op of the function, for which propagation alone would choose another sharding.

    Attributes:
      kind: the op's name.
      number: the number of its jaxpr equation.
      where: its `file:line`. Constraints are equal whatever the line, which a layout file keeps without directories.
      operands: the spec of each operand; None is left to propagation.
      results: the same of each result.
      shifts: whether `number` counts the equations of the program with its movement as shifts, not those of the user's.
    """

    kind: str
    number: int
    where: str = dataclasses.field(compare=False)
    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    shifts: bool = False


@dataclasses.dataclass(frozen=True)
class DecisionSource:
    """Who decided the sharding of some arrays, and why: `by` as in `Decision.source`, `of` their paths."""

    by: str
    why: str
    of: tuple[str, ...]


class WrittenAsLayout:
    """What has a layout file of its own, which it equals: a plan."""

    def _as_layout_file(self) -> LayoutFile:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutFile:
    """The contents of a layout file. It equals a plan with the same decisions.

    Attributes:
      mesh: axis names and sizes, row-major, the last axis fastest; None is the size that the device count leaves.
      arguments, results, activations: the rules of each section.
      constraints: sharding constraints on ops inside the function.
      others: the sharding of arguments that no rule matches.
      batch: the leading dimensions of function arguments none of whose arrays a rule matches.
      order: the device at each mesh position; None for 0, 1, 2, ….
      about, function, device, level, style, sources: what the file was made for, and who decided.
      name: where it was read from, for errors and reports.
      lines: the line of each section, from 1.
    """

    mesh: tuple[tuple[str, int | None], ...] = ()
    arguments: tuple[LayoutRule, ...] = ()
    results: tuple[LayoutRule, ...] = ()
    activations: tuple[LayoutRule, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    others: tuple[RuleDim, ...] | None = None
    batch: tuple[RuleDim, ...] | None = None
    order: tuple[int, ...] | None = None
    about: str = ""
    function: str = ""
    fingerprint: str = ""
    """`planning.fingerprint.fingerprint` of the function."""
    device: str = ""
    level: int | None = None
    style: str = ""
    sources: tuple[DecisionSource, ...] = ()
    rehearsal: Rehearsal | None = None
    """What one device measured of the plan that the file was made from: no decision, so files that differ in it are equal."""
    name: str = "layout"
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
    every_rule_matches: bool = True
    """Whether a rule that matches no array is an error."""
    every_array_ruled: bool = False
    """Whether an argument that no rule matches is an error."""

    def __eq__(self, other: object) -> bool:
        other = other._as_layout_file() if isinstance(other, WrittenAsLayout) else other
        return self._key() == other._key() if isinstance(other, LayoutFile) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it equals plans, which have hashes of their own

    def _key(self) -> tuple[Any, ...]:
        skipped = (
            "name",
            "fingerprint",
            "lines",
            "constraints",
            "rehearsal",
            "every_rule_matches",
            "every_array_ruled",
        )
        ordered = sorted(self.constraints, key=lambda c: (c.number, c.kind, repr((c.operands, c.results))))
        return (*(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped), ordered)

    if not TYPE_CHECKING:  # a checker knows what a layout has

        def __getattr__(self, name: str) -> Any:
            text = f"a layout has no attribute {name!r}"
            if not name.startswith("_") and any(name in _attributes(of) for of in WrittenAsLayout.__subclasses__()):
                text += (
                    ", which plans have: a layout holds shardings, not the function that costs and collectives come from; "
                    f"fix: plan(f, *args, layout=layout, device=...).{name}"
                )
            raise AttributeError(text, name=name, obj=self)

    def with_mesh(self, **sizes: int) -> LayoutFile:
        """A copy with other sizes of mesh axes.

        Args:
          **sizes: the new size of each axis, by its name.

        >>> LayoutFile(mesh=(("data", None), ("model", 4))).with_mesh(model=8).mesh
        (('data', None), ('model', 8))
        """
        return dataclasses.replace(self, mesh=tuple((name, sizes.get(name, size)) for name, size in self.mesh))


def _attributes(of: type) -> set[str]:
    return {*dir(of), *of.__annotations__}  # a field without a default is no attribute of the class
