"""`shard`, `layout_of` and `get_strategy`, with MindSpore's names and order of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from shardfn import api
from shardfn.layoutfile.mindspore_json import strategies_by_op
from shardfn.mindspore.layout import Layout, spec_layout
from shardfn.planning.plan import Plan, decision_of, op_strategies


def __getattr__(name: str) -> Any:
    if name in ("auto_parallel", "nn"):
        raise AttributeError(f"shardfn.mindspore.parallel has no {name}: instead of AutoParallel(cell) use cell.shard(...), or "
                             "shardfn.train.step; instead of PipelineCell, shardfn.train.pipeline")  # fmt: skip
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    parameter_plan: Any = None,
    device: Any = None,
    level: Any = None,
    **options: Any,
) -> Any:
    """`shardfn.shard` with the order of arguments of MindSpore 2.x; by position also the older one, `(in_strategy,
    out_strategy, device, level)`, which the types tell apart.

    Args:
      fn: a function, a method, a module or a `Cell`; without it, a decorator is returned.
      in_strategy: one entry for each positional argument, such as `((8, 1), (1, 4))`; None leaves all to the search.
      out_strategy: one entry for each result.
      parameter_plan: entries of parameters by path.
      device: "CPU", "GPU", "TPU", "Ascend", a list of devices, a mesh, or a target such as "tpu-v5e:4x8".
      level: the objective: 0 communication, 1 memory, 2 time.
      options: the other options of `shardfn.shard`, by keyword.

    Returns:
      A `ShardedFunction`.

    Raises:
      ShardError: when it is called: all problems of the call at once.

    >>> import jax.numpy as jnp
    >>> dense = shard(lambda x, w: x @ w, ((1, 1), (1, 1)), None, {"w": (1, 1)})
    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    if fn is None:
        return functools.partial(shard, in_strategy=in_strategy, out_strategy=out_strategy,
                                 parameter_plan=parameter_plan, device=device, level=level, **options)  # fmt: skip
    parameter_plan, device, level = by_type(parameter_plan, device, level)
    return api.shard(fn, in_strategy, out_strategy, device, level, parameter_plan=parameter_plan, **options)


def by_type(parameter_plan: Any, device: Any, level: Any) -> tuple[Any, Any, Any]:
    """These three options, of which `parameter_plan` may hold the device and `device` the level: the order before
    MindSpore 2.0 had no `parameter_plan`, and the types tell the two orders apart.

    >>> by_type("CPU", 0, None), by_type(None, 2, None), by_type({"w": (1, 2)}, "CPU", 0)
    ((None, 'CPU', 0), (None, None, 2), ({'w': (1, 2)}, 'CPU', 0))
    """
    is_level = type(device) is int and level is None
    if is_level and (parameter_plan is None or isinstance(parameter_plan, Mapping)):
        return parameter_plan, None, device
    is_devices = isinstance(parameter_plan, list) and all(isinstance(one, jax.Device) for one in parameter_plan)
    is_older = (is_devices or isinstance(parameter_plan, str | Mesh)) and (device is None or is_level) and level is None
    return (None, parameter_plan, device) if is_older else (parameter_plan, device, level)


def layout_of(plan: Plan, path: str) -> Layout:
    """The `Layout` (device matrix, axis names, tensor map) of one array of a plan.

    Args:
      plan: the plan.
      path: the array's path, as the report has it; a result's path begins with `result`.

    Returns:
      The layout. Its `device_matrix` has the sizes of the plan's mesh axes, its `slices(shape)` the slice of each rank.

    Raises:
      StrategyError: no array has that path.

    >>> import jax, shardfn
    >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8, 2), "float32"), in_strategy=((4, 1),), device="tpu-v5e:4")
    >>> layout_of(made, "x").tensor_map
    (0, -1)
    """
    order = list(plan.order) if plan.order else None
    return spec_layout(plan.axes or (("a", 1),), decision_of(plan, path).spec, order)


def get_strategy(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The strategy of every op of a plan: for each operand the number of shards of its dimensions.

    Args:
      plan: the plan.

    Returns:
      Strategies by the op's name and number, in program order, as a strategy file in MindSpore's JSON has them.

    >>> import jax, shardfn
    >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8, 2), "float32"), in_strategy=((4, 1),), device="tpu-v5e:4")
    >>> get_strategy(made)
    {'abs-op0': ((4, 1),)}
    """
    return strategies_by_op(op_strategies(plan))
