"""Errors of a user's function while it is traced, where an argument explains them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from shardfn.errors import Problem, ShardError, StrategyTypeError, a, fail
from shardfn.frontend.arguments import Call
from shardfn.frontend.jax_errors import JaxError
from shardfn.frontend.strategy import fix_of_numbers, is_of_numbers, short


@contextlib.contextmanager
def explained_by_arguments(call: Call) -> Iterator[None]:
    """A block that traces a call; a type error that an argument explains becomes one that names it.

    Raises:
      StrategyTypeError: an argument is a Python number whose value the function needs, or numbers where it needs an array.
    """
    try:
        yield
    except ValueError as error:
        if JaxError.TRACED_STATIC.match(error) is None:
            raise
        fail(StrategyTypeError, "a `jax.jit` gets a traced value for one of its static arguments", where="the function, or in it",
             why="`shard` traces all arguments that it is not told to leave static",
             fix="shard the function that jax.jit has, with the same option: shard(f, static_argnums=...)")  # fmt: skip
    except (TypeError, AttributeError, IndexError) as error:
        problems = [] if isinstance(error, ShardError) else list(_causes(call, error))
        if not problems:
            raise
        raise StrategyTypeError(problems) from error


def _causes(call: Call, error: Exception) -> Iterator[Problem]:
    text = " ".join(str(error).split("\n")[0].split())
    dynamic = {slot.name: call.arguments()[slot.name] for slot in call.slots if not slot.is_static}
    if isinstance(error, jax.errors.ConcretizationTypeError) or JaxError.NEEDS_VALUE.match(error):
        named = JaxError.NEEDS_ARGUMENTS.match(error)
        for name, value in dynamic.items():
            is_named = named is None or re.search(rf"\b{re.escape(name)}\b", named["what"]) is not None
            if isinstance(value, bool | int | float) and is_named:
                yield Problem(f"the function needs the value of argument `{name}`, which is traced like an array",
                              f"{name} = {value!r}", f"{type(error).__name__}: {text}",
                              f"make it static, then it has no entry: static_argnames={name!r}", is_type=True)  # fmt: skip
        return
    for name, value in dynamic.items():
        if is_of_numbers(value):
            yield Problem(f"argument `{name}` is {a(value)} of numbers, not an array", f"{name} = {short(value)}",
                          f"it is traced as a pytree of scalars, with which the function fails: {type(error).__name__}: {text}",
                          fix_of_numbers(name, value), is_type=True)  # fmt: skip
