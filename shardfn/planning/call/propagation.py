"""The partitioned program of a call for chosen shardings of its arguments, results and constrained ops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.trace import Traced
from shardfn.ir import shardy
from shardfn.ir.model import Axes, Graph, InnerSpec, Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.partition_cache import PartitionCache
from shardfn.partition.partitioner import insert_collectives
from shardfn.search.problem import NO_RESULT_SPECS, Answer, OpConstraints, Partitioner, ResultSpecs


@dataclasses.dataclass(frozen=True, eq=False)
class Propagation:
    """Propagates shardings through a call's program with Shardy."""

    traced: Traced
    hardware: Hardware
    given: tuple[Spec | None, ...]
    """The shardings that the user or the layout file gives the results; None is open."""
    same_as: Mapping[int, int]
    """For an open result, by position, the input that it can replace."""
    inner: Mapping[int, InnerSpec] = dataclasses.field(default_factory=dict)
    """The shardings of values inside, by number (`Graph.inner`)."""
    alltoall: bool = True
    """Whether XLA may reshard by all-to-all."""
    given_constraints: Callable[[Axes], OpConstraints] = lambda axes: {}
    """The op constraints of the layout file on a mesh: every candidate has them."""

    @functools.cached_property
    def _ready(self) -> shardy.PreparedModule:
        """The module prepared for all propagations."""
        return shardy.PreparedModule(self.traced.module, self.traced.seen)

    @functools.cached_property
    def _known(self) -> PartitionCache:
        """Results of the partitioner for the next shardings."""
        return PartitionCache()

    def results(self, specs: Sequence[Spec | None]) -> list[Spec | None]:
        """The results' shardings for arguments sharded as `specs`: as given, or as the input whose place they take."""
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
        """The partitioned program of a full choice: mesh axes, arguments, constrained ops, results by position."""
        traced, graph = self.traced, self.traced.graph
        wanted = [result_specs.get(i, spec) for i, spec in enumerate(self.results(specs))]
        spread = [None] * traced.captured
        spread += [padded(s, graph, v) for s, v in zip(specs, traced.inputs, strict=True)]
        tokens = [None] * (len(graph.outputs) - len(wanted))
        results = [padded(s, graph, v) for s, v in zip(wanted, traced.outputs, strict=True)]
        every = {**constraints, **self.given_constraints(axes)}
        constrained = {graph.ops[index].site: constraint for index, constraint in every.items()}
        partitioned = self._ready.propagate(axes, spread, tokens + results, constrained, self.inner)
        found = insert_collectives(
            partitioned,
            self.hardware.platform,
            self.hardware.topology,
            self._known,
            self.alltoall,
            self.hardware.chip.collective_matmul_rows,
        )
        held = sum(array.bytes for array in traced.closed_over)
        return dataclasses.replace(found, constant_bytes=held) if held else found


KEPT = 16
"""Partitioned programs that `memoized` keeps: those of the candidates at work. All of a search would take much memory."""


def memoized(propagation: Partitioner) -> Partitioner:
    """`propagation` with a cache of the last `KEPT` programs."""
    known: dict[object, PartitionedProgram] = {}

    def partitioned_of(
        axes: Axes,
        specs: Sequence[Spec | None],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> PartitionedProgram:
        key = axes, tuple(specs), tuple(constraints.items()), tuple(sorted(result_specs.items()))
        found = known.pop(key, None)
        if found is None:
            found = propagation(axes, specs, constraints, result_specs)
            while len(known) >= KEPT:
                known.pop(next(iter(known)))
        known[key] = found
        return found

    return partitioned_of


def knowing(propagation: Partitioner, answer: Answer, partitioned: PartitionedProgram) -> Partitioner:
    """`propagation`, of which the program for an answer is known; it keeps no other."""

    def partitioned_of(
        axes: Axes,
        specs: Sequence[Spec | None],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> PartitionedProgram:
        known = answer.axes, tuple(answer.specs), answer.constraints, answer.result_specs
        is_known = (axes, tuple(specs), constraints, result_specs) == known
        return partitioned if is_known else propagation(axes, specs, constraints, result_specs)

    return partitioned_of


def padded(spec: Spec | None, graph: Graph, value: int) -> Spec | None:
    """A spec for the array as the module has it: a PRNG key has one dim more there."""
    return None if spec is None else (*spec, *((),) * (len(graph.values[value].shape) - len(spec)))
