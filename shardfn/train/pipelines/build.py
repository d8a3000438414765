"""Build a pipeline: from the options and the shapes of a call to a differentiable function of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.cost.devices import hardware
from shardfn.errors import Problem, StrategyError, a, closest, did_you_mean, fail, nearest, raise_problems, warn
from shardfn.frontend.callee import is_function
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.meshes import abstract_mesh, mesh_on
from shardfn.frontend.outer_call import on_parts
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import short
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.frontend.watch import NOTHING_READ, Watch
from shardfn.train.batch_reduction import MEAN, SUM, batch_reduction, twice
from shardfn.train.flat_jaxpr import FlatJaxpr
from shardfn.train.pipelines import flat_parameters
from shardfn.train.pipelines.across_batch import across_batch
from shardfn.train.pipelines.executor import DATA, STAGE, TENSOR, PipelineExecutor, pipeline_executor
from shardfn.train.pipelines.flat_parameters import PackedParameters, flat_layout
from shardfn.train.pipelines.schedule import FORWARD, SCHEDULES, Schedule, schedule
from shardfn.train.pipelines.stage_marks import Mark, cell_marks, module_marks, staged, with_config
from shardfn.train.pipelines.stages import is_inexact, split_into_stages
from shardfn.train.pipelines.tensor_parallel import sharded_dims
from shardfn.train.pipelines.trace_loss import trace_loss, trace_outputs
from shardfn.train.steps.batches import batch_problems, part_shapes
from shardfn.train.steps.state import ModelParts, model_parts, shapes_of


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `pipeline`."""

    stages: Any
    micro_size: int
    pipeline_stages: int | None
    schedule: str
    interleave: int | None
    interleaves: bool
    """Whether each device holds several chunks, two unless the options or marks say how many."""
    auto: bool
    stage_config: Mapping[str, int]
    segment_config: Mapping[str, int]
    parameter_plan: Mapping[str, Any]
    loss: str | None
    device: Any
    defaults: Defaults

    @property
    def is_list(self) -> bool:
        """Whether `stages` is a list of functions."""
        return isinstance(self.stages, list | tuple)

    @property
    def is_cell(self) -> bool:
        """Whether `stages` is a `Cell`."""
        return getattr(type(self.stages), "__shardfn_cell__", False)

    @property
    def root(self) -> tuple[Any, None, None]:
        """What a call belongs to, for `frontend.watch`; nothing if a module gives its own parameters, which are arguments."""
        is_plain = self.is_list or (not self.is_cell and tree_util.all_leaves([self.stages]))
        return self.stages if is_plain else None, None, None

    @property
    def order(self) -> str:
        """The name of the order of ticks; outputs need forwards alone."""
        return FORWARD if self.loss is None else self.schedule

    @property
    def name(self) -> str:
        """The name of the loss function."""
        if self.is_list:
            return f"{len(self.stages)} layers"
        return getattr(self.stages, "__name__", type(self.stages).__name__)

    def counts(self, marks: Sequence[Mark | None] = ()) -> tuple[int | None, int]:
        """How many stages run at a time (None if nothing says it), and how many chunks each device holds."""
        given = [mark for mark in marks if mark]
        chunks = self.interleave or max([1 + segment for _, segment in given], default=1)
        if self.interleave is None and self.interleaves:
            chunks = max(chunks, 2)
        devices = self.pipeline_stages
        if devices is None and self.is_list:
            devices = max(len(self.stages) // chunks, 1)
        if devices is None and given:
            devices = max(1 + stage for stage, _ in given)
        return devices, chunks


@dataclasses.dataclass(frozen=True)
class BuiltPipeline:
    """A pipeline for one kind of call."""

    parts: ModelParts
    executor: PipelineExecutor
    schedule: Schedule
    call: Callable[..., Any]
    watch: Watch = NOTHING_READ
    """What the functions of the stages read when they were traced."""


_NOTE = (
    f"the loss is called on a part of the batch within a stage; shard parameters by the pipeline's parameter_plan, over its "
    f"axis `{TENSOR}`"
)
"""Why operators run without their shardings, and what to do."""


def pipeline_problems(options: PipelineOptions) -> Iterator[Problem]:
    """The problems with the arguments, before any model is known."""
    functions = options.stages if options.is_list else [options.stages]
    for i, function in enumerate(functions):
        if not is_function(function):
            name = f"stages[{i}]" if options.is_list else "stages"
            yield Problem(f"`{name}` is {a(function)}, no function", f"{name} = {short(function)}",
                          "it is called with parameters and arrays", "pass a function, a module or a list of functions",
                          is_type=True)  # fmt: skip
    if options.is_list and not options.stages:
        yield Problem("`stages` is empty", f"stages = {options.stages!r}", "a pipeline has at least one stage",
                      "list its functions")  # fmt: skip
    counts = {"micro_size": options.micro_size}
    counts |= {name: n for name in ("pipeline_stages", "interleave") if (n := getattr(options, name)) is not None}
    wrong = [problem for name, n in counts.items() for problem in option_problems(integer(1), name, n)]
    yield from wrong
    if wrong:
        return
    if options.schedule not in SCHEDULES:
        known = (*SCHEDULES, "interleaved")
        yield Problem(f"there is no schedule {options.schedule!r}", f"schedule = {options.schedule!r}",
                      f"the orders in which stages work are {', '.join(known)}", nearest(options.schedule, known))  # fmt: skip
    if options.loss not in (MEAN, SUM, None):
        yield Problem(f"`loss` cannot be {options.loss!r}", f"loss = {options.loss!r}",
                      "it says how the micro-batches' losses become one",
                      did_you_mean(closest(str(options.loss), (MEAN, SUM)))
                      or "use 'mean' or 'sum', or None for outputs")  # fmt: skip
    devices, chunks = options.counts()
    if devices is not None and options.is_list and len(options.stages) < devices * chunks:
        yield Problem(f"{len(options.stages)} functions do not fill {devices} stages of {chunks} chunks",
                      f"pipeline_stages = {devices}, interleave = {chunks}",
                      f"at least {devices * chunks} are needed", "list more, or use fewer stages")  # fmt: skip
    for name, config in (("stage_config", options.stage_config), ("segment_config", options.segment_config)):
        for glob, number in config.items():
            yield from option_problems(integer(0), f"{name}[{glob!r}]", number)


def build_pipeline(
    options: PipelineOptions, params: Any, batch: tuple[Any, ...], earlier: BuiltPipeline | None
) -> BuiltPipeline:
    """A pipeline for arrays of these shapes.

    Args:
      options: checked options.
      params: the model, or `PackedParameters` of `earlier`.
      batch: arrays or shapes.
      earlier: the same pipeline, built for another call.

    Raises:
      StrategyError: marks, batch or devices do not fit.
    """
    if isinstance(params, PackedParameters):
        if earlier is None:
            fail(StrategyError, "these packed parameters are of a pipeline that has not seen the model",
                 where=options.name, why="the content of the stages depends on the model and the batch",
                 fix="call pack(params, *batch) first; shapes will do")  # fmt: skip
        if params.layout != earlier.executor.layout:
            fail(StrategyError, "packed parameters of another pipeline, or of other stage boundaries",
                 where=options.name, why="their flat buffers hold other stages than this pipeline's",
                 fix="unpack them with the pipeline that packed them, and pack them again with this one")  # fmt: skip
        parts, layout = earlier.parts, params.layout
        of = lambda s: params.shared[s.path] if s.stage < 0 else params.buffers[s.buffer]  # noqa: E731
        shapes = [jax.ShapeDtypeStruct(s.shape, of(s).dtype) for s in layout.slots]  # the buffers may have been cast
        arrays = tree_util.tree_unflatten(layout.treedef, shapes)
        model = parts.model(arrays)
    else:
        model, parts, layout = params, model_parts(params), None
        arrays = shapes_of(parts.arrays(params))
    found = cell_marks(options.stages, parts.paths) if options.is_cell else module_marks(model, parts.arrays(model))
    marks, problems = with_config(parts.paths, options.stage_config, options.segment_config, found)
    devices, chunks = options.counts(marks)
    if devices is None:
        problems.append(Problem("the number of stages is unknown", "pipeline_stages = None", "the model has no stage marks",
                                "give pipeline_stages, or mark the model's parts"))  # fmt: skip
    raise_problems(problems)
    assert devices is not None
    leaf_shapes = [tuple(x.shape) for x in tree_util.tree_leaves(arrays)]
    dims, shards, problems = sharded_dims(parts.paths, leaf_shapes, options.parameter_plan)
    raise_problems(problems)
    mesh = _mesh(options, devices, shards)
    raise_problems(
        list(batch_problems(batch, mesh.shape[DATA], options.micro_size, option="micro_size", takes_scalars=False))
    )
    micro_batch = part_shapes(tuple(batch), mesh.shape[DATA] * options.micro_size)
    loss = on_parts(_loss_of_arrays(options, parts), _NOTE if mesh.size > 1 and earlier is None else "")
    if options.loss is None:
        (jaxpr, outputs), adds_parts = trace_outputs(loss, arrays, micro_batch), False
    else:
        jaxpr, outputs = trace_loss(loss, arrays, micro_batch), None
        adds_parts = _adds_parts(
            options, jaxpr, mesh.shape[DATA], lambda batch: trace_loss(loss, arrays, batch), micro_batch
        )
    if earlier is None:
        _refuse_mixing(options, loss, arrays, micro_batch, mesh.shape[DATA])
    stages = [None if mark is None else mark[1] * devices + mark[0] for mark in marks]
    layers, by_cost, like = len(options.stages) if options.is_list else 0, options.auto, None
    if layout is not None and earlier is not None:  # another batch: the parameters stay on their stages
        stages = [slot.stage if slot.stage >= 0 else mark for slot, mark in zip(layout.slots, stages, strict=True)]
        by_cost, like = False, earlier.executor.split
    count = devices * chunks
    is_marked = any(s is not None for s in stages) or any(one.label for one in jaxpr.equations) or count == 1
    if not (layers or by_cost or is_marked):
        fail(StrategyError, f"nothing assigns the model to {count} stages", where=f"train.pipeline({options.name})",
             why="no module has a `pipeline_stage`, no function is `staged`, no path is in `stage_config`",
             fix="mark the model's parts, or let auto_pipeline=True balance the stages by cost")  # fmt: skip
    if not by_cost and (options.stage_config or layout is not None) and layers != count:
        layers = 0
    split = split_into_stages(jaxpr, count, devices, stages, layers, by_cost, parts.paths, like)
    if layout is None:
        layout = flat_layout(arrays, parts.paths, split.stage_of_leaf, dims, devices, chunks, shards)
    executor = pipeline_executor(mesh, split, layout, options.loss == MEAN, adds_parts, outputs)
    order = schedule(options.order, devices, options.micro_size, chunks)
    if options.micro_size < devices and earlier is None:
        warn(f"with micro_size={options.micro_size} at most {options.micro_size} of {devices} stages work at a time, and devices "
             f"idle for {order.bubble:.0%} of the ticks; use {devices} or more, or fewer stages")  # fmt: skip
    return BuiltPipeline(parts, executor, order, _differentiable(executor, order))


def _refuse_mixing(
    options: PipelineOptions, loss: Callable[..., Any], arrays: Any, micro_batch: Any, shards: int
) -> None:
    """Refuse outputs that mix the examples of a batch, which runs in parts (`across_batch`); a loss that does warns."""
    parts = shards * options.micro_size
    is_one = any(x.ndim and x.shape[0] == 1 for x in tree_util.tree_leaves(micro_batch))
    batch = tree_util.tree_map(twice, micro_batch) if is_one else micro_batch
    try:
        found = across_batch(loss, arrays, batch, options.loss is None) if parts > 1 else ""
    except Exception:  # the user's function is written for one size of the batch
        return
    if found and options.loss is None:
        fail(StrategyError, "an output of a pipeline depends on other examples of the batch", where=found,
             why=f"the model sees {parts} parts of the batch one by one, and this op has another result there",
             fix="take the op out of the pipeline, and apply it to the outputs of the whole batch")  # fmt: skip
    if found:
        warn(f"{found} is computed over the batch, of which the pipeline sees {parts} parts one by one: the loss may have "
             "another value than on the whole batch; fix: compute it outside of the pipeline, or keep it where parts of the "
             "batch are meant, as in a batch norm of micro-batches")  # fmt: skip


def _adds_parts(
    options: PipelineOptions, jaxpr: FlatJaxpr, shards: int, traced: Callable[[Any], FlatJaxpr], micro_batch: Any
) -> bool:
    """Whether the loss of a micro-batch is the sum of the losses of its shards, rather than their mean. It warns of a loss that
    is taken for a mean and need be none.

    Args:
      options: checked options.
      jaxpr: the loss of a shard of a micro-batch.
      shards: how many shards a micro-batch has.
      traced: the loss for a batch of other shapes.
      micro_batch: the shapes of a shard.

    Raises:
      StrategyError: it cannot be known, or the mean is asked for of a loss that is a sum.
    """
    if shards * options.micro_size == 1:
        return False
    try:
        found = batch_reduction(jaxpr, traced(tree_util.tree_map(twice, micro_batch)))
    except Exception:  # the user's function is written for one size of the batch
        found, is_known = None, False
    else:
        is_known = True
    if options.loss == MEAN and found == SUM:
        fail(StrategyError, "the loss is a sum over the batch, and the pipeline takes a mean", where="loss = 'mean'",
             why=f"the mean of {shards * options.micro_size} parts of a sum is not the sum over the batch",
             fix="pass loss='sum', or return the mean over the batch")  # fmt: skip
    if options.loss == SUM and found is None and shards > 1:
        fail(StrategyError, f"nothing shows how the losses of {shards} shards of a micro-batch become its loss",
             where=f"loss = 'sum', {shards} shards of the batch",
             why="the loss is neither written as a sum over the batch nor as a mean: neither the sum nor the mean of its "
             "shards' losses need be its value",
             fix="end the loss with jnp.sum or jnp.mean over the batch")  # fmt: skip
    parts = shards * options.micro_size
    if options.loss == MEAN and found is None and is_known:
        warn(f"nothing shows that the loss is a mean over the batch, and the pipeline takes the mean of the losses of {parts} "
             "parts of it: another loss, such as a mean with weights or a mask, has another value; fix: end the loss with "
             "jnp.mean over the batch, or return a sum with loss='sum' and divide it outside")  # fmt: skip
    if options.loss == SUM and found is None and is_known:
        warn(f"nothing shows that the loss is a sum over the batch, and the pipeline adds the losses of {parts} parts of it: "
             "another loss, such as a sum with a penalty on the parameters, has another value; fix: end the loss with jnp.sum "
             "over the batch, and add what does not depend on it outside")  # fmt: skip
    return options.loss == SUM and found == SUM


def _loss_of_arrays(options: PipelineOptions, parts: ModelParts) -> Callable[..., Any]:
    """The loss as a function of the model's arrays and a micro-batch."""
    stages = options.stages
    if options.is_list:
        layers = [staged(layer, i) for i, layer in enumerate(stages)]

        def chained(arrays: Any, x: Any, *rest: Any) -> Any:
            model = parts.model(arrays)
            for i, layer in enumerate(layers[:-1]):
                x = layer(model[i], x)
            return layers[-1](model[len(layers) - 1], x, *rest)

        return chained
    if options.is_cell:
        model_of = (
            parts.model if parts.cells is not None else lambda arrays: stages.with_parameters(parts.model(arrays))
        )
        return lambda arrays, *batch: model_of(arrays)(*batch)
    is_module = not tree_util.all_leaves([stages])  # a module that is a pytree is called itself

    def loss(arrays: Any, *batch: Any) -> Any:
        model = parts.model(arrays)
        value = model(*batch) if is_module else stages(model, *batch)
        after = zip(parts.paths, tree_util.tree_leaves(arrays), tree_util.tree_leaves(parts.arrays(model)), strict=True)
        if changed := [path for path, old, new in after if old is not new]:
            fail(StrategyError, "the loss of a pipeline changes the model's state", where=listed(changed),
                 why="a stage sees one micro-batch at a time, and sends activations only",
                 fix="use the model in evaluation mode, or a norm that has no statistics")  # fmt: skip
        return value

    return loss


def _mesh(options: PipelineOptions, devices: int, shards: int) -> Mesh | AbstractMesh:
    """Stages x data x tensor, row-major, so that the devices of a stage are contiguous."""
    found = hardware.resolve(options.device, count=options.defaults.device_count, default=options.defaults.platform)
    if found.count % (devices * shards):
        within = f" with {shards} tensor shards each" if shards > 1 else ""
        raise_problems([Problem(f"{found.count} devices cannot be shared by {devices} stages{within}",
                                f"pipeline_stages = {devices}, {found.count} devices",
                                f"{devices * shards} does not divide {found.count}",
                                "use a number of stages that does, or other devices")])  # fmt: skip
    axes = (STAGE, devices), (DATA, found.count // (devices * shards)), (TENSOR, shards)
    return abstract_mesh(axes) if found.devices is None else mesh_on(found.devices, axes)


def _differentiable(executor: PipelineExecutor, order: Schedule) -> Callable[..., Any]:
    """(parameters, packed or not; batch) -> loss, with gradients that the schedule computes together with the loss."""
    layout = executor.layout
    evaluation = schedule(FORWARD, order.devices, order.micro_size, order.chunks)
    checked: set[str] = set()

    def run(ticks: Schedule, packed: PackedParameters, batch: Any) -> Any:
        if ticks.name not in checked:
            executor.check(ticks, packed, batch)
            checked.add(ticks.name)
        return executor.run(ticks, packed, batch)

    @jax.custom_vjp
    def loss(packed: PackedParameters, batch: Any) -> Any:
        return run(evaluation, packed, batch)

    def forward(packed: Any, batch: Any) -> Any:
        if any(x.perturbed and is_inexact(x.value) for x in tree_util.tree_leaves(batch, is_leaf=_is_primal)):
            fail(StrategyError, "a pipeline has no gradients of the batch", where="jax.grad of a pipeline by its batch",
                 why="it computes gradients of the parameters only",
                 fix="make the array that you differentiate by a parameter")  # fmt: skip
        packed, batch = tree_util.tree_map(lambda x: x.value, (packed, batch), is_leaf=_is_primal)
        if executor.outputs is not None:
            fail(StrategyError, "a pipeline of outputs has no gradients", where="jax.grad of a pipeline with loss=None",
                 why="its schedule has no backwards", fix="train a pipeline of the loss")  # fmt: skip
        value, d_buffers, d_shared = run(order, packed, batch)
        return value, (d_buffers, d_shared, tree_util.tree_map(_zeros, (packed, batch)))

    def backward(kept: Any, seed: Any) -> Any:
        d_buffers, d_shared, (packed, batch) = kept
        scale = lambda x: (x * seed).astype(x.dtype)  # noqa: E731
        grads = PackedParameters(
            {k: scale(x) for k, x in d_buffers.items()},
            {k: scale(d_shared[k]) if k in d_shared else x for k, x in packed.shared.items()},
            layout,
        )
        return grads, batch

    loss.defvjp(forward, backward, symbolic_zeros=True)

    def call(params: Any, batch: tuple[Any, ...]) -> Any:
        packed = params if isinstance(params, PackedParameters) else flat_parameters.pack(layout, params)
        buffers = lax.with_sharding_constraint(dict(packed.buffers), dict(executor.shardings.buffers))
        return loss(dataclasses.replace(packed, buffers=buffers), batch)

    return jax.jit(call)


def _zeros(x: Any) -> Any:
    """The cotangent of an array without a gradient."""
    return jnp.zeros(x.shape, x.dtype) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed") and hasattr(x, "value")
