"""`train.step`: a loss function and an optimizer to a jitted, donated training step, laid out by a mode."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
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
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import shape_of, short
from shardfn.planning.plan import Plan
from shardfn.report.report import Report
from shardfn.train.collectives.buckets import Bucket, fusion_of
from shardfn.train.optimizer_adapters import adapted
from shardfn.train.pipelines.pipeline import Pipeline
from shardfn.train.remat import recompute as again
from shardfn.train.scan_layers.scan import DEFAULT_LIMIT, ScannedLoss, fold, limit_of
from shardfn.train.scan_layers.train_step import Chosen, chosen, folding_of
from shardfn.train.steps.checks import problems
from shardfn.train.steps.modes import mode_of
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shard_step import ShardedStep, shard_step, whole_layout
from shardfn.train.steps.state import (
    ModelParts,
    TrainState,
    holds_array,
    is_incomplete,
    model_parts,
    owned,
    retied,
    ties,
)


def step(
    loss_fn: Any,
    optimizer: optax.GradientTransformation,
    *,
    mode: str | None = None,
    has_aux: bool = False,
    mutable: str | Sequence[str] = (),
    device: Any = None,
    level: int = 0,
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
    """A training step: `state, loss = step(state, *batch)`.

    Args:
      loss_fn: `(params, *batch) -> loss`, a mean over the batch; with `has_aux`, `-> (loss, auxiliary output)`.
      optimizer: any optax transformation; one that takes more gets `value` (the loss), `grad` and `value_fn`. With
        `optax.lookahead` give the parameters as they are: the slow ones are `state.opt_state.slow`.
      mode: "stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel" or "auto_parallel"; the context's
        `parallel_mode` where you set it, else "auto_parallel".
      mutable: collections of Linen's variables that the loss changes, `"batch_stats"`: it gives `(loss, collections)`, with
        `has_aux` `(loss, (auxiliary output, collections))`, the collections as `apply(..., mutable=["batch_stats"])` does.
      device, level, options: as in `shard` (`search_mode`, `memory_limit`, `compile_candidates`, ...).
      in_strategy: an entry for each argument of the batch, in the semi-auto and auto modes; not said: dim 0 is cut over
        all devices in "semi_auto_parallel", searched in "auto_parallel".
      parameter_plan: entries by path glob within the parameters, `{"layers/*/w1": (1, 4)}`, in the same modes.
      micro_batches: each batch is worked through in so many parts, whose gradients are added up; over devices they are
        reduced once, at the end.
      compute_dtype: the dtype that floating-point parameters are cast to for the loss and its gradients.
      gradients_mean: False makes the objective the sum of the devices' losses (MindSpore's default), not their mean.
      gradient_fp32_sync: sum gradients of 16 bits in float32 (where each device works on its part of the batch).
      loss_repeated_mean: False multiplies gradients by the number of devices that work out the same loss.
      parameter_broadcast: `init` sends process 0's parameters to all processes.
      cross_batch: in the semi-auto and auto modes, batch statistics are those of each device's part of the batch, as
        data parallelism computes them; False: of the whole batch.
      layerwise_parallel: globs of parameters of which each device keeps one of its own, not aggregated ("data_parallel"
        and "hybrid_parallel"); they get a leading dim, one entry for each device.
      frozen: globs of parameters that are not trained.
      enable_parallel_optimizer, parallel_optimizer_config: as MindSpore's context has them: cut the optimizer's states
        (`optimizer_level` "level1"), gradients too ("level2"), parameters too ("level3").
      parallel_optimizer_comm_recompute: at "level3", gather the parameters again for the backward pass; False keeps them
        whole from the forward pass on.
      opt_state_memory_kind: "pinned_host" keeps the optimizer's states in the host's memory, and moves them to the devices
        for the update.
      comm_fusion, all_reduce_fusion_config: as MindSpore's context has them: which collectives travel as one, by size in
        MB or by index. Where each device works on its part of the batch they are exactly so many collectives; else
        XLA's combiners are told, where they take it. Not set: as XLA likes.
      fusion: numbers by path glob; gradients (and gathered parameters) with the same number travel together, 0 alone.
      reuse: "auto" folds the equal blocks of an unrolled model into one that is scanned, with their parameters stacked
        in the state ("layers/*/w"; `parameter_plan` and other globs name those); `init` then needs a batch. A positive
        int is the most blocks in one scan, -1 is 1000. What is folded, and why not: `folding.explain()`.
      recompute: how many of the equal blocks are worked out again in the backward pass; "auto" as few as fit into
        `memory_limit`, and `recomputed` says what that costs. It folds as `reuse` does. Or globs of submodules of the
        model, "layers/*", as in `train.recompute`.
      donate: give the old state's memory to the new one.

    Raises:
      ContextError, ContextTypeError, StrategyError: what is wrong with the options, all at once.

    >>> import jax.numpy as jnp, optax
    >>> mean_square = lambda params, x, y: jnp.mean((x @ params["w"] - y) ** 2)
    >>> train = step(mean_square, optax.sgd(0.1), mode="data_parallel")
    >>> state = train.init({"w": jnp.zeros((2, 1))})
    >>> state, loss = train(state, jnp.ones((8, 2)), jnp.ones((8, 1)))
    >>> float(loss), int(state.step)
    (1.0, 1)
    """
    mode_asked = mode_of(mode)
    if parallel_optimizer_config is not None and enable_parallel_optimizer is None:
        enable_parallel_optimizer = True
    current = defaults.current()
    settings = current.training.changed(
        "train.step", gradients_mean=gradients_mean, gradient_fp32_sync=gradient_fp32_sync,
        loss_repeated_mean=loss_repeated_mean, parameter_broadcast=parameter_broadcast,
        enable_parallel_optimizer=enable_parallel_optimizer, parallel_optimizer_config=parallel_optimizer_config,
        comm_fusion=comm_fusion, all_reduce_fusion_config=all_reduce_fusion_config,
    )  # fmt: skip
    mutable = _globs(mutable)
    globs = _globs(recompute) if _is_by_path(recompute) else ()
    if globs and callable(loss_fn) and not isinstance(loss_fn, Pipeline):
        loss_fn, recompute = _recomputing(loss_fn, globs), None
    options = {**options, "level": level, "in_strategy": in_strategy, "parameter_plan": parameter_plan}
    raise_problems(problems({
        "loss_fn": loss_fn, "optimizer": optimizer, "micro_batches": micro_batches, "has_aux": has_aux, "mutable": mutable,
        "cross_batch": cross_batch, "compute_dtype": compute_dtype,
        "layerwise_parallel": layerwise_parallel, "fusion": fusion, "reuse": reuse,
        "recompute": recompute, "opt_state_memory_kind": opt_state_memory_kind,
        "parallel_optimizer_comm_recompute": parallel_optimizer_comm_recompute, "options": options,
    }, mode_asked, settings))  # fmt: skip
    # The mode and the layout of the data have been acted on.
    current = dataclasses.replace(
        current, training=settings, parallel_mode=None, dataset_strategy=None, honours_out_strategy=True
    )
    options["parameter_plan"] = dict(parameter_plan or {})
    folded = limit_of("auto" if recompute and (reuse is None or reuse is False) else reuse)
    return TrainStep(StepOptions(
        loss_fn=loss_fn, optimizer=adapted(optimizer), mode=mode_asked, defaults=current, has_aux=has_aux, mutable=mutable,
        device=device, micro_batches=micro_batches, compute_dtype=compute_dtype, cross_batch=cross_batch,
        own=_globs(layerwise_parallel), frozen=_globs(frozen), donate=donate,
        gathers_again=parallel_optimizer_comm_recompute, opt_state_memory_kind=opt_state_memory_kind,
        fusion=fusion_of(settings, fusion), reuse=folded, recompute=recompute, options=types.MappingProxyType(options),
    ))  # fmt: skip


class TrainStep:
    """What `train.step` returns. `init` makes the state; a call takes one step."""

    def __init__(self, training: StepOptions):
        self.training = self._asked = training
        self._anatomy: ModelParts | None = None
        self._kind: Any = None
        self._laid: dict[Any, ShardedStep] = {}
        self._unfolded: ModelParts | None = None
        self.folding: ScannedLoss | None = None
        """What was folded, with `reuse`; None before `init`."""
        self.recomputed: Chosen | None = None
        """What is recomputed, and what it costs, with `recompute`."""

    def __repr__(self) -> str:
        name = getattr(self.training.loss_fn, "__name__", type(self.training.loss_fn).__name__)
        return f"train.step({name}, mode={self.training.mode.name!r})"

    def init(self, params: Any, /, *batch: Any, **named: Any) -> TrainState:
        """The first state, laid out where the mode or `batch` says how.

        Args:
          params: the model (a pytree, an NNX or Equinox module), or a function of nothing that makes it: then it is
            made where it lies, and never whole on one device.
          batch: arrays or shapes as the step will get them; in the semi-auto and auto modes the layout depends on them.
            Without them the first call moves the state. Here and in a call they may be given by name.
        """
        batch = self._ordered(batch, named)
        make = params if _makes(params) else lambda: params
        model = _shape_of_model(make) if _makes(params) else params
        if self.training.reuse is not None:
            make, model = self._fold(make, model, batch)
        parts = model_parts(model, self.training.frozen, self.training.mutable)
        if parts != self._anatomy:
            self._anatomy, self._laid = parts, {}
        if self.training.settings.parameter_broadcast and jax.process_count() > 1:
            arrays = multihost_utils.broadcast_one_to_all(jax.jit(lambda: parts.arrays(make()))())
            make = lambda: parts.model(arrays)  # noqa: E731
        own, count = owned(parts, self.training.own), self.training.hardware().count

        def first() -> TrainState:
            leaves = parts.treedef.flatten_up_to(parts.arrays(make()))
            leaves = [jnp.broadcast_to(x, (count, *x.shape)) if o else x for x, o in zip(leaves, own, strict=True)]
            arrays = tree_util.tree_unflatten(parts.treedef, leaves)
            return TrainState(arrays, self.training.optimizer.init(parts.split(arrays)[0]), jnp.zeros((), jnp.int32))

        shapes = jax.eval_shape(first)
        kind = [shape_of(x) for x in tree_util.tree_leaves(shapes)]
        if kind != self._kind:
            self._kind, self._laid = kind, {}
        if not batch and self.training.mode.layouts != "whole":
            return jax.jit(first)()
        shardings = self._for(shapes, batch).state if batch else whole_layout(self.training, parts, shapes)
        return jax.jit(first, out_shardings=shardings)()

    def __call__(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[TrainState, Any]:
        if named:
            batch = self._ordered(batch, named)
        count = getattr(state, "step", None)
        if isinstance(count, jax.Array) and not isinstance(count, Tracer) and count.is_deleted():
            fail(StrategyError, "the state was given away: a step takes its memory for the next one", where="state",
                 why="donate = True", fix="go on with the state that the step gave, or set donate=False")  # fmt: skip
        laid = self._for(state, batch)
        with defaults.held(self.training.defaults):
            return laid.sharded(state, *batch)

    def plan(self, state: TrainState, /, *batch: Any, **named: Any) -> Plan:
        """The plan of a step; arguments may be shapes."""
        batch = self._ordered(batch, named)
        with defaults.held(self.training.defaults):
            return self._for(state, batch).sharded.plan(state, *batch)

    def explain(self, state: TrainState, /, *batch: Any, compiled: bool = False, **named: Any) -> Report:
        """The report of a step; with `compiled`, beside what XLA made of it."""
        batch = self._ordered(batch, named)
        with defaults.held(self.training.defaults):
            return self._for(state, batch).sharded.explain(state, *batch, compiled=compiled)

    def lower(self, state: TrainState, /, *batch: Any, **named: Any) -> Any:
        """`jax.stages.Lowered` of a step."""
        batch = self._ordered(batch, named)
        with defaults.held(self.training.defaults):
            return self._for(state, batch).sharded.lower(state, *batch)

    def buckets(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
        """The collectives of gradients and of gathered parameters, each with the paths of what it takes.

        Empty where XLA puts them together: `comm_fusion` and `fusion` were not set, or its partitioner makes them.
        """
        return self._for(state, self._ordered(batch, named)).buckets

    def model(self, state: TrainState) -> Any:
        """The model that a state holds, with what of it is no array."""
        if self._unfolded is not None and self.folding is not None:
            return self._unfolded.model(self.folding.unstack(state.params))
        return self._parts(state).model(state.params)

    # ---- inside

    def _ordered(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        return in_order(self._asked.loss_fn, batch, named) if named else batch

    def _fold(self, make: Callable[[], Any], model: Any, batch: tuple[Any, ...]) -> tuple[Callable[[], Any], Any]:
        """Parameters and what makes them, stacked; the loss becomes the folded one."""
        asked, parts = self._asked, model_parts(model, self._asked.frozen)
        limit = asked.reuse or DEFAULT_LIMIT
        made = folding_of(parts, model, batch, asked.loss_fn, asked.optimizer, limit)
        shapes, given = _shapes(parts.arrays(model)), _shapes(batch)
        if asked.recompute:
            refold = lambda n: fold(  # noqa: E731
                lambda a, *b: asked.loss_fn(parts.model(a), *b), shapes, *given, limit=limit, recomputed=n
            )
            kept = sum(x.size * x.dtype.itemsize for x in tree_util.tree_leaves(
                (shapes, shapes, jax.eval_shape(asked.optimizer.init, parts.split(shapes)[0]))))  # fmt: skip
            self.recomputed = chosen(made, refold, shapes, given, asked.recompute, asked.options.get("memory_limit"),
                                     asked.hardware().count, kept)  # fmt: skip
            made = refold(self.recomputed.blocks) if self.recomputed else made
        self.folding, self._laid = made, {}
        if not made.groups:
            warn(f"`reuse` has no effect: {made.explain()}")
            self.training, self._unfolded = asked, None
            return make, model
        self._unfolded = parts
        trained = made.stack(tree_util.tree_unflatten(parts.treedef, parts.trained))
        if some := [name for name, one in trained.items() if np.any(one) and not np.all(one)]:
            fail(StrategyError, f"`frozen` names some of equal blocks that are folded into one: {listed(some)}",
                 where=f"frozen = {asked.frozen}", why="their parameters are one stacked array, which is trained or is not",
                 fix="freeze all of them or none, or leave reuse and recompute out")  # fmt: skip
        frozen = tuple(name for name, one in trained.items() if not np.all(one))
        self.training = dataclasses.replace(asked, loss_fn=made.loss, frozen=frozen)
        return lambda: made.stack(parts.arrays(make())), jax.eval_shape(made.stack, shapes)

    def _parts(self, state: TrainState) -> ModelParts:
        if not isinstance(state, TrainState):
            fail(StrategyTypeError, f"the state is {a(state)}", where=f"state = {short(state)}",
                 why="a step takes the State that `init` gives, or the last step",
                 fix="call init(params) first; from a checkpoint, restore(path, like=step.init(...))")  # fmt: skip
        if self._anatomy is None and self.training.reuse is not None:
            fail(StrategyError, "the blocks of this state are folded, and this step has not folded them",
                 where="reuse", why="what folds is found by `init`", fix="call init(params, *batch) once before")  # fmt: skip
        if self._anatomy is None and is_incomplete(state.params):
            fail(StrategyError, "this step has not seen the module that the state is of", where="state.params",
                 why="what of it is no array, or stands at several places, stays with the step, and `init` takes it out",
                 fix="call init(model) once before")  # fmt: skip
        if self._anatomy is None:  # a state from elsewhere, such as a checkpoint
            self._anatomy = model_parts(state.params, self.training.frozen, self.training.mutable)
        return self._anatomy

    def _for(self, state: TrainState, batch: tuple[Any, ...]) -> ShardedStep:
        leaves, treedef = tree_util.tree_flatten(batch)
        key = treedef, tuple(map(shape_of, leaves))
        found = self._laid.get(key)
        if found is None:
            with defaults.held(self.training.defaults):
                found = self._laid[key] = shard_step(self.training, self._parts(state), *_shapes((state, batch)))
        return found


def in_order(loss_fn: Callable[..., Any], batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """A batch of which some arrays are given by the loss function's names for them, as it is by position.

    Raises:
      StrategyTypeError: names that it does not have, or that have no position.

    >>> in_order(lambda params, x, y, scale=1.0: x, (), {"y": 2, "x": 1})
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
    rows = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    if len(rows) < len(batch) or not set(named) <= {p.name for p in rows}:
        fail(StrategyTypeError, "the loss function takes by position alone what is given by name", where=f"by name: {names}",
             why="an array of the batch is cut by its position, which *args, **kwargs and keyword-only arguments do not give",
             fix="write loss_fn(params, x, y, ...) with an argument for each")  # fmt: skip
    last = max(i for i, p in enumerate(rows) if p.name in bound)
    return tuple(bound.get(p.name, p.default) for p in rows[: last + 1])


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
    """A loss of the model whose submodules at these paths are worked out again."""

    @functools.wraps(loss_fn)
    def loss(model: Any, *batch: Any) -> Any:
        return loss_fn(again(model, paths=globs), *batch)

    return loss


def _makes(params: Any) -> bool:
    """Whether it is a function that makes parameters, and no model."""
    return callable(params) and tree_util.all_leaves([params])


def _shape_of_model(make: Callable[[], Any]) -> Any:
    """The model that a function makes, with shapes for arrays; nothing is computed."""
    made: list[Any] = []

    def arrays() -> list[Any]:
        model = make()
        made[:] = *tree_util.tree_flatten(model), ties(model)
        return [leaf if holds_array(model, leaf) else None for leaf in made[0]]

    shapes = jax.eval_shape(arrays)
    leaves = [a if b is None else b for a, b in zip(made[0], shapes, strict=True)]
    return retied(tree_util.tree_unflatten(made[1], leaves), made[2])


def _shapes(tree: Any) -> Any:
    return tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), getattr(x, "dtype", None) or jnp.result_type(x)), tree
    )
