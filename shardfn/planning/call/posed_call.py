"""A call on its way to a plan: traced, posed as a search problem, and answered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from shardfn import search
from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.ambient_mesh import AmbientMesh
from shardfn.frontend.memories import memory_kinds, with_entries
from shardfn.frontend.options import SearchOptions
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.trace import Traced
from shardfn.ir.dimension_groups import DimensionGroups
from shardfn.ir.model import Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.planning.call.call_function import CallFunction
from shardfn.planning.call.propagation import Propagation
from shardfn.planning.inside import InnerEntry
from shardfn.planning.layout_rules import LayoutFile
from shardfn.planning.meshes import Placement, PlanMesh
from shardfn.search.problem import Answer, Partitioner, Search, SearchProblem


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """A traced call with what the user asked of its arrays."""

    name: str
    search: SearchOptions
    hardware: Hardware
    layout: LayoutFile | None
    function: CallFunction
    traced: Traced
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    """Results, then the changed state."""
    same_as: Mapping[int, int]
    """Results, by position, that can take the place of an input in the next call."""
    donated: tuple[int, ...]
    """Positions in `inputs`."""
    compiler_options: Mapping[str, Any] | None = None
    inner: tuple[InnerEntry, ...] = ()
    """The entries of values inside the function."""
    written: tuple[CallFunction, Traced] | None = None
    """Of a call of shifts the function without them and its trace, where a search needs both."""

    @property
    def ambient_mesh(self) -> AmbientMesh | None:
        """The mesh around the call, if the call uses it."""
        return self.function.ambient

    @property
    def memories(self) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
        """The memory kinds of inputs and outputs; None where the devices compute from it."""
        kinds = self.function.call.memories or (None,) * len(self.inputs)
        return kinds, with_entries(self.outputs, memory_kinds(self.traced.results))

    def of(self, function: CallFunction, mesh: PlanMesh | None = None) -> TracedCall:
        """The call with its function in another form, traced anew on a mesh."""
        return dataclasses.replace(
            self, function=function, traced=function.traced(self.hardware.platform, mesh), written=None
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PosedCall:
    """A call posed as a search problem, with what else `finish` needs."""

    call: TracedCall
    problem: SearchProblem
    placed: Placement
    """The entries on mesh axes, for `pose_again`."""
    entries: tuple[Spec | None, ...]
    """The shardings that the user or the layout file gives the inputs; None is open."""
    order: tuple[int, ...] | None
    """`Plan.order`."""
    groups: DimensionGroups
    propagation: Propagation
    anchored: Mapping[int, int]
    """For each op that can be constrained the number of its jaxpr equation (`anchors`)."""
    written: PosedCall | None = None
    """Of a call of shifts the same without them, where a search needs both."""
    both: Partitioner | None = None
    """Then it partitions what is compiled of a candidate."""

    @property
    def partition(self) -> Partitioner:
        """Partitions what is compiled of a candidate, and keeps nothing."""
        return self.both or self.propagation

    def without_programs(self) -> PosedCall:
        """The call without the partitioned programs that a search kept, which are large."""
        written = self.written and self.written.without_programs()
        return dataclasses.replace(
            self, problem=dataclasses.replace(self.problem, partition=self.partition), written=written
        )

    @property
    def chosen_search(self) -> Search:
        """The search that the user asked for."""
        style = self.call.search.style
        return (
            functools.partial(search.styles.search, style)
            if style and self.problem.is_open
            else search.select(self.call.search.mode)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class AnsweredCall:
    """A posed call and the answer that a plan is made from."""

    posed: PosedCall
    answer: Answer

    @property
    def problem(self) -> SearchProblem:
        """The search problem."""
        return self.posed.problem

    def partitioned_with(self, paths: Collection[str], spec: Spec) -> PartitionedProgram:
        """The partitioned program where the arrays at `paths` are sharded as `spec`, and all others as answered."""
        call, answer = self.posed.call, self.answer
        specs = [spec if leaf.path in paths else own for leaf, own in zip(call.inputs, answer.specs, strict=True)]
        results = {**answer.result_specs, **{i: spec for i, leaf in enumerate(call.outputs) if leaf.path in paths}}
        return self.posed.partition(answer.axes, specs, answer.constraints, results)
