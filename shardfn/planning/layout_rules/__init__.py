"""Layout files as data: their rules, how these apply to the arrays of a call, and which function a file was made for.

| module | holds |
|---|---|
| `layout_file` | `LayoutFile`, its `LayoutRule`s and the `Constraint`s on ops |
| `matching` | which rule an array has, and the sharding that the rule gives it |
| `fingerprint` | whether a function is still the one that a file was made for |

The TOML is in `shardfn.layoutfile`.
"""

from shardfn.planning.layout_rules.fingerprint import as_it_holds, change_since, fingerprint
from shardfn.planning.layout_rules.layout_file import (
    ELLIPSIS,
    UNSHARDED,
    Constraint,
    DecisionSource,
    LayoutFile,
    LayoutRule,
    RuleDim,
    WrittenAsLayout,
    at_line,
)
from shardfn.planning.layout_rules.matching import (
    MAX_REPORTED,
    as_layout,
    match_rules,
    mesh_axes,
    printable,
    rule_entries,
    rule_entry,
    unmatched_note,
    with_layout,
)

__all__ = [
    "ELLIPSIS", "MAX_REPORTED", "UNSHARDED", "Constraint", "DecisionSource", "LayoutFile", "LayoutRule", "RuleDim",
    "WrittenAsLayout", "as_it_holds", "as_layout", "at_line", "change_since", "fingerprint", "match_rules", "mesh_axes",
    "printable", "rule_entries", "rule_entry", "unmatched_note", "with_layout",
]  # fmt: skip
