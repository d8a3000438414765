"""A jitted training step, which `train.step` makes: its state, its plan, and one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.cost.devices.hardware import Hardware, used_here
from shardfn.errors import StrategyError, StrategyTypeError, a, fail, raise_problems, warn
from shardfn.frontend import defaults
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import shape_of, short
from shardfn.planning.plan import Plan
from shardfn.report.report import Report
from shardfn.runtime.agreement import CheckResult
from shardfn.runtime.apply import moved
from shardfn.runtime.processes import spans_processes
from shardfn.train.collectives import Bucket
from shardfn.train.scan_layers.scan import DEFAULT_LIMIT, ScannedLoss, scan_layers
from shardfn.train.scan_layers.train_step import RematChoice, choose_recomputed_blocks, scan_step_loss
from shardfn.train.steps import cells
from shardfn.train.steps.batches import positional_batch, refuse_other_count
from shardfn.train.steps.check_step import check_problems, check_step, refuse_wrong_step
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.shard_step import ShardedStep, shard_step, state_shardings
from shardfn.train.steps.state import (
    ModelParts,
    TrainState,
    is_incomplete,
    is_maker,
    model_parts,
    model_shapes,
    shapes_of,
)
from shardfn.train.steps.tables import refuse_tables


class TrainStep:
    """A training step; `train.step` makes it. `init` makes the state, and a call takes one step.

    `plan`, `explain`, `check`, `lower` and `buckets` take the state and the batch as a call does, and raise what a call raises.
    Shapes will do for all of them but `check`.

    Attributes:
      scanned_layers: which layers are scanned, with `reuse` or `recompute`; None before `init`.
      recomputed: how many layers are rematerialised and at what cost, with `recompute`; None before `init`.
    """

    def __init__(self, options: StepOptions):
        self.options = self._given_options = options
        self._parts: ModelParts | None = None
        self._unscanned: ModelParts | None = None
        self._state_shapes: Any = None
        self._sharded: dict[Any, ShardedStep] = {}
        self.scanned_layers: ScannedLoss | None = None
        self.recomputed: RematChoice | None = None

    def __repr__(self) -> str:
        name = getattr(self.options.loss_fn, "__name__", type(self.options.loss_fn).__name__)
        return f"train.step({name}, mode={self.options.mode.name!r})"

    def init(self, params: Any, /, *batch: Any, **named: Any) -> TrainState:
        """Make the first state.

        Args:
          params: the model (a pytree, an NNX or Equinox module, a `Cell`), or a function without arguments that makes it. The
            function's arrays are created with their final shardings. For each `Cell` in the model the state holds a dict of
            its arrays, by path.
          *batch: arrays or shapes as the step will get them. In the semi-auto and auto modes the shardings depend on
            them; without them the first call moves the state.
          **named: arrays of the batch by the loss function's names.

        Returns:
          The state, with its shardings if they are known.

        Raises:
          StrategyError, StrategyTypeError: if model, batch or devices do not fit the options, or the devices are a target that
            is not here.
        """
        batch = self._ordered(batch, named)
        make = params if is_maker(params) else lambda: params
        model = model_shapes(make) if is_maker(params) else params
        refuse_tables(model)
        if self.options.reuse is not None:
            make, model = self._scan_layers(make, model, batch)
        parts = self._model_parts(model)
        spanning = (
            parts.arrays_made(make())
            if not is_maker(params) and any(map(spans_processes, tree_util.tree_leaves(model)))
            else None
        )
        if self.options.settings.parameter_broadcast and jax.process_count() > 1 and spanning is None:
            arrays = multihost_utils.broadcast_one_to_all(jax.jit(lambda: parts.arrays_made(make()))())
            make = lambda: parts.model(arrays)  # noqa: E731
        hardware = self.options.hardware()
        if not (hardware.is_here or isinstance(jnp.zeros(()), Tracer)):
            shapes_first = "state = jax.eval_shape(lambda: step.init(params, *batch)), then step.plan(state, *batch)"
            self._refuse_target(hardware, "the state cannot be made on", f"plan with shapes: {shapes_first}; to train")

        def first(given: Any = None) -> TrainState:
            made = parts.arrays_made(make()) if given is None else given
            leaves = zip(parts.treedef.flatten_up_to(made), parts.own, strict=True)
            arrays = parts.treedef.unflatten(
                jnp.broadcast_to(x, (hardware.count, *x.shape)) if own else x for x, own in leaves
            )
            return TrainState(arrays, self.options.optimizer.init(parts.split(arrays)[0]), jnp.zeros((), jnp.int32))

        # `jax.jit` takes arrays that span processes as arguments only; others, closed over, fit any devices.
        given = () if spanning is None else (spanning,)
        shapes = jax.eval_shape(first, *given)
        state_shapes = list(map(shape_of, tree_util.tree_leaves(shapes)))
        if (parts, state_shapes) != (self._parts, self._state_shapes):
            self._parts, self._state_shapes, self._sharded = parts, state_shapes, {}
        if not batch and self.options.mode.layouts != "replicated":
            return jax.jit(first)(*given)
        shardings = self._for(shapes, batch).state if batch else state_shardings(self.options, parts, shapes)
        if spanning is not None:
            leaves, targets = tree_util.tree_leaves(spanning), tree_util.tree_leaves(shardings.params)
            whole = [
                NamedSharding(t.mesh, PartitionSpec()) if own else t for t, own in zip(targets, parts.own, strict=True)
            ]
            given = (tree_util.tree_unflatten(tree_util.tree_structure(spanning), moved(leaves, whole)),)
        return jax.jit(first, out_shardings=shardings)(*given)

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
        _refuse_given_away(state)
        if self.options.device is not None and not (hardware := self.options.hardware()).is_here:
            self._refuse_target(hardware, f"{self!r} cannot run on", "use .plan(...) or .explain(...); to run")
        function = self._for(state, batch).function
        if self.options.check:
            self._check_once(state, batch)
        with defaults.override(self.options.defaults):
            return function(state, *batch)

    def plan(self, state: TrainState, /, *batch: Any, **named: Any) -> Plan:
        """The plan of a step, as from `shardfn.plan`."""
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).planned.plan(state, *batch)

    def explain(self, state: TrainState, /, *batch: Any, compiled: bool = False, **named: Any) -> Report:
        """The report of a step, as from `shardfn.explain`. With `compiled` it compares the compiled step with the prediction."""
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).planned.explain(state, *batch, compiled=compiled)

    def check(self, state: TrainState, /, *batch: Any, **named: Any) -> CheckResult:
        """Take a step sharded and unsharded, and compare the loss and the next state leaf by leaf. The state keeps its memory.

        Returns:
          The `CheckResult`: print it for a table. A difference is no error; ask `agrees`.

        Raises:
          StrategyError: there is no unsharded step to compare with.
          DeviceError: the devices are not here.
          NotAvailableError: they belong to several processes.

        >>> import optax
        >>> from shardfn import train
        >>> step = train.step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.sgd(0.1), mode="data_parallel")
        >>> result = step.check(step.init({"w": jnp.ones((4, 2))}), jnp.ones((8, 4)))
        >>> result.agrees, [row.path for row in result.rows]
        (True, ['state/params/w', 'state/step', 'loss'])
        """
        raise_problems(check_problems(dataclasses.replace(self._given_options, check=True)))
        batch = self._ordered(batch, named)
        step = self._for(state, batch)
        return check_step(self.options, self._parts_of(state), step, state, batch)

    def lower(self, state: TrainState, /, *batch: Any, **named: Any) -> Any:
        """The `jax.stages.Lowered` of a step."""
        batch = self._ordered(batch, named)
        with defaults.override(self.options.defaults):
            return self._for(state, batch).function.lower(state, *batch)

    def buckets(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
        """The fused collectives of gradients and of gathered parameters, each with the paths of its operands; empty if XLA
        chooses which collectives to fuse."""
        return self._for(state, self._ordered(batch, named)).buckets

    def model(self, state: TrainState) -> Any:
        """The model that a state holds.

        Args:
          state: a state of this step.

        Returns:
          The model as given to `init`, with unstacked layers and its static leaves.

        Raises:
          StrategyError: if this step has not seen the model, or the state was donated to a step.
        """
        _refuse_given_away(state)
        if self._unscanned is not None and self.scanned_layers is not None:
            return self._unscanned.model(self.scanned_layers.unstack(state.params))
        return self._parts_of(state).model(state.params)

    # ---- inside

    def _refuse_target(self, hardware: Hardware, what: str, instead: str) -> NoReturn:
        fail(StrategyError, f"{what} {hardware.name}, which is not here", where=f"device = {self.options.device!r}",
             why="a target is only planned for, and not run on",
             fix=f"{instead}, {used_here(hardware) or 'give a device of this machine'}")  # fmt: skip

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
        return lambda: scanned.stack(parts.arrays_made(make())), jax.eval_shape(scanned.stack, shapes)

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
            self.options = dataclasses.replace(self.options, loss_fn=cells.of_unseen_model(self.options.loss_fn))
        return self._parts

    def _model_parts(self, model: Any) -> ModelParts:
        options = self.options
        return model_parts(model, options.frozen, options.mutable, options.layerwise_parallel)

    def _check_once(self, state: TrainState, batch: tuple[Any, ...]) -> None:
        step = self._for(state, batch)
        if any(isinstance(leaf, Tracer) for leaf in tree_util.tree_leaves((state, batch))):
            warn("`check` does not see the values of a step in a transformation; use step.check(state, *batch) outside")
        elif not step.is_checked:
            result = check_step(self.options, self._parts_of(state), step, state, batch)
            refuse_wrong_step(self.options, result)
            with defaults.override(self.options.defaults):
                step.planned._calls.keep_agreement((state, *batch), result)
            self._sharded[_kind(batch)] = dataclasses.replace(step, is_checked=True)

    def _for(self, state: TrainState, batch: tuple[Any, ...]) -> ShardedStep:
        key = _kind(batch)
        if key not in self._sharded:
            refuse_other_count(self._given_options.loss_fn, batch, "state")
            with defaults.override(self.options.defaults):
                parts = self._parts_of(state)
                self._sharded[key] = shard_step(self.options, parts, *shapes_of((state, batch)))
        return self._sharded[key]


def _kind(batch: tuple[Any, ...]) -> Any:
    """What batches of one step share."""
    leaves, treedef = tree_util.tree_flatten(batch)
    return treedef, tuple(map(shape_of, leaves))


def _refuse_given_away(state: TrainState) -> None:
    """Refuse a state whose memory a step has reused.

    Raises:
      StrategyError: its arrays were donated.
    """
    count = getattr(state, "step", None)
    if isinstance(count, jax.Array) and not isinstance(count, Tracer) and count.is_deleted():
        fail(StrategyError, "the state was given away: a step reuses its memory for the next one", where="state",
             why="donate = True", fix="go on with the state that the step returned, or set donate=False")  # fmt: skip
