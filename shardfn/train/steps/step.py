"""`train.step`: a jitted training step with a donated state, from a loss function and an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import tree_util
from jax.core import Tracer
from jax.experimental import multihost_utils

from shardfn.errors import StrategyError, StrategyTypeError, a, fail, raise_problems, warn
from shardfn.frontend import defaults
from shardfn.frontend.callee import is_cell
from shardfn.frontend.option_checks import positional
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import shape_of, short
from shardfn.planning.plan import Plan
from shardfn.report.report import Report
from shardfn.train.collectives import Bucket, fusion_of
from shardfn.train.optimizer_adapters import adapted
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.remat import recompute as again
from shardfn.train.scan_layers.scan import DEFAULT_LIMIT, ScannedLoss, scan_layers, scan_limit
from shardfn.train.scan_layers.train_step import RematChoice, choose_recomputed_blocks, scan_step_loss
from shardfn.train.steps import cells
from shardfn.train.steps.checks import step_problems
from shardfn.train.steps.options import StepOptions, mode_of
from shardfn.train.steps.shard_step import ShardedStep, shard_step, state_shardings
from shardfn.train.steps.state import (
    ModelParts,
    TrainState,
    holds_array,
    is_incomplete,
    model_parts,
    retie,
    shapes_of,
    tied_variables,
)


def step(
    loss_fn: Any,
    optimizer: optax.GradientTransformation,
    *,
    mode: str | None = None,
    has_aux: bool = False,
    mutable: str | Sequence[str] = (),
    device: Any = None,
    level: int | str | None = None,
    in_strategy: Any = None,
    parameter_plan: Mapping[str, Any] | None = None,
    micro_batches: int = 1,
    compute_dtype: Any = None,
    gradients_mean: bool | None = None,
    gradient_fp32_sync: bool | None = None,
    loss_repeated_mean: bool | None = None,
    parameter_broadcast: bool | None = None,
    cross_batch: bool = False,
    layerwise_parallel: Sequence[str] = (),
    frozen: Sequence[str] = (),
    enable_parallel_optimizer: bool | None = None,
    parallel_optimizer_config: Mapping[str, Any] | None = None,
    parallel_optimizer_comm_recompute: bool = False,
    opt_state_memory_kind: str | None = None,
    comm_fusion: Mapping[str, Any] | None = None,
    all_reduce_fusion_config: Sequence[int] | None = None,
    fusion: Mapping[str, int] | None = None,
    reuse: Any = None,
    recompute: Any = None,
    donate: bool = True,
    **options: Any,
) -> TrainStep:
    """Make a jitted training step, called as `state, loss = step(state, *batch)`.

    Args:
      loss_fn: `(params, *batch) -> loss`, a mean over the batch; with `has_aux`, `-> (loss, auxiliary output)`. Or a `Cell`
        that is called as `(*batch)` and returns the loss.
      optimizer: an optax transformation. One that takes more than gradients gets `value` (the loss), `grad` and
        `value_fn`. With `optax.lookahead` give plain parameters; the slow ones are `state.opt_state.slow`.
      mode: "stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel" or "auto_parallel"; by default the
        context's `parallel_mode` if set, else "auto_parallel".
      has_aux: whether the loss function returns an auxiliary output too.
      mutable: collections of Linen variables that the loss returns, such as "batch_stats": it returns
        `(loss, collections)`, with `has_aux` `(loss, (auxiliary output, collections))`.
      device: the devices, as in `shard`.
      level: what the search minimises, as in `shard`.
      in_strategy: one entry for each argument of the batch, in the semi-auto and auto modes. By default the context's
        `dataset_strategy` if set, else dimension 0 is sharded over all devices in "semi_auto_parallel", and searched in
        "auto_parallel".
      parameter_plan: entries by path glob within the parameters, `{"layers/*/w1": (1, 4)}`, in the same modes.
      micro_batches: how many parts of a batch to process in sequence. Their gradients are accumulated, and reduced over
        devices once.
      compute_dtype: the dtype to which floating-point parameters are cast for the loss and its gradients.
      gradients_mean: False makes the objective the sum of the devices' losses (MindSpore's default) instead of the mean.
      gradient_fp32_sync: whether 16-bit gradients are summed in float32, if each device works on its part of the batch.
      loss_repeated_mean: False multiplies gradients by the number of devices that compute the same loss.
      parameter_broadcast: True makes `init` send process 0's parameters to all processes.
      cross_batch: True computes batch statistics on each device's part of the batch in the semi-auto and auto modes
        too, as data parallelism does; False on the global batch.
      layerwise_parallel: globs of parameters of which each device has its own, in "data_parallel" and
        "hybrid_parallel". They get a leading dimension with one entry for each device.
      frozen: globs of parameters that are not trained.
      enable_parallel_optimizer: True shards the optimizer's states, as in MindSpore's context.
      parallel_optimizer_config: MindSpore's dict. `optimizer_level` "level1" shards the optimizer's states, "level2"
        gradients too, "level3" parameters too.
      parallel_optimizer_comm_recompute: at "level3", True gathers parameters again for the backward pass; False keeps
        the gathered ones.
      opt_state_memory_kind: "pinned_host" keeps the optimizer's states in host memory between steps.
      comm_fusion: MindSpore's dict: which collectives are fused, by size in MB or by index. If each device works on its
        part of the batch, the step has exactly these collectives. Otherwise XLA's combiners get the sizes, where XLA has
        such an option. By default XLA chooses.
      all_reduce_fusion_config: MindSpore's list: the index of the last gradient of each fused all-reduce.
      fusion: bucket numbers by path glob. Gradients and gathered parameters with the same number share a collective; 0
        is a collective of its own.
      reuse: "auto" scans repeated layers of an unrolled model. Their parameters are stacked in the state (`"layers/*/w"`),
        globs name the stacked paths, and `init` needs a batch. A positive int is the largest number of layers in one
        scan, -1 is 1000. `step.scanned_layers.explain()` shows which layers are scanned.
      recompute: how many repeated layers the backward pass rematerialises, or "auto" for the fewest that fit
        `memory_limit`; either scans layers as `reuse` does, and `step.recomputed` has the cost. Or globs of submodules of
        the model, `"layers/*"`, as in `train.recompute`.
      donate: whether the next state reuses the memory of the old one.
      **options: options of `shard` for the search (`search_mode`, `memory_limit`, `compile_candidates`, ...).

    Returns:
      A `TrainStep`.

    Raises:
      ContextError, ContextTypeError, StrategyError, StrategyTypeError: for wrong options, all at once.

    >>> import jax.numpy as jnp, optax
    >>> mean_square = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
    >>> train = step(mean_square, optax.sgd(0.1), mode="data_parallel")
    >>> state = train.init({"w": jnp.zeros((2, 1))})
    >>> state, loss = train(state, jnp.ones((8, 2)), jnp.ones((8, 1)))
    >>> float(loss), int(state.step)
    (1.0, 1)
    """
    if parallel_optimizer_config is not None and enable_parallel_optimizer is None:
        enable_parallel_optimizer = True
    current = defaults.current()
    settings = current.training.changed(
        "train.step", gradients_mean=gradients_mean, gradient_fp32_sync=gradient_fp32_sync,
        loss_repeated_mean=loss_repeated_mean, parameter_broadcast=parameter_broadcast,
        enable_parallel_optimizer=enable_parallel_optimizer, parallel_optimizer_config=parallel_optimizer_config,
        comm_fusion=comm_fusion, all_reduce_fusion_config=all_reduce_fusion_config,
    )  # fmt: skip
    loss_fn = cells.loss_of(loss_fn)
    globs = _globs(recompute) if _is_by_path(recompute) else ()
    if globs and callable(loss_fn) and not isinstance(loss_fn, Pipeline):
        loss_fn, recompute = _recomputing(loss_fn, globs), None
    dataset_strategy = current.dataset_strategy
    # The mode and the layout of the data are applied here.
    current = dataclasses.replace(
        current, training=settings, parallel_mode=None, dataset_strategy=None, honours_out_strategy=True
    )
    asked = StepOptions(
        loss_fn=loss_fn, optimizer=optimizer, mode=mode_of(mode), defaults=current,
        dataset_strategy=dataset_strategy, has_aux=has_aux, mutable=_globs(mutable),
        device=device, micro_batches=micro_batches, compute_dtype=compute_dtype, cross_batch=cross_batch,
        layerwise_parallel=_globs(layerwise_parallel), frozen=_globs(frozen), donate=donate,
        parallel_optimizer_comm_recompute=parallel_optimizer_comm_recompute, opt_state_memory_kind=opt_state_memory_kind,
        fusion=fusion, reuse=reuse, recompute=recompute,
        options={**options, "level": level, "in_strategy": in_strategy, "parameter_plan": parameter_plan},
    )  # fmt: skip
    raise_problems(step_problems(asked, inspect.signature(step).parameters))
    _warn_of_dataset(asked)
    limit = scan_limit("auto" if recompute and (reuse is None or reuse is False) else reuse)
    return TrainStep(
        dataclasses.replace(asked, optimizer=adapted(optimizer), fusion=fusion_of(settings, fusion), reuse=limit)
    )


class TrainStep:
    """A training step; `train.step` makes it. `init` makes the state, and a call takes one step.

    Attributes:
      scanned_layers: which layers are scanned, with `reuse` or `recompute`; None before `init`.
      recomputed: how many layers are rematerialised and at what cost, with `recompute`; None before `init`.
    """

    def __init__(self, options: StepOptions):
        self.options = self._given_options = options
        self._loss_fn = options.loss_fn
        self._parts: ModelParts | None = None
        self._unscanned: ModelParts | None = None
        self._state_shapes: Any = None
        self._sharded: dict[Any, ShardedStep] = {}
        self._cell: Any = None
        self.scanned_layers: ScannedLoss | None = None
        self.recomputed: RematChoice | None = None

    def __repr__(self) -> str:
        name = getattr(self.options.loss_fn, "__name__", type(self.options.loss_fn).__name__)
        return f"train.step({name}, mode={self.options.mode.name!r})"

    def init(self, params: Any, /, *batch: Any, **named: Any) -> TrainState:
        """Make the first state.

        Args:
          params: the model (a pytree, an NNX or Equinox module, a `Cell`), or a function without arguments that makes it. The
            function's arrays are created with their final shardings. Of a `Cell` the state holds the arrays, by path.
          *batch: arrays or shapes as the step will get them. In the semi-auto and auto modes the shardings depend on
            them; without them the first call moves the state.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The state, with its shardings if they are known.

        Raises:
          StrategyError, StrategyTypeError: if model, batch or devices do not fit the options.
        """
        batch = self._ordered(batch, named)
        make, model = self._made(params)
        if self.options.reuse is not None:
            make, model = self._scan_layers(make, model, batch)
        parts = self._model_parts(model)
        if self.options.settings.parameter_broadcast and jax.process_count() > 1:
            arrays = multihost_utils.broadcast_one_to_all(jax.jit(lambda: parts.arrays(make()))())
            make = lambda: parts.model(arrays)  # noqa: E731
        count = self.options.hardware().count

        def first() -> TrainState:
            leaves = zip(parts.treedef.flatten_up_to(parts.arrays(make())), parts.own, strict=True)
            arrays = parts.treedef.unflatten(jnp.broadcast_to(x, (count, *x.shape)) if own else x for x, own in leaves)
            return TrainState(arrays, self.options.optimizer.init(parts.split(arrays)[0]), jnp.zeros((), jnp.int32))

        shapes = jax.eval_shape(first)
        state_shapes = list(map(shape_of, tree_util.tree_leaves(shapes)))
        if (parts, state_shapes) != (self._parts, self._state_shapes):
            self._parts, self._state_shapes, self._sharded = parts, state_shapes, {}
        if not batch and self.options.mode.layouts != "replicated":
            return jax.jit(first)()
        shardings = self._for(shapes, batch).state if batch else state_shardings(self.options, parts, shapes)
        return jax.jit(first, out_shardings=shardings)()

    def __call__(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[TrainState, Any]:
        """Take one step.

        Args:
          state: the state; its memory is donated unless `donate=False`.
          *batch: arrays with the batch in dimension 0, or scalars.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The next state, and the loss (a scalar), with `has_aux` a pair of the loss and the auxiliary output.

        Raises:
          StrategyError, StrategyTypeError: if state, batch or devices do not fit.
        """
        batch = self._ordered(batch, named)
        count = getattr(state, "step", None)
        if isinstance(count, jax.Array) and not isinstance(count, Tracer) and count.is_deleted():
            fail(StrategyError, "the state was given away: a step reuses its memory for the next one", where="state",
                 why="donate = True", fix="go on with the state that the step returned, or set donate=False")  # fmt: skip
        function = self._for(state, batch).function
        with defaults.override(self.options.defaults):
            return function(state, *batch)

    def plan(self, state: TrainState, /, *batch: Any, **named: Any) -> Plan:
        """The plan of a step.

        Args:
          state: the state; shapes will do.
          *batch: arrays or shapes.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The plan, as from `shardfn.plan`.

        Raises:
          StrategyError, StrategyTypeError: if state, batch or devices do not fit.
        """
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).planned.plan(state, *batch)

    def explain(self, state: TrainState, /, *batch: Any, compiled: bool = False, **named: Any) -> Report:
        """The report of a step.

        Args:
          state: the state; shapes will do.
          *batch: arrays or shapes.
          compiled: whether to compile the step and compare the prediction with it.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The report, as from `shardfn.explain`.

        Raises:
          StrategyError, StrategyTypeError: if state, batch or devices do not fit.
        """
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).planned.explain(state, *batch, compiled=compiled)

    def lower(self, state: TrainState, /, *batch: Any, **named: Any) -> Any:
        """Lower a step.

        Args:
          state: the state; shapes will do.
          *batch: arrays or shapes.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The `jax.stages.Lowered` of the step.

        Raises:
          StrategyError, StrategyTypeError: if state, batch or devices do not fit.
        """
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).function.lower(state, *batch)

    def buckets(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
        """The fused collectives of gradients and of gathered parameters.

        Args:
          state: the state; shapes will do.
          *batch: arrays or shapes.
          **named: arrays of the batch by the loss function's names.

        Returns:
          Each collective with the paths of its operands; empty if XLA chooses which collectives to fuse.

        Raises:
          StrategyError, StrategyTypeError: if state, batch or devices do not fit.
        """
        return self._for(state, self._ordered(batch, named)).buckets

    def model(self, state: TrainState) -> Any:
        """The model that a state holds.

        Args:
          state: a state of this step.

        Returns:
          The model as given to `init`, with unstacked layers and its static leaves.

        Raises:
          StrategyError: if this step has not seen the model.
        """
        arrays = self._arrays_model(state)
        return arrays if self._cell is None else cells.with_arrays(self._cell, arrays)

    def _arrays_model(self, state: TrainState) -> Any:
        if self._unscanned is not None and self.scanned_layers is not None:
            return self._unscanned.model(self.scanned_layers.unstack(state.params))
        return self._parts_of(state).model(state.params)

    # ---- inside

    def _made(self, params: Any) -> tuple[Callable[[], Any], Any]:
        """A function that makes the model's arrays, and the model, maybe of shapes. For a `Cell` both are its arrays by path,
        and the step's loss becomes one of these."""
        make = params if _is_maker(params) else lambda: params
        model = _model_shapes(make) if _is_maker(params) else params
        if isinstance(self._loss_fn, Pipeline) or not (is_cell(model) or self._cell is not None):
            return make, model
        cell = model if is_cell(model) else None
        arrays = cells.arrays_of(cell) if cell is not None else {}
        if cell is not None and _is_maker(params):
            arrays = jax.eval_shape(lambda: cells.arrays_of(make()))
            cell = cells.with_arrays(cell, arrays)
        loss_fn = self._loss_fn if cell is None else cells.on_arrays(self._loss_fn, cell)
        self.options = self._given_options = dataclasses.replace(self._given_options, loss_fn=loss_fn)
        self._cell, self._sharded = cell, {}
        return (make, model) if cell is None else (lambda: cells.arrays_of(make()), arrays)

    def _ordered(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        return positional_batch(self._given_options.loss_fn, batch, named) if named else batch

    def _scan_layers(
        self, make: Callable[[], Any], model: Any, batch: tuple[Any, ...]
    ) -> tuple[Callable[[], Any], Any]:
        """A function that makes the stacked parameters, and their shapes; the loss becomes the scanned one."""
        options, parts = self._given_options, model_parts(model, self._given_options.frozen)
        limit = options.reuse or DEFAULT_LIMIT
        scanned = scan_step_loss(parts, model, batch, options.loss_fn, options.optimizer, limit)
        shapes, batch_shapes = shapes_of((parts.arrays(model), batch))
        if options.recompute:
            rescan = lambda n: scan_layers(  # noqa: E731
                lambda a, *b: options.loss_fn(parts.model(a), *b), shapes, *batch_shapes, limit=limit, recomputed=n
            )
            opt_state = jax.eval_shape(options.optimizer.init, parts.split(shapes)[0])
            arrays = tree_util.tree_leaves((shapes, shapes, opt_state))  # parameters, gradients, states
            self.recomputed = choose_recomputed_blocks(
                scanned, rescan, shapes, batch_shapes, options.recompute, options.options.get("memory_limit"),
                options.hardware().count, sum(x.size * x.dtype.itemsize for x in arrays),
            )  # fmt: skip
            scanned = rescan(self.recomputed.blocks)
        self.scanned_layers, self._sharded = scanned, {}
        if not scanned.groups:
            warn(f"`reuse` has no effect: {scanned.explain()}")
            self.options, self._unscanned = options, None
            return make, model
        self._unscanned = parts
        trained = scanned.stack(parts.treedef.unflatten(parts.trained))
        if some := [name for name, one in trained.items() if np.any(one) and not np.all(one)]:
            fail(StrategyError, f"`frozen` names some of the layers that are scanned: {listed(some)}",
                 where=f"frozen = {options.frozen}",
                 why="their parameters are one stacked array, which is trained or is not",
                 fix="freeze all of them or none, or leave reuse and recompute out")  # fmt: skip
        frozen = tuple(name for name, one in trained.items() if not np.all(one))
        self.options = dataclasses.replace(options, loss_fn=scanned.loss, frozen=frozen)
        return lambda: scanned.stack(parts.arrays(make())), jax.eval_shape(scanned.stack, shapes)

    def _parts_of(self, state: TrainState) -> ModelParts:
        if not isinstance(state, TrainState):
            fail(StrategyTypeError, f"the state is {a(state)}", where=f"state = {short(state)}",
                 why="a step takes the State that `init` gives, or the last step",
                 fix="call init(params) first; from a checkpoint, restore(path, like=step.init(...))")  # fmt: skip
        if self._parts is None and self.options.reuse is not None:
            fail(StrategyError, "the layers of this state are stacked, and this step has not scanned them",
                 where="reuse", why="`init` finds the repeated layers", fix="call init(params, *batch) once before")  # fmt: skip
        if self._parts is None and is_incomplete(state.params):
            fail(StrategyError, "this step has not seen the module that the state is of", where="state.params",
                 why="the step keeps tied variables and leaves that are no arrays, and `init` finds them",
                 fix="call init(model) once before")  # fmt: skip
        if self._parts is None:  # a state from elsewhere, such as a checkpoint
            self._parts = self._model_parts(state.params)
        return self._parts

    def _model_parts(self, model: Any) -> ModelParts:
        options = self.options
        return model_parts(model, options.frozen, options.mutable, options.layerwise_parallel)

    def _for(self, state: TrainState, batch: tuple[Any, ...]) -> ShardedStep:
        leaves, treedef = tree_util.tree_flatten(batch)
        key = treedef, tuple(map(shape_of, leaves))
        if key not in self._sharded:
            with defaults.override(self.options.defaults):
                self._sharded[key] = shard_step(self.options, self._parts_of(state), *shapes_of((state, batch)))
        return self._sharded[key]


def _warn_of_dataset(asked: StepOptions) -> None:
    """Warn where the mode shards the batch in its own way, whatever the context says."""
    mode, said = asked.mode, asked.dataset_strategy
    if mode.layouts != "replicated" or said in (None, "data_parallel") or isinstance(asked.loss_fn, Pipeline):
        return
    count = asked.hardware().count
    is_same = isinstance(said, tuple) and all(
        isinstance(entry, tuple) and entry in ((), (count, *(1,) * (len(entry) - 1))) for entry in said
    )
    if not (is_same or (mode.one_device and said == "full_batch")):
        own = "uses one device" if mode.one_device else "shards dimension 0 of the batch over all devices"
        warn(f"dataset_strategy={said!r} has no effect in mode {mode.name!r}, which {own}; "
             'use mode="semi_auto_parallel" or "auto_parallel"')  # fmt: skip


def positional_batch(loss_fn: Callable[..., Any], batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A batch by position, of arrays that are partly given by the loss function's names.

    Raises:
      StrategyTypeError: a name does not exist, or has no position.

    >>> positional_batch(lambda params, x, y, scale=1.0: x, (), {"y": 2, "x": 1})
    (1, 2)
    """
    names = ", ".join(named)
    try:
        signature = inspect.signature(loss_fn)
        bound = signature.bind(None, *batch, **named).arguments
    except (TypeError, ValueError) as error:
        fail(StrategyTypeError, f"the batch does not fit the loss function: {error}", where=f"by name: {names}",
             why=f"it is called as loss_fn(params, *batch), here with {len(batch)} by position",
             fix="give each argument once, by its name in the loss function or by position")  # fmt: skip
    parameters = positional(signature)[1:]
    if len(parameters) < len(batch) or not set(named) <= set(parameters):
        fail(StrategyTypeError, "an array of the batch is given by name, but has no position", where=f"by name: {names}",
             why="the step shards arrays by their position, which *args, **kwargs and keyword-only arguments do not have",
             fix="write loss_fn(params, x, y, ...) with an argument for each")  # fmt: skip
    last = max(i for i, name in enumerate(parameters) if name in bound)
    return tuple(bound.get(name, signature.parameters[name].default) for name in parameters[: last + 1])


def _globs(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(glob, str) for glob in given):
        fail(StrategyTypeError, f"globs of paths are strings, but here is {a(given)}", where=short(given),
             why="`mutable`, `frozen`, `layerwise_parallel` name arrays by path", fix='write them as ["layers/*"]')  # fmt: skip
    return tuple(given)


def _is_by_path(recompute: Any) -> bool:
    return (isinstance(recompute, str) and recompute != "auto") or (
        isinstance(recompute, list | tuple) and bool(recompute) and all(isinstance(glob, str) for glob in recompute)
    )


def _recomputing(loss_fn: Callable[..., Any], globs: tuple[str, ...]) -> Callable[..., Any]:
    """A loss that recomputes the submodules at these paths."""

    @functools.wraps(loss_fn)
    def loss(model: Any, *batch: Any) -> Any:
        return loss_fn(again(model, paths=globs), *batch)

    return loss


def _is_maker(params: Any) -> bool:
    """Whether `params` is a function that makes a model."""
    return callable(params) and not is_cell(params) and tree_util.all_leaves([params])


def _model_shapes(make: Callable[[], Any]) -> Any:
    """The model that a function makes, with shapes for arrays."""
    found: list[Any] = []

    def arrays() -> list[Any]:
        model = make()
        found[:] = *tree_util.tree_flatten(model), tied_variables(model)
        return [leaf if holds_array(model, leaf) else None for leaf in found[0]]

    shapes = jax.eval_shape(arrays)
    leaves = [a if b is None else b for a, b in zip(found[0], shapes, strict=True)]
    return retie(tree_util.tree_unflatten(found[1], leaves), found[2])
