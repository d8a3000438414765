"""`train.step`: makes a training step with a donated state from a loss function, an optimizer and options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from shardfn.errors import StrategyTypeError, a, fail, raise_problems, warn
from shardfn.frontend import defaults
from shardfn.frontend.called import answered
from shardfn.frontend.strategy import short
from shardfn.train.collectives import fusion_of
from shardfn.train.optimizer_adapters import adapted
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.remat import recompute as again
from shardfn.train.scan_layers.scan import scan_limit
from shardfn.train.steps import cells
from shardfn.train.steps.checks import step_problems
from shardfn.train.steps.options import StepOptions, mode_of
from shardfn.train.steps.table_step import TableStep
from shardfn.train.steps.train_step import TrainStep
from shardfn.train.steps.without_effect import warn_of_settings, without_effect

_NET = ("give the loss of the network: train.step(lambda net, x, y: loss(net(x), y), optimizer), and "
        "step.init(net, x, y)")  # fmt: skip


@answered("train.step", {}, _NET)
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
    ids: Mapping[str, Any] | None = None,
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
    check: bool = False,
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
      compute_dtype: the dtype to which floating-point parameters are cast for the loss and its gradients; the batch is not cast.
      gradients_mean: False makes the objective the sum of the devices' losses (MindSpore's default) instead of the mean.
      gradient_fp32_sync: whether 16-bit gradients are summed in float32, if each device works on its part of the batch.
      loss_repeated_mean: False multiplies gradients by the number of devices that compute the same loss.
      parameter_broadcast: True makes `init` send process 0's parameters to all processes.
      cross_batch: True computes batch statistics on each device's part of the batch in the semi-auto and auto modes
        too, as data parallelism does; False on the global batch.
      layerwise_parallel: globs of parameters of which each device has its own, in "data_parallel" and
        "hybrid_parallel". They get a leading dimension with one entry for each device.
      frozen: globs of parameters that are not trained.
      ids: for each `embedding.Table` among the parameters, by its path, where its ids are in the batch: the number of an
        argument, `(argument, column)` or `(argument, (column, column))` of its last dimension. The loss gets the rows that
        the batch needs as `params["items"]`, and the batch has their positions as ids: `params["items"][ids]`. Each table
        updates its rows by its own optimizer. Norms over all parameters do not count the tables.
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
      check: whether the first step also runs unsharded, and the loss and the next state are compared leaf by leaf. A difference
        beyond rounding is a `CheckError`; `step.check(state, *batch)` gives the table.
      **options: options of `shard` for the search (`search_mode`, `memory_limit`, `compile_candidates`, ...).

    Returns:
      A `TrainStep`; with `ids` a `TableStep`, whose `feed` reads ahead.

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
        layerwise_parallel=_globs(layerwise_parallel), frozen=_globs(frozen), ids=ids or {}, donate=donate,
        parallel_optimizer_comm_recompute=parallel_optimizer_comm_recompute, opt_state_memory_kind=opt_state_memory_kind,
        fusion=fusion, reuse=reuse, recompute=recompute,
        options={**options, "level": level, "in_strategy": in_strategy, "parameter_plan": parameter_plan},
        check=check,
    )  # fmt: skip
    raise_problems(step_problems(asked, inspect.signature(step).parameters))
    _warn_of_dataset(asked)
    warn_of_settings(without_effect(asked))
    limit = scan_limit("auto" if recompute and (reuse is None or reuse is False) else reuse)
    if asked.has_own_shardings:
        asked = dataclasses.replace(asked, defaults=dataclasses.replace(current, layout_file=""))
    kind = TableStep if asked.ids else TrainStep
    return kind(
        dataclasses.replace(asked, optimizer=adapted(optimizer), fusion=fusion_of(settings, fusion), reuse=limit)
    )


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
