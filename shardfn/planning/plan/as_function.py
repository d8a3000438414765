"""What to write where a plan is called as if it were its function, or its function with other arguments."""

from __future__ import annotations

from typing import NoReturn

from shardfn.errors import StrategyTypeError, fail
from shardfn.frontend.arguments import Call
from shardfn.planning.call import CallFunction
from shardfn.planning.plan.plan import Plan, answered_call, argument_names


def refuse_call(plan: Plan) -> NoReturn:
    """`Plan.__call__`.

    Raises:
      StrategyTypeError: always.
    """
    function = None if plan._answered is None else plan._answered.posed.call.function
    name = plan.function if plan.function.isidentifier() else "f"
    given = ", ".join(argument_names(plan) if function is None else _written(function.call))
    fix = f"write shardfn.shard({name}, layout=plan{_statics(function)})({given})"
    if function is not None and _is_as_written(function):
        shardings = "in_shardings=plan.in_shardings, out_shardings=plan.out_shardings"
        fix += f", or with jax.jit alone: jax.jit(plan.apply({name}), {shardings})({given})"
    fail(StrategyTypeError, f"the plan of `{plan.function}` is no function", where=f"plan({given})",
         why=f"a plan says how `{plan.function}` is sharded, and does not hold the function", fix=fix)  # fmt: skip


def code_of_plan(plan: Plan, name: str) -> str:
    """The code that plans the same call again, of arguments by the same names, with the shardings of the plan.

    >>> import jax, shardfn
    >>> code_of_plan(shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), device="cpu:4"), "abs")
    'shardfn.plan(abs, x, layout=plan)'
    """
    function = answered_call(plan).posed.call.function
    name = name if name.isidentifier() else "f"
    return f"shardfn.plan({', '.join([name, *_written(function.call)])}, layout=plan{_statics(function)})"


def _statics(function: CallFunction | None) -> str:
    """The option that makes the static arguments of a call static."""
    names = () if function is None else tuple(slot.name for slot in function.call.slots if slot.is_static)
    return f", static_argnames={names!r}" if names else ""


def _is_as_written(function: CallFunction) -> bool:
    """Whether `plan.apply` of a function takes the arguments of the planned call as they are."""
    call = function.call
    is_plain = not call.stateful and not function.callee.has_held
    return is_plain and all(slot.keyword is None and not slot.is_static for slot in call.slots)


def _written(call: Call) -> list[str]:
    """The arguments of the planned call, by their names."""
    return [slot.name if slot.keyword is None else f"{slot.keyword}={slot.keyword}" for slot in call.slots]
