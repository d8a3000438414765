"""The program of a plan with fewer of a model's layers: with two such programs, the figures of all layers are scaled."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util

from shardfn.cost.compute import op_flops
from shardfn.errors import ShardError
from shardfn.frontend.arguments import Call, bind
from shardfn.frontend.callee import describe
from shardfn.frontend.outer_call import inside
from shardfn.ir.equal_blocks import KEPT, fewer_blocks
from shardfn.ir.rewrite import equations
from shardfn.ir.scanned_inputs import scanned_inputs
from shardfn.planning.call import AnsweredCall, CallFunction, pure_function
from shardfn.planning.plan import Plan, answered_call
from shardfn.runtime.apply import jitted
from shardfn.runtime.rehearsal.job import Measured
from shardfn.search.problem import unsharded_program

SAME_WORK = 1e-3
"""Relative: the FLOPs of all layers are those that two numbers of them let expect, up to this."""


class NoLayers(Exception):
    """The program has no layers of which fewer could be measured; the text says why."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """A plan for fewer layers: it has the shardings of the whole one, and its function serves to be measured alone."""

    kept: int
    count: int
    """Of the whole program."""
    plan: Plan
    inputs: tuple[int, ...]
    """For each of its inputs which one of the whole program's it is, by position."""


def fewer_layers(plan: Plan) -> tuple[Layers, Layers]:
    """Two plans with fewer layers, the smaller one first.

    Layers are what a scan takes rows of, or blocks of equations that repeat. Of the former at least two stay: XLA runs a single
    one without a loop. They are layers if each adds the same work.

    Raises:
      NoLayers: there are no such layers, or too few of them.
    """
    why: list[str] = []
    for find in (_of_scan, _of_blocks):
        try:
            few, more = find(plan)
        except NoLayers as error:
            why.append(str(error))
            continue
        expected = _scaled(_flops(few.plan), _flops(more.plan), (few.kept, more.kept), more.count)
        if math.isclose(_flops(plan), expected, rel_tol=SAME_WORK):
            return few, more
        why.append(f"{more.count} rows or blocks do not add the same work each, as rows that every step reads do not")
    raise NoLayers("; ".join(why))


def _flops(plan: Plan) -> float:
    """The FLOPs of a plan's program, unsharded."""
    call = answered_call(plan).posed.call
    program = unsharded_program(call.function.traced(call.hardware.platform).graph, call.hardware.platform)
    return sum(op_flops(program, op) * op.trips for op in program.graph.ops)


def scaled(few: Measured, more: Measured, kept: tuple[int, int], count: int) -> Measured:
    """What a program would measure with `count` layers, of what it did with `kept`: the rest is the same for each layer more.

    >>> one = Measured("GPU", "0.12.0", (1.0, 1.25), 100, None, (), 0.9, ())
    >>> scaled(one, dataclasses.replace(one, rounds_s=(1.5, 1.5), compiled_bytes=140), (2, 4), 10).rounds_s
    (3.0, 2.25)
    """

    def whole(less: float, own: float) -> float:
        return max(own, _scaled(less, own, kept, count))

    def whole_bytes(less: int | None, own: int | None) -> int | None:
        return None if less is None or own is None else round(whole(less, own))

    return dataclasses.replace(
        more,
        rounds_s=tuple(map(whole, few.rounds_s, more.rounds_s)),
        compiled_bytes=whole_bytes(few.compiled_bytes, more.compiled_bytes),
        peak_bytes=whole_bytes(few.peak_bytes, more.peak_bytes),
    )


def _scaled(less: float, more: float, kept: tuple[int, int], count: int) -> float:
    return more + (more - less) * (count - kept[1]) / (kept[1] - kept[0])


# ---- rows of a scan


def _of_scan(plan: Plan) -> tuple[Layers, Layers]:
    """With fewer rows of the inputs that a scan takes, and of all that follow them, such as gradients' moments."""
    posed = answered_call(plan).posed
    call = posed.call
    captured = len(call.traced.jaxpr.invars) - len(call.inputs)
    scanned = {i - captured: length for i, length in scanned_inputs(call.traced.jaxpr).items() if i >= captured}
    groups = posed.groups.members(call.traced.inputs)
    bytes_of = collections.Counter[int]()
    for i, length in scanned.items():
        bytes_of[length] += plan.inputs[i].local_bytes * math.prod(plan.inputs[i].strategy)
    for count, _ in bytes_of.most_common():
        rows = {(i, 0) for i, length in scanned.items() if length == count}
        taken = [place for places in groups.values() if not rows.isdisjoint(places) for place in places]
        if any(call.inputs[i].shape[d] != count for i, d in taken):
            continue
        unit = math.lcm(*(plan.inputs[i].strategy[d] for i, d in taken))
        if 4 * unit < count:
            few, more = (_with_rows(plan, taken, count, kept) for kept in (2 * unit, 4 * unit))
            return few, more
    raise NoLayers("no scan takes the rows of arguments, more than four of them or four shards")


def _with_rows(plan: Plan, taken: Sequence[tuple[int, int]], count: int, kept: int) -> Layers:
    function = answered_call(plan).posed.call.function
    leaves, treedef = tree_util.tree_flatten(function.call.dynamic)
    for i, d in taken:
        leaves[i] = leaves[i].update(shape=(*leaves[i].shape[:d], kept, *leaves[i].shape[d + 1 :]))
    call = dataclasses.replace(function.call, values=function.call.replaced(treedef, leaves))
    smaller = dataclasses.replace(
        function.of(inside(pure_function(function.callee.frozen(call), call), function.outer)), call=call
    )
    made = _with_function(plan, smaller)
    try:
        names = _names(made)
    except ShardError:
        raise
    except Exception as error:  # of the user's function
        raise NoLayers(f"with {kept} of {count} layers it raises {type(error).__name__}: {error}") from error
    if names != _names(plan):
        raise NoLayers(f"with {kept} of {count} layers it traces to another program")
    return Layers(kept, count, made, tuple(range(len(plan.inputs))))


def _names(plan: Plan) -> list[str]:
    """The primitives of a plan's program, in order."""
    jaxpr = jitted(plan).trace(*answered_call(plan).posed.call.function.call.values).jaxpr
    return [eqn.primitive.name for _, eqn, _ in equations(jaxpr.jaxpr)]


def _with_function(plan: Plan, function: CallFunction, **changes: Any) -> Plan:
    """The plan for another function; `changes` are of its call."""
    answered = answered_call(plan)
    call = dataclasses.replace(answered.posed.call, function=function, **changes)
    return dataclasses.replace(
        plan, _answered=AnsweredCall(dataclasses.replace(answered.posed, call=call), answered.answer)
    )


# ---- equal blocks


def _of_blocks(plan: Plan) -> tuple[Layers, Layers]:
    """With fewer blocks of the planned program, whose constraints are written in it."""
    call = answered_call(plan).posed.call
    closed = jitted(plan).trace(*call.function.call.values).jaxpr
    if len(closed.jaxpr.invars) != len(call.inputs):
        raise NoLayers("the function closes over arrays")
    few, more = (_with_blocks(plan, closed, kept) for kept in (KEPT, KEPT + 2))
    return few, more


def _with_blocks(plan: Plan, closed: Any, kept: int) -> Layers:
    call, jaxpr = answered_call(plan).posed.call, closed.jaxpr
    fewer = fewer_blocks(jaxpr, call.same_as, kept, closed.consts)
    if fewer is None:
        raise NoLayers(f"no block repeats more than {kept} times")

    def run(*arrays: Any) -> list[Any]:
        return fewer.run(*arrays)

    run.__name__ = run.__qualname__ = plan.function
    callee = describe(run)
    types = [jaxpr.invars[i].aval for i in fewer.inputs]
    slots, values = bind(callee.signature, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types], {})
    own = Call(slots, values, stateful=False)
    donated = tuple(at for at, i in enumerate(fewer.inputs) if i in call.donated)
    flat = CallFunction(
        inside(pure_function(callee, own), call.function.outer), call.function.outer, callee, own, donated
    )
    results = [jaxpr.outvars[i].aval for i in fewer.outputs]
    traced = dataclasses.replace(call.traced, results=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in results])
    made = dataclasses.replace(
        _with_function(plan, flat, traced=traced), constraints=(), detours=(),
        inputs=tuple(plan.inputs[i] for i in fewer.inputs), outputs=tuple(plan.outputs[i] for i in fewer.outputs),
    )  # fmt: skip
    return Layers(kept, fewer.count, made, fewer.inputs)
