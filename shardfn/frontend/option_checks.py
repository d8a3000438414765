"""What is wrong with the options of `shard`, found when it is called: whatever its arguments will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from shardfn import search
from shardfn.cost.devices import hardware
from shardfn.errors import Problem, ShardError, StrategyTypeError, a, closest, did_you_mean, fail, raise_problems
from shardfn.frontend import other_words
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.frontend.closed_over import OPTIONS as CLOSED_OVER
from shardfn.frontend.options import Options
from shardfn.frontend.parameter_plan import apply_parameter_plan
from shardfn.frontend.strategy import not_a_tuple, short
from shardfn.frontend.validation import any_of
from shardfn.frontend.value_checks import boolean, integer, one_of, option_problems
from shardfn.search.generators import STYLES
from shardfn.search.problem import BUDGETS, OBJECTIVES

MOST_COMPILED = 64
"""A search finds about thirty plans worth compiling; each takes seconds to minutes."""


def problems(options: Options, signature: inspect.Signature | None) -> list[Problem]:
    """All of it; `signature` is the function's, where it has one."""
    device, search_mode = ([p for error in errors for p in error.problems] for errors in _refusals(options))
    of_arguments = _of_the_arguments(options, signature)
    return [*_of_any_function(options, dynamic(options, signature)), *device, *of_arguments, *search_mode]


def check(options: Options, signature: inspect.Signature | None) -> None:
    """Raise one error that holds all `problems`; of an unknown search or device alone it is a ContextError or a DeviceError."""
    found, refusals = problems(options, signature), [error for errors in _refusals(options) for error in errors]
    if len(refusals) == 1 and found == [*refusals[0].problems] and not found[0].is_type:
        raise refusals[0]
    raise_problems(found)


def refuse_clash(name: str, value: Any, owner: str, fix: str) -> NoReturn:
    """Raise that a keyword could be the function's parameter or an option of `owner`.

    Raises:
      StrategyTypeError: always.
    """
    fail(StrategyTypeError, f"`{name}` is a parameter of the function and an option of {owner}",
         where=f"{name} = {short(value)}", why="the keyword could mean either",
         fix=f"write {fix}: every keyword of that `plan` goes to the function")  # fmt: skip


def positional(signature: inspect.Signature | None) -> list[str]:
    """The parameters that are given by their place."""
    parameters = signature.parameters.values() if signature else ()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _of_the_arguments(options: Options, signature: inspect.Signature | None) -> Iterator[Problem]:
    """What is wrong with static_argnums and its three companions, held against the function's parameters."""
    parameters = dict(signature.parameters) if signature else {}
    kinds = {p.kind for p in parameters.values()}
    by_place = positional(signature)
    endless = signature is None or inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = signature is None or inspect.Parameter.VAR_KEYWORD in kinds
    places: dict[str, dict[str, Any]] = {"static": {}, "donate": {}}
    for word, found in places.items():
        for i in getattr(options, f"{word}_argnums"):
            where = f"{word}_argnums = {short(getattr(options, f'{word}_argnums'))}"
            if not isinstance(i, int) or isinstance(i, bool):
                yield Problem(f"`{word}_argnums` holds {a(i)}", where, "arguments are counted by ints, from 0",
                              f"write ints there, or names in {word}_argnames", is_type=True)  # fmt: skip
            elif (i < 0 and endless) or (not endless and not -len(by_place) <= i < len(by_place)):
                word_for = "argument" if len(by_place) == 1 else "arguments"
                why = f"the function has {len(by_place)} positional {word_for}: {', '.join(by_place) or 'none'}"
                if endless:
                    why = "the function takes any number of arguments"
                yield Problem(f"`{word}_argnums` names argument {i}, which does not exist", where, why,
                              "count from 0" + (f", up to {len(by_place) - 1}" if not endless else ""))  # fmt: skip
            elif by_place and i < len(by_place):
                found[by_place[i]] = i
        for name in getattr(options, f"{word}_argnames"):
            where = f"{word}_argnames = {short(getattr(options, f'{word}_argnames'))}"
            if not isinstance(name, str):
                yield Problem(f"`{word}_argnames` holds {a(name)}", where, "an argument's name is a string",
                              f"write names there, or numbers in {word}_argnums", is_type=True)  # fmt: skip
            elif name not in parameters and not any_name:
                yield Problem(f"`{word}_argnames` names `{name}`, which is no argument of the function", where,
                              f"its arguments are {', '.join(parameters) or 'none'}",
                              did_you_mean(closest(name, parameters)) or "use one of these names")  # fmt: skip
            else:
                found[name] = name
    for name in places["static"].keys() & places["donate"].keys():
        yield Problem(f"`{name}` is static and donated", f"static: {name}; donated: {name}",
                      "a static argument is no array, so it has no memory to give away",
                      "take it out of the static or out of the donated arguments")  # fmt: skip


def dynamic(options: Options, signature: inspect.Signature | None) -> list[str]:
    """The positional parameters that have entries: those that no option makes static."""
    names = positional(signature)
    static = {names[i] for i in options.static_argnums if isinstance(i, int) and -len(names) <= i < len(names)}
    return [name for name in names if name not in static and name not in options.static_argnames]


def _of_any_function(options: Options, arguments: Sequence[str]) -> list[Problem]:
    """What is wrong with the options whatever the function is; `arguments` are named where a fix has them in their order."""
    problems: list[Problem] = []
    level = options.level
    is_type = isinstance(level, bool) or not isinstance(level, int | str)
    if level is not None and (is_type or level not in (0, 1, 2)):
        what = f"`level` is {a(level)}" if is_type else f"`level` is {short(level)}, which is no objective"
        fix = (isinstance(level, str) and other_words.level_fix(level, OBJECTIVES)) or (
            f"write {any_of([*map(repr, OBJECTIVES)])}, or 0, 1 or 2"
        )
        why = "the level is the objective of the search"
        is_type = is_type or isinstance(level, str)  # as in MindSpore
        problems.append(Problem(what, f"level = {short(level)}", why, fix, is_type=is_type))
    if options.memory_limit is not None and isinstance(
        found := bytes_of(options.memory_limit, "memory_limit"), Problem
    ):
        problems.append(found)
    problems += [*_of_the_style(options), *_bounds(options), *_of_the_compiler(options.compiler_options)]
    problems += option_problems(one_of(*CLOSED_OVER), "closed_over", options.closed_over)
    problems += option_problems(integer(1), "assumed_trips", options.assumed_trips)
    problems += option_problems(boolean, "check", options.check)
    for name in ("in_strategy", "out_strategy"):
        value = getattr(options, name)
        if value is not None and (problem := not_a_tuple(value, name, arguments)):
            problems.append(problem)
    apply_parameter_plan((), options.parameter_plan, found := [])
    problems += [p for p in found if p.is_type]
    return problems


def _of_the_style(options: Options) -> Iterator[Problem]:
    style = options.style
    if style is None:
        return
    where = f"style = {short(style)}"
    if not isinstance(style, str):
        yield Problem(f"`style` is {a(style)}", where, "a style is asked for by its name",
                      f"write {any_of([*map(repr, STYLES)])}", is_type=True)  # fmt: skip
    elif style not in STYLES:
        yield Problem(f"there is no style {short(style)}", where, f"the styles are {', '.join(STYLES)}",
                      other_words.style_fix(style, STYLES))  # fmt: skip
    elif options.search_mode not in (None, "auto"):
        yield Problem(f"`style` and `search_mode` both choose how to search: {style!r} and {short(options.search_mode)}",
                      f"{where}, search_mode = {short(options.search_mode)}", "a style compares the plans of that style alone",
                      "leave one of the two out")  # fmt: skip


def _bounds(options: Options) -> Iterator[Problem]:
    count, seconds, rehearsed = options.compile_candidates, options.time_limit, options.rehearse_candidates
    is_count = isinstance(count, int) and not isinstance(count, bool)
    close = did_you_mean(closest(count, ["auto"])) if isinstance(count, str) else ""
    if count != "auto" and not (is_count and 0 <= int(count) <= MOST_COMPILED):
        yield Problem(f'`compile_candidates` must be an int from 0 to {MOST_COMPILED}, or "auto"',
                      f"compile_candidates = {short(count)}", "so many plans are compiled, and the best compiled one wins",
                      close or "write 0 to compile none, or 4", is_type=not isinstance(count, str) and not is_count)  # fmt: skip
    is_int = isinstance(rehearsed, int) and not isinstance(rehearsed, bool)
    if not is_int or not 0 <= rehearsed <= MOST_COMPILED:
        yield Problem(f"`rehearse_candidates` must be an int from 0 to {MOST_COMPILED}",
                      f"rehearse_candidates = {short(rehearsed)}",
                      "so many plans are measured on one GPU, and the best measured one wins",
                      "write 0 to measure none, or 5", is_type=not is_int)  # fmt: skip
    if count and rehearsed:
        yield Problem("`compile_candidates` and `rehearse_candidates` both choose the plan",
                      f"compile_candidates = {short(count)}, rehearse_candidates = {short(rehearsed)}",
                      "a rehearsal compiles its plan too", "leave compile_candidates out")  # fmt: skip
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and (not is_number or not seconds > 0):
        yield Problem("`time_limit` must be a number of seconds above 0", f"time_limit = {short(seconds)}",
                      "the search answers with the best it has after so long", "write 60", is_type=not is_number)  # fmt: skip
    part = options.tolerance
    is_number = isinstance(part, int | float) and not isinstance(part, bool)
    if part is not None and (not is_number or not 0 <= part < 1):
        yield Problem("`tolerance` must be a number from 0 to 1", f"tolerance = {short(part)}",
                      "the search ends when its plan is proved to cost at most this part more than the optimum",
                      "write 0.01, or 0 to search until the budget is spent", is_type=not is_number)  # fmt: skip
    work = options.budget
    is_number = isinstance(work, int | float) and not isinstance(work, bool)
    if not ((is_number and not isinstance(work, str) and work > 0) or (isinstance(work, str) and work in BUDGETS)):
        close = did_you_mean(closest(work, BUDGETS)) if isinstance(work, str) else ""
        yield Problem("`budget` must be a name, or a number of ops visited above 0", f"budget = {short(work)}",
                      "it is the work of the search: each candidate visits every op of the program once",
                      close or f"write {any_of([*map(repr, BUDGETS)])}, or 100_000",
                      is_type=not is_number and not isinstance(work, str))  # fmt: skip


def _of_the_compiler(given: Any) -> Iterator[Problem]:
    odd = [key for key in given if not isinstance(key, str)] if isinstance(given, Mapping) else []
    if given is not None and (odd or not isinstance(given, Mapping)):
        what = f"holds {a(odd[0])} for a name" if odd else f"must be a dict, but it is {a(given)}"
        yield Problem(f"`compiler_options` {what}", f"compiler_options = {short(given)}",
                      "it gives XLA's options values, by their names",
                      'write {"xla_cpu_enable_fast_math": True}, or leave it out', is_type=True)  # fmt: skip


def _refusals(options: Options) -> tuple[list[ShardError], list[ShardError]]:
    """The errors of a device that is none whatever devices are here, and of an unknown search."""

    def error_of(lookup: Callable[[Any], object], value: Any) -> list[ShardError]:
        try:
            lookup(value)
        except ShardError as error:
            return [error]
        return []

    device, mode = options.device, options.search_mode
    is_target = isinstance(device, str) and (":" in device or device.strip().lower() in hardware.CHIPS.keys() - {"cpu"})
    is_known = not is_target and not isinstance(device, bool | int | float)
    return [] if is_known else error_of(hardware.resolve, device), [] if mode is None else error_of(search.select, mode)
