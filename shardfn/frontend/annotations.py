"""Flax's partitioning annotations as entries: `nnx.with_partitioning`, `nn.with_partitioning`, logical axes with rules."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jax import tree_util
from jax.sharding import PartitionSpec

from shardfn.frontend import nnx_objects
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.strategy import AUTO, Leaf


def with_annotations(leaves: Sequence[Leaf], callee: Callee, call: Call) -> list[Leaf]:
    """The leaves that have no entry with their annotations as entries; one that names no mesh axis leaves the array open."""
    nodes = [callee.owner] * nnx_objects.is_module(callee.owner) + [callee.objects.nodes] * bool(callee.objects)
    by_path = {path: spec for node in nodes for path, spec in nnx_objects.partition_specs(node).items()}
    found = []
    for leaf, spec in zip(leaves, _of_tree(call.dynamic), strict=True):
        spec = spec if spec is not None else by_path.get(leaf.path)
        if spec is not None and any(spec) and leaf.entry is AUTO and not leaf.where:
            leaf = dataclasses.replace(leaf, entry=spec, where=f"annotation of {leaf.path}")
        found.append(leaf)
    return found


def _of_tree(values: Any) -> Iterator[PartitionSpec | None]:
    """The annotation of each array of a pytree: of the variables in an `nnx.State`, and of Linen's boxes."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    variable = () if nnx is None else (nnx.Variable,)
    box = () if linen is None else (linen.Partitioned,)
    for node in tree_util.tree_leaves(values, is_leaf=lambda node: isinstance(node, variable + box)):
        spec = None
        if nnx is not None and isinstance(node, variable):
            spec = nnx.get_partition_spec(node).get_value()
        elif linen is not None and isinstance(node, linen.LogicallyPartitioned):  # without rules it names no mesh axis
            spec = linen.logical_to_mesh_axes(node.names, node.rules)
        elif isinstance(node, box):
            spec = node.get_partition_spec()
        yield from [spec] * len(tree_util.tree_leaves(node))


def rules_in_force() -> Any:
    """Flax's rules of logical axes where a call is made, which decide what its annotations mean. Hashable."""
    linen = sys.modules.get("flax.linen")
    return () if linen is None else tuple(map(tuple, linen.get_logical_axis_rules()))
