"""From what was asked of a pipeline and the shapes of a call to a function of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.cost.devices import hardware
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import Problem, StrategyError, a, fail, raise_problems
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.meshes import abstract_mesh, mesh_on
from shardfn.frontend.paths import join, listed
from shardfn.frontend.strategy import short
from shardfn.train.pipelines import flat_parameters as packing
from shardfn.train.pipelines.executor import DATA, STAGE, TENSOR, PipelineExecutor, machine, row_spec
from shardfn.train.pipelines.flat_parameters import FlatLayout, PackedParameters
from shardfn.train.pipelines.program import program_of
from shardfn.train.pipelines.schedule import SCHEDULES, Schedule, forward_only, schedule
from shardfn.train.pipelines.stage_marks import Mark, configured, marks_by_path, marks_of, staged
from shardfn.train.pipelines.stages import cut, is_inexact
from shardfn.train.pipelines.tensor_parallel import tensor_cuts
from shardfn.train.steps.batches import part_problems
from shardfn.train.steps.state import ModelParts, model_parts

_ORDERS = (*SCHEDULES, "interleaved")


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `pipeline`."""

    stages: Any
    micro_size: int
    pipeline_stages: int | None
    schedule: str
    interleave: int | None
    interleaves: bool
    """Whether each device holds several chunks, two where nothing says how many."""
    auto: bool
    stage_config: Mapping[str, int]
    segment_config: Mapping[str, int]
    parameter_plan: Mapping[str, Any]
    loss: str
    device: Any
    defaults: Defaults

    @property
    def is_list(self) -> bool:
        """Whether the stages were given one by one."""
        return isinstance(self.stages, list | tuple)

    @property
    def name(self) -> str:
        """What the loss function is called."""
        if self.is_list:
            return f"{len(self.stages)} layers"
        return getattr(self.stages, "__name__", type(self.stages).__name__)

    def counts(self, marks: Sequence[Mark | None]) -> tuple[int | None, int]:
        """How many stages work at a time, and how many chunks each device holds."""
        said = [mark for mark in marks if mark]
        chunks = self.interleave or max([1 + segment for _, segment in said], default=1)
        if self.interleave is None and self.interleaves:
            chunks = max(chunks, 2)
        devices = self.pipeline_stages
        if devices is None and self.is_list:
            devices = max(len(self.stages) // chunks, 1)
        if devices is None and said:
            devices = max(1 + stage for stage, _ in said)
        return devices, chunks

    def hardware(self) -> Hardware:
        """The devices."""
        return hardware.resolve(self.device, count=self.defaults.device_count, default=self.defaults.platform)


@dataclasses.dataclass(frozen=True)
class BuiltPipeline:
    """A pipeline for one kind of call."""

    parts: ModelParts
    layout: FlatLayout
    machine: PipelineExecutor
    schedule: Schedule
    call: Callable[..., Any]

    def shardings(self) -> PackedParameters:
        """Where packed parameters lie."""
        mesh = self.machine.mesh
        rows = {kind: NamedSharding(mesh, row_spec(kind)) for kind, _ in self.layout.lengths}
        shared = {self.layout.places[i].path: NamedSharding(mesh, PartitionSpec()) for i in self.layout.beside}
        return PackedParameters(rows, shared, self.layout)


def problems_of(asked: PipelineOptions) -> Iterator[Problem]:
    """What is wrong with the arguments, before any model is seen."""
    functions = asked.stages if asked.is_list else [asked.stages]
    for i, function in enumerate(functions):
        if not callable(function):
            name = f"stages[{i}]" if asked.is_list else "stages"
            yield Problem(f"`{name}` is {a(function)}, no function", f"{name} = {short(function)}",
                          "it is called with parameters and arrays", "pass a function, a module or a list of functions",
                          is_type=True)  # fmt: skip
    if asked.is_list and not asked.stages:
        yield Problem("`stages` is empty", f"stages = {asked.stages!r}", "a pipeline has one stage at least",
                      "list its functions")  # fmt: skip
    for name in ("micro_size", "pipeline_stages", "interleave"):
        value = getattr(asked, name)
        if value is None and name != "micro_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(f"`{name}` must be an int from 1 up", f"{name} = {short(value)}",
                          "it counts " + _COUNTS[name], "write 1 for none",
                          is_type=not isinstance(value, int) or isinstance(value, bool))  # fmt: skip
            return
    if asked.schedule not in SCHEDULES:
        yield Problem(f"there is no schedule {asked.schedule!r}", f"schedule = {asked.schedule!r}",
                      "a schedule is the order in which stages work", f"use one of {', '.join(_ORDERS)}")  # fmt: skip
    if asked.loss not in ("mean", "sum"):
        yield Problem(f"`loss` cannot be {asked.loss!r}", f"loss = {asked.loss!r}",
                      "it says what becomes of the micro-batches' losses", "use 'mean' or 'sum'")  # fmt: skip
    devices, chunks = asked.counts([])
    if devices is not None:
        yield from _micro_problems(asked, devices)
        if asked.is_list and len(asked.stages) < devices * chunks:
            yield Problem(f"{len(asked.stages)} functions do not fill {devices} stages of {chunks} chunks",
                          f"pipeline_stages = {devices}, interleave = {chunks}",
                          f"{devices * chunks} are needed at least", "list more, or use fewer stages")  # fmt: skip
    for name, config in (("stage_config", asked.stage_config), ("segment_config", asked.segment_config)):
        for glob, number in config.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                yield Problem(f"{name}[{glob!r}] must be an int from 0 up", f"{name}[{glob!r}] = {short(number)}",
                              "stages and segments are numbered from 0", "write 0 for the first",
                              is_type=not isinstance(number, int) or isinstance(number, bool))  # fmt: skip


_COUNTS = {
    "micro_size": "the micro-batches",
    "pipeline_stages": "the stages that work at a time",
    "interleave": "the chunks of the model on each device",
}


def _micro_problems(asked: PipelineOptions, devices: int) -> Iterator[Problem]:
    if asked.micro_size < devices:
        yield Problem(f"`micro_size` {asked.micro_size} is less than the number of stages {devices}",
                      f"micro_size = {asked.micro_size}, pipeline_stages = {devices}",
                      "with fewer micro-batches than stages some stages could never work at the same time",
                      f"use {devices} or more, or fewer stages")  # fmt: skip


def make(asked: PipelineOptions, params: Any, batch: tuple[Any, ...], earlier: BuiltPipeline | None) -> BuiltPipeline:
    """A pipeline for arrays of these shapes.

    Raises:
      StrategyError: marks, batch or devices that do not fit.
    """
    if isinstance(params, PackedParameters):
        if earlier is None:
            fail(StrategyError, "packed parameters of a pipeline that has not seen the model",
                 where=f"{asked.name}", why="what the stages hold depends on the model and the batch",
                 fix="call pack(params, *batch) first; shapes will do")  # fmt: skip
        if params.layout != earlier.layout:
            fail(StrategyError, "packed parameters of another pipeline, or of another cut into stages",
                 where=f"{asked.name}", why="their rows hold other stages than this pipeline's",
                 fix="unpack them with the pipeline that packed them, and pack them again with this one")  # fmt: skip
        parts, layout = earlier.parts, params.layout
        of = lambda p: params.shared[p.path] if p.stage < 0 else params.rows[p.kind]  # noqa: E731
        places = [jax.ShapeDtypeStruct(p.shape, of(p).dtype) for p in layout.places]  # they may have been cast
        arrays = tree_util.tree_unflatten(layout.treedef, places)
        model = parts.model(arrays)
    else:
        model, parts, layout = params, model_parts(params), None
        arrays = tree_util.tree_map(_shape, parts.arrays(params))
    paths = parts.paths
    marks, problems = _marks(asked, model, parts.arrays(model), paths)
    devices, chunks = asked.counts(marks)
    if devices is None:
        problems.append(_no_count())
    raise_problems(problems)
    assert devices is not None
    leaves = tree_util.tree_leaves(arrays)
    dims, ways, problems = tensor_cuts(paths, [tuple(x.shape) for x in leaves], asked.parameter_plan)
    problems += _micro_problems(asked, devices)
    raise_problems(problems)
    mesh = _mesh(asked, devices, ways)
    micro, batch_problems = _micro_shapes(asked, batch, mesh.shape[DATA])
    raise_problems(batch_problems)
    count = devices * chunks
    program = program_of(_function(asked, parts), arrays, micro)
    virtual = [None if mark is None else mark[1] * devices + mark[0] for mark in marks]
    if layout is not None:  # new shapes of a batch: the parameters stay where they are
        virtual = [
            place.stage if place.stage >= 0 else mark for place, mark in zip(layout.places, virtual, strict=True)
        ]
    by_cost = asked.auto and layout is None
    layers = len(asked.stages) if asked.is_list else 0
    is_marked = any(v is not None for v in virtual) or any(op.mark for op in program.ops) or count == 1
    if not (layers or by_cost or is_marked):
        raise_problems([_no_marks(asked, count)])
    if layers and not by_cost and (asked.stage_config or layout is not None) and layers != count:
        layers = 0
    like = earlier.machine.cut if layout is not None and earlier is not None else None
    made = cut(program, count, devices, virtual, layers, by_cost, paths, like)
    if layout is None:
        layout = packing.layout_of(arrays, paths, made.homes, dims, devices, chunks, ways)
    engine = machine(mesh, made, layout, asked.loss == "mean")
    order = schedule(asked.schedule, devices, asked.micro_size, chunks)
    return BuiltPipeline(parts, layout, engine, order, _callable(engine, order))


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype if hasattr(x, "dtype") else jnp.result_type(x))


def _function(asked: PipelineOptions, parts: ModelParts) -> Callable[..., Any]:
    """The loss as a function of arrays and a micro-batch."""
    stages = asked.stages
    if asked.is_list:
        layers = [staged(layer, i) for i, layer in enumerate(stages)]

        def chained(arrays: Any, first: Any, *rest: Any) -> Any:
            model = parts.model(arrays)
            if len(layers) == 1:
                return layers[0](model[0], first, *rest)
            for i, layer in enumerate(layers[:-1]):
                first = layer(model[i], first)
            return layers[-1](model[len(layers) - 1], first, *rest)

        return chained
    if getattr(type(stages), "__shardfn_cell__", False):
        return lambda arrays, *batch: stages.with_parameters(parts.model(arrays))(*batch)
    if not tree_util.all_leaves([stages]):  # a module that is a pytree
        return _unchanging(parts, lambda model, *batch: model(*batch))
    return _unchanging(parts, stages)


def _unchanging(parts: ModelParts, loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of arrays, of one of a model. Raises if it changes arrays of the model."""

    def run(arrays: Any, *batch: Any) -> Any:
        model = parts.model(arrays)
        value = loss(model, *batch)
        after = zip(parts.paths, tree_util.tree_leaves(arrays), tree_util.tree_leaves(parts.arrays(model)), strict=True)
        if changed := [path for path, old, new in after if old is not new]:
            fail(StrategyError, "the loss of a pipeline changes the model's state", where=listed(changed),
                 why="a stage sees one micro-batch at a time, and hands on activations alone",
                 fix="use the model in evaluation mode, or a norm that has no statistics")  # fmt: skip
        return value

    return run


def _marks(
    asked: PipelineOptions, model: Any, arrays: Any, paths: Sequence[str]
) -> tuple[list[Mark | None], list[Problem]]:
    if getattr(type(asked.stages), "__shardfn_cell__", False):
        found = marks_by_path(asked.stages, paths)
    else:
        found = marks_of(model, arrays)
    return configured(paths, asked.stage_config, asked.segment_config, found)


def _mesh(asked: PipelineOptions, devices: int, ways: int) -> Mesh | AbstractMesh:
    """Stages x data x tensor, row-major: the devices of a stage lie side by side."""
    found = asked.hardware()
    if found.count % (devices * ways):
        cuts = f", {ways} ways within each" if ways > 1 else ""
        raise_problems([Problem(f"{found.count} devices cannot be shared by {devices} stages{cuts}",
                                f"pipeline_stages = {devices}, {found.count} devices",
                                f"{devices * ways} does not divide {found.count}",
                                "use a number of stages that does, or other devices")])  # fmt: skip
    axes = (STAGE, devices), (DATA, found.count // (devices * ways)), (TENSOR, ways)
    return abstract_mesh(axes) if found.devices is None else mesh_on(found.devices, axes)


def _micro_shapes(asked: PipelineOptions, batch: tuple[Any, ...], parts: int) -> tuple[tuple[Any, ...], list[Problem]]:
    problems = []
    need = parts * asked.micro_size
    for key, x in tree_util.tree_flatten_with_path(batch)[0]:
        path = join("batch", key)
        shape = jnp.shape(x)
        if not shape:
            problems.append(Problem(f"`{path}` is a scalar, which has no batch dim", f"{path}: {short(x)}",
                                    "dim 0 of every array of the batch is cut into micro-batches",
                                    "close over it in the loss function"))  # fmt: skip
    problems += part_problems(batch, parts, asked.micro_size)
    if problems:
        return (), problems
    cut_one = lambda x: jax.ShapeDtypeStruct((x.shape[0] // need, *x.shape[1:]), x.dtype)  # noqa: E731
    return tree_util.tree_map(cut_one, tuple(batch)), []


def _callable(engine: PipelineExecutor, order: Schedule) -> Callable[..., Any]:
    """(parameters in rows or not, batch) -> loss, whose gradients the schedule works out beside it."""
    layout = engine.layout
    evaluates = forward_only(order.devices, order.micro_size, order.chunks)
    seen: set[str] = set()

    def run(beats: Schedule, packed: PackedParameters, batch: Any) -> Any:
        if beats.name not in seen:
            engine.check(beats, packed, batch)
            seen.add(beats.name)
        return engine.mapped(beats, packed, batch)

    @jax.custom_vjp
    def loss(packed: PackedParameters, batch: Any) -> Any:
        return run(evaluates, packed, batch)

    def forward(packed: Any, batch: Any) -> Any:
        if any(x.perturbed and is_inexact(x.value) for x in tree_util.tree_leaves(batch, is_leaf=_is_primal)):
            fail(StrategyError, "a pipeline has no gradients of the batch", where="jax.grad of a pipeline by its batch",
                 why="only those of the parameters are worked out with the loss",
                 fix="make what is to be differentiated a parameter")  # fmt: skip
        value = lambda tree: tree_util.tree_map(lambda x: x.value, tree, is_leaf=_is_primal)  # noqa: E731
        packed, batch = value(packed), value(batch)
        made, d_rows, d_shared = run(order, packed, batch)
        shapes = tree_util.tree_map(_zeros, (packed, batch))
        return made, (d_rows, d_shared, shapes)

    def backward(kept: Any, seed: Any) -> Any:
        d_rows, d_shared, (packed, batch) = kept
        times = lambda x: (x * seed).astype(x.dtype)  # noqa: E731
        grads = PackedParameters(
            {k: times(x) for k, x in d_rows.items()},
            {k: times(d_shared[k]) if k in d_shared else x for k, x in packed.shared.items()},
            layout,
        )
        return grads, batch

    loss.defvjp(forward, backward, symbolic_zeros=True)

    def call(params: Any, batch: tuple[Any, ...]) -> Any:
        packed = params if isinstance(params, PackedParameters) else packing.pack(layout, params)
        return loss(_held(engine.mesh, packed), batch)

    return jax.jit(call)


def _held(mesh: Any, packed: PackedParameters) -> PackedParameters:
    """In rows that lie on their devices."""

    lies = lambda kind, x: lax.with_sharding_constraint(x, NamedSharding(mesh, row_spec(kind)))  # noqa: E731
    return dataclasses.replace(packed, rows={kind: lies(kind, x) for kind, x in packed.rows.items()})


def _zeros(x: Any) -> Any:
    """The cotangent of an array that has no gradient."""
    return jnp.zeros(x.shape, x.dtype) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed") and hasattr(x, "value")


def _no_count() -> Problem:
    return Problem("nothing says how many stages there are", "pipeline_stages = None",
                   "the model has no marks to count", "give pipeline_stages, or mark the model's parts")  # fmt: skip


def _no_marks(asked: PipelineOptions, count: int) -> Problem:
    return Problem(f"nothing says what belongs to which of {count} stages", f"train.pipeline({asked.name})",
                   "no module has a `pipeline_stage`, no function is `staged`, no path is in `stage_config`",
                   "mark the model's parts, or let auto_pipeline=True cut it by cost")  # fmt: skip
