"""Where tokens and experts are: a mesh, the axes that shard each, and how tokens reach their experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend import defaults
from shardfn.frontend.meshes import mesh_and_spec
from shardfn.frontend.outer_call import is_on_parts
from shardfn.frontend.value_checks import boolean, option_problems

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding of tokens and experts, hashable.

    Attributes:
      mesh: the mesh; None where nothing is sharded.
      tokens: the mesh axes of the tokens, major to minor.
      experts: the mesh axes of the experts.
      alltoall: whether tokens reach the experts by all-to-all. False gathers them, and each device takes its part.
    """

    mesh: Mesh | AbstractMesh | None
    tokens: Axes = ()
    experts: Axes = ()
    alltoall: bool = True

    @property
    def sources(self) -> Axes:
        """The axes that shard the tokens while they are dispatched. An all-to-all splits them over all experts' axes."""
        return (*self.tokens, *(axis for axis in self.experts if axis not in self.tokens and self.alltoall))

    @property
    def gathered(self) -> Axes:
        """The axes over which the tokens are gathered, without an all-to-all."""
        return () if self.alltoall else tuple(axis for axis in self.tokens if axis in self.experts)

    @property
    def summed(self) -> Axes:
        """The axes over which the results are summed, without an all-to-all, because all devices have all tokens."""
        return () if self.alltoall else tuple(axis for axis in self.experts if axis not in self.tokens)

    @property
    def apart(self) -> Axes:
        """The axes of the tokens along which the experts are replicated: each group of devices has its own rows."""
        return tuple(axis for axis in self.tokens if axis not in self.experts)

    def size(self, axes: Axes) -> int:
        """The number of devices along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def sharding(self) -> NamedSharding:
        """The sharding of the tokens [tokens, width]."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(self.tokens or None, None))


def placement(layout: Any, axes: str | Axes | None, count: int, alltoall: bool | None) -> Placement:
    """The placement of tokens and `count` experts, as the user gave it.

    Raises:
      StrategyError: a sharded width, unknown axes, or axes that do not divide the number of experts.
      StrategyTypeError: a layout of another type.
    """
    if alltoall is not None:
        raise_problems(option_problems(boolean, "alltoall", alltoall))
    if layout is None:
        return Placement(None)
    mesh, spec = mesh_and_spec(layout, 2, "layout", "an all-to-all needs named mesh axes")
    if spec[1]:
        fail(StrategyError, "`layout` must shard the tokens of x [tokens, width], and nothing else",
             where=f"layout = {layout!r:.80}", why="a row is sent with all its columns",
             fix="reshape x to [tokens, width] and leave the width unsharded")  # fmt: skip
    if not (
        axes is None
        or isinstance(axes, str)
        or (isinstance(axes, tuple | list) and all(isinstance(x, str) for x in axes))
    ):
        fail(StrategyTypeError, f"`axes` is {a(axes)}", where=f"axes = {axes!r:.40}", why="it names axes of the mesh",
             fix=f"name some of {', '.join(map(repr, mesh.shape))}")  # fmt: skip
    experts = spec[0] if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [axis for axis in experts if axis not in mesh.shape]
    if unknown:
        fail(StrategyError, f"the mesh has no axis {', '.join(map(repr, unknown))}", where=f"axes = {axes!r}",
             why=f"its axes are {', '.join(map(repr, mesh.shape))}", fix="name some of these")  # fmt: skip
    found = Placement(mesh, spec[0], experts, _alltoall(alltoall))
    if count % found.size(experts):
        fail(StrategyError, f"{count} experts cannot be sharded {found.size(experts)} ways over {', '.join(experts)}",
             where=f"axes = {axes!r}", why=f"{count} is not divisible by {found.size(experts)}",
             fix="name fewer axes, or use a multiple of experts")  # fmt: skip
    return Placement(None) if is_on_parts("experts.dispatch") else found


def _alltoall(given: bool | None) -> bool:
    """The switch of a call, else that of the context, else an all-to-all."""
    return next(on for on in (given, defaults.current().alltoall, True) if on is not None)
