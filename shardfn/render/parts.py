"""What a report consists of: plain data, shown as text or as HTML."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of prose below a title; each may be long."""

    title: str
    lines: tuple[str, ...]


class Cell(str):
    """A cell that an HTML page shows with more than its text.

    Attributes:
      members: what the text stands for, where it is short for several.
      place: `file:line` with directories, where it is a line of code.
    """

    members: tuple[str, ...]
    place: str

    def __new__(cls, text: str, members: Iterable[str] = (), place: str = "") -> Cell:
        """The text with what it stands for."""
        cell = super().__new__(cls, text)
        cell.members, cell.place = tuple(members), place
        return cell


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells below named columns.

    HTML shows a table closed at first where `is_open` is false. Text leaves `optional` columns out where they do not fit.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_open: bool = True
    optional: tuple[str, ...] = ()

    def without(self, name: str) -> Table:
        """The table without one optional column."""
        kept = [i for i, column in enumerate(self.columns) if column != name]
        columns, *rows = (tuple(row[i] for i in kept) for row in (self.columns, *self.rows))
        optional = tuple(other for other in self.optional if other != name)
        return dataclasses.replace(self, columns=columns, rows=tuple(rows), optional=optional)

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers only (with or without units): such a column is flush right."""
        return any(row[column] for row in self.rows) and all(_NUMBER.fullmatch(row[column]) for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Placed:
    """One array on a mesh: for each device shown, the slice of the array that is its shard (`cells.shard_text`)."""

    name: str
    shards: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Arrays on a mesh with `axes` as (name, size), row-major. HTML shows it; text leaves it out."""

    title: str
    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    arrays: tuple[Placed, ...]
    note: str = ""


Part = Text | Table | Drawing

_NUMBER = re.compile(r"(<?[+-]?[\d,.]+(e[+-]\d+)?%?( ([KMGT]?i?B|[nµm]?s|[kMGTP]?FLOPs))?|-)?")
