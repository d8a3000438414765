"""`infer_predict_layout`: inference planned, and the layout of every weight, without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from shardfn import api
from shardfn.errors import ContextError, StrategyTypeError, a, fail
from shardfn.frontend.plain_objects import SHARDED
from shardfn.ir.model import mesh_sizes, mesh_text
from shardfn.mindspore import context
from shardfn.mindspore.inference.weights import Named, Weights, of_call
from shardfn.mindspore.parallel import layout_of
from shardfn.planning.plan import Plan, decision_of
from shardfn.render.cells import shape_text
from shardfn.render.parts import Table, Text
from shardfn.render.text import to_text
from shardfn.runtime.sharded_function import ShardedFunction


class WeightLayout(NamedTuple):
    """The layout of one weight, as MindSpore orders it: the device matrix, the axis of each dim counted from the last."""

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    slice_shape: tuple[int, ...]
    field: int
    uniform_split: bool
    opt_shard_group: str
    full_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class PredictLayout(Mapping[str, WeightLayout]):
    """The layout of each weight by its name, and the plan they come from; `load_distributed_checkpoint` takes it."""

    plan: Plan
    weights: Weights

    def __getitem__(self, name: str) -> WeightLayout:
        path = self.weights.paths[name]
        found, decision = layout_of(self.plan, path), decision_of(self.plan, path)
        matrix = mesh_sizes(found.axes)
        return WeightLayout(matrix, found.tensor_map, decision.local_shape, 0, True, "", decision.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights.paths)

    def __len__(self) -> int:
        return len(self.weights.paths)

    def __repr__(self) -> str:
        return f"<PredictLayout of {self.plan.function}: {len(self)} weights>"

    def __str__(self) -> str:
        decisions = {name: decision_of(self.plan, path) for name, path in self.weights.paths.items()}
        rows = tuple((name, d.dtype + shape_text(d.shape), str(d.strategy), str(d.partition_spec), f"{d.local_bytes:,}")
                     for name, d in decisions.items())  # fmt: skip
        total = sum(d.local_bytes for d in decisions.values())
        head = f"{self.plan.function}: {len(self)} weights, mesh {mesh_text(self.plan.axes)}, {total:,} B per device"
        return to_text([Text("", (head,)), Table("", ("weight", "shape", "strategy", "spec", "B/device"), rows)])

    def shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each weight.

        Returns:
          A dict of `NamedSharding` by the name of the weight.
        """
        mesh, specs = self.plan.mesh, {d.path: d.partition_spec for d in self.plan.inputs}
        return {name: NamedSharding(mesh, specs[path]) for name, path in self.weights.paths.items()}


def infer_predict_layout(
    fn: Callable[..., Any], *predict_data: Any, weights: Named = None, skip_backend_compile: bool = True, **options: Any
) -> PredictLayout:
    """Plan inference and return the layout of every weight. Nothing runs, and no weight needs memory.

    Args:
      fn: what is served: a function, a module, or what `shard` returned.
      predict_data: the arguments of a call, arrays or shapes (`jax.ShapeDtypeStruct`).
      weights: the name of the argument with the weights, or several names. None is a module's own arrays, or the first
        argument that is a pytree.
      skip_backend_compile: False also compiles the plan, so that a program that XLA refuses or that does not fit is an error.
      options: those of `shard` (`in_strategy`, `parameter_plan`, `layout`, `device`, `level`, …); the others go to `fn`.

    Returns:
      A mapping from the path of each weight in its argument to a `WeightLayout`: (dev_matrix, tensor_map, slice_shape, field,
      uniform_split, opt_shard_group, full_shape). It also has `plan` and `shardings()`. Print it for a table.

    Raises:
      ContextError: MindSpore's `parallel_mode` is set, to one that shards no weight.
      ShardError: all that is wrong with the call; no argument is a pytree.

    >>> import jax
    >>> shapes = {"w": jax.ShapeDtypeStruct((64, 32), "float32")}
    >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
    >>> found = infer_predict_layout(lambda params, x: x @ params["w"], shapes, x,
    ...                              parameter_plan={"w": (1, 4)}, device="tpu-v5e:4")
    >>> found["w"].dev_matrix, found["w"].tensor_map, found["w"].slice_shape
    ((4,), (-1, 0), (64, 8))
    """
    current = context.current()
    if current.is_set("parallel_mode") and "auto" not in current.parallel_mode:
        fail(ContextError, "Infer predict layout only supports semi auto parallel and auto parallel mode.",
             where=f"parallel_mode = {current.parallel_mode!r}", why="that mode shards no weight",
             fix='set_auto_parallel_context(parallel_mode="semi_auto_parallel"), or leave parallel_mode unset')  # fmt: skip
    if not isinstance(skip_backend_compile, bool):
        fail(StrategyTypeError, f"`skip_backend_compile` must be a bool, not {a(skip_backend_compile)}",
             where=f"skip_backend_compile = {skip_backend_compile!r:.60}", why="it says whether XLA compiles the plan too",
             fix="write True or False")  # fmt: skip
    function, rest = with_options(fn, options)
    plan = function.plan(*predict_data, **rest)
    found = PredictLayout(plan, of_call(function, predict_data, rest, weights))
    if not skip_backend_compile:
        plan.verify()
    return found


def with_options(fn: Any, options: dict[str, Any]) -> tuple[ShardedFunction, dict[str, Any]]:
    """`fn` sharded with those of `options` that `shard` has, and the others; a Cell that is sharded already as it is."""
    held = getattr(fn, "__dict__", {}).get(SHARDED)
    return api.with_options(fn if held is None else held.of(fn), options)
