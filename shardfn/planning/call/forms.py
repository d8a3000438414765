"""The forms of a call: as the user wrote it, and with its static movement as shifts (`movement`).

A plan is compiled as it is written where nothing moves along sharded dimensions, and as shifts elsewhere. The choices of a
search are those of the form with shifts; which form is compiled differs from candidate to candidate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.trace import Traced, TracedJaxpr
from shardfn.ir.correspondence import matches
from shardfn.ir.model import Axes, Graph, Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.movement import Shards
from shardfn.planning.call.call_function import CallFunction
from shardfn.planning.call.posed_call import PosedCall, TracedCall
from shardfn.planning.call.problem_of_call import pose_again
from shardfn.planning.call.propagation import memoized
from shardfn.planning.workarounds import has_windows, moves_shards, windows_clash
from shardfn.search.problem import NO_RESULT_SPECS, Answer, OpConstraints, Partitioner, ResultSpecs


def pose_shifted(posed: PosedCall) -> PosedCall:
    """The call with its movement as shifts, where that is still open (`CallFunction.unshifted`)."""
    function = posed.call.function
    if function.unshifted is None:
        return posed
    shifted = function.with_shifts(function.unshifted)
    if shifted.shifted is None:
        return dataclasses.replace(posed, call=dataclasses.replace(posed.call, function=shifted))
    function, traced, lowered = with_windows_apart(*traced_shifts(shifted), posed.call.hardware)
    traced = lowered or function.lowered(traced, posed.call.hardware.platform)
    return pose_again(posed, dataclasses.replace(posed.call, function=function, traced=traced))


def traced_shifts(function: CallFunction) -> tuple[CallFunction, TracedJaxpr]:
    """A function with its movement as shifts, and its trace. Windows are read anew: they may read other arrays."""
    function = dataclasses.replace(function, separates_windows=False)
    return function, function.as_jaxpr()


def with_windows_apart(
    function: CallFunction, traced: TracedJaxpr, hardware: Hardware
) -> tuple[CallFunction, TracedJaxpr, Traced | None]:
    """The function with an array for each window, where some clash; its trace, and that lowered, where that was needed."""
    lowered = function.lowered(traced, hardware.platform) if has_windows(traced.jaxpr) else None
    if lowered is None or not windows_clash(lowered.graph):
        return function, traced, lowered
    function = dataclasses.replace(function, separates_windows=True)
    return function, function.as_jaxpr(), None


def is_shifted(call: TracedCall) -> bool:
    """Whether a call is one of shifts, and could be one without: functions inside have numbers of its ops."""
    return call.function.has_shifts and not call.function.inner


def as_written(posed: PosedCall) -> PosedCall:
    """A call of shifts as the user wrote it, with what is asked of the search now: `Plan.at` asks otherwise."""
    call, problem, written = posed.call, posed.problem, posed.written
    function = _without_shifts(call.function)
    if written is None:
        return pose_again(posed, call.of(function))
    return dataclasses.replace(
        written,
        call=dataclasses.replace(written.call, function=function, search=call.search),
        problem=dataclasses.replace(written.problem, level=problem.level, begun=problem.begun),
    )


def with_written(posed: PosedCall) -> PosedCall:
    """The call of a search: candidates are partitioned as they are compiled, with shifts only where rows move along sharded
    dimensions."""
    call = posed.call
    if not is_shifted(call):
        return posed
    if call.written is None:
        function = _without_shifts(call.function)
        call = dataclasses.replace(call, written=(function, function.traced(call.hardware.platform)))
    assert call.written is not None
    function, traced = call.written
    written = pose_again(posed, dataclasses.replace(call, function=function, traced=traced, written=None))
    both = _BothForms(posed.propagation, written.propagation, _op_numbers(posed, written))
    partition = memoized(dataclasses.replace(both, written=written.problem.partition))
    problem = dataclasses.replace(posed.problem, partition=partition, written=written.problem.graph)
    return dataclasses.replace(posed, call=call, problem=problem, written=written, both=both)


def in_other_form(posed: PosedCall, other: PosedCall, answer: Answer) -> Answer:
    """An answer for another form of the call, whose ops have other numbers."""
    if other.problem.graph is posed.problem.graph:
        return answer
    ops = _op_numbers(posed, other)
    others = tuple(dataclasses.replace(one, constraints=_moved(one.constraints, ops)) for one in answer.others)
    return dataclasses.replace(answer, constraints=_moved(answer.constraints, ops), others=others)


def _op_numbers(posed: PosedCall, other: PosedCall) -> Mapping[int, int]:
    """The index in another form of the call of each op that can be constrained there."""
    graph, of_other = posed.problem.graph, other.problem.graph
    found: Iterable[tuple[int, int]] = matches(graph, of_other)
    if _numbers_as(posed) == _numbers_as(other):
        there = {number: op for op, number in other.anchored.items()}
        pairs = ((op, there[number]) for op, number in posed.anchored.items() if number in there)
        found = (pair for pair in pairs if _ranks(graph, pair[0]) == _ranks(of_other, pair[1]))
    return {own: at for own, at in found if at in other.problem.can_constrain}


def _ranks(graph: Graph, op: int) -> object:
    """The name of an op and the ranks of its operands and results."""
    found = graph.ops[op]
    return found.name, [[len(graph.values[v].shape) for v in values] for values in (found.inputs, found.outputs)]


def _numbers_as(posed: PosedCall) -> object:
    """What the numbers of a call's equations follow from: workarounds change none."""
    function = posed.call.function
    return function.has_shifts, function.halo_shards


def _moved(constraints: OpConstraints, ops: Mapping[int, int]) -> OpConstraints:
    """Constraints go with their ops."""
    return {ops[i]: constraint for i, constraint in constraints.items() if i in ops}


def moves(partitioned: PartitionedProgram) -> bool:
    """Whether rows move along sharded dimensions."""
    return bool(rotated(partitioned)) or moves_shards(partitioned)


def rotated(partitioned: PartitionedProgram) -> Shards:
    """The number of shards of the dimensions along which several arrays are rotated."""
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for op in partitioned.graph.ops:
        if op.name == "rotate":
            (window,), value = op.window_dims, op.outputs[0]
            place = partitioned.graph.values[value].shape, window.dim
            found.setdefault(place, []).append(partitioned.shards(value)[window.dim])
    return {place: math.lcm(*counts) for place, counts in found.items() if len(counts) > 1 and max(counts) > 1}


def _without_shifts(function: CallFunction) -> CallFunction:
    return dataclasses.replace(function, is_as_written=True, wrong=(), halo_shards={})


@dataclasses.dataclass(frozen=True, eq=False)
class _BothForms:
    """Partitions the form that is compiled; constraints are of ops of the form with shifts."""

    shifted: Partitioner
    written: Partitioner
    ops: Mapping[int, int]
    """The ops of the written form, by those of the shifted one."""

    def __call__(
        self,
        axes: Axes,
        specs: Sequence[Spec | None],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> PartitionedProgram:
        found = self.written(axes, specs, _moved(constraints, self.ops), result_specs)
        return self.shifted(axes, specs, constraints, result_specs) if moves(found) else found
