"""A layout file held against a model: everything that does not fit, at once. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardfn.cost.hardware import resolve
from shardfn.errors import Problem, ShardError
from shardfn.layoutfile import LayoutFile, LayoutFileError, read, shardings
from shardfn.options import Options
from shardfn.plan import Plan
from shardfn.sharded import ShardedFunction


class Alone(ShardedFunction):
    """A sharded function whose layout file has to speak of every array."""

    layout_alone = True


def check(layout: Any, model: Any, args: Sequence[Any] = (), *, device: Any = None) -> tuple[Problem, ...]:
    """What is wrong with a layout file for a model; nothing where it fits.

    Args:
      layout: as `load` takes it.
      model: a function, for `args`, which may be shapes; or a tree of arrays or shapes, of parameters say.
      args: the arguments of the function.
      device: as in `shard`: a target such as "tpu-v5e:4x4" needs no devices.

    Raises:
      ShardError: what is wrong with the function, its arguments or the device.

    >>> import jax
    >>> layout = read("llama/fsdp-tp")
    >>> print(check(layout, {"lm_head": jax.ShapeDtypeStruct((6, 8), "float32")}, device="cpu:8")[0].what)
    a rule of llama/fsdp-tp meets no array: `*[qkv]_proj/weight`
    """
    return checked(layout, model, args, device=device)[0]


def checked(
    layout: Any, model: Any, args: Sequence[Any] = (), *, device: Any = None
) -> tuple[tuple[Problem, ...], Plan | None]:
    """`check`, and the plan by the layout file where it fits a function."""
    found, faults = _read(layout)
    if found is None:
        return faults, None
    try:
        if not callable(model):
            shardings(found, model, resolve(device))
            return faults, None
        sharded: Callable[..., Any] = Alone(model, Options(device=device, layout=found))
        plan = sharded.plan(*args)
    except ShardError as error:
        return (*faults, *error.problems), None
    if faults:
        return faults, None
    return tuple(
        Problem(text, fix="save a plan of this function") for text in plan.findings if "[[inside]]" in text
    ), plan


def _read(layout: Any) -> tuple[LayoutFile | None, tuple[Problem, ...]]:
    """What can be held against the model, and what is wrong with the file itself."""
    try:
        return read(layout), ()
    except LayoutFileError as error:
        return error.part, error.problems
    except ShardError as error:
        return None, error.problems
