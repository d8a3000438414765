"""Uneven splits in layout files: the key `rows` of a table's rule."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardfn.embedding.split import UnevenRows
from shardfn.errors import fail
from shardfn.layoutfile import LayoutFileError, read_layout
from shardfn.planning.layout_rules import LayoutFile


def splits_of(layout: Any) -> dict[str, UnevenRows]:
    """The uneven splits that a layout file holds, by path or glob.

    Args:
      layout: as `layoutfile.read_layout` takes it.

    Returns:
      The splits, as `pack` and `unpack` take them.

    Raises:
      LayoutFileError: as `read_layout`.

    >>> splits_of(with_splits("dlrm/data-parallel", {"*emb_l/*/weight": UnevenRows((1, 3))}))
    {'*emb_l/*/weight': UnevenRows(rows=(1, 3), offsets=(0, 1))}
    """
    return {rule.glob: UnevenRows(rule.rows) for rule in read_layout(layout).arguments if rule.rows}


def with_splits(layout: Any, splits: dict[str, UnevenRows]) -> LayoutFile:
    """A layout file with the uneven splits of its tables.

    Args:
      layout: as `layoutfile.read_layout` takes it: of a plan whose arguments are padded tables, say.
      splits: the split of each table, by the path or the glob of its rule.

    Returns:
      The layout file, for `layoutfile.write_layout`.

    Raises:
      LayoutFileError: a path without a rule, or as `read_layout`.

    >>> made = with_splits("dlrm/data-parallel", {"*emb_l/*/weight": UnevenRows((1, 3))})
    >>> [rule.rows for rule in made.arguments if rule.rows]
    [(1, 3)]
    """
    found = read_layout(layout)
    globs = [rule.glob for rule in found.arguments]
    if unknown := [glob for glob in splits if glob not in globs]:
        fail(LayoutFileError, f"the layout file has no rule for {unknown[0]!r}", where=f"splits[{unknown[0]!r}]",
             why=f"its rules are {', '.join(globs[:8])}", fix="name the path of a rule as it stands in the file")  # fmt: skip
    rules = (dataclasses.replace(r, rows=splits[r.glob].rows) if r.glob in splits else r for r in found.arguments)
    return dataclasses.replace(found, arguments=tuple(rules))
