"""The cells of tables as text, and tables without empty columns and with a limited number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.render.parts import Table


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    note: str = "",
    most: int = 32,
    optional: tuple[str, ...] = (),
) -> Table:
    """A table without its empty columns and with at most `most` rows."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    left = len(rows) - most
    more = [f"… {left} more row{'s'[: left != 1]}"] if left > 0 else []
    cells = tuple(tuple(row[i] for i in kept) for row in rows[:most])
    return Table(
        title, tuple(columns[i] for i in kept), cells, "; ".join([*more, *([note] if note else [])]), optional=optional
    )


def times(count: int) -> str:
    """A count, if it is above one."""
    return f"{count:,}" if count > 1 else ""


def shape_text(shape: Sequence[int]) -> str:
    """`[32,64]`."""
    return f"[{','.join(map(str, shape))}]"


def spec_text(spec: Sequence[Sequence[str]]) -> str:
    """As JAX writes a PartitionSpec.

    >>> spec_text((("a",), (), ("b", "c")))
    "P('a', None, ('b', 'c'))"
    """
    return f"P({', '.join(repr(None if not d else d[0] if len(d) == 1 else d) for d in spec) if any(spec) else ''})"


def axes_text(axes: Sequence[str]) -> str:
    """Mesh axes as people read them; of an axis that is used in part, the number of its shards.

    >>> axes_text(("b", "a:(1)2")), axes_text(())
    ('b, 2 ways of a', '-')
    """
    parts = (axis.partition(":") for axis in axes)
    return ", ".join(f"{part.partition(')')[2]} ways of {name}" if part else name for name, _, part in parts) or "-"


def shard_text(shard: Sequence[int], strategy: Sequence[int], local_shape: Sequence[int]) -> str:
    """The slice of an array that a shard is, as one would index it; `:` for a dimension without shards.

    Args:
      shard: the number of the shard along each dimension.
      strategy: the number of shards of each dimension.
      local_shape: the shape of a shard.

    >>> shard_text((2, 0), (4, 1), (16, 8))
    '[32:48, :]'
    """
    parts = zip(shard, strategy, local_shape, strict=True)
    return f"[{', '.join(':' if count == 1 else f'{i * n}:{(i + 1) * n}' for i, count, n in parts)}]"
