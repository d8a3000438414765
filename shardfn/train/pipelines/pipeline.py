"""`train.pipeline`: a loss function whose layers run on groups of devices, micro-batch after micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.errors import StrategyError, fail, raise_problems
from shardfn.frontend import defaults
from shardfn.frontend.meshes import spec_of
from shardfn.frontend.recorder import include, recording
from shardfn.frontend.strategy import count
from shardfn.ir.model import Spec
from shardfn.runtime.entries import Entries
from shardfn.train.pipelines import flat_parameters
from shardfn.train.pipelines.build import BuiltPipeline, PipelineOptions, build_pipeline, pipeline_problems
from shardfn.train.pipelines.executor import DATA, TENSOR, PipelineExecutor
from shardfn.train.pipelines.flat_parameters import SHARDED, PackedParameters
from shardfn.train.pipelines.schedule import Schedule
from shardfn.train.pipelines.schedule import schedule as schedule_of
from shardfn.train.steps.state import shapes_of


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
    loss: str | None = "mean",
    device: Any = None,
) -> Pipeline:
    """Make a loss function run in pipeline stages.

    The devices form a mesh of stages x data x tensor. Each stage's devices hold its parameters, work on their part of the
    batch, and send activations to the neighbouring stages only. Loss and gradients are those of the plain function.

    Assign the model to stages by `staged`, by an attribute `pipeline_stage` (and `pipeline_segment`) of its modules, by
    `stage_config`, or by `auto_pipeline`. A list with one function for each stage needs no mark; the stages of a longer
    list are balanced by cost.

    Args:
      stages: one of
        a loss function `(params, *batch) -> loss`, a mean over the batch (a sum with `loss="sum"`);
        a module or a `Cell` that is such a function of its own parameters, `module(*batch) -> loss`;
        a list of functions `(params[i], x) -> x`: the first takes the batch's first array, and the last,
        `(params[-1], x, *rest) -> loss`, takes the others.
      micro_size: the number of micro-batches in a batch. Fewer than stages leave stages idle, with a warning.
      pipeline_stages: how many stages run at a time; by default the context's, else as marked or listed.
      schedule: "1f1b", "gpipe", or "interleaved" for 1f1b with several chunks; by default the context's
        `pipeline_config`, else "1f1b".
      interleave: how many chunks of the model each device holds; by default as many as segments are marked, else 2
        with "interleaved" and 1 without.
      auto_pipeline: True balances the stages by their modelled costs and ignores marks; by default the context's.
      stage_config: the stage of parameters, by globs of paths or paths of modules.
      segment_config: the segment of parameters, likewise.
      parameter_plan: the number of shards of each dimension of parameters within a stage, by globs of paths, as
        `{"*/w1": (1, 2), "*/w2": (2, 1)}`; one dimension of each, all with the same number of shards.
      loss: "mean" of the micro-batches' losses, for a loss that is a mean over the batch; or "sum", for one that is a sum over
        the batch. Of a mean, "sum" gives `micro_size` times the loss, as MindSpore's `PipelineCell` does. None for a function
        that returns outputs, arrays with the batch in dimension 0, such as logits; without gradients.
      device: the devices, as in `shard`.

    Returns:
      A `Pipeline`, called as `pipe(params, *batch)`, which returns the loss or the outputs.

    Raises:
      StrategyError, StrategyTypeError: for wrong arguments, all at once; at the first call, if the model, the batch or
        the devices do not fit.

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
    if schedule is None and (config := settings.pipeline_config):
        schedule, interleaves = config["pipeline_scheduler"], config["pipeline_interleave"]
    if pipeline_stages is None:
        pipeline_stages = settings.pipeline_stages
    options = PipelineOptions(
        stages, micro_size, pipeline_stages, "1f1b" if schedule in (None, "interleaved") else schedule, interleave,
        interleaves, settings.auto_pipeline if auto_pipeline is None else auto_pipeline,
        dict(stage_config or {}), dict(segment_config or {}), dict(parameter_plan or {}), loss, device, current,
    )  # fmt: skip
    raise_problems(list(pipeline_problems(options)))
    return Pipeline(options)


@dataclasses.dataclass(frozen=True)
class StageDescription:
    """One stage; `share` is the stage's fraction of the model's modelled cost."""

    stage: int
    device: int
    chunk: int
    ops: int
    parameters: int
    share: float
    sends: int
    """Bytes sent to the next stage for a micro-batch."""


@dataclasses.dataclass(frozen=True)
class PipelineDescription:
    """A pipeline's stages, its schedule and the bytes on each device; `print` shows a table."""

    stages: tuple[StageDescription, ...]
    schedule: Schedule
    data: int
    """Devices along the data axis."""
    tensor: int
    """Devices along the tensor axis."""
    buffer_bytes: int
    """Parameters in flat buffers, in bytes per device."""
    shared_bytes: int
    """Parameters that several stages read, in bytes per device."""
    kept_bytes: int
    """Stage inputs kept from a forward to its backward, in bytes per device."""
    over_best: float
    """Modelled cost of the longest stage over that of the best contiguous split."""

    def to_dict(self) -> dict[str, Any]:
        """The description as plain data, for JSON."""
        schedule = self.schedule
        found = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("stages", "schedule")
        }
        return found | {
            "stages": [dataclasses.asdict(row) for row in self.stages],
            "schedule": {"name": schedule.name, "micro_size": schedule.micro_size, "bubble": schedule.bubble},
        }

    def __str__(self) -> str:
        s = self.schedule
        return "\n".join([
            f"{'stage':>5} {'device':>6} {'chunk':>5} {'ops':>5} {'parameters':>12} {'share':>6} {'sends B':>10}",
            *(f"{r.stage:>5} {r.device:>6} {r.chunk:>5} {r.ops:>5} {r.parameters:>12,} {r.share:>6.1%} {r.sends:>10,}"
              for r in self.stages),
            f"{s.name}, {count(s.micro_size, 'micro-batch', 'micro-batches')}: bubble {s.bubble:.1%}; "
            f"mesh stage={s.devices} x data={self.data} x tensor={self.tensor}",
            f"bytes per device: parameters {self.buffer_bytes + self.shared_bytes:,} (shared by stages "
            f"{self.shared_bytes:,}), stage inputs kept {self.kept_bytes:,}",
            f"longest stage: {self.over_best:.3f} x the best contiguous split (modelled)",
        ])  # fmt: skip


class Pipeline:
    """A loss function, or one of outputs, that runs in pipeline stages, as one program on all devices; `pipeline` makes it."""

    def __init__(self, options: PipelineOptions):
        self.options = options
        self._built: Entries[BuiltPipeline] = Entries()
        self._last: BuiltPipeline | None = None

    def __repr__(self) -> str:
        o = self.options
        return (
            f"train.pipeline({o.name}, micro_size={o.micro_size}, schedule={o.schedule!r}, stages={o.pipeline_stages})"
        )

    def __call__(self, params: Any, *batch: Any) -> Any:
        """The loss of a batch.

        Args:
          params: the parameters as the loss function takes them, or as `pack` returns them.
          *batch: arrays with the batch in dimension 0.

        Returns:
          The loss, a scalar of at least float32. `jax.grad` gives its gradients by `params`. With `loss=None` the outputs.

        Raises:
          StrategyError: if marks, batch or devices do not fit, or a stage would wait for another forever.
        """
        built = self._for(params, batch)
        return built.call(params if isinstance(params, PackedParameters) else built.parts.arrays(params), batch)

    def pack(self, params: Any, *batch: Any) -> PackedParameters:
        """Move parameters into flat buffers, so that each device holds those of its own stages only.

        Args:
          params: the model as the loss function takes it; shapes give shapes.
          *batch: arrays or shapes as the loss will get them.

        Returns:
          The packed parameters, which the pipeline takes in place of `params`.

        Raises:
          StrategyError: if marks, batch or devices do not fit.
        """
        built = self._for(params, batch)
        arrays, executor = built.parts.arrays(params), built.executor
        pack = lambda arrays: flat_parameters.pack(executor.layout, arrays)  # noqa: E731
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in tree_util.tree_leaves(arrays)):
            return shapes_of(jax.eval_shape(pack, arrays), executor.shardings)
        return jax.jit(pack, out_shardings=executor.shardings)(arrays)

    def unpack(self, packed: PackedParameters) -> Any:
        """The inverse of `pack`.

        Args:
          packed: packed parameters, their gradients, or an optimizer's moments of them.

        Returns:
          The model.
        """
        arrays = _unpack(packed)
        return self._last.parts.model(arrays) if self._last else arrays

    def describe(self, params: Any, *batch: Any) -> PipelineDescription:
        """Describe the stages: ops, parameters, cost and bytes sent of each, and the schedule.

        Args:
          params: the model or packed parameters; shapes will do. A pipeline of a `Cell` takes the batch alone too.
          *batch: arrays or shapes.

        Returns:
          The description; `print` shows it as a table.

        Raises:
          StrategyError: if marks, batch or devices do not fit.
        """
        if self.options.is_cell and hasattr(params, "shape"):  # the batch alone: the cell is known
            params, batch = self.options.stages.parameters_dict(), (params, *batch)
        built = self._for(params, batch)
        return _description(built.executor, built.schedule)

    def shardings(self, params: Any, batch: tuple[Any, ...]) -> tuple[Mesh | AbstractMesh, list[Spec], list[Spec]]:
        """The mesh, and the mesh axes of each dimension of every parameter and every array of the batch.

        Args:
          params: the model or packed parameters; shapes will do.
          batch: arrays or shapes; empty for those of the last call.

        Returns:
          The mesh, the specs of the leaves of `params`, and those of `batch`.

        Raises:
          StrategyError: if the stages are not known yet, or marks, batch or devices do not fit.
        """
        built = self._for(params, batch) if batch else self._last
        if built is None:
            _fail_unknown()
        if isinstance(params, PackedParameters):
            named = zip(tree_util.tree_leaves(built.executor.shardings), tree_util.tree_leaves(params), strict=True)
            specs = [spec_of(sharding.spec, len(x.shape)) for sharding, x in named]
        else:
            specs: list[Spec] = [((),) * len(x.shape) for x in tree_util.tree_leaves(built.parts.arrays(params))]
        batch_specs: list[Spec] = [((DATA,), *((),) * (len(x.shape) - 1)) for x in tree_util.tree_leaves(batch)]
        return built.executor.mesh, specs, batch_specs

    @property
    def schedule(self) -> Schedule:
        """The schedule; if only the model's marks give the number of stages, it is known from the first call on.

        Raises:
          StrategyError: if the stages are not known yet.
        """
        if self._last is not None:
            return self._last.schedule
        devices, chunks = self.options.counts()
        if devices is None:
            _fail_unknown()
        return schedule_of(self.options.order, devices, self.options.micro_size, chunks)

    def _for(self, params: Any, batch: tuple[Any, ...]) -> BuiltPipeline:
        shape = lambda x: (x.shape, x.dtype) if hasattr(x, "dtype") else type(x)  # noqa: E731
        leaves, treedef = tree_util.tree_flatten((params, batch))
        key = treedef, tuple(map(shape, leaves))
        root = self.options.root
        found = self._built.find(key, root)
        if found is None:
            with recording(root, self.options.name) as read:
                found = build_pipeline(self.options, params, batch, self._last)
            found = self._built.keep(key, dataclasses.replace(found, watch=read()), root)
        include(found.watch, root)
        self._last = found
        return found


def _description(executor: PipelineExecutor, schedule: Schedule) -> PipelineDescription:
    """Describe a pipeline."""
    layout, split, mesh = executor.layout, executor.split, executor.mesh
    total = sum(stage.cost_s for stage in split.stages) or 1.0
    itemsize = lambda name: jnp.dtype(name.removesuffix(SHARDED)).itemsize  # noqa: E731
    elements = lambda stage: [math.prod(layout.slots[i].shape) for i in layout.of_stage(stage)]  # noqa: E731
    shared = zip(layout.of_stage(-1), elements(-1), strict=True)
    return PipelineDescription(
        tuple(
            StageDescription(
                i, i % layout.devices, i // layout.devices, len(stage.equations), sum(elements(i)), stage.cost_s / total,
                executor.message_bytes if i < executor.count - 1 else 0,
            )
            for i, stage in enumerate(split.stages)
        ),
        schedule, mesh.shape[DATA], mesh.shape[TENSOR],
        sum(length * itemsize(name) for name, length in layout.lengths) * layout.chunks,
        sum(n * jnp.dtype(layout.slots[i].dtype).itemsize for i, n in shared),
        schedule.slots * executor.message_bytes, split.longest_s / split.bound_s if split.bound_s else 1.0,
    )  # fmt: skip


_unpack = jax.jit(flat_parameters.unpack)


def _fail_unknown() -> NoReturn:
    fail(StrategyError, "the stages are not known yet", where="before the first call of a pipeline",
         why="their number and content depend on the model and the batch",
         fix="call pack(params, *batch) first, with arrays or shapes")  # fmt: skip
