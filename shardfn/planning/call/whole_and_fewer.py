"""The search problem of a call with fewer of its equal blocks, and its proposals for the whole call."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax import tree_util

from shardfn.frontend.memories import kind_of_type, typed
from shardfn.frontend.trace import TracedJaxpr, lower
from shardfn.ir.equal_blocks import FewerBlocks, fewer_blocks
from shardfn.ir.rewrite import first_numbers
from shardfn.planning.call.pose import place_call
from shardfn.planning.call.posed_call import PosedCall, TracedCall
from shardfn.search.problem import OpConstraints, Proposal, SmallerProblem

T = TypeVar("T")


def with_fewer_blocks(posed: PosedCall) -> SmallerProblem | None:
    """The search problem of a call with fewer of its equal blocks; None where no blocks repeat, entries tell them apart, a mesh,
    a layout file or shardings inside are given, or candidates are compiled or rehearsed."""
    call = posed.call
    is_plain = call.layout is None and call.ambient_mesh is None and not call.inner and not call.traced.captured
    compares = (
        call.search.compile_candidates != 0 or call.search.rehearse_candidates > 0
    )  # it needs more candidates of the whole program
    if not is_plain or compares or len(call.traced.jaxpr.invars) != len(call.inputs):
        return None
    fewer = fewer_blocks(call.traced.jaxpr, call.same_as, consts=call.traced.consts)
    if fewer is None or (small := _call_of(call, fewer)) is None:
        return None
    other = place_call(small, [])
    is_alike = (
        other.problem.axes == posed.problem.axes
        and _of(other.problem.specs, fewer.input_of) == [*posed.problem.specs]
        and _of(other.propagation.given, fewer.output_of) == [*posed.propagation.given]
    )
    if not is_alike:
        return None
    problem = dataclasses.replace(other.problem, begun=posed.problem.begun)
    return SmallerProblem(problem, _Whole(posed, other, fewer).of, f"{fewer.count} equal blocks as {fewer.kept}")


def _call_of(call: TracedCall, fewer: FewerBlocks) -> TracedCall | None:
    """The call with fewer blocks, traced; None where JAX makes other equations of it."""
    jaxpr = call.traced.jaxpr
    types = [jaxpr.invars[i].aval for i in fewer.inputs]
    shapes = [typed(jax.ShapeDtypeStruct(t.shape, t.dtype), kind_of_type(t)) for t in types]
    stage = jax.jit(fewer.run, keep_unused=True).trace(*shapes)
    names = [eqn.primitive.name for eqn in stage.jaxpr.jaxpr.eqns]
    if names != [jaxpr.eqns[i].primitive.name for i in fewer.equations]:
        return None
    results = _of(tree_util.tree_leaves(call.traced.results), fewer.outputs)
    inputs, outputs = ({i: n for n, i in enumerate(kept)} for kept in (fewer.inputs, fewer.outputs))
    return dataclasses.replace(
        call,
        function=dataclasses.replace(call.function, shifted=None),  # it is in one form
        written=None,
        traced=lower(TracedJaxpr(stage, results, len(shapes), ()), call.hardware.platform),
        inputs=tuple(_of(call.inputs, fewer.inputs)),
        outputs=tuple(_of(call.outputs, fewer.outputs)),
        same_as={outputs[i]: inputs[of] for i, of in call.same_as.items() if i in outputs and of in inputs},
        donated=tuple(inputs[i] for i in call.donated if i in inputs),
    )


def _of(every: Sequence[T], places: Sequence[int]) -> list[T]:
    return [every[i] for i in places]


class _Whole:
    """From proposals for the call with fewer blocks to those for the whole call."""

    def __init__(self, posed: PosedCall, other: PosedCall, fewer: FewerBlocks):
        self.posed, self.fewer = posed, fewer
        own, there = first_numbers(posed.call.traced.jaxpr), first_numbers(other.call.traced.jaxpr)
        op_of = {number: op for op, number in posed.anchored.items()}
        self.ops: dict[int, tuple[int, ...]] = {}
        """By op of the smaller program, those of the whole one."""
        for op, number in other.anchored.items():
            at = bisect.bisect_right(there, number) - 1
            index = fewer.equations[at]
            alike = (own[i] + number - there[at] for i in fewer.stands_for.get(index, (index,)))
            self.ops[op] = tuple(op_of[n] for n in alike if n in op_of)

    def of(self, proposal: Proposal) -> Proposal:
        """The proposal for the whole call."""
        problem, fewer = self.posed.problem, self.fewer
        constraints: OpConstraints = {
            i: constraint for op, constraint in proposal.constraints.items() for i in self.ops.get(op, ())
        }
        results = (
            (i, proposal.result_specs.get(of)) for i, of in enumerate(fewer.output_of) if i in problem.open_results
        )
        specs = tuple(_of(proposal.specs, fewer.input_of))
        return Proposal(proposal.name, proposal.axes, specs, dict(sorted(constraints.items())),
                        {i: spec for i, spec in results if spec is not None}, origin=proposal.origin)  # fmt: skip
