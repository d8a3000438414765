"""Compare a layout file with a model and report everything that does not fit. Nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import tree_util

from shardfn.cost.devices.hardware import resolve
from shardfn.errors import Problem, ShardError
from shardfn.frontend.callee import is_function
from shardfn.frontend.options import Options
from shardfn.frontend.paths import listed, met
from shardfn.frontend.static_leaves import hide_static
from shardfn.frontend.strategy import Argument, leaves_of
from shardfn.layoutfile.files import LayoutFile, LayoutFileError, layout_shardings, read_layout
from shardfn.planning.plan import Plan
from shardfn.runtime.sharded_function import ShardedFunction


def check_layout(layout: Any, model: Any, args: Sequence[Any] = (), *, device: Any = None) -> tuple[Problem, ...]:
    """Everything in a layout file that does not fit a model.

    Args:
      layout: as `load_layout` takes it.
      model: a function, or a pytree of arrays or shapes, such as parameters.
      args: the arguments of the function, arrays or shapes.
      device: as in `shard`; a target such as "tpu-v5e:4x4" needs no devices.

    Returns:
      The problems; empty where the file fits.

    Raises:
      ShardError: the function, its arguments or the device are wrong.

    >>> import jax
    >>> layout = read_layout("llama/fsdp-tp")
    >>> print(check_layout(layout, {"lm_head": jax.ShapeDtypeStruct((6, 8), "float32")}, device="cpu:8")[0].what)
    a rule of llama/fsdp-tp matches no array: `*[qkv]_proj/weight`
    """
    return check_with_plan(layout, model, args, device=device)[0]


def check_with_plan(
    layout: Any, model: Any, args: Sequence[Any] = (), *, device: Any = None
) -> tuple[tuple[Problem, ...], Plan | None]:
    """`check_layout`; also the plan that the layout file gives a function which it fits."""
    found, faults = _read(layout)
    if found is None:
        return faults, None
    try:
        if not is_function(model) or (not args and not tree_util.all_leaves([model])):  # a module may be a tree too
            if nameless := _nameless(found, model):
                return (*faults, *nameless), None
            layout_shardings(found, model, resolve(device))
            return faults, None
        options = Options(device=device, layout=dataclasses.replace(found, every_array_ruled=True))
        plan = ShardedFunction(model, options).plan(*args)
    except ShardError as error:
        return (*faults, *error.problems), None
    if faults:
        return faults, None
    return tuple(
        Problem(text, fix="save a plan of this function")
        for text in plan.diagnostics
        if "[[constraints]]" in text or " has changed since " in text
    ), plan


def _nameless(layout: LayoutFile, tree: Any) -> list[Problem]:
    """Problems of a tuple of arguments that was given without its function, so that its arrays have no argument names."""
    problems: list[Problem] = []
    paths = [leaf.path for leaf in leaves_of(Argument("", "the tree", hide_static(tree)), problems)]
    if type(tree) is not tuple or not layout.arguments or any(met(rule.glob, paths)[0] for rule in layout.arguments):
        return []
    function = layout.function or "function"
    named = f", `{layout.function}`" if layout.function else ""
    found = Problem(f"no rule of {layout.name} matches an array of the tuple, whose items have no names",
                    f"{layout.arguments[0].where(layout.name, 'arguments')}; the tuple has {listed(paths, 3)}",
                    f"a file that a plan wrote names arrays by the arguments of its function{named}",
                    f"give the function with its arguments: --model FILE.py:{function} --args FILE.py:FUNCTION, where FUNCTION "
                    f"returns the tuple; in Python check(layout, {function}, arguments)")  # fmt: skip
    return [*problems, found]


def _read(layout: Any) -> tuple[LayoutFile | None, tuple[Problem, ...]]:
    """The part of the file that can be compared with the model, and what is wrong with the file itself."""
    try:
        return read_layout(layout), ()
    except LayoutFileError as error:
        return error.part, error.problems
    except ShardError as error:
        return None, error.problems
