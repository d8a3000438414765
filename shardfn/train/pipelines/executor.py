"""The pipeline executor: runs any schedule's ticks as scans, in one program for all devices.

A `jax.shard_map` is manual over the stage and data axes; XLA partitions its body over the tensor axis. A `lax.switch`
selects the device's stage, and after each tick a collective-permute sends the result to the neighbour. Between the
forward and the backward of a stage only its input is kept: the backward rematerialises the stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.ir.purposes import purpose
from shardfn.ir.rewrite import bind_one
from shardfn.train.pipelines.deadlock import check_no_deadlock
from shardfn.train.pipelines.flat_parameters import SHARDED, FlatLayout, PackedParameters, stage_buffers, stage_leaves
from shardfn.train.pipelines.schedule import FORWARD, Phase, Schedule, Unit
from shardfn.train.pipelines.stage_boundary import StageBoundary, stage_boundary
from shardfn.train.pipelines.stages import StageSplit, is_inexact
from shardfn.train.pipelines.tensor_parallel import bind_unsharded
from shardfn.train.steps.state import shapes_of

STAGE, DATA, TENSOR = "stage", "data", "tensor"


@dataclasses.dataclass(frozen=True)
class PipelineExecutor:
    """The pipeline for one kind of call."""

    mesh: Mesh | AbstractMesh
    split: StageSplit
    layout: FlatLayout
    is_mean: bool
    """Whether the loss is the mean of the micro-batches' losses; else it is their sum."""
    adds_parts: bool
    """Whether the loss of a micro-batch is the sum of those of its shards; else it is their mean."""
    boundaries: tuple[StageBoundary, StageBoundary]
    """Of the floating-point values, which have gradients, and of the others."""
    outputs: Any = None
    """The structure of the outputs; None for a loss."""

    @property
    def count(self) -> int:
        """How many stages there are, over all devices and chunks."""
        return len(self.split.stages)

    @property
    def message_bytes(self) -> int:
        """Bytes that a stage sends to the next for a micro-batch."""
        return sum(boundary.nbytes for boundary in self.boundaries)

    @property
    def loss_dtype(self) -> Any:
        """That of the loss, at least float32."""
        loss = self.split.jaxpr.outputs[0]
        return jnp.float32 if isinstance(loss, core.Literal) else _wide(self.split.jaxpr.avals[loss].dtype)

    @property
    def output_avals(self) -> list[Any]:
        """The types of the outputs of a shard of a micro-batch."""
        return [v.aval if isinstance(v, core.Literal) else self.split.jaxpr.avals[v] for v in self.split.jaxpr.outputs]

    @property
    def shardings(self) -> PackedParameters:
        """Of packed parameters: buffers over the stages and, where their leaves are sharded, the tensor axis."""
        specs = {True: PartitionSpec(STAGE, None, TENSOR), False: PartitionSpec(STAGE)}
        buffers = {name: NamedSharding(self.mesh, specs[name.endswith(SHARDED)]) for name, _ in self.layout.lengths}
        paths = [self.layout.slots[i].path for i in self.layout.of_stage(-1)]
        return PackedParameters(buffers, dict.fromkeys(paths, NamedSharding(self.mesh, PartitionSpec())), self.layout)

    # ---- one stage

    def _apply(self, stage: int, own: Sequence[Any], shared: Mapping[str, Any], message: Any, batch: Any) -> Any:
        """The message to the next stage, and the loss or a list of the outputs (0 but on the last stage)."""
        jaxpr, leaves = self.split.jaxpr, self.layout.of_stage(stage)
        known = dict(zip(leaves, map(self._parameter, leaves, own), strict=True))
        known |= {i: self._parameter(i, shared[self.layout.slots[i].path]) for i in self.layout.of_stage(-1)}
        known |= {jaxpr.params + i: self._replicated(x) for i, x in enumerate(tree_util.tree_leaves(batch))}
        for boundary, received in zip(self.boundaries, message, strict=True):
            values = boundary.unpack(stage - 1, tuple(map(self._replicated, received)))
            known |= zip(boundary.at(stage - 1), map(self._replicated, values), strict=True)
        shards = self.mesh.shape[TENSOR]
        bind = functools.partial(bind_unsharded, shards=shards) if shards > 1 else bind_one
        env = self.split.stages[stage].run(jaxpr, known, bind)
        given = []
        for boundary in self.boundaries:
            packed = boundary.pack(stage, [self._replicated(env[v]) for v in boundary.at(stage)])
            given.append(tuple(map(self._replicated, packed)))
        if self.outputs is not None:
            read = lambda v: v.val if isinstance(v, core.Literal) else self._replicated(env[v])  # noqa: E731
            zeros = [jnp.zeros(x.shape, x.dtype) for x in self.output_avals]
            return tuple(given), list(map(read, jaxpr.outputs)) if stage == self.count - 1 else zeros
        loss = jaxpr.outputs[0]
        value = 0 if stage < self.count - 1 else loss.val if isinstance(loss, core.Literal) else env[loss]
        return tuple(given), jnp.asarray(value).astype(self.loss_dtype)

    def _parameter(self, leaf: int, x: Any) -> Any:
        slot = self.layout.slots[leaf]
        return self._constrain(x, *(TENSOR if d == slot.sharded_dim else None for d in range(len(slot.shape))))

    def _replicated(self, x: Any) -> Any:
        return self._constrain(x, *(None,) * jnp.ndim(x))

    def _constrain(self, x: Any, *spec: Any) -> Any:
        """`x` with this sharding over the tensor axis."""
        return lax.with_sharding_constraint(x, PartitionSpec(*spec)) if self.mesh.shape[TENSOR] > 1 else x

    def _constrain_buffers(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        put = lambda k, x: self._constrain(x, TENSOR, None) if k.endswith(SHARDED) else self._replicated(x)  # noqa: E731
        return {k: put(k, x) for k, x in buffers.items()}

    def _leaves(self, stage: int, buffers: Any) -> list[Any]:
        return stage_leaves(self.layout, stage, self._constrain_buffers(buffers))

    def _backward(
        self, stage: int, buffers: Any, shared: Any, message: Any, batch: Any, cotangent: Any, seed: Any, sums: Any, on: Any
    ) -> Any:  # fmt: skip
        """Gradients of the stage's buffers; `sums` plus those of shared parameters; gradients of the message."""
        paths = {self.layout.slots[i].path for i in self.split.stages[stage].leaves}
        used = {k: x for k, x in shared.items() if k in paths and is_inexact(x)}

        def function(own: Any, used: Any, sent: Any) -> Any:
            given, loss = self._apply(stage, own, {**shared, **used}, (sent, message[1]), batch)
            return given[0], loss

        _, pull = jax.vjp(function, self._leaves(stage, buffers), used, message[0])
        d_own, d_used, d_sent = pull((cotangent, seed))
        sums = {k: s + jnp.where(on, d_used[k], 0).astype(s.dtype) if k in used else s for k, s in sums.items()}
        d_own = list(map(self._parameter, self.layout.of_stage(stage), d_own))
        d_buffers = self._constrain_buffers(stage_buffers(self.layout, stage, d_own, _wide))
        return d_buffers, {k: self._replicated(x) for k, x in sums.items()}, tuple(map(self._replicated, d_sent))

    # ---- all ticks

    def _run(self, schedule: Schedule, buffers: Any, shared: Any, batch: Any) -> Any:
        """The loss and, with backward ticks, the gradients of buffers and shared parameters; or a list of the outputs, with the
        stages in dimension 0; inside the shard_map."""
        devices, last = self.layout.devices, self.count - 1
        me = lax.axis_index(STAGE)
        buffers = {k: x[0] for k, x in buffers.items()}
        micro = schedule.micro_size
        batch = tree_util.tree_map(lambda x: x.reshape(micro, x.shape[0] // micro, *x.shape[1:]), batch)
        trains = schedule.name != FORWARD
        weight = 1.0 / micro if self.is_mean else 1.0
        pick = lambda tree, i: tree_util.tree_map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)  # noqa: E731

        def at(unit: dict[str, Any]) -> Any:
            return unit["chunk"] * devices + me, pick(buffers, unit["chunk"]), pick(batch, unit["micro"])

        def switch(stage: Any, function: Callable[..., Any], *args: Any) -> Any:
            branches = [functools.partial(function, s) for s in range(self.count)]
            return branches[0](*args) if self.count == 1 else lax.switch(stage, branches, *args)

        def send(tree: Any, by: int) -> Any:
            with purpose("activations to the next stage" if by > 0 else "gradients to the stage before"):
                return tree_util.tree_map(
                    lambda x: lax.ppermute(x, STAGE, _ring(devices, self.layout.chunks, by)), tree
                )

        def apply(stage: int, own: Any, message: Any, batch: Any) -> Any:
            return self._apply(stage, self._leaves(stage, own), shared, message, batch)

        def forward(carry: dict[str, Any], unit: dict[str, Any]) -> dict[str, Any]:
            stage, own, part = at(unit)
            if trains:
                keep = lambda old, new: _put(old, new, unit["slot"], unit["on"])  # noqa: E731
                carry = {**carry, "inputs": tree_util.tree_map(keep, carry["inputs"], carry["message"])}
            given, value = switch(stage, apply, own, carry["message"], part)
            is_last = jnp.logical_and(unit["on"], stage == last)
            if self.outputs is not None:
                values = [
                    _put(old, new, unit["micro"], is_last) for old, new in zip(carry["value"], value, strict=True)
                ]
                return {**carry, "message": send(given, 1), "value": values}
            return {**carry, "message": send(given, 1), "value": carry["value"] + jnp.where(is_last, value, 0.0)}

        def backward(carry: dict[str, Any], unit: dict[str, Any]) -> dict[str, Any]:
            stage, own, part = at(unit)
            message = pick(carry["inputs"], unit["slot"])
            seed = jnp.where(stage == last, weight, 0.0).astype(self.loss_dtype)
            d_own, sums, d_sent = switch(
                stage, self._backward, own, shared, message, part, carry["cotangent"], seed, carry["shared"], unit["on"]
            )
            add = lambda s, d: s.at[unit["chunk"]].add(jnp.where(unit["on"], d, 0).astype(s.dtype))  # noqa: E731
            d_buffers = tree_util.tree_map(add, carry["buffers"], d_own)
            return {**carry, "buffers": d_buffers, "shared": sums, "cotangent": send(d_sent, -1)}

        message = tuple(boundary.empty() for boundary in self.boundaries)
        value = jnp.zeros((), self.loss_dtype) if self.outputs is None else [
            jnp.zeros((micro, *x.shape), x.dtype) for x in self.output_avals
        ]  # fmt: skip
        carry: dict[str, Any] = {"message": message, "value": value}
        if trains:
            zeros = lambda tree: {k: jnp.zeros(x.shape, _wide(x.dtype)) for k, x in tree.items() if is_inexact(x)}  # noqa: E731
            slots = lambda x: jnp.zeros((schedule.slots, *x.shape), x.dtype)  # noqa: E731
            carry |= {"inputs": tree_util.tree_map(slots, message), "cotangent": message[0], "buffers": zeros(buffers),
                      "shared": zeros(shared)}  # fmt: skip
        for phase in schedule.phases:
            runs = [forward if kind == FORWARD else backward for kind in phase.kinds]

            def body(carry: Any, units: Any, runs: Any = runs) -> Any:
                for run, unit in zip(runs, units, strict=True):
                    carry = run(carry, {k: x[me] for k, x in unit.items()})
                return carry, None

            carry, _ = lax.scan(body, carry, _tables(phase))
        if self.outputs is not None:
            return [x.reshape(1, micro * x.shape[1], *x.shape[2:]) for x in carry["value"]]
        parts = 1 if self.adds_parts else self.mesh.shape[DATA]
        both = (STAGE, DATA)
        with purpose("the loss"):
            loss = lax.psum(carry["value"] * weight, both) / parts
        if not trains:
            return loss
        with purpose("gradients of the stages' parameters"):
            sums = {k: lax.psum(x, DATA) / parts for k, x in carry["buffers"].items()}
        with purpose("gradients of parameters that stages share"):
            d_shared = {k: (lax.psum(x, both) / parts).astype(shared[k].dtype) for k, x in carry["shared"].items()}
        d_buffers = {k: x.astype(buffers[k].dtype)[None] for k, x in sums.items()}
        return loss, d_buffers, d_shared

    def run(self, schedule: Schedule, packed: PackedParameters, batch: Any) -> Any:
        """The loss and, with backward ticks, the gradients of buffers and shared parameters; or the outputs."""
        staged, replicated = PartitionSpec(STAGE), PartitionSpec()
        of_forward = replicated if self.outputs is None else PartitionSpec(STAGE, DATA)
        function = jax.shard_map(
            functools.partial(self._run, schedule),
            mesh=self.mesh,
            in_specs=(staged, replicated, PartitionSpec(DATA)),
            out_specs=of_forward if schedule.name == FORWARD else (replicated, staged, replicated),
            axis_names={STAGE, DATA} if self.mesh.shape[TENSOR] > 1 else {STAGE, DATA, TENSOR},
            check_vma=False,
        )
        found = function(dict(packed.buffers), dict(packed.shared), batch)
        return found if self.outputs is None else tree_util.tree_unflatten(self.outputs, [x[-1] for x in found])

    def check(self, schedule: Schedule, packed: PackedParameters, batch: Any) -> None:
        """Check for deadlocks between stages; this compiles the program if parameters are sharded within stages.

        Raises:
          StrategyError: a stage would wait for devices of another.
        """
        if self.mesh.shape[TENSOR] == 1 or self.mesh.shape[STAGE] == 1 or not isinstance(self.mesh, Mesh):
            return
        of_batch = tree_util.tree_map(lambda x: NamedSharding(self.mesh, PartitionSpec(DATA)), batch)
        shapes = shapes_of((packed, batch), (self.shardings, of_batch))
        lowered = jax.jit(functools.partial(self.run, schedule)).lower(*shapes)
        sharded = {i: slot.path for i, slot in enumerate(self.layout.slots) if slot.sharded_dim >= 0}
        check_no_deadlock(lowered, self.mesh, self.split.stages, sharded)


def pipeline_executor(
    mesh: Mesh | AbstractMesh,
    split: StageSplit,
    layout: FlatLayout,
    is_mean: bool,
    adds_parts: bool,
    outputs: Any = None,
) -> PipelineExecutor:
    """The executor for a loss, or a function with this structure of outputs, that is split into stages."""
    values = [stage.sends for stage in split.stages[:-1]]
    floating = stage_boundary(split.jaxpr, values, is_inexact)
    others = stage_boundary(split.jaxpr, values, lambda aval: not is_inexact(aval))
    return PipelineExecutor(mesh, split, layout, is_mean, adds_parts, (floating, others), outputs)


def _tables(phase: Phase) -> tuple[dict[str, np.ndarray], ...]:
    """For each kind of a phase what each device works on, arrays of shape [rounds, devices]."""

    idle = Unit(0, 0)
    found = []
    for kind in range(len(phase.kinds)):
        units = [one[kind].units for one in phase.rounds]
        table = {"on": np.array([[u is not None for u in row] for row in units])}
        for name in ("micro", "chunk", "slot"):
            table[name] = np.array([[getattr(u or idle, name) for u in row] for row in units], np.int32)
        found.append(table)
    return tuple(found)


def _ring(devices: int, chunks: int, by: int) -> list[tuple[int, int]]:
    """Source and target of each send to a neighbour; with several chunks the ends are neighbours too."""
    if devices == 1:
        return [(0, 0)]
    return [(d, (d + by) % devices) for d in range(devices) if chunks > 1 or 0 <= d + by < devices]


def _put(kept: Any, new: Any, slot: Any, on: Any) -> Any:
    old = lax.dynamic_index_in_dim(kept, slot, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(kept, jnp.where(on, new, old), slot, 0)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
