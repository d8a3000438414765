"""What to write where a plan is called as if it were its function."""

from __future__ import annotations

from typing import NoReturn

from shardfn.errors import StrategyTypeError, fail
from shardfn.frontend.arguments import Call
from shardfn.planning.call import CallFunction
from shardfn.planning.plan.plan import Plan, argument_names


def refuse_call(plan: Plan) -> NoReturn:
    """`Plan.__call__`.

    Raises:
      StrategyTypeError: always.
    """
    function = None if plan._answered is None else plan._answered.posed.call.function
    call = None if function is None else function.call
    given = ", ".join(argument_names(plan) if call is None else _written(call))
    name = plan.function if plan.function.isidentifier() else "f"
    statics = () if call is None else tuple(slot.name for slot in call.slots if slot.is_static)
    options = f", static_argnames={statics!r}" if statics else ""
    fix = f"write shardfn.shard({name}, layout=plan{options})({given})"
    if function is not None and _is_as_written(function):
        shardings = "in_shardings=plan.in_shardings, out_shardings=plan.out_shardings"
        fix += f", or with jax.jit alone: jax.jit(plan.apply({name}), {shardings})({given})"
    fail(StrategyTypeError, f"the plan of `{plan.function}` is no function", where=f"plan({given})",
         why=f"a plan says how `{plan.function}` is sharded, and does not hold the function", fix=fix)  # fmt: skip


def _is_as_written(function: CallFunction) -> bool:
    """Whether `plan.apply` of a function takes the arguments of the planned call as they are."""
    call = function.call
    is_plain = not call.stateful and not function.callee.has_held
    return is_plain and all(slot.keyword is None and not slot.is_static for slot in call.slots)


def _written(call: Call) -> list[str]:
    """The arguments of the planned call, by their names."""
    return [slot.name if slot.keyword is None else f"{slot.keyword}={slot.keyword}" for slot in call.slots]
