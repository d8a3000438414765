"""Offload the optimizer's state between steps, to host memory for instance; the step moves it for the update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn.errors import Problem, nearest
from shardfn.frontend.strategy import short
from shardfn.runtime.apply import moved
from shardfn.runtime.sharded_function import ShardedFunction
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.state import TrainState, shapes_of

MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def memory_problems(kind: Any) -> Iterator[Problem]:
    """What is wrong with `opt_state_memory_kind`."""
    if kind is not None and kind not in MEMORY_KINDS:
        yield Problem(f"`opt_state_memory_kind` cannot be {short(kind)}", f"opt_state_memory_kind = {short(kind)}",
                      "it names a memory of the devices, as jax.sharding.NamedSharding(memory_kind=) does",
                      nearest(kind, MEMORY_KINDS), is_type=not isinstance(kind, str))  # fmt: skip


def with_memory_kind(shardings: TrainState, shapes: TrainState, kind: str | None) -> TrainState:
    """A state's shardings with the optimizer's arrays in another memory; scalars stay on the device.

    Args:
      shardings: a `NamedSharding` for each leaf.
      shapes: the state's, for the ranks.
      kind: of `MEMORY_KINDS`; None changes nothing.
    """
    if kind is None:
        return shardings
    put = lambda s, x: s.with_memory_kind(kind) if jnp.ndim(x) else s  # noqa: E731
    return shardings._replace(opt_state=tree_util.tree_map(put, shardings.opt_state, shapes.opt_state))


@dataclasses.dataclass(frozen=True)
class OffloadedStep:
    """A sharded step that moves the optimizer's state to the device and back."""

    function: ShardedFunction
    """`(state, *batch) -> (state, result)`, all of it in the devices' memory."""
    on_device: TrainState
    """The shardings with which it takes the state."""
    stored: TrainState
    """The shardings between steps."""
    batch: tuple[NamedSharding, ...]
    """Of each array of the batch."""
    donates: bool
    compiler_options: Mapping[str, Any]

    @functools.cached_property
    def jitted(self) -> Any:
        """The step from and to the other memory, as one program."""

        def step(state: TrainState, batch: tuple[Any, ...]) -> Any:
            following, result = self.function(_placed(state, self.on_device), *batch)
            return _placed(following, self.stored), result

        return jax.jit(
            step, out_shardings=(self.stored, None), donate_argnums=(0,) if self.donates else (),
            compiler_options=dict(self.compiler_options) or None,
        )  # fmt: skip

    def __call__(self, state: TrainState, *batch: Any) -> Any:
        """Run one step; the optimizer states come from the host and go back to it."""
        leaves, treedef = tree_util.tree_flatten((state, batch))
        targets = self._targets
        stored = [_brought(x, target) for x, target in zip(moved(leaves, targets), targets, strict=True)]
        return self.jitted(*treedef.unflatten(stored))

    @property
    def _targets(self) -> list[NamedSharding]:
        return [*tree_util.tree_leaves(self.stored), *self.batch]

    def lower(self, state: TrainState, *batch: Any) -> Any:
        """`jax.stages.Lowered` of the whole step."""
        leaves, treedef = tree_util.tree_flatten((state, batch))
        return self.jitted.lower(*treedef.unflatten(shapes_of(leaves, self._targets)))


def offload_step(
    options: StepOptions, function: ShardedFunction, on_device: TrainState, compiler_options: Mapping[str, Any],
    state: TrainState, batch: tuple[Any, ...],
) -> OffloadedStep:  # fmt: skip
    """A step with the optimizer's arrays in another memory between calls; from shapes."""
    plan = function.plan(state, *batch)
    of_batch = tree_util.tree_leaves(plan.in_shardings)[len(tree_util.tree_leaves(state)) :]
    stored = with_memory_kind(on_device, state, options.opt_state_memory_kind)
    return OffloadedStep(function, on_device, stored, tuple(of_batch), options.donate, compiler_options)


def _brought(x: Any, target: NamedSharding) -> Any:
    """An array in the target's memory; a first state without a batch is made in device memory."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return jax.device_put(x, target) if target.memory_kind is not None and kind != target.memory_kind else x


def _placed(state: TrainState, layout: TrainState) -> TrainState:
    def put(x: Any, sharding: NamedSharding) -> Any:
        return jax.device_put(x, sharding) if jnp.ndim(x) else x

    return state._replace(opt_state=tree_util.tree_map(put, state.opt_state, layout.opt_state))
