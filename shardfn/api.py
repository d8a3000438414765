"""`shard`, `plan`, `explain`, `reshard`: what a user calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
from jax.core import Tracer

from shardfn import layoutfile
from shardfn.errors import StrategyTypeError, a, fail, nearest
from shardfn.frontend import option_checks
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import shape_of, short
from shardfn.layoutfile.files import LayoutFile
from shardfn.planning.plan import Plan
from shardfn.report.report import Report, in_detail, make_report
from shardfn.runtime.sharded_function import ShardedFunction


class More(TypedDict, total=False):
    """The keyword-only options of `shard`."""

    parameter_plan: dict[str, Any] | None
    search_mode: str | None
    memory_limit: int | float | str | None
    compile_candidates: int
    time_limit: float | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    layout: Any
    compiler_options: Mapping[str, Any] | None


@overload
def shard(
    fn: Callable[..., Any],
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int = 0,
    **options: Unpack[More],
) -> ShardedFunction: ...
@overload
def shard(
    fn: None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int = 0,
    **options: Unpack[More],
) -> Callable[[Callable[..., Any]], ShardedFunction]: ...
def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int = 0,
    *,
    parameter_plan: dict[str, Any] | None = None,
    search_mode: str | None = None,
    memory_limit: int | float | str | None = None,
    compile_candidates: int = 0,
    time_limit: float | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    layout: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Shard a function from integers: how many ways each dimension of each argument is cut.

    Args:
      fn: any JAX function, method, module object or `functools.partial`; without it, a decorator is returned.
      in_strategy: a tuple with one entry for each positional argument (static ones have none), or None for AUTO
        throughout. An entry is a tuple with the number of pieces of each dim, None (as a batch in data parallel: dim 0
        over all devices where it divides, else whole; of weights too), `AUTO`, a `Layout`, a `PartitionSpec`, a
        `NamedSharding`, or, for a pytree argument, a container of entries with its structure.
      out_strategy: the same for the results: always a tuple, with one entry for each element if the function returns a
        tuple, else with one entry. None leaves results to propagation.
      device: "CPU", "GPU", "TPU", a list of devices, a mesh, or a target to plan for ("tpu-v5e:4x8").
      level: what the search makes best: 0 most compute per byte communicated, 1 least memory per device, 2 least time.
      parameter_plan: entries by path glob, `{"params/layers/*/w1": (1, 4)}`; they win over `in_strategy`.
      search_mode: name of the search for what is left open (`search.MODES`); the context's if None. One that is named, but
        for "auto", decides the layouts inside where no argument is open, too.
      memory_limit: bytes that one device may hold, or text such as "14GiB"; what the device has if None.
      compile_candidates: how many of the best plans are compiled, plain layouts among them, for the best compiled one to win; at
        most 64.
      time_limit: seconds after which the search answers with the best it has; what is under way then is ended, and the
        plan's `policy` says what there was no time for. Tracing comes before. Without it no clock is read: what a search
        may do is counted, and the plan is the same on every machine, however busy.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.
      layout: a layout file by its path, a recipe by its name ("llama/fsdp-tp"), what `load_layout` gives, or a plan: it lays
        out what no entry speaks of.
      compiler_options: what XLA is told for this function's compile; a call inside another `jit` is compiled with that.

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
        in_strategy, out_strategy, device, level, parameter_plan, search_mode, memory_limit, compile_candidates,
        time_limit, _several(static_argnums), _several(static_argnames), _several(donate_argnums), _several(donate_argnames),
        layout,
        dict(compiler_options) if isinstance(compiler_options, Mapping) else compiler_options,
    )  # fmt: skip
    if fn is None:
        return functools.partial(_sharded, options=options)
    return _sharded(fn, options)


def plan(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Plan a call without running it; `args` may be shapes (`jax.ShapeDtypeStruct`), and no device is needed.

    Keyword arguments that `shard` knows are options, the others go to `fn`.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    >>> made = plan(lambda x, w: x @ w, x, w, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    >>> made.mesh.axis_sizes, made.outputs[0].strategy
    ((16, 16), (16, 16))
    """
    function, rest = with_options(fn, kwargs)
    return function.plan(*args, **rest)


def explain(
    fn: Callable[..., Any] | Plan, *args: Any, compiled: bool = False, detail: str = "short", **kwargs: Any
) -> Report:
    """The report of a call or of a plan: kind of plan, shardings and who chose them, collectives with file and line, memory.

    Args:
      fn: a function, a `ShardedFunction`, or a plan, which takes no arguments.
      *args: the arguments of the call, or their shapes.
      compiled: compile the call and compare XLA's program with the prediction. This needs the devices; for a plan it is
        `Plan.verify`.
      detail: "short", or "full" for every section.
      **kwargs: options of `shard` and keyword arguments of `fn`, as in `plan`.

    Returns:
      The report.

    Raises:
      ShardError: with everything that is wrong with the call.

    >>> import jax
    >>> made = plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
    >>> explain(made).to_dict()["arguments"][0]["strategy"]
    [4]
    """
    if isinstance(fn, Plan):
        if args or kwargs:
            given = [*map(short, args), *(f"{name}={short(value)}" for name, value in kwargs.items())]
            fail(StrategyTypeError, f"the plan of `{fn.function}` is explained by itself",
                 where=f"explain(plan, {', '.join(given)})", why="it was made for its own arguments and options",
                 fix="write explain(plan), or explain the function with these")  # fmt: skip
        return in_detail(fn.verify() if compiled else make_report(fn), detail)
    function, rest = with_options(fn, kwargs)
    return function.explain(*args, compiled=compiled, detail=detail, **rest)


def load_layout(path: Any) -> LayoutFile:
    """A layout file, saved by `plan.save` or written by hand, or a recipe by its name ("llama/fsdp-tp").

    It equals the plan that it was saved from; `shard(f, layout=...)` and `plan(f, ..., layout=...)` use it, or the path.

    Raises:
      ShardError: all that is wrong with the file.

    >>> load_layout("llama/fsdp-tp").mesh
    (('data', None), ('model', 4))
    """
    return layoutfile.read_layout(path)


def reshard(x: Any, layout: Any) -> Any:
    """Lay an array out anew; inside a jitted function a constraint, outside a move.

    >>> import jax.numpy as jnp
    >>> from shardfn.mindspore import Layout
    >>> reshard(jnp.ones((4, 2)), Layout((1,), ("dp",))("dp", "None")).shape
    (4, 2)

    Raises:
      StrategyTypeError: `x` is no array, or `layout` no Layout. LayoutError: it does not fit the array or the devices.
    """
    if shape_of(x) is None or not hasattr(x, "shape"):
        fail(StrategyTypeError, f"`reshard` takes an array, not {a(x)}", where=f"x = {short(x)}",
             why="only arrays lie on devices", fix="pass a jax.Array, such as jnp.asarray(x)")  # fmt: skip
    if not isinstance(layout, MeshLayout):
        fail(StrategyTypeError, f"`reshard` takes a Layout, not {a(layout)}", where=f"layout = {short(layout)}",
             why="the cuts of a tuple do not say which devices hold which piece",
             fix='build one: Layout((2, 4), ("dp", "mp"))("dp", "None")')  # fmt: skip
    wanted: Any = layout
    wanted.slice_shape(x.shape)
    devices = jax.devices()
    if len(devices) == 1:
        return x
    sharding = wanted.sharding(devices[: wanted.size])
    if isinstance(x, Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options))


def with_options(fn: Any, kwargs: dict[str, Any]) -> tuple[ShardedFunction, dict[str, Any]]:
    """`fn` sharded with the options of `shard` that `kwargs` holds, and the rest of `kwargs`."""
    mine = {k: kwargs.pop(k) for k in _OPTION_NAMES if k in kwargs}
    if isinstance(fn, ShardedFunction):
        if not mine:
            return fn, kwargs
        mine = {name: getattr(fn.options, name) for name in _OPTION_NAMES} | mine
        fn = fn.fn
    function: Any = shard(fn, **mine)
    taken = function.callee.signature.parameters if function.callee.signature else {}
    unknown = [name for name in kwargs if name not in taken]
    if unknown and taken and all(p.kind is not p.VAR_KEYWORD for p in taken.values()):
        fail(StrategyTypeError, f"`{unknown[0]}` is no argument of the function, and no option of `shard`",
             where=f"{unknown[0]} = {short(kwargs[unknown[0]])}", why=f"the function's arguments are {', '.join(taken)}",
             fix=nearest(unknown[0], [*taken, *_OPTION_NAMES]))  # fmt: skip
    return function, kwargs


def _several(value: Any) -> tuple[Any, ...]:
    """One number or name, or a sequence of them, as a tuple; checked later."""
    return tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)


def _sharded(fn: Callable[..., Any], options: Options) -> ShardedFunction:
    if not callable(fn):
        fix = "pass the function first: shard(fn, in_strategy, out_strategy)"
        if isinstance(fn, tuple | list):
            fix += f"; as a decorator, name the strategy: @shard(in_strategy={short(tuple(fn))})"
        fail(StrategyTypeError, f"`shard` takes a function, not {a(fn)}", where=f"fn = {short(fn)}",
             why="the first argument is what is sharded", fix=fix)  # fmt: skip
    made = ShardedFunction(fn, options)
    option_checks.check(options, made.callee.signature)
    if any(i < 0 for i in (*options.static_argnums, *options.donate_argnums)):  # counted from the end
        count = len(option_checks.positional(made.callee.signature))
        static, donated = ({i % count for i in n} for n in (options.static_argnums, options.donate_argnums))
        options = dataclasses.replace(options, static_argnums=tuple(static), donate_argnums=tuple(donated))
        return ShardedFunction(fn, options)
    return made
