"""How a choice of layouts spreads through a call's program: the flow of each grid, its arguments, results and held ops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.trace import Traced
from shardfn.ir import shardy
from shardfn.ir.model import Axes, Graph, PartitionedProgram, Spec
from shardfn.partition.partitioner import insert_collectives
from shardfn.search.problem import NO_RESULT_SPECS, OpConstraints, Partitioner, ResultSpecs


@dataclasses.dataclass(frozen=True, eq=False)
class Propagation:
    """How layouts spread through a call's program."""

    traced: Traced
    hardware: Hardware
    given: tuple[Spec | None, ...]
    """The results' layouts as given; None of what is open."""
    same_as: Mapping[int, int]
    """Of an open result, by position, the input whose place it can take."""

    @functools.cached_property
    def _ready(self) -> shardy.PreparedModule:
        """The module as all flows begin."""
        return shardy.prepare_for_propagation(self.traced.module, self.traced.seen)

    def results(self, specs: Sequence[Spec | None]) -> list[Spec | None]:
        """The results' layouts where the arguments lie as `specs` say: as given, or as the input whose place they can take."""
        return [
            specs[self.same_as[i]] if spec is None and i in self.same_as else spec for i, spec in enumerate(self.given)
        ]

    def __call__(
        self,
        axes: Axes,
        specs: Sequence[Spec | None],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> PartitionedProgram:
        """The flow of a full choice: grid, arguments, ops held inside, results that lie otherwise (by position)."""
        traced, graph = self.traced, self.traced.graph
        laid = [result_specs.get(i, spec) for i, spec in enumerate(self.results(specs))]
        spread = [None] * traced.captured
        spread += [padded(s, graph, v) for s, v in zip(specs, traced.inputs, strict=True)]
        tokens = [None] * (len(graph.outputs) - len(laid))
        results = [padded(s, graph, v) for s, v in zip(laid, traced.outputs, strict=True)]
        held = {graph.ops[index].site: constraint for index, constraint in constraints.items()}
        partitioned = shardy.propagate(traced.module, axes, spread, tokens + results, held, self._ready)
        return insert_collectives(partitioned, self.hardware.platform, self.hardware.topology)


def kept(propagation: Partitioner) -> Partitioner:
    """The same, which remember what they were asked."""
    known: dict[object, PartitionedProgram] = {}

    def partitioned_of(
        axes: Axes,
        specs: Sequence[Spec | None],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> PartitionedProgram:
        key = axes, tuple(specs), tuple(constraints.items()), tuple(sorted(result_specs.items()))
        if key not in known:
            known[key] = propagation(axes, specs, constraints, result_specs)
        return known[key]

    return partitioned_of


def padded(spec: Spec | None, graph: Graph, value: int) -> Spec | None:
    """A spec for the array as the module has it: a PRNG key has one dim more there."""
    return None if spec is None else (*spec, *((),) * (len(graph.values[value].shape) - len(spec)))
