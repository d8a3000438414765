"""Shard a training step: from its options and the shapes of a call to the mesh, all shardings and the jitted function."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardfn.api import shard
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import Problem, raise_problems
from shardfn.frontend.meshes import abstract_mesh, mesh_on, wired
from shardfn.frontend.parameter_plan import no_such_array
from shardfn.frontend.paths import array_paths, met, met_by_end, ruled
from shardfn.frontend.strategy import AUTO, ModeEntry, PassedOn, short
from shardfn.ir.divisors import divisors
from shardfn.layoutfile.files import read_layout
from shardfn.planning.inside import AsReadInside
from shardfn.planning.plan import Decision
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.train.collectives import Bucket
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.steps.batches import batch_names, batch_problems, dataset_entries, in_the_batch
from shardfn.train.steps.communication import fusion_options, gradient_sync, is_per_device, step_buckets, update_sync
from shardfn.train.steps.gradients import GradientSync
from shardfn.train.steps.offload import OffloadedStep, offload_step, with_memory_kind
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shardings import (
    OptimizerParallel,
    StepShardings,
    mirrored_paths,
    reason_with,
    shard_further,
    tree_of,
)
from shardfn.train.steps.state import ModelParts, TrainState
from shardfn.train.steps.update import update_function
from shardfn.train.steps.without_effect import warn_of_settings, without_effect_on


@dataclasses.dataclass(frozen=True)
class ShardedStep:
    """A step for one kind of call."""

    planned: ShardedFunction
    """The step in the devices' memory, which `shard` plans."""
    function: ShardedFunction | OffloadedStep
    """The step from and to the memory where the optimizer's states are kept."""
    state: TrainState
    """Of `NamedSharding`s."""
    buckets: tuple[tuple[Bucket, tuple[str, ...]], ...] = ()
    """The fused collectives of gradients and parameters, each with the paths of its operands."""
    is_checked: bool = False
    """Whether a check found no difference to the unsharded step."""


def shard_step(options: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> ShardedStep:
    """A step for arrays of these shapes.

    Raises:
      StrategyError: devices or micro-batches do not divide the batch; a glob matches nothing; what `shard` raises in the
        semi-auto and auto modes.
    """
    if isinstance(options.loss_fn, Pipeline):
        shardings: StepShardings | ShardedStep = _of_pipeline(options, parts, state, batch)
    elif options.mode.layouts == "replicated":
        shardings = _replicated(options, parts, state, batch)
    else:
        shardings = _planned(options, parts, state, batch)
    if isinstance(shardings, ShardedStep):
        step, given = shardings, shardings.planned.options.compiler_options
        compile_with = _compiler_options(options, None) if given is None else dict(given)
    else:
        shardings = _with_zero(options, parts, state, shardings)
        of_state = _state_shardings(state, shardings)
        named = [*tree_util.tree_leaves(of_state), *(shardings.named(s) for s in shardings.batch)]
        paths = [path for path, _ in (*_keyed("state", state), *_keyed("batch", batch))]
        sync = gradient_sync(options, parts, shardings)
        trained = tree_util.tree_leaves(parts.split(state.params)[0])
        warn_of_settings(without_effect_on(options, shardings, trained, sync is not None))
        compile_with = _compiler_options(options, sync)
        function = shard(
            update_function(options, parts, shardings, sync, state, batch),
            device=shardings.mesh if isinstance(shardings.mesh, Mesh) else options.device,  # that of the step's constraints
            parameter_plan=_of_mode(options, zip(paths, named, strict=True), shardings.reasons),
            donate_argnums=(0,) if options.donate else (), compiler_options=compile_with,
            closed_over=options.options.get("closed_over", "constant"),
            assumed_trips=options.options.get("assumed_trips", 1),
        )  # fmt: skip
        updated = update_sync(options, parts, shardings, sync)
        fused = step_buckets(options, parts.split(state.params)[0], sync, updated)
        step = ShardedStep(function, function, of_state, fused)
    if options.opt_state_memory_kind is None:
        return step
    offloaded = offload_step(options, step.planned, step.state, compile_with, state, batch)
    return dataclasses.replace(step, function=offloaded, state=offloaded.stored)


def _compiler_options(options: StepOptions, sync: GradientSync | None) -> dict[str, Any]:
    """XLA's options for fusion, and the user's."""
    return {**fusion_options(options, sync), **(options.options.get("compiler_options") or {})}


def state_shardings(options: StepOptions, parts: ModelParts, state: TrainState) -> TrainState:
    """The shardings of a state in the modes where they do not depend on the batch."""
    of_mode = _of_pipeline if isinstance(options.loss_fn, Pipeline) else _replicated
    shardings = _with_zero(options, parts, state, of_mode(options, parts, state, ()))
    return with_memory_kind(_state_shardings(state, shardings), state, options.opt_state_memory_kind)


def _state_shardings(state: TrainState, shardings: StepShardings) -> TrainState:
    return tree_of(state, [shardings.named(spec) for spec in (*shardings.stored, *shardings.opt_state, ())])


# ---- the shardings of each mode


def _replicated(options: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> StepShardings:
    """Replicated parameters, and dimension 0 of the batch sharded over all devices."""
    devices = options.hardware()
    axes = _data_axes(devices.count, options.zero)
    names = tuple(name for name, _ in axes)
    first_dim = lambda x: (names, *((),) * (len(x.shape) - 1))  # noqa: E731
    leaves = parts.treedef.flatten_up_to(state.params)
    params = tuple(first_dim(x) if o else ((),) * len(x.shape) for x, o in zip(leaves, parts.own, strict=True))
    of_batch = tuple(first_dim(x) if x.shape else () for x in tree_util.tree_leaves(batch))
    raise_problems(list(batch_problems(batch, devices.count, options.micro_batches, batch_names(options.loss_fn))))
    return StepShardings(_mesh(devices, axes), names, params, _like_params(parts, state, params), of_batch)


def _of_pipeline(options: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]) -> StepShardings:
    """The pipeline's own mesh and shardings."""
    assert isinstance(options.loss_fn, Pipeline)
    mesh, params, of_batch = options.loss_fn.shardings(parts.model(state.params), batch)
    devices = options.hardware().devices if options.device is not None else None
    if devices is not None and isinstance(mesh, Mesh) and set(devices) != set(mesh.devices.flat):
        raise_problems([Problem("the step and its pipeline are for different devices",
                                f"{len(devices)} devices in train.step, {mesh.size} in train.pipeline",
                                "a step runs on the mesh of its pipeline", "leave `device` out of train.step")])  # fmt: skip
    return StepShardings(mesh, (), tuple(params), _like_params(parts, state, params), tuple(of_batch))


def _planned(
    options: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...]
) -> StepShardings | ShardedStep:
    """The plan of `shard` for the step on the global batch; its function too if the step needs no change."""
    rest = {name: value for name, value in options.options.items() if name != "compiler_options"}
    file = rest.get("layout") or (options.defaults.layout_file and pathlib.Path(options.defaults.layout_file))
    given = options.mode.layouts == "given" and not file  # a layout file shards arrays without an entry
    of_file = bool(file) and not _is_of_parameters(file, "layout" if rest.get("layout") else "strategy_ckpt_load_file")
    of_mode = ModeEntry(None, _mode_text(options)) if options.mode.layouts == "given" and not of_file else AUTO
    given_entries = rest.pop("in_strategy")
    entries = given_entries or dataset_entries(options.dataset_strategy, batch, of_mode)
    if not isinstance(entries, tuple) or len(entries) != len(batch):
        name, asked = (
            ("in_strategy", given_entries) if given_entries else ("dataset_strategy", options.dataset_strategy)
        )
        entry = "entry" if len(batch) == 1 else "entries"
        full = short((*asked, *[None] * len(batch))[: len(batch)]) if isinstance(asked, tuple) else ""
        raise_problems([Problem(f"`{name}` must be a tuple with {len(batch)} {entry}", f"{name} = {asked!r}",
                                "it has one for each argument of the batch; parameter_plan shards parameters",
                                "write an entry for each, None for data parallel"
                                + (f": {name}={full}" if full else ""))])  # fmt: skip
    if given_entries or isinstance(options.dataset_strategy, tuple):  # the function has the state before the batch
        name = "in_strategy" if given_entries else "dataset_strategy"
        entries = tuple(PassedOn(entry, f"{name}[{i}]") for i, entry in enumerate(entries))
    plan = _parameter_plan(options, parts, state, batch, rest.pop("parameter_plan") or {}, given)
    is_plain = options.is_plain and not options.cross_batch
    function = shard(
        update_function(options, parts, None, None, state, batch),
        (AUTO, *entries), device=options.device, parameter_plan=plan, donate_argnums=(0,) if options.donate else (),
        compiler_options=_compiler_options(options, None) if is_plain else None, **rest,
    )  # fmt: skip
    planned = function.plan(state, *batch)
    count, end = len(parts.paths), len(tree_util.tree_leaves(state))
    own = end + len(tree_util.tree_leaves(batch))  # before them stand the arrays that the loss closes over
    specs = tuple(d.spec for d in planned.inputs[len(planned.inputs) - own :])
    params, opt_state = specs[:count], specs[count : end - 1]  # then comes the step counter
    of_batch = specs[end:]
    batch_axes = next((spec[0] for spec in of_batch if spec and spec[0]), ())
    reasons = {d.path: _reason_of(options, d) for d in planned.inputs[len(planned.inputs) - own :]}
    shardings = StepShardings(planned.mesh, batch_axes, params, opt_state, of_batch, reasons=reasons)
    per_device = is_per_device(options, shardings)
    if options.is_plain and not per_device:
        warn_of_settings(without_effect_on(options, shardings, (), per_device))
        return ShardedStep(function, function, tree_of(state, list(map(shardings.named, specs[:end]))))
    devices = shardings.count if per_device else 1
    raise_problems(list(batch_problems(batch, devices, options.micro_batches, batch_names(options.loss_fn))))
    return shardings


def _is_of_parameters(layout: Any, option: str) -> bool:
    """Whether a layout is a strategy file as MindSpore writes them, without a row for the batch of a step."""
    if not isinstance(layout, str | os.PathLike) or not os.fspath(layout).endswith((".json", ".ckpt")):
        return False
    return not any(rule.glob.replace(".", "/").startswith("batch/") for rule in read_layout(layout, option).arguments)


def _with_zero(options: StepOptions, parts: ModelParts, state: TrainState, shardings: StepShardings) -> StepShardings:
    """The shardings with optimizer parallel."""
    zero = options.zero
    if zero is None:
        return dataclasses.replace(shardings, stored=shardings.params, updates=shardings.params)
    further = lambda x, spec: shard_further(x.shape, x.dtype.itemsize, spec, shardings.axes, zero)  # noqa: E731
    leaves = zip(parts.treedef.flatten_up_to(state.params), shardings.params, parts.trained, strict=True)
    updates = tuple(further(x, spec) if trained else spec for x, spec, trained in leaves)
    rest = [further(x, s) for x, s in zip(tree_util.tree_leaves(state.opt_state), shardings.opt_state, strict=True)]
    opt_state = _like_params(parts, state, updates, rest)
    rows = list(zip(_keyed("state/opt_state", state.opt_state), shardings.opt_state, opt_state, strict=True))
    if zero.level == 3:
        params = zip(_keyed("state/params", state.params), shardings.params, updates, strict=True)
        rows += [row for row, trained in zip(params, parts.trained, strict=True) if trained]
    reasons = {
        path: reason_with(shardings.reasons.get(path, _mode_text(options)), x, before, after, shardings.axes, zero)
        for (path, x), before, after in rows
    }
    return dataclasses.replace(
        shardings,
        stored=updates if zero.level == 3 else shardings.params,
        updates=updates,
        opt_state=opt_state,
        has_optimizer_parallel=(updates, opt_state) != (shardings.params, shardings.opt_state),
        reasons={**shardings.reasons, **reasons},
    )


def _like_params(parts: ModelParts, state: TrainState, params: Sequence[Any], rest: Any = None) -> tuple[Any, ...]:
    """The specs of the optimizer's state: those of the parameters that it mirrors, else of `rest`, else replicated."""
    rest = rest or [((),) * len(x.shape) for x in tree_util.tree_leaves(state.opt_state)]
    shapes = [tuple(x.shape) for x in parts.treedef.flatten_up_to(state.params)]
    mirrored = mirrored_paths(state.opt_state, dict(zip(parts.paths, shapes, strict=True)))
    like = dict(zip(parts.paths, params, strict=True))
    return tuple(spec if path is None else like[path] for path, spec in zip(mirrored, rest, strict=True))


def _parameter_plan(
    options: StepOptions, parts: ModelParts, state: TrainState, batch: tuple[Any, ...], plan: Mapping[str, Any],
    is_given: bool,
) -> dict[str, Any]:  # fmt: skip
    """The user's parameter plan by paths within the step's arguments.

    With given shardings, parameters without an entry are sharded as a sharded function inside reads them, or else replicated,
    and the optimizer's states follow their parameters.
    """
    keyed = _keyed("state/params", state.params)
    globs = list(plan)
    found = ruled(globs, parts.paths, lambda one, two: plan[globs[one]] == plan[globs[two]], _met_in_state)
    names = batch_names(options.loss_fn)
    missing = [(globs[rule], plan[globs[rule]]) for rule in found.missing]
    raise_problems([
        *(in_the_batch(*rule, batch, names) or no_such_array(*rule, parts.paths) for rule in missing), *(
        Problem(f"two entries of `parameter_plan` match `{parts.paths[i]}`", f"{globs[one]!r} and {globs[two]!r}",
                "an array has one entry, and neither glob has priority",
                "make one of the globs narrower, or name the path itself")
        for i, one, two in found.clashes)
    ])  # fmt: skip
    entries = {
        keyed[i][0]: PassedOn(plan[globs[rule]], f"parameter_plan[{globs[rule]!r}]") for i, rule in found.rules.items()
    }
    if not is_given:
        return entries
    states = _keyed("state/opt_state", state.opt_state)
    rest = [(1,) * len(x.shape) for _, x in states]
    params = [
        plan[globs[found.rules[i]]] if i in found.rules else AsReadInside(path) for i, (path, _) in enumerate(keyed)
    ]
    names = [name for name, _ in (*keyed, *states)]
    of_all = (*params, *_like_params(parts, state, params, rest))
    paths = [path for path, _ in keyed]
    reasons = dict.fromkeys(paths, f"{_mode_text(options)}: no entry in parameter_plan")
    for (name, _), path in zip(states, _like_params(parts, state, paths, [""] * len(states)), strict=True):
        reasons[name] = f"as `{path}`" if path else _mode_text(options)
    of_mode = _of_mode(options, [*zip(names, of_all, strict=True), ("state/step", ())], reasons)
    return {**of_mode, **entries}


def _mode_text(options: StepOptions) -> str:
    return f"mode={options.mode.name!r}"


def _reason_of(options: StepOptions, d: Decision) -> str:
    """The reason of a decision for a step that gives its sharding as the mode's."""
    return d.reason if d.source in ("you", "mode", "file") else f"{_mode_text(options)}: {d.source}"


def _of_mode(
    options: StepOptions, entries: Iterable[tuple[str, Any]], reasons: Mapping[str, str]
) -> dict[str, ModeEntry]:
    """Entries that the mode gives, by path, with their reasons."""
    return {path: ModeEntry(entry, reasons.get(path, _mode_text(options))) for path, entry in entries}


def _met_in_state(pattern: str, paths: Sequence[str]) -> tuple[list[int], str]:
    """`met`; a pattern that meets none is held against the paths of a step's report: `state/params/w` for `w`. Then the one path
    with that end."""
    hits, glob = met(pattern, paths)
    if not hits:
        hits, glob = met(pattern, [f"state/params/{path}" for path in paths])
    ends = [] if hits else met_by_end(pattern, paths)
    return (ends, paths[ends[0]]) if len(ends) == 1 else (hits, glob)


def _data_axes(count: int, zero: OptimizerParallel | None) -> tuple[tuple[str, int], ...]:
    """One mesh axis, or two where states are sharded over groups of neighbouring devices."""
    size = zero.shard_size if zero else -1
    if size in (-1, count) or size == 1:
        return (("data", count),)
    if size > count or count % size:
        where = f"optimizer_weight_shard_size = {size}"
        fix = f"use one of {', '.join(map(str, divisors(count)[1:]))}, or -1 for all"
        raise_problems([Problem(f"states cannot be sharded over {size} of {count} devices", where,
                                f"{size} does not divide {count}", fix)])  # fmt: skip
    return (("replica", count // size), ("data", size))


def _mesh(devices: Hardware, axes: Sequence[tuple[str, int]]) -> Mesh | AbstractMesh:
    axes = axes or (("data", devices.count),)
    if devices.devices is None:
        return abstract_mesh(axes)
    if devices.mesh is None and devices.platform == "tpu":
        return wired(devices.devices, axes)
    return mesh_on(devices.devices, axes)


def _keyed(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths as `shard` writes them."""
    return list(zip(array_paths(name, tree), tree_util.tree_leaves(tree), strict=True))
