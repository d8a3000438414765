"""Reshards without all-to-all: sharding constraints that make XLA gather an array and then slice it.

A constraint to an intermediate sharding is enough, if the array reaches it, and leaves it, without an all-to-all: XLA then
reshards twice. Constraints to the shardings before and after keep propagation as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.ir.model import Graph, Spec, axes_of
from shardfn.ir.partitioned import Detour, PartitionedProgram
from shardfn.ir.source_lines import file_line
from shardfn.planning.meshes import PlanMesh


@dataclasses.dataclass(frozen=True)
class PlacedDetour:
    """The shardings that an array takes one after the other.

    Attributes:
      number: the number of the jaxpr equation that reads or makes the array; -1 for an argument of the function.
      operand: which operand of the equation it is; -1 for the result; of the function the position of the argument.
      path: the shardings.
    """

    number: int
    operand: int
    path: tuple[Spec, ...]


def placed_detours(
    partitioned: PartitionedProgram, graph: Graph, anchored: Mapping[int, int], captured: int
) -> tuple[tuple[PlacedDetour, ...], tuple[Detour, ...]]:
    """The detours of a program as its function can take them, and those for which it has no place.

    A detour is placed where an equation reads the array or returns it, else where the array is made.

    Args:
      partitioned: the program, partitioned without all-to-alls.
      graph: the traced function.
      anchored: the numbers of its equations by op (`op_constraints.anchors`).
      captured: how many inputs of the graph are no arguments of the call; they are the first.
    """
    number_of = {graph.ops[index].site: number for index, number in anchored.items()}
    found, left = list[PlacedDetour](), list[Detour]()
    for detour in partitioned.detours:
        before, between, _ = detour.path
        if any(":" in axis for spec in detour.path for axis in axes_of(spec)):
            left.append(detour)
        elif detour.site in number_of:
            found.append(PlacedDetour(number_of[detour.site], detour.operand, detour.path))
        elif detour.operand >= 0 and detour.maker in number_of:
            found.append(PlacedDetour(number_of[detour.maker], -1, (before, between)))
        elif detour.operand >= 0 and detour.argument >= captured:
            found.append(PlacedDetour(-1, detour.argument - captured, (before, between)))
        else:
            left.append(detour)
    return tuple(dict.fromkeys(found)), tuple(left)


def alltoalls_left(left: Sequence[Detour]) -> list[str]:
    """A note on the reshards that XLA may still do by all-to-all; empty without any."""
    if not left:
        return []
    lines = sorted({file_line(d.where) or "the function's arguments or results" for d in left})
    return [f"enable_alltoall=False: at {', '.join(lines)} XLA may still use an all-to-all, because no op there can get a "
            "sharding constraint. Shard the array alike before and after that line"]  # fmt: skip


def along(value: Any, path: Iterable[Spec | None], mesh: PlanMesh) -> Any:
    """An array under sharding constraints, one after the other; a spec of None, of a scalar or of another rank is left out."""
    for spec in path:
        if spec and len(spec) == np.ndim(value):
            # The module's operand may be a broadcast of the equation's.
            dims = tuple(dim if n > 1 else () for n, dim in zip(value.shape, spec, strict=True))
            value = jax.lax.with_sharding_constraint(value, mesh.sharding(dims))
    return value


def on_arguments(
    function: Callable[..., Any], detours: Sequence[PlacedDetour], mesh: PlanMesh, static_argnums: tuple[int, ...]
) -> Callable[..., Any]:
    """The function with the detours of its arguments."""
    paths = {d.operand: d.path for d in detours if d.number < 0}
    if not paths:
        return function

    def run(*args: Any) -> Any:
        dynamic = [a for i, a in enumerate(args) if i not in static_argnums]
        leaves, structure = tree_util.tree_flatten(dynamic)
        placed = iter(
            tree_util.tree_unflatten(structure, [along(x, paths.get(i, ()), mesh) for i, x in enumerate(leaves)])
        )
        return function(*(a if i in static_argnums else next(placed) for i, a in enumerate(args)))

    return run
