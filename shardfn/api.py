"""`shard`, `plan`, `explain`, `reshard`, `load_layout`: the functions of the public API."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardfn import layoutfile
from shardfn.errors import Problem, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend import option_checks, other_words
from shardfn.frontend.ambient_mesh import on_mesh_around, reshard_traced
from shardfn.frontend.callee import describe, is_function
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.options import OPTION_NAMES, Options
from shardfn.frontend.outer_call import is_on_parts
from shardfn.frontend.strategy import shape_of, short
from shardfn.layoutfile.files import LayoutFile
from shardfn.planning.plan import Plan
from shardfn.report.report import Report, in_detail, make_report
from shardfn.runtime import sharded_module as _sharded_module  # noqa: F401  (registers a pytree)
from shardfn.runtime.sharded_function import ShardedFunction

P = ParamSpec("P")
R = TypeVar("R")


class More(TypedDict, total=False):
    """The keyword-only options of `shard`."""

    parameter_plan: Mapping[str, Any] | None
    search_mode: str | None
    style: str | None
    memory_limit: int | float | str | None
    compile_candidates: int | str
    rehearse_candidates: int
    time_limit: float | None
    budget: str | int | float
    tolerance: float | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    layout: Any
    compiler_options: Mapping[str, Any] | None
    closed_over: str
    assumed_trips: int
    check: bool


@overload
def shard(
    fn: Callable[P, R],
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int | str | None = None,
    **options: Unpack[More],
) -> ShardedFunction[P, R]: ...
@overload
def shard(
    fn: None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int | str | None = None,
    **options: Unpack[More],
) -> Callable[[Callable[P, R]], ShardedFunction[P, R]]: ...
def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int | str | None = None,
    **options: Unpack[More],
) -> Any:
    """Shard a function by integers: the number of shards of each dimension of each argument.

    Args:
      fn: any JAX function, method, module object or `functools.partial`. Without it, `shard` returns a decorator.
      in_strategy: a tuple with one entry for each positional argument that is not static, or None to leave all of them to
        the search. Entries are

        - a tuple of ints, the number of shards of each dimension; `AUTO` in it leaves that dimension to the search
        - `AUTO`: the search chooses
        - `REPLICATED`: every device holds the full array, of any rank
        - `DATA_PARALLEL`, or None: dimension 0 over all devices where it divides, else replicated. Weights included
        - a `PartitionSpec` on the mesh of `device`, a `NamedSharding`, or a `shardfn.mindspore.Layout`
        - for a pytree argument, one entry for all its arrays, or a container of entries with its structure.
      out_strategy: a tuple with one entry for each element of a returned tuple; for any other result of one entry. None
        leaves the results to propagation.
      device: "CPU", "GPU", "TPU", a device, a list of them, a `jax.sharding.Mesh`, whose axes the plan then uses, or hardware to
        plan for ("tpu-v5e:4x8"). None is the mesh around the call (`jax.set_mesh`), or else all devices.
      level: the objective of the search: "communication" (0), the least time in communication with the work evenly spread;
        "memory" (1), the smallest peak per device; or "time" (2), the shortest modelled step. None is that of the layout file, or
        else "communication".
      options: the options below, by keyword.
      parameter_plan: entries by path or glob, `{"params/layers/*/w1": (1, 4)}`. They override `in_strategy`.
      search_mode: the name of a search: "auto", "sharding_propagation", "dynamic_programming", "recursive_programming" or
        one of `register_search`. If named, and not "auto", it also chooses the shardings of ops when no argument is open.
      style: the parallel style of the plan: "data_parallel", "zero1", "fsdp", "tensor_parallel" or "fsdp_tensor_parallel".
        The search compares the plans of that style alone. Arrays with an entry keep it.
      memory_limit: bytes per device, or text such as "14GiB"; None for the memory of the device.
      compile_candidates: how many of the best plans XLA compiles, at most 64; the best one as compiled wins. "auto" chooses how
        many, so that compiling adds at most the search's work; none where the devices are not here.
      rehearse_candidates: how many of the best plans one GPU measures (`Plan.rehearse`), at most 64; the best one by measured
        compute and modelled communication wins.
      time_limit: seconds for the search, tracing excluded. Without it the search reads no clock, and the plan is the same on
        every machine.
      budget: the work of the search: "fast" (a quarter), "default" or "thorough" (ten times as much), or a number of ops visited.
        More never gives a worse plan.
      tolerance: the search ends when its plan is proved to cost at most this part more than the optimum of the cost model. 0 ends
        it by the budget alone. None is 0.01, or 0 with budget="thorough".
      static_argnums: positions of static arguments, as in `jax.jit`.
      static_argnames: names of static arguments, as in `jax.jit`.
      donate_argnums: positions of donated arguments, as in `jax.jit`.
      donate_argnames: names of donated arguments, as in `jax.jit`.
      layout: a layout file (its path), a recipe ("llama/fsdp-tp"), a result of `load_layout`, or a plan. It applies to the
        arrays that no entry names.
      compiler_options: XLA options, as in `jax.jit`. A call inside another `jit` ignores them.
      closed_over: what becomes of arrays that the function closes over. "constant": every device holds all of each, as in
        `jax.jit`. "argument": they are sharded as arguments are, by the search or by `parameter_plan`, with paths such as
        "closed_over/weights".
      assumed_trips: how often the cost model counts a loop whose length is not known before it runs, such as that of
        `lax.while_loop`. It changes no result.
      check: whether the first call with new shapes also runs the unsharded function, and compares results and gradients leaf by
        leaf (`ShardedFunction.check`). A difference beyond rounding is a `CheckError`. The function runs a few more times.

    Returns:
      A `ShardedFunction`. It plans on the first call with new shapes, and then runs as an ordinary JAX function.

    Raises:
      ShardError: an option is wrong. A call raises it for its arguments: all problems at once, before anything compiles.

    >>> import jax.numpy as jnp
    >>> dense = shard(lambda x, w: x @ w, ((1, 1), (1, 1)), ((1, 1),))
    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    raise_problems(
        Problem(f"`shard` has no option {name!r}", f"{name} = {short(value)}", "an option of that name would have no effect",
                other_words.option_fix(name, OPTION_NAMES), is_type=True)
        for name, value in options.items() if name not in OPTION_NAMES
    )  # fmt: skip
    asked = Options(in_strategy, out_strategy, device, level, **options)
    return functools.partial(_sharded, options=asked) if fn is None else _sharded(fn, asked)


def plan(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
    """Plan a call without running it. No device is needed.

    Args:
      fn: the function, or a `ShardedFunction`, whose options then apply.
      args: the positional arguments of the call: arrays, or their shapes (`jax.ShapeDtypeStruct`).
      kwargs: options of `shard`, and keyword arguments of the call.

    Returns:
      The `Plan`.

    Raises:
      ShardError: all problems of the call, or a keyword that is both an option of `shard` and a parameter of `fn`.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    >>> made = plan(lambda x, w: x @ w, x, w, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    >>> made.mesh.axis_sizes, made.outputs[0].strategy
    ((16, 16), (16, 16))
    """
    if not is_function(fn):
        _not_a_function(fn, "plan", "pass the function first, and then its arguments: plan(f, x)")
    function, rest = with_options(fn, kwargs)
    return function.plan(*args, **rest)


def explain(
    fn: Callable[..., Any] | Plan,
    /,
    *args: Any,
    compiled: bool = False,
    run: bool = False,
    rehearse: bool = False,
    detail: str = "short",
    **kwargs: Any,
) -> Report:
    """The report of a call or of a plan: kind of plan, shardings and who chose them, collectives with file and line, memory.

    Args:
      fn: the function, a `ShardedFunction`, or a plan.
      args: the positional arguments of the call; none for a plan.
      compiled: whether to compile the call and put XLA's collectives and memory beside the predicted ones.
      run: whether to run the call once, and report what only a run knows: the tokens of each expert (`experts.route`).
      rehearse: whether to measure compute and memory of one device's part on one GPU (`Plan.rehearse`).
      detail: "short", or "full" for every section.
      kwargs: as in `plan`; none for a plan.

    Returns:
      The `Report`. Print it, `save` it as a page, or use `to_dict`.

    Raises:
      ShardError: all problems of the call; or arguments beside a plan.

    >>> import jax
    >>> made = plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
    >>> explain(made).to_dict()["arguments"][0]["strategy"]
    [4]
    """
    if isinstance(fn, Plan):
        if args or kwargs or run:
            named = {**kwargs, **({"run": True} if run else {})}
            given = [*map(short, args), *(f"{name}={short(value)}" for name, value in named.items())]
            fail(StrategyTypeError, f"the plan of `{fn.function}` takes no arguments",
                 where=f"explain(plan, {', '.join(given)})", why="a plan has its own arguments and options",
                 fix="write explain(plan), or explain the function with these")  # fmt: skip
        fn = fn.rehearse() if rehearse else fn
        return in_detail(fn.verify() if compiled else make_report(fn), detail)
    if not is_function(fn):
        _not_a_function(fn, "explain", "pass the function first, and then its arguments: explain(f, x)")
    function, rest = with_options(fn, kwargs)
    return function.explain(*args, compiled=compiled, run=run, rehearse=rehearse, detail=detail, **rest)


def load_layout(path: str | os.PathLike[str] | LayoutFile | Plan) -> LayoutFile:
    """Read a layout file, or a recipe.

    Args:
      path: a file that `plan.save` or a person wrote, the name of a recipe ("llama/fsdp-tp"), or a plan.

    Returns:
      The layout. It equals the plan it was saved from; `shard(f, layout=...)` uses it, as it does the path. It has no costs:
      `plan(f, *args, layout=layout)` makes a plan of it.

    Raises:
      ShardError: all problems of the file.

    >>> load_layout("llama/fsdp-tp").mesh
    (('data', None), ('model', 4))
    """
    return layoutfile.read_layout(path)


def reshard(x: jax.Array, sharding: Any) -> jax.Array:
    """Move an array to another sharding. In a traced function it is a sharding constraint.

    Args:
      x: an array of any shape.
      sharding: a `NamedSharding`, a `shardfn.mindspore.Layout`, or a `PartitionSpec` on the mesh around: that of
        `shard(f, device=mesh)` or `jax.set_mesh`.

    Returns:
      The array with that sharding. On a single device a Layout has no effect, nor has any in a loss that is called on a part of
      the batch (`shardfn.train`).

    Raises:
      StrategyTypeError: `x` is no array, or `sharding` none of these.
      StrategyError: there is no mesh around, or the PartitionSpec does not fit it.
      LayoutError: the Layout does not fit the array or the devices.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> reshard(jnp.ones((4, 2)), NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))).shape
    (4, 2)
    """
    if shape_of(x) is None or not hasattr(x, "shape"):
        fail(StrategyTypeError, f"`reshard` takes an array, not {a(x)}", where=f"x = {short(x)}",
             why="only arrays have shardings", fix="pass a jax.Array, such as jnp.asarray(x)")  # fmt: skip
    if not isinstance(sharding, NamedSharding | PartitionSpec | MeshLayout):
        fail(StrategyTypeError, f"`reshard` takes a NamedSharding, a PartitionSpec or a Layout, not {a(sharding)}",
             where=f"sharding = {short(sharding)}",
             why="it has to say which device holds which shard",
             fix='build one: NamedSharding(mesh, PartitionSpec("data", None))')  # fmt: skip
    if is_on_parts("reshard"):
        return x
    if isinstance(sharding, PartitionSpec):
        sharding = on_mesh_around(x, sharding)
    wanted: Any = sharding
    if not isinstance(sharding, NamedSharding):
        wanted.slice_shape(x.shape)
        devices = jax.devices()
        if len(devices) == 1:
            return x
        sharding = wanted.sharding(devices[: wanted.size])
    is_traced = isinstance(x, Tracer) or isinstance(sharding.mesh, AbstractMesh)
    return reshard_traced(x, sharding) if is_traced else jax.device_put(x, sharding)


def with_options(fn: Any, kwargs: Mapping[str, Any]) -> tuple[ShardedFunction[..., Any], dict[str, Any]]:
    """`fn` sharded with the options of `shard` among `kwargs`, and the rest of `kwargs`."""
    mine = {name: kwargs[name] for name in OPTION_NAMES if name in kwargs}
    rest = {name: value for name, value in kwargs.items() if name not in mine}
    signature = (
        fn.callee.signature if isinstance(fn, ShardedFunction) else describe(fn).signature if callable(fn) else None
    )
    parameters = dict(signature.parameters) if signature else {}
    for name in mine.keys() & parameters.keys():
        option_checks.refuse_clash(name, mine[name], "shardfn", f"shard(f, {name}=...).plan(...)")
    if isinstance(fn, ShardedFunction):
        if not mine:
            return fn, rest
        mine = {name: getattr(fn.options, name) for name in OPTION_NAMES} | mine
        fn = fn.fn
    function: ShardedFunction[..., Any] = shard(fn, **mine)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in rest if name not in parameters]
    if unknown and parameters and not takes_any:
        fail(StrategyTypeError, f"`{unknown[0]}` is no argument of the function, and no option of `shard`",
             where=f"{unknown[0]} = {short(rest[unknown[0]])}", why=f"the function's arguments are {', '.join(parameters)}",
             fix=other_words.option_fix(unknown[0], [*parameters, *OPTION_NAMES]))  # fmt: skip
    return function, rest


def _not_a_function(fn: Any, called: str, fix: str) -> NoReturn:
    fail(StrategyTypeError, f"`{called}` takes a function, not {a(fn)}", where=f"fn = {short(fn)}",
         why=f"the first argument of `{called}` is the function that is sharded", fix=fix)  # fmt: skip


def _sharded(fn: Callable[P, R], options: Options) -> ShardedFunction[P, R]:
    if not is_function(fn) or isinstance(fn, staticmethod):
        fix = "pass the function first: shard(fn, in_strategy, out_strategy)"
        if isinstance(fn, tuple | list):
            fix += f"; as a decorator, name the strategy: @shard(in_strategy={short(tuple(fn))})"
        if isinstance(fn, classmethod | staticmethod | property):
            fix = f"write @{type(fn).__name__} above @shard"
        if isinstance(fn, Plan):
            fix = "pass the function first, and the plan as its layout: shard(fn, layout=plan)"
        _not_a_function(fn, "shard", fix)
    sharded = ShardedFunction(fn, options)
    option_checks.check(options, sharded.callee.signature)
    if any(i < 0 for i in (*options.static_argnums, *options.donate_argnums)):  # counted from the end
        count = len(option_checks.positional(sharded.callee.signature))
        static, donated = ({i % count for i in n} for n in (options.static_argnums, options.donate_argnums))
        options = dataclasses.replace(options, static_argnums=tuple(static), donate_argnums=tuple(donated))
        return ShardedFunction(fn, options)
    return sharded
