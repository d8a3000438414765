"""Ways to compute a planned function a second time, to compare with: unsharded on one device, replicated, sharded otherwise."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.errors import NotAvailableError, fail
from shardfn.frontend.ambient_mesh import without_types
from shardfn.frontend.arguments import Call
from shardfn.frontend.closed_over import identity
from shardfn.frontend.strategy import AUTO
from shardfn.ir.rewrite import constants, evaluate_with_constants, rebind
from shardfn.planning.answers import alternatives, plan_fixed_answer
from shardfn.planning.call import CallFunction
from shardfn.planning.plan import Plan, answered_call
from shardfn.runtime.apply import moved
from shardfn.runtime.executable import Entry
from shardfn.units import bytes_text


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to compute a function, of the leaves of its dynamic arguments."""

    where: str
    function: Callable[..., list[Any]]
    """For `jax.jit` and derivatives."""
    compiled: Callable[..., list[Any]]
    place: Callable[[Sequence[Any]], list[Any]]
    """Puts arrays where it takes them."""

    @classmethod
    def of(cls, entry: Entry, where: str) -> Run:
        """The run of an entry, with what it donates copied."""
        planned = answered_call(entry.plan).posed.call
        call, donated = planned.function.call, frozenset(planned.donated)

        def flat(function: Callable[..., Any]) -> Callable[..., list[Any]]:
            return lambda *leaves: tree_util.tree_leaves(function(*call_values(call, leaves)))

        def compiled(*leaves: Any) -> list[Any]:
            kept = [x.copy() if i in donated and isinstance(x, jax.Array) else x for i, x in enumerate(leaves)]
            return flat(entry.jitted)(*kept)

        return cls(where, flat(entry.nested), compiled, lambda leaves: moved(leaves, entry.targets))

    @classmethod
    def unsharded(cls, plan: Plan) -> Run:
        """The function on the first device of a plan, without sharding constraints."""
        (device, *_), platform = plan.hardware.devices or (None,), plan.hardware.platform
        function = answered_call(plan).posed.call.function
        with without_types(function.ambient, plan.function):
            closed = jax.make_jaxpr(_unconstrained(function), static_argnums=function.call.statics)(
                *function.call.values
            )
        here = {
            identity(value): jax.device_put(value, device)
            for value in constants(closed)
            if isinstance(value, jax.Array) and value.is_fully_addressable
        }

        def flat(*leaves: Any) -> list[Any]:
            return evaluate_with_constants(closed, lambda value: here.get(identity(value), value), leaves)

        def place(leaves: Sequence[Any]) -> list[Any]:
            return [jax.device_put(x, device) if isinstance(x, np.ndarray | jax.Array) else x for x in leaves]

        kind = "CPU" if platform == "cpu" else plan.hardware.chip.name
        return cls(f"the unsharded function on one {kind} device", flat, jax.jit(flat), place)


def call_values(call: Call, leaves: Sequence[Any]) -> list[Any]:
    """The values of a call, with other leaves in its dynamic ones."""
    return call.replaced(tree_util.tree_structure(call.dynamic), leaves)


def _unconstrained(function: CallFunction) -> Callable[..., Any]:
    """The user's function without sharding constraints, and without the marks of sharded functions inside."""
    inner = function.inner
    return rebind(
        function.pure,
        lambda eqn, number: number in inner or eqn.primitive.name == "sharding_constraint",
        lambda eqn, inputs, number: list(inputs[:1]),
        function.call.statics,
    )


def _replicated(plan: Plan) -> Plan:
    """The plan with every array replicated, and without constraints and workarounds."""
    answered = answered_call(plan)
    call = answered.posed.call
    function = dataclasses.replace(call.function, donate_argnums=(), tags={}, wrong=(), inner=call.function.inner)
    posed = dataclasses.replace(answered.posed, call=dataclasses.replace(call, function=function, donated=()))
    rows = [[dataclasses.replace(d, spec=((),) * len(d.shape)) for d in side] for side in (plan.inputs, plan.outputs)]
    return dataclasses.replace(
        plan, inputs=tuple(rows[0]), outputs=tuple(rows[1]), constraints=(), detours=(),
        _answered=dataclasses.replace(answered, posed=posed),
    )  # fmt: skip


def unsharded_peak(plan: Plan) -> float:
    """The estimated bytes of a plan's function on one device, unsharded."""
    problem = answered_call(plan).problem
    return problem.evaluate(problem.axes, tuple(((),) * len(shape) for shape in problem.shapes), {}, {}).memory.peak


def references(plan: Plan, peak: float, own: Plan) -> Iterator[Callable[[], Run]]:
    """Ways to compute the function otherwise, the best first.

    Args:
      plan: a plan of the function.
      peak: the bytes that the unsharded function takes.
      own: the plan that is checked.
    """
    problem = answered_call(plan).problem
    resident = sum(d.local_bytes for d in (*own.inputs, *own.outputs))
    if peak + resident <= problem.memory_limit:
        if answered_call(plan).posed.call.ambient_mesh is None:
            yield lambda: Run.unsharded(plan)
        yield lambda: Run.of(Entry.of(_replicated(plan)), "the function with every array replicated on all devices")
    here = f"unsharded it takes {bytes_text(peak)}, and {bytes_text(problem.memory_limit)} is there"
    for other in _other_plans(plan, [d.strategy for d in own.inputs]):
        text = f"another sharding ({other.kind}): {here}"
        yield lambda other=other, text=text: Run.of(Entry.of(other), text)


def _other_plans(plan: Plan, own: Sequence[tuple[int, ...]]) -> Iterator[Plan]:
    """Plans of the same function that fit, and shard its arguments otherwise than `own`."""
    opened = plan.what_if({d.path: AUTO for d in plan.inputs})
    for one in (plan, opened):
        answered = answered_call(one)
        own_answer = [("", answered.posed, answered.answer)] if one is opened else []
        for _, posed, answer in itertools.chain(own_answer, alternatives(answered)):
            found = plan_fixed_answer(posed, answer)
            fits = found.cost.memory.peak <= answered.problem.memory_limit
            if fits and [d.strategy for d in found.inputs] != [*own]:
                yield found


def first_that_runs(plan: Plan, references: Iterator[Callable[[], Run]], host: Sequence[Any]) -> tuple[Run, list[Any]]:
    """The first reference that JAX runs, and its results: what has a mesh inside does not run on one device.

    Raises:
      NotAvailableError: there is none.
    """
    refused: list[str] = []
    for make in references:
        try:
            run = make()
            return run, run.compiled(*run.place(host))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            refused.append(first_line(error))
    fail(NotAvailableError, f"there is nothing to compare `{plan.function}` with", where="check",
         why="; ".join(dict.fromkeys(refused)) or "it does not fit on one device, and no other sharding of it fits",
         fix="check it on smaller arrays, or with a larger memory_limit")  # fmt: skip


def first_line(error: Exception) -> str:
    """An error of the user's program in a line."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
