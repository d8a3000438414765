"""Tables that people can read: what differs only in the number of a layer is one row, and long ones are cut short."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from shardfn.ir.model import Spec
from shardfn.render.parts import Table

MOST_ROWS = 32


def table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], note: str = "", most: int = MOST_ROWS
) -> Table:
    """A table without its empty columns and with at most `most` rows."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    more = [f"… {len(rows) - most} more rows: see .to_dict()"] if len(rows) > most else []
    cells = tuple(tuple(row[i] for i in kept) for row in rows[:most])
    return Table(title, tuple(columns[i] for i in kept), cells, "; ".join([*more, *([note] if note else [])]))


def times(count: int) -> str:
    """A count, if it is above one."""
    return f"{count:,}" if count > 1 else ""


def shape_text(shape: Sequence[int]) -> str:
    """`[32,64]`."""
    return f"[{','.join(map(str, shape))}]"


def spec_text(spec: Spec) -> str:
    """As JAX writes a PartitionSpec."""
    return f"P({', '.join(repr(None if not d else d[0] if len(d) == 1 else d) for d in spec) if any(spec) else ''})"


def file_line(where: str) -> str:
    """`file:line` without the directories; the data has them."""
    return pathlib.PurePath(where).name


def unit_of(sizes: Iterable[float]) -> tuple[str, int]:
    """The unit that shows the largest of some sizes in bytes with at least two digits before the point."""
    top = max(sizes, default=0)
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next(((name, size) for name, size in units if top >= 10 * size), ("B", 1))
