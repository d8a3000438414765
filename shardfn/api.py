"""`shard`, `plan`, `explain`, `reshard`: what a user calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from shardfn import search
from shardfn.cost import hardware
from shardfn.errors import Problem, StrategyTypeError, fail, raise_problems
from shardfn.layout import Layout
from shardfn.plan import Plan
from shardfn.report import Report
from shardfn.sharded import Options, ShardedFunction
from shardfn.strategy import apply_parameter_plan, match, shape_of


def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int = 0,
    *,
    parameter_plan: dict[str, Any] | None = None,
    search_mode: str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> Any:
    """Shard a function from integers: how many ways each dimension of each argument is cut.

    Args:
      fn: any JAX function, method, module object or `functools.partial`; without it, a decorator is returned.
      in_strategy: a tuple with one entry for each positional argument (static ones have none), or None for AUTO
        throughout. An entry is a tuple with the number of pieces of each dim, None (data parallel: dim 0 over all
        devices where it divides, else whole), `AUTO`, a `Layout`, a `PartitionSpec`, a `NamedSharding`, or, for a
        pytree argument, a container of entries with its structure.
      out_strategy: the same for the results: always a tuple, with one entry for each element if the function returns a
        tuple, else with one entry. None leaves results to propagation.
      device: "CPU", "GPU", "TPU", a list of devices, a mesh, or a target to plan for ("tpu-v5e:4x8").
      level: what the search makes best: 0 most compute per byte communicated, 1 least memory per device, 2 least time.
      parameter_plan: entries by path glob, `{"params/layers/*/w1": (1, 4)}`; they win over `in_strategy`.
      search_mode: name of the search for what is left open (`search.MODES`); the context's if None.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.

    Returns:
      A `ShardedFunction`. It plans on the first call with new shapes, and is an ordinary JAX function otherwise.

    Raises:
      ShardError: when called; all problems of a call at once, before anything is compiled.

    >>> import jax.numpy as jnp
    >>> dense = shard(lambda x, w: x @ w, ((1, 1), (1, 1)), ((1, 1),))
    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    options = Options(
        in_strategy, out_strategy, device, level, parameter_plan, search_mode,
        _ints(static_argnums), _names(static_argnames), _ints(donate_argnums), _names(donate_argnames),
    )  # fmt: skip
    if fn is None:
        return functools.partial(_sharded, options=options)
    return _sharded(fn, options)


def plan(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Plan a call without running it; `args` may be `jax.ShapeDtypeStruct`s, and no device is needed.

    Keyword arguments that `shard` knows are options, the others go to `fn`.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    >>> made = plan(lambda x, w: x @ w, x, w, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    >>> made.device_matrix, made.outputs[0].cuts
    ((16, 16), (16, 16))
    """
    function, rest = _with_options(fn, kwargs)
    return function.plan(*args, **rest)


def explain(fn: Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any) -> Report:
    """The report of a call: grid, layouts and their reasons, collectives with file and line, memory, findings.

    `compiled=True` holds the prediction against what XLA compiled (which needs the devices). Other keyword arguments
    are as in `plan`.
    """
    function, rest = _with_options(fn, kwargs)
    return function.explain(*args, compiled=compiled, **rest)


def reshard(x: Any, layout: Layout) -> Any:
    """Lay an array out anew; inside a jitted function a constraint, outside a move.

    >>> import jax.numpy as jnp
    >>> reshard(jnp.ones((4, 2)), Layout((1,), ("dp",))("dp", "None")).shape
    (4, 2)

    Raises:
      StrategyTypeError: `x` is no array, or `layout` no Layout. LayoutError: it does not fit the array or the devices.
    """
    if shape_of(x) is None or not hasattr(x, "shape"):
        fail(StrategyTypeError, f"`reshard` takes an array, not a {type(x).__name__}", fix="pass a jax.Array")
    if not isinstance(layout, Layout):
        fail(StrategyTypeError, f"`reshard` takes a Layout, not a {type(layout).__name__}",
             where=f"layout = {layout!r}", fix='build one: Layout((2, 4), ("dp", "mp"))("dp", "None")')  # fmt: skip
    layout.slice_shape(x.shape)
    devices = jax.devices()
    if len(devices) == 1:
        return x
    sharding = layout.sharding(devices[: layout.size])
    if isinstance(x, Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options))


def _with_options(fn: Any, kwargs: dict[str, Any]) -> tuple[ShardedFunction, dict[str, Any]]:
    mine = {k: kwargs.pop(k) for k in _OPTION_NAMES if k in kwargs}
    if isinstance(fn, ShardedFunction):
        return (ShardedFunction(fn.fn, dataclasses.replace(fn.options, **mine)) if mine else fn), kwargs
    return shard(fn, **mine), kwargs


def _ints(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _sharded(fn: Callable[..., Any], options: Options) -> ShardedFunction:
    if not callable(fn):
        fail(StrategyTypeError, f"`shard` takes a function, not a {type(fn).__name__}", where=f"fn = {fn!r}",
             fix="pass the function first: shard(fn, in_strategy, out_strategy)")  # fmt: skip
    raise_problems(_option_problems(options))
    return ShardedFunction(fn, options)


def _option_problems(options: Options) -> list[Problem]:
    """What is wrong with the options whatever the function is."""
    problems: list[Problem] = []
    level = options.level
    if isinstance(level, bool) or not isinstance(level, int):
        problems.append(Problem(f"`level` must be an int, but it is a {type(level).__name__}", f"level = {level!r}",
                                fix=_LEVELS, is_type=True))  # fmt: skip
    elif level not in (0, 1, 2):
        problems.append(
            Problem(f"`level` is {level}, but there are only 0, 1 and 2", f"level = {level!r}", fix=_LEVELS)
        )
    for name in ("in_strategy", "out_strategy"):
        if getattr(options, name) is not None:
            match((), getattr(options, name), name, found := [])
            problems += [p for p in found if p.is_type]
    apply_parameter_plan((), options.parameter_plan, found := [])
    problems += [p for p in found if p.is_type]
    device = options.device
    if isinstance(device, bool | int | float):
        try:
            hardware.resolve(device)
        except hardware.DeviceTypeError as error:
            problems += error.problems
    if options.search_mode is not None:
        search.select(options.search_mode)
    return problems


_LEVELS = "0 for most compute per byte communicated, 1 for least memory per device, 2 for least time"
