"""Shardings of values inside a function: where they come from, and the constraints that keep them.

| module | holds |
|---|---|
| `inner_entries` | entries of sharded functions that the function calls, `reshard`, and JAX's own constraints |
| `inner_placement` | these entries on the mesh of a plan |
| `tags` | names of values, and the shardings that a layout file gives them |
| `op_constraints` | constraints on ops: which jaxpr equation is which op of the module |
| `detours` | reshards without all-to-all, as constraints |
"""

from shardfn.planning.inside.detours import PlacedDetour, alltoalls_left, placed_detours
from shardfn.planning.inside.inner_entries import (
    AsReadInside,
    InnerEntry,
    constrain_inner,
    inner_entries,
    mark,
    mark_named,
    operands_as_read,
    operands_of_calls,
    resolve_read_inside,
)
from shardfn.planning.inside.inner_placement import OnMesh, on_mesh_of_function, place_inner, refuse_other_devices
from shardfn.planning.inside.op_constraints import RESHARDED, anchors, apply_constraints, match_file_constraints
from shardfn.planning.inside.tags import constrain_tags, match_tags, tag

__all__ = [
    "RESHARDED", "AsReadInside", "InnerEntry", "OnMesh", "PlacedDetour", "alltoalls_left", "anchors", "apply_constraints",
    "constrain_inner", "constrain_tags", "inner_entries", "mark", "mark_named", "match_file_constraints", "match_tags",
    "on_mesh_of_function", "operands_as_read", "operands_of_calls", "place_inner", "placed_detours", "refuse_other_devices",
    "resolve_read_inside", "tag",
]  # fmt: skip
