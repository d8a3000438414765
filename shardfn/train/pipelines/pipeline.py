"""`train.pipeline`: a loss function whose layers are spread over groups of devices, micro-batch after micro-batch."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.errors import Problem, raise_problems
from shardfn.frontend import defaults
from shardfn.ir.model import Spec
from shardfn.train.pipelines import flat_parameters as packing
from shardfn.train.pipelines.build import BuiltPipeline, PipelineOptions, make, problems_of
from shardfn.train.pipelines.description import PipelineDescription, described
from shardfn.train.pipelines.executor import DATA, STAGE, TENSOR
from shardfn.train.pipelines.flat_parameters import PackedParameters
from shardfn.train.pipelines.schedule import Schedule
from shardfn.train.pipelines.schedule import schedule as schedule_of


def pipeline(
    stages: Any,
    micro_size: int,
    *,
    pipeline_stages: int | None = None,
    schedule: str | None = None,
    interleave: int | None = None,
    auto_pipeline: bool | None = None,
    stage_config: Mapping[str, int] | None = None,
    segment_config: Mapping[str, int] | None = None,
    parameter_plan: Mapping[str, Sequence[int]] | None = None,
    loss: str = "mean",
    device: Any = None,
) -> Pipeline:
    """A loss function that runs in stages: `pipe(params, *batch)`, with `jax.grad` and in `train.step`.

    The devices form a grid of stages x data x tensor; each stage's devices hold its parameters (`Pipeline.pack`), work on
    their part of the batch, and send to their neighbours only.

    Args:
      stages: one of
        a loss function `(params, *batch) -> loss`, the loss a mean over the batch;
        a module or a `Cell` that is such a function of its own parameters, `module(*batch) -> loss`;
        a list of functions `(params[i], x) -> x`, of which the first gets the batch's first array and the last, which
        gives the loss, the batch's others too, `(params[-1], x, *rest)`.
        What belongs to which stage is marked: by `staged`, by an attribute `pipeline_stage` (and `pipeline_segment`) of a
        module in it, or by `stage_config`; a list of as many functions as stages needs no mark, a longer one is cut by cost.
      micro_size: how many micro-batches the batch is cut into; not fewer than stages.
      pipeline_stages: how many stages work at a time; the context's where it is set, else as marked or listed.
      schedule: "1f1b", "gpipe" or "interleaved", which is 1f1b with several chunks; the context's `pipeline_config` if
        left out.
      interleave: how many chunks of the model each device holds; where it is not said as many as segments are marked, or
        else 2 with "interleaved" and 1 without.
      auto_pipeline: cut the stages where their modelled costs are most alike, whatever is marked.
      stage_config, segment_config: the stage and the segment of parameters, by globs of paths or paths of modules.
      parameter_plan: cuts of parameters within a stage, by globs of paths, as `{"*/w1": (1, 2), "*/w2": (2, 1)}`; one dim
        of each, all by the same number of devices.
      loss: "mean" of the micro-batches' losses, or "sum", which is MindSpore's.
      device: as in `shard`.

    Raises:
      StrategyError, StrategyTypeError: what is wrong with the arguments, all at once; at the first call, what does not
        fit the model, the batch or the devices.

    >>> import jax, jax.numpy as jnp
    >>> layers = [lambda w, x: jnp.tanh(x @ w), lambda w, x, y: jnp.mean((x @ w - y) ** 2)]
    >>> pipe = pipeline(layers, micro_size=2, device=jax.devices()[:2])
    >>> w, x, y = [jnp.eye(2), jnp.eye(2)], jnp.ones((4, 2)), jnp.zeros((4, 2))
    >>> value, grads = jax.value_and_grad(pipe)(w, x, y)
    >>> print(f"{value:.4f}", pipe.schedule.bubble == 1 / 3)
    0.5800 True
    """
    current = defaults.current()
    settings = current.training
    interleaves = schedule == "interleaved"
    if schedule is None and settings.pipeline_config:
        order = settings.pipeline_config
        schedule, interleaves = order["pipeline_scheduler"], order["pipeline_interleave"]
    if pipeline_stages is None:
        pipeline_stages = settings.pipeline_stages
    auto = settings.auto_pipeline if auto_pipeline is None else auto_pipeline
    name = "1f1b" if schedule in (None, "interleaved") else schedule
    asked = PipelineOptions(
        stages, micro_size, pipeline_stages, name, interleave, interleaves, auto,
        types.MappingProxyType(dict(stage_config or {})), types.MappingProxyType(dict(segment_config or {})),
        types.MappingProxyType(dict(parameter_plan or {})), loss, device, current,
    )  # fmt: skip
    raise_problems(list(problems_of(asked)))
    return Pipeline(asked)


class Pipeline:
    """What `pipeline` returns: `pipe(params, *batch) -> loss`, in one program over all devices."""

    def __init__(self, asked: PipelineOptions):
        self.asked = asked
        self._made: dict[Any, BuiltPipeline] = {}
        self._last: BuiltPipeline | None = None

    def __repr__(self) -> str:
        a = self.asked
        return (
            f"train.pipeline({a.name}, micro_size={a.micro_size}, schedule={a.schedule!r}, stages={a.pipeline_stages})"
        )

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The loss. `params` as the loss function takes them, or as `pack` gives them."""
        made = self._for(params, batch)
        return made.call(params if isinstance(params, PackedParameters) else made.parts.arrays(params), batch)

    def pack(self, params: Any, *batch: Any) -> PackedParameters:
        """Parameters laid out by stage: each device gets those of its own stages.

        Args:
          params: the model as the loss function takes it; shapes give shapes.
          batch: arrays or shapes as the loss will get them.
        """
        made = self._for(params, batch)
        arrays, shardings = made.parts.arrays(params), made.shardings()
        move = lambda arrays: packing.pack(made.layout, arrays)  # noqa: E731
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in tree_util.tree_leaves(arrays)):
            with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
            return tree_util.tree_map(with_sharding, jax.eval_shape(move, arrays), shardings)
        return jax.jit(move, out_shardings=shardings)(arrays)

    def unpack(self, packed: PackedParameters) -> Any:
        """The inverse of `pack`; of gradients and of an optimizer's moments too."""
        arrays = _unpack(packed)
        return self._last.parts.model(arrays) if self._last else arrays

    def described(self, params: Any, *batch: Any) -> PipelineDescription:
        """The stages: what each holds, works out and sends, and the schedule; it prints as a table."""
        made = self._for(params, batch)
        return described(made.machine, made.schedule)

    def grid(self, params: Any, batch: tuple[Any, ...]) -> tuple[Mesh | AbstractMesh, list[Spec], list[Spec]]:
        """The mesh, and the axes that cut each array of the parameters and of the batch: where a training step keeps them.

        Without a batch, as at the last call.
        """
        made = self._for(params, batch) if batch else self._last
        if made is None:
            raise_problems([_unknown()])
        assert made is not None
        if not isinstance(params, PackedParameters):
            specs: list[Spec] = [((),) * len(x.shape) for x in tree_util.tree_leaves(made.parts.arrays(params))]
        else:
            rows = [((STAGE,), (), *(((TENSOR,),) if k.endswith("_cut") else ()), ()) for k in sorted(params.rows)]
            specs = [*rows, *(((),) * len(params.shared[k].shape) for k in sorted(params.shared))]
        cuts: list[Spec] = [((DATA,), *((),) * (len(x.shape) - 1)) for x in tree_util.tree_leaves(batch)]
        return made.machine.mesh, specs, cuts

    @property
    def schedule(self) -> Schedule:
        """Who works when; where the number of stages is in the model's marks, known from the first call on."""
        if self._last is not None:
            return self._last.schedule
        devices, chunks = self.asked.counts([])
        if devices is None:
            raise_problems([_unknown()])
        assert devices is not None
        return schedule_of(self.asked.schedule, devices, self.asked.micro_size, chunks)

    def _for(self, params: Any, batch: tuple[Any, ...]) -> BuiltPipeline:
        shapes = lambda tree: [_kind(x) for x in tree_util.tree_leaves(tree)]  # noqa: E731
        calls = tree_util.tree_structure(batch), tuple(shapes(batch))
        key = calls, tuple(shapes(params)), tree_util.tree_structure(params)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make(self.asked, params, batch, self._last)
        self._last = found
        return found


def _kind(x: Any) -> Any:
    return (x.shape, x.dtype) if hasattr(x, "dtype") else type(x)


_unpack = jax.jit(packing.unpack)


def _unknown() -> Problem:
    return Problem("the stages are not known yet", "before the first call of a pipeline",
                   "how many there are and what they hold depends on the model and the batch",
                   "call pack(params, *batch) first, with arrays or shapes")  # fmt: skip
