"""Run a sharded function and the unsharded one on the same arguments, and compare results and gradients leaf by leaf.

The reference is the function as the user wrote it, on one device, without the plan's constraints, the library's workarounds
and the sharding constraints of the user. A function that needs its mesh (`shard_map`, a mesh around the call) runs on all
devices with every array replicated. What does not fit on one device is compared with another sharding.

Gradients are those of the sum of all results times fixed random weights, so that errors do not cancel. They are taken from
outside, as `jax.grad(f)` does, and inside, as `shard(jax.grad(f))` does: XLA partitions these two programs differently.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import Mesh

from shardfn.errors import CheckError, DeviceError, NotAvailableError, Problem, StrategyError, fail, warn
from shardfn.frontend import defaults
from shardfn.frontend.ambient_mesh import without_types
from shardfn.frontend.arguments import Call, bind, signature
from shardfn.frontend.callee import describe
from shardfn.frontend.nnx_objects import HeldObjects
from shardfn.frontend.options import Options
from shardfn.frontend.other_call import differences
from shardfn.frontend.paths import listed
from shardfn.frontend.refs import HeldRefs
from shardfn.frontend.static_leaves import hide_static
from shardfn.planning.answers import with_notes
from shardfn.planning.call import pure_function
from shardfn.planning.meshes import PlanMesh
from shardfn.planning.plan import Plan, answered_call, shardings_on
from shardfn.runtime.agreement import (
    CheckResult,
    CheckRow,
    Rounding,
    changed_arguments,
    compared_leaves,
    host_leaf,
    is_inexact,
    is_inexact_dtype,
    number_text,
)
from shardfn.runtime.apply import moved
from shardfn.runtime.call_checks import refuse_shapes
from shardfn.runtime.executable import Entry, compile_entry, make_entry
from shardfn.runtime.processes import is_of_several_processes
from shardfn.runtime.progress import progress
from shardfn.runtime.reference_run import Run, call_values, first_line, first_that_runs, references, unsharded_peak
from shardfn.units import bytes_text

RESULT, OUTSIDE, INSIDE = "result", "gradient", "gradient inside"
"""`CheckRow.what`: gradients are taken of the sharded function, and inside a sharded function."""


def check_plan(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> CheckResult:
    """`Plan.check`."""
    refuse_uncheckable(plan)
    planned = answered_call(plan).posed.call.function
    own = planned.call
    if planned.callee.adapter is not None:
        fail(StrategyError, f"the plan of `{plan.function}` has no arrays of the object that is called",
             where="plan.check(...)", why="a plan keeps the shapes of a module's arrays, and not the arrays",
             fix="check the sharded function: shard(f, ...).check(...), or shard(f, check=True)")  # fmt: skip
    static = frozenset(slot.name for slot in own.slots if slot.is_static)
    callee = dataclasses.replace(planned.callee, objects=HeldObjects(), refs=HeldRefs())
    try:
        slots, values = bind(callee.signature, args, kwargs, static_argnames=static)
    except TypeError as error:
        fail(StrategyError, f"the arguments do not fit `{plan.function}`: {error}", where="plan.check(...)",
             why="a check runs the function on its own arguments", fix="pass the arguments of the planned call")  # fmt: skip
    _, values = callee.of_call(slots, values)
    values = [v if slot.is_static else hide_static(v) for slot, v in zip(slots, values, strict=True)]
    call = Call(slots, values, stateful=False, returns_changes=own.returns_changes).in_place()
    if own.closed_over is not None:
        call = call.with_closed_over(own.closed_over)
    if slots != own.slots or signature(call.values, own.statics) != signature(own.values, own.statics):
        fail(StrategyError, f"`{plan.function}` is checked with other arguments than it was planned for",
             where=": ".join(filter(None, ["plan.check(...)", differences(own, call.values)])),
             why="a plan is for one structure, one set of shapes and dtypes, and its static values",
             fix="pass arguments with the shapes of the planned call, or plan again for these")  # fmt: skip
    leaves = tree_util.tree_leaves(call.dynamic)
    refuse_shapes(plan.function, plan, leaves)
    return check_entry(Entry.of(plan), leaves)


def check_entry(entry: Entry, leaves: Sequence[Any]) -> CheckResult:
    """Check a planned call.

    Args:
      entry: its entry.
      leaves: the arrays of the call, `tree_leaves(call.dynamic)`. None of them is donated.

    Raises:
      DeviceError, NotAvailableError: the devices of the plan are not here, or belong to several processes.
    """
    plan = entry.plan
    refuse_uncheckable(plan)
    with progress(f"checking {plan.function}") as say, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the plan says was said when it was planned
        own = Run.of(entry, "sharded")
        say("results")
        got = own.compiled(*own.place(leaves))
        at = tuple(i for i, leaf in enumerate(leaves) if is_inexact(leaf))
        why = _no_gradients(plan, at)
        inside, notes = (None, list[str]()) if why else _gradient_inside(plan, at)
        why = why or (_too_large(inside.plan) if inside else "")
        host = [*map(host_leaf, leaves)]
        peak = max(unsharded_peak(one) for one in (plan, *([inside.plan] if inside and not why else [])))
        reference, want = first_that_runs(plan, references(plan, peak, plan), host)
        rounding = _rounding(plan)
        again = [reference.compiled(*reference.place(some)) for some in changed_arguments(host, rounding)]
        rows = compared_leaves([d.path for d in plan.outputs], RESULT, got, want, again, rounding)
        if not why:
            say("gradients")
            found, more = _gradient_rows(plan, own, reference, inside, host, leaves, at, got)
            rows, notes = [*rows, *found], [*notes, *more]
        else:
            notes = [f"gradients are not compared: {why}"]
    return CheckResult(plan.function, reference.where, tuple(rows), tuple(notes))


def check_run(
    plan: Plan, run: Callable[[], list[Any]], unsharded: Plan, leaves: Sequence[Any], paths: Sequence[str]
) -> CheckResult:  # fmt: skip
    """Check the results of a program that has parts of its own for devices, such as a training step.

    Args:
      plan: its plan.
      run: gives the leaves of its results.
      unsharded: a plan of a function that computes the same for one device.
      leaves: the arrays of the call.
      paths: the paths of the results.
    """
    with progress(f"checking {plan.function}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, host, rounding = run(), [*map(host_leaf, leaves)], _rounding(unsharded)
        ways = references(unsharded, unsharded_peak(unsharded), plan)
        reference, want = first_that_runs(plan, ways, host)
        again = [reference.compiled(*reference.place(some)) for some in changed_arguments(host, rounding)]
        rows = compared_leaves(paths, RESULT, got, want, again, rounding)
    return CheckResult(plan.function, reference.where, tuple(rows))


def _gradient_rows(
    plan: Plan, own: Run, reference: Run, inside: Entry | None, host: Sequence[Any], leaves: Sequence[Any],
    at: Sequence[int], results: Sequence[Any],
) -> tuple[list[CheckRow], list[str]]:  # fmt: skip
    """The rows of gradients, and what is not compared."""
    weights, paths = _weights(plan), [plan.inputs[i].path for i in at]
    rounding = _rounding(inside.plan if inside else plan)
    placed = [jax.device_put(w, results[i].sharding) for i, w in weights.items()]
    notes: list[str] = []
    ways: list[tuple[str, Callable[[], list[Any]]]] = [
        (OUTSIDE, lambda: jax.jit(_pull(own.function, at))(own.place(leaves), placed)),
        (INSIDE, lambda: _run_inside(inside, own.place(leaves), placed)),
    ]
    found: dict[str, list[Any]] = {}
    for what, run in ways if inside else ways[:1]:
        try:
            found[what] = run()
        except Exception as error:  # of any rule of the user's program
            notes.append(f"{what}: not compared, {first_line(error)}")
    if not found:
        return [], notes
    pull = jax.jit(_pull(reference.function, at))
    want, *again = (
        pull(reference.place(some), [*weights.values()]) for some in (host, *changed_arguments(host, rounding))
    )
    rows = [row for what, got in found.items() for row in compared_leaves(paths, what, got, want, again, rounding)]
    return rows, notes


def refuse_uncheckable(plan: Plan) -> None:
    """Refuse to check a plan that cannot run in this process alone.

    Raises:
      DeviceError: its devices are not here.
      NotAvailableError: they belong to several processes.
    """
    if not plan.hardware.is_here:
        fail(DeviceError, f"`{plan.function}` cannot be checked on {plan.hardware.name}, which is not here",
             where=f"device = {plan.hardware.name!r}", why="a check runs the sharded and the unsharded function",
             fix="plan for devices of this machine and check that; plan.verify() compiles for others")  # fmt: skip
    if is_of_several_processes(plan):
        fail(NotAvailableError, f"`{plan.function}` cannot be checked on devices of {len(plan.hardware.processes)} processes",
             where="check", why="one process runs the unsharded function, and has to hold all arrays",
             fix="check it in one process, on smaller arrays or virtual devices: "
                 'jax.config.update("jax_num_cpu_devices", 8)')  # fmt: skip


def checked(entry: Entry, leaves: Sequence[Any]) -> Entry:
    """The entry of a call after a check that found no difference. Its plan says what was compared.

    Raises:
      CheckError: there is a difference.
    """
    result = check_entry(entry, leaves)
    refuse_difference(result, "f.check(*args)")
    for note in result.notes:
        warn(f"check of `{result.function}`: {note}")
    return with_agreement(entry, result)


def with_agreement(entry: Entry, result: CheckResult) -> Entry:
    """The entry of a call whose check found no difference. Its plan says what was compared."""
    said = "; ".join([f"checked: {len(result.rows)} arrays agree with {result.reference}", *result.notes])
    return dataclasses.replace(entry, plan=with_notes(entry.plan, said), is_checked=True)


def warn_of_tracers(name: str) -> None:
    """Warn of a call that cannot be checked, as it has no values."""
    warn(f"`check` does not see the values of a call of `{name}` in a transformation; to check it, call it once outside, "
         "or use its `check` method")  # fmt: skip


def refuse_difference(result: CheckResult, how: str, fix: str = "") -> None:
    """Raise where a check found a difference.

    Args:
      result: the check.
      how: how the user sees the table: "f.check(*args)".
      fix: what else may be the reason, and what to do then.

    Raises:
      CheckError: it names the leaf that differs most, the place, and both values.
    """
    if result.agrees:
        return
    row, *others = result.differing
    taken = {OUTSIDE: "the gradient by ", INSIDE: "the gradient, taken inside, by "}.get(row.what, "")
    more = f"; so do {listed([other.name for other in others], 4)}" if others else ""
    if jnp.issubdtype(jnp.dtype(row.dtype), jnp.inexact):
        why = (f"the difference is {row.relative:.2g} of the size of the numbers, in the mean {row.mean:.2g}; rounding explains "
               f"{row.tolerance:.2g}, in the mean {row.mean_tolerance:.2g}")  # fmt: skip
    else:
        why = f"{row.difference:.0f} of {math.prod(row.shape)} elements differ"
    kinds, compared = ({r.what for r in rows} for rows in (result.differing, result.rows))
    advice = "give the arrays around it another strategy, or replicate them"
    if kinds == {OUTSIDE} and INSIDE in compared:
        advice = "take the gradient inside, shard(jax.grad(f)), which agrees"
    elif kinds == {INSIDE} and OUTSIDE in compared:
        advice = "take the gradient outside, jax.grad(shard(f)), which agrees"
    error = CheckError(Problem(
        f"`{result.function}` differs from {result.reference}: {taken}`{row.place}` is {number_text(row.sharded)} as sharded, "
        f"and {number_text(row.reference)} there",
        f"{row.name}, {row.dtype}{list(row.shape)}, differs{more}", why,
        f"print({how}) shows every array; {fix or advice}; and report the program and the plan as a bug",
    ))  # fmt: skip
    error.result = result
    raise error


# ---- gradients


def _pull(function: Callable[..., list[Any]], at: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The gradients of a function's weighted results by its leaves at `at`, as a function of its leaves and the weights."""

    def gradients(leaves: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        def of(chosen: Sequence[Any]) -> list[Any]:
            given = dict(zip(at, chosen, strict=True))
            results = function(*(given.get(i, leaf) for i, leaf in enumerate(leaves)))
            return [y for y in results if is_inexact(y) and y.size]

        _, pull = jax.vjp(of, [leaves[i] for i in at])
        return pull([*weights])[0]

    return gradients


def _weights(plan: Plan) -> dict[int, np.ndarray]:
    """For each floating-point result, by position, fixed random weights of about one: without them errors may cancel."""
    return {
        i: _weight(np.random.default_rng(i), d.shape, d.dtype)
        for i, d in enumerate(plan.outputs)
        if is_inexact_dtype(d.dtype) and math.prod(d.shape)
    }


def _weight(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    def part() -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape) * rng.choice((-1.0, 1.0), shape)

    is_complex = jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating)
    return np.asarray(part() + 1j * part() if is_complex else part()).astype(jnp.dtype(dtype))


def _gradient_function(plan: Plan, at: Sequence[int]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """The gradient as a function of the leaves of the arguments and of the weights, and the shapes of these."""
    planned, weights, count = answered_call(plan).posed.call.function, _weights(plan), len(plan.inputs)
    call, pure = planned.call, pure_function(planned.callee, planned.call)
    pull = _pull(lambda *leaves: tree_util.tree_leaves(pure(*call_values(call, leaves))), at)

    def gradient(*flat: Any) -> list[Any]:
        return pull(flat[:count], flat[count:])

    gradient.__name__ = gradient.__qualname__ = f"gradient_of_{plan.function}"
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights.values()]
    return gradient, [*tree_util.tree_leaves(call.dynamic), *shapes]


def _no_gradients(plan: Plan, at: Sequence[int]) -> str:
    """Why a function has no gradients by the leaves `at`; empty if it has some."""
    if not at or not _weights(plan):
        return f"no {'result' if at else 'argument'} has a floating-point dtype"
    gradient, shapes = _gradient_function(plan, at)
    try:
        with without_types(answered_call(plan).posed.call.ambient_mesh, plan.function):
            jax.eval_shape(gradient, *shapes)
    except Exception as error:  # of any rule of the user's program
        return first_line(error)
    return ""


def _gradient_inside(plan: Plan, at: Sequence[int]) -> tuple[Entry | None, list[str]]:
    """The entry of the sharded gradient, with the plan's shardings of arguments; or why there is none."""
    gradient, shapes = _gradient_function(plan, at)
    ambient = answered_call(plan).posed.call.ambient_mesh
    ins, outs = map(tree_util.tree_leaves, shardings_on(plan, PlanMesh.of(plan.mesh)))
    mesh = plan.mesh if ambient is None and isinstance(plan.mesh, Mesh) else None
    options = Options(in_strategy=(*ins, *(outs[i] for i in _weights(plan))), device=mesh, level=plan.level)
    callee = describe(gradient)
    slots, values = bind(callee.signature, shapes, {})
    current = dataclasses.replace(defaults.current(), layout_file="", plan_file="", graphs=0)
    try:
        entry = make_entry(callee, options, Call(slots, values, stateful=False).in_place(), current)
    except Exception as error:  # the gradient from outside is compared
        return None, [f"{INSIDE}: not compared, {first_line(error)}"]
    return entry, []


def _too_large(plan: Plan) -> str:
    """Why a plan's gradients do not fit; empty if they do."""
    memory, limit = plan.cost.memory.peak, answered_call(plan).problem.memory_limit
    return f"they take {bytes_text(memory)} per device, and {bytes_text(limit)} is there" if memory > limit else ""


def _run_inside(entry: Entry | None, leaves: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    assert entry is not None
    values = moved([*leaves, *weights], entry.targets)
    return tree_util.tree_leaves(compile_entry(entry, lambda _: values).jitted(*values))


def _rounding(plan: Plan) -> Rounding:
    jaxpr = answered_call(plan).posed.call.traced.jaxpr
    return Rounding.of(getattr(jaxpr, "jaxpr", jaxpr), plan.hardware.platform)
