"""From what was asked for and the shapes of a call to a laid-out step: the grid, a layout for every array, the function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.api import shard
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import Problem, raise_problems
from shardfn.frontend.meshes import abstract_mesh, mesh_on, wired
from shardfn.frontend.paths import join, ruled
from shardfn.frontend.strategy import AUTO
from shardfn.ir.model import Spec
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.train.collectives.buckets import Bucket
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.batches import batch_problems
from shardfn.train.steps.communication import fused, parts_of, told
from shardfn.train.steps.gradients import Parts
from shardfn.train.steps.offload import Offloaded, in_memory, offloaded
from shardfn.train.steps.optimizer_parallel import OptimizerParallel, cut_further, mirrored
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import Cut, StepShardings, is_per_device, tree_of
from shardfn.train.steps.state import ModelParts, TrainState, owned
from shardfn.train.steps.update import update_of


@dataclasses.dataclass(frozen=True)
class ShardedStep:
    """A step for one kind of call."""

    sharded: ShardedFunction | Offloaded
    state: TrainState
    """Of `NamedSharding`s."""
    buckets: tuple[tuple[Bucket, tuple[str, ...]], ...] = ()
    """The collectives of gradients and parameters, each with the paths of what it takes."""


def shard_step(training: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> ShardedStep:
    """A step for arrays of these shapes.

    Raises:
      StrategyError: a batch that the devices or the micro-batches do not divide; a glob that matches nothing; what
        `shard` raises in the semi-auto and auto modes.
    """
    if isinstance(training.loss_fn, Pipeline):
        drawn: StepShardings | ShardedStep = _in_stages(training, parts, state, batch)
    elif training.mode.layouts == "whole":
        drawn = _whole(training, parts, state, batch)
    else:
        drawn = _planned(training, parts, state, batch)
    if isinstance(drawn, ShardedStep):
        return _offloaded(training, drawn, _compiled_with(training, None), state, batch)
    cut = _cut(training, parts, state, drawn)
    function = update_of(training, parts, drawn, cut, owned(parts, training.own), state, batch)
    shardings = _shardings(state, drawn, cut)
    named = [*tree_util.tree_leaves(shardings), *(drawn.named(s) for s in drawn.batch)]
    keyed = [*_keyed("state", state), *_keyed("batch", batch)]
    entries = {path: sharding for (path, _), sharding in zip(keyed, named, strict=True)}
    donated = (0,) if training.donate else ()
    how = parts_of(training, parts, drawn, cut, owned(parts, training.own)) if is_per_device(training, drawn) else None
    device = drawn.mesh if isinstance(drawn.mesh, Mesh) else training.device  # what stands in the step is on that mesh
    options = _compiled_with(training, how)
    sharded = shard(function, device=device, parameter_plan=entries, donate_argnums=donated, compiler_options=options)
    laid = ShardedStep(sharded, shardings, fused(training, parts, state.params, drawn, cut, how) if how else ())
    return _offloaded(training, laid, options, state, batch)


def _compiled_with(training: StepOptions, how: Parts | None) -> dict[str, Any]:
    """The options of the compile: those of fusion, and the user's."""
    return {**told(training, how), **(training.options.get("compiler_options") or {})}


def _offloaded(
    training: StepOptions, laid: ShardedStep, options: Mapping[str, Any] | None, state: TrainState, batch: Any
) -> ShardedStep:
    kind = training.opt_state_memory_kind
    if kind is None or not isinstance(laid.sharded, ShardedFunction):
        return laid
    made = offloaded(laid.sharded, laid.state, kind, training.donate, options, state, batch)
    return dataclasses.replace(laid, sharded=made, state=made.there)


def whole_layout(training: StepOptions, parts: ModelParts, state: TrainState) -> TrainState:
    """The layout of a state in the modes whose layouts do not depend on the batch."""
    lies = _in_stages if isinstance(training.loss_fn, Pipeline) else _whole
    drawn = lies(training, parts, state, ())
    layout = _shardings(state, drawn, _cut(training, parts, state, drawn))
    return in_memory(layout, state, training.opt_state_memory_kind)


def _shardings(state: TrainState, drawn: StepShardings, cut: Cut) -> TrainState:
    return TrainState(
        tree_of(state.params, [drawn.named(s) for s in cut.params]),
        tree_of(state.opt_state, [drawn.named(s) for s in cut.opt_state]),
        drawn.named(()),
    )


# ---- where everything lies


def _whole(training: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> StepShardings:
    """Parameters whole on every device, dim 0 of the batch cut over all."""
    devices = training.hardware()
    axes = _data_axes(devices.count, training.zero)
    names = tuple(name for name, _ in axes)
    own = owned(parts, training.own)
    params = tuple(
        (names, *((),) * (len(x.shape) - 1)) if mine else ((),) * len(x.shape)
        for x, mine in zip(parts.treedef.flatten_up_to(state.params), own, strict=True)
    )
    cuts = tuple((names, *((),) * (len(x.shape) - 1)) if x.shape else () for x in tree_util.tree_leaves(batch))
    raise_problems(list(batch_problems(batch, devices.count, training.micro_batches)))
    return StepShardings(_mesh(devices, axes), names, params, _as_params(parts, state, params), cuts)


def _in_stages(training: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> StepShardings:
    """As a pipeline keeps its parameters, on its own grid."""
    assert isinstance(training.loss_fn, Pipeline)
    mesh, params, cuts = training.loss_fn.shardings(parts.model(state.params), batch)
    devices = training.hardware().devices if training.device is not None else None
    if devices is not None and isinstance(mesh, Mesh) and set(devices) != set(mesh.devices.flat):
        raise_problems([Problem("the step and its pipeline are for different devices",
                                f"{len(devices)} devices in train.step, {mesh.size} in train.pipeline",
                                "a step runs on the grid of its pipeline", "leave `device` out of train.step")])  # fmt: skip
    return StepShardings(mesh, (), tuple(params), _as_params(parts, state, params), tuple(cuts))


def _planned(
    training: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]
) -> StepShardings | ShardedStep:
    """As `shard` plans the step on the whole batch; that plan itself where nothing of it is changed."""
    options = {name: value for name, value in training.options.items() if name != "compiler_options"}
    has_file = options.get("layout") is not None or bool(training.defaults.layout_file)
    given = training.mode.layouts == "given" and not has_file  # a layout file says what no entry speaks of
    entries = options.pop("in_strategy") or ((None if given else AUTO),) * len(batch)
    raise_problems(list(_entry_problems(entries, batch)))
    wanted = _wanted(parts, state, options.pop("parameter_plan"), given)
    none = (False,) * len(parts.paths)
    function = update_of(dataclasses.replace(training, micro_batches=1), parts, None, None, none, state, batch)
    draft = shard(
        function,
        (AUTO, *entries), device=training.device, parameter_plan=wanted,
        donate_argnums=(0,) if training.donate else (),
        compiler_options=_compiled_with(training, None) if training.is_plain and not training.cross_batch else None, **options,
    )  # fmt: skip
    made = draft.plan(state, *batch)
    specs = [d.spec for d in made.inputs]
    counts = [len(tree_util.tree_leaves(part)) for part in (state.params, state.opt_state, state.step)]
    params, opt_state, _, rest = (specs[sum(counts[:i]) : (sum(counts[: i + 1]) if i < 3 else None)] for i in range(4))
    data = next((spec[0] for spec in rest if spec and spec[0]), ())
    drawn = StepShardings(made.mesh, data, tuple(params), tuple(opt_state), tuple(rest))
    if training.is_plain and not is_per_device(training, drawn):
        shardings = [drawn.named(s) for s in specs]
        return ShardedStep(draft, tree_util.tree_unflatten(tree_util.tree_structure(state), shardings[: sum(counts)]))
    ways = drawn.count if is_per_device(training, drawn) else 1
    raise_problems(list(batch_problems(batch, ways, training.micro_batches)))
    return drawn


def _cut(training: StepOptions, parts: ModelParts, state: TrainState, drawn: StepShardings) -> Cut:
    zero = training.zero
    if zero is None:
        return Cut(drawn.params, drawn.params, drawn.opt_state)
    leaves = parts.treedef.flatten_up_to(state.params)
    states = tuple(
        cut_further(x.shape, x.dtype.itemsize, spec, drawn.axes, zero) if trained else spec
        for x, spec, trained in zip(leaves, drawn.params, parts.trained, strict=True)
    )
    like = dict(zip(parts.paths, states, strict=True))
    opt_state = tuple(
        like[path] if path is not None else cut_further(x.shape, x.dtype.itemsize, spec, drawn.axes, zero)
        for x, path, spec in zip(
            tree_util.tree_leaves(state.opt_state), _mirrored(parts, state), drawn.opt_state, strict=True
        )
    )
    return Cut(states if zero.level == 3 else drawn.params, states, opt_state)


def _as_params(parts: ModelParts, state: TrainState, params: Sequence[Spec]) -> tuple[Spec, ...]:
    """The layouts of the optimizer's states: as the parameters that they mirror lie, else whole."""
    like = dict(zip(parts.paths, params, strict=True))
    pairs = zip(_mirrored(parts, state), tree_util.tree_leaves(state.opt_state), strict=True)
    return tuple(((),) * len(x.shape) if path is None else like[path] for path, x in pairs)


def _mirrored(parts: ModelParts, state: TrainState) -> list[str | None]:
    shapes = [tuple(x.shape) for x in parts.treedef.flatten_up_to(state.params)]
    return mirrored(state.opt_state, dict(zip(parts.paths, shapes, strict=True)))


def _wanted(parts: ModelParts, state: TrainState, plan: Mapping[str, Any], is_given: bool) -> dict[str, Any]:
    """The user's parameter plan by paths within the step's arguments.

    Where layouts are given, what it does not name is whole, and the optimizer's states lie as their parameters.
    """
    found: dict[str, Any] = {}
    by_path: dict[str | None, Any] = {}
    keyed = _keyed("state/params", state.params)
    globs = list(plan)
    said = ruled(globs, parts.paths, lambda one, two: plan[globs[one]] == plan[globs[two]])
    raise_problems([
        Problem(f"two rules of `parameter_plan` speak of `{parts.paths[i]}`", f"{globs[one]!r} and {globs[two]!r}",
                "an array has one entry, and no rule comes before the other",
                "make one of the globs narrower, or name the path itself")
        for i, one, two in said.clashes
    ])  # fmt: skip
    missing = [globs[rule] for rule in said.missing]
    found |= {f"state/params/{glob}": plan[glob] for glob in missing}  # `shard` says that it meets nothing
    for i, rule in said.rules.items():
        by_path[parts.paths[i]] = found[keyed[i][0]] = plan[globs[rule]]
    if is_given:
        states = zip(_keyed("state/opt_state", state.opt_state), _mirrored(parts, state), strict=True)
        rest = {name: (1,) * len(x.shape) for name, x in keyed}
        rest |= {name: by_path.get(path, (1,) * len(x.shape)) for (name, x), path in states}
        found = {**rest, "state/step": (), **found}
    return found


def _data_axes(count: int, zero: OptimizerParallel | None) -> tuple[tuple[str, int], ...]:
    """One axis, or two where states are cut over groups of devices that lie side by side."""
    size = zero.shard_size if zero else -1
    if size in (-1, count) or size == 1:
        return (("data", count),)
    if size > count or count % size:
        where = f"optimizer_weight_shard_size = {size}"
        fix = f"use one of {', '.join(str(n) for n in range(2, count + 1) if count % n == 0)}, or -1 for all"
        raise_problems([Problem(f"states cannot be cut over {size} of {count} devices", where,
                                f"{size} does not divide {count}", fix)])  # fmt: skip
    return (("replica", count // size), ("data", size))


def _mesh(devices: Hardware, axes: Sequence[tuple[str, int]]) -> Mesh | AbstractMesh:
    axes = axes or (("data", devices.count),)
    if devices.devices is None:
        return abstract_mesh(axes)
    if devices.mesh is None and devices.platform == "tpu":
        return wired(devices.devices, axes)
    return mesh_on(devices.devices, axes)


def _entry_problems(entries: Any, batch: tuple[Any, ...]) -> Iterator[Problem]:
    if not isinstance(entries, tuple) or len(entries) != len(batch):
        yield Problem(f"`in_strategy` must be a tuple with {len(batch)} entries", f"in_strategy = {entries!r}",
                      "it holds one for each argument of the batch; parameters are cut by parameter_plan",
                      "write an entry for each, None for data parallel")  # fmt: skip


def _keyed(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths as `shard` writes them."""
    return [(join(name, key), x) for key, x in tree_util.tree_flatten_with_path(tree)[0]]
