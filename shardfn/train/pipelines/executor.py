"""The executor: a schedule's beats as scans in one program for all devices, each of which works on its own stages.

A `jax.shard_map` that is manual over the stage and data axes; over the tensor axis XLA partitions what is in it. Stages
differ by a `lax.switch`; after each beat what was computed goes to the neighbour by one collective-permute. From a forward
to its backward only the input of the stage is kept: the backward works the stage out again.
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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.ir.rewrite import bind_one
from shardfn.train.pipelines import flat_parameters as packing
from shardfn.train.pipelines.boundary import Wire, wire_of
from shardfn.train.pipelines.data_movement import bind_held
from shardfn.train.pipelines.deadlock import check_waits
from shardfn.train.pipelines.flat_parameters import FlatLayout, PackedParameters
from shardfn.train.pipelines.program import Value
from shardfn.train.pipelines.schedule import FORWARD, Phase, Schedule
from shardfn.train.pipelines.stages import Cut, is_inexact

STAGE, DATA, TENSOR = "stage", "data", "tensor"


@dataclasses.dataclass(frozen=True)
class PipelineExecutor:
    """All that the beats of one kind of call need."""

    mesh: Mesh | AbstractMesh
    cut: Cut
    layout: FlatLayout
    is_mean: bool
    sends: Wire
    """Values with gradients."""
    tells: Wire
    """Values without."""

    @property
    def count(self) -> int:
        """How many stages there are, over all devices and chunks."""
        return len(self.cut.stages)

    @property
    def loss_dtype(self) -> Any:
        """That of the loss, at least float32."""
        loss = self.cut.program.loss
        return _wide(self.cut.program.avals[loss.number].dtype) if isinstance(loss, Value) else jnp.float32

    # ---- one stage

    def apply(self, stage: int, own: Sequence[Any], shared: Mapping[str, Any], sent: Any, told: Any, batch: Any) -> Any:
        """What a stage hands on and, of the last one, the loss."""
        program, me = self.cut.program, self.cut.stages[stage]
        known = dict(zip(self.layout.of_stage(stage), map(self._held, self.layout.of_stage(stage), own), strict=True))
        known |= {i: self._held(i, shared[self.layout.places[i].path]) for i in self.layout.beside}
        known |= {program.params + i: self._whole(x) for i, x in enumerate(tree_util.tree_leaves(batch))}
        for wire, message in ((self.sends, sent), (self.tells, told)):
            came = wire.read(stage - 1, tuple(map(self._whole, message)))
            known |= dict(zip(wire.borders[stage - 1] if stage else (), map(self._whole, came), strict=True))
        ways = self.mesh.shape[TENSOR]
        env = me.run(program, known, functools.partial(bind_held, ways=ways) if ways > 1 else bind_one)
        given = []
        for wire in (self.sends, self.tells):
            goes = [self._whole(env[v]) for v in wire.borders[stage]] if stage < self.count - 1 else []
            given.append(tuple(map(self._whole, wire.written(stage, goes))))
        if stage < self.count - 1:
            return given[0], given[1], jnp.zeros((), self.loss_dtype)
        loss = program.loss
        value = env[loss.number] if isinstance(loss, Value) else loss
        return given[0], given[1], jnp.asarray(value).astype(self.loss_dtype)

    def _held(self, leaf: int, x: Any) -> Any:
        place = self.layout.places[leaf]
        spec: list[Any] = [None] * len(place.shape)
        if place.cut_dim >= 0:
            spec[place.cut_dim] = TENSOR
        return self._laid(x, *spec)

    def _whole(self, x: Any) -> Any:
        return self._laid(x, *(None,) * jnp.ndim(x))

    def _laid(self, x: Any, *spec: Any) -> Any:
        """Held so over the tensor axis, whatever the rest of the program would like."""
        return lax.with_sharding_constraint(x, PartitionSpec(*spec)) if self.mesh.shape[TENSOR] > 1 else x

    def forward(self, stage: int, row: Any, shared: Any, sent: Any, told: Any, batch: Any) -> Any:
        """One stage on one micro-batch."""
        return self.apply(stage, self._leaves(stage, row), shared, sent, told, batch)

    def backward(
        self,
        stage: int,
        row: Any,
        shared: Any,
        sent: Any,
        told: Any,
        batch: Any,
        got: Any,
        seed: Any,
        sums: Any,
        on: Any,
    ) -> Any:
        """Its gradients: of its row, added to those of what is shared, and of what it got."""
        own = self._leaves(stage, row)
        mine = {k: x for k, x in shared.items() if is_inexact(x)}
        rest = {k: x for k, x in shared.items() if k not in mine}

        def function(own: Any, mine: Any, sent: Any) -> Any:
            given, _, loss = self.apply(stage, own, {**mine, **rest}, sent, told, batch)
            return given, loss

        reads = {self.layout.places[i].path for i in self.cut.stages[stage].leaves}
        used = {k: x for k, x in mine.items() if k in reads}
        unused = {k: x for k, x in mine.items() if k not in reads}
        _, pull = jax.vjp(lambda own, used, sent: function(own, {**used, **unused}, sent), own, used, sent)
        d_own, d_used, d_sent = pull((got, seed))
        sums = {k: s + jnp.where(on, d_used[k], 0).astype(s.dtype) if k in used else s for k, s in sums.items()}
        d_row = packing.row_of(self.layout, stage, list(map(self._held, self.layout.of_stage(stage), d_own)), _wide)
        return self._laid_row(d_row), {k: self._whole(x) for k, x in sums.items()}, tuple(map(self._whole, d_sent))

    def _leaves(self, stage: int, row: Any) -> list[Any]:
        return packing.leaves_of(self.layout, stage, self._laid_row(row))

    def _laid_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {k: self._laid(x, TENSOR, None) if k.endswith("_cut") else self._whole(x) for k, x in row.items()}

    # ---- all beats

    def run(self, schedule: Schedule, rows: Any, shared: Any, batch: Any) -> Any:
        """The loss, and with backward beats the gradients of rows and of what is shared; on each device its own."""
        devices, last = self.layout.devices, self.count - 1
        me = lax.axis_index(STAGE)
        rows = {k: x[0] for k, x in rows.items()}
        micro = schedule.micro_size
        batch = tree_util.tree_map(lambda x: x.reshape(micro, x.shape[0] // micro, *x.shape[1:]), batch)
        trains = schedule.name != FORWARD
        weight = 1.0 / micro if self.is_mean else 1.0
        onward, back = _ring(devices, self.layout.chunks, 1), _ring(devices, self.layout.chunks, -1)

        def at(unit: dict[str, Any]) -> Any:
            stage = unit["chunk"] * devices + me
            row = {k: lax.dynamic_index_in_dim(x, unit["chunk"], 0, keepdims=False) for k, x in rows.items()}
            part = tree_util.tree_map(lambda x: lax.dynamic_index_in_dim(x, unit["micro"], 0, keepdims=False), batch)
            return stage, row, part

        def switched(stage: Any, function: Callable[..., Any], *args: Any) -> Any:
            branches = [lambda *args, s=s: function(s, *args) for s in range(self.count)]
            return branches[0](*args) if self.count == 1 else lax.switch(stage, branches, *args)

        def forward(held: dict[str, Any], unit: dict[str, Any]) -> dict[str, Any]:
            stage, row, part = at(unit)
            sent, told = held["came"]
            if trains:
                keep = lambda old, new: _put(old, new, unit["slot"], unit["on"])  # noqa: E731
                held = {**held, "kept": tree_util.tree_map(keep, held["kept"], (sent, told))}
            given, said, loss = switched(stage, self.forward, row, shared, sent, told, part)
            is_loss = jnp.logical_and(unit["on"], stage == last)
            came = tree_util.tree_map(lambda x: lax.ppermute(x, STAGE, onward), (given, said))
            return {**held, "came": came, "loss": held["loss"] + jnp.where(is_loss, loss, 0.0)}

        def backward(held: dict[str, Any], unit: dict[str, Any]) -> dict[str, Any]:
            stage, row, part = at(unit)
            take = lambda x: lax.dynamic_index_in_dim(x, unit["slot"], 0, keepdims=False)  # noqa: E731
            sent, told = tree_util.tree_map(take, held["kept"])
            seed = jnp.where(stage == last, weight, 0.0).astype(self.loss_dtype)
            d_row, sums, d_sent = switched(
                stage, self.backward, row, shared, sent, told, part, held["back"], seed, held["shared"], unit["on"]
            )
            add = lambda s, d: s.at[unit["chunk"]].add(jnp.where(unit["on"], d, 0).astype(s.dtype))  # noqa: E731
            back_ = tree_util.tree_map(lambda x: lax.ppermute(x, STAGE, back), d_sent)
            return {**held, "rows": tree_util.tree_map(add, held["rows"], d_row), "shared": sums, "back": back_}

        held: dict[str, Any] = {
            "came": (self.sends.empty(), self.tells.empty()),
            "loss": jnp.zeros((), self.loss_dtype),
        }
        if trains:
            slots = lambda x: jnp.zeros((schedule.slots, *x.shape), x.dtype)  # noqa: E731
            held["kept"] = tree_util.tree_map(slots, held["came"])
            held["back"] = self.sends.empty()
            held["rows"] = {k: jnp.zeros(x.shape, _wide(x.dtype)) for k, x in rows.items()}
            held["shared"] = {k: jnp.zeros(x.shape, _wide(x.dtype)) for k, x in shared.items() if is_inexact(x)}
        for phase in schedule.phases:
            does = [forward if kind == FORWARD else backward for kind in phase.kinds]

            def body(held: Any, units: Any, does: Any = does) -> Any:
                for do, unit in zip(does, units, strict=True):
                    held = do(held, {k: x[me] for k, x in unit.items()})
                return held, None

            held, _ = lax.scan(body, held, _tables(phase))
        loss = lax.pmean(lax.psum(held["loss"] * weight, STAGE), DATA)
        if not trains:
            return loss
        parts = self.mesh.shape[DATA]
        d_rows = {k: (lax.psum(x, DATA) / parts).astype(rows[k].dtype)[None] for k, x in held["rows"].items()}
        both = (STAGE, DATA)
        d_shared = {k: (lax.psum(x, both) / parts).astype(shared[k].dtype) for k, x in held["shared"].items()}
        return loss, d_rows, d_shared

    def mapped(self, schedule: Schedule, packed: PackedParameters, batch: Any) -> Any:
        """`run` on all devices."""
        row, whole = PartitionSpec(STAGE), PartitionSpec()
        out = whole if schedule.name == FORWARD else (whole, row, whole)
        function = jax.shard_map(
            lambda rows, shared, batch: self.run(schedule, rows, shared, batch),
            mesh=self.mesh,
            in_specs=(row, whole, PartitionSpec(DATA)),
            out_specs=out,
            axis_names={STAGE, DATA} if self.mesh.shape[TENSOR] > 1 else {STAGE, DATA, TENSOR},
            check_vma=False,
        )
        return function(dict(packed.rows), dict(packed.shared), batch)

    def check(self, schedule: Schedule, packed: PackedParameters, batch: Any) -> None:
        """That no stage waits for another's devices for ever; it takes a compile, where layers are cut within stages.

        Raises:
          StrategyError: one would.
        """
        if self.mesh.shape[TENSOR] == 1 or self.mesh.shape[STAGE] == 1 or not isinstance(self.mesh, Mesh):
            return
        lies = lambda spec: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))  # noqa: E731
        rows = {k: lies(row_spec(k))(x) for k, x in packed.rows.items()}
        shapes = dataclasses.replace(packed, rows=rows, shared=tree_util.tree_map(lies(PartitionSpec()), packed.shared))
        batch = tree_util.tree_map(lies(PartitionSpec(DATA)), batch)
        lowered = jax.jit(lambda packed, batch: self.mapped(schedule, packed, batch)).lower(shapes, batch)
        check_waits(lowered, self.mesh, self.cut.stages, self._cut_path)

    def _cut_path(self, leaf: int) -> str:
        place = self.layout.places[leaf]
        return place.path if place.cut_dim >= 0 else ""


def row_spec(kind: str) -> PartitionSpec:
    """How the rows of a kind lie."""
    return PartitionSpec(STAGE, None, TENSOR) if kind.endswith("_cut") else PartitionSpec(STAGE)


def machine(mesh: Mesh | AbstractMesh, cut: Cut, layout: FlatLayout, is_mean: bool) -> PipelineExecutor:
    """A machine for a cut program."""
    borders = [stage.gives for stage in cut.stages[:-1]]
    sends = wire_of(cut.program, borders, is_inexact)
    tells = wire_of(cut.program, borders, lambda aval: not is_inexact(aval))
    return PipelineExecutor(mesh, cut, layout, is_mean, sends, tells)


def _tables(phase: Phase) -> tuple[dict[str, np.ndarray], ...]:
    """For each kind of a phase what each device works on, by round and device."""

    def table(column: int, read: Callable[[Any], Any], dtype: Any) -> np.ndarray:
        return np.array([[read(u) if u else 0 for u in one[column].units] for one in phase.rounds], dtype)

    return tuple(
        {
            "micro": table(i, lambda u: u.micro, np.int32),
            "chunk": table(i, lambda u: u.chunk, np.int32),
            "slot": table(i, lambda u: u.slot, np.int32),
            "on": table(i, lambda u: True, bool),
        }
        for i in range(len(phase.kinds))
    )


def _ring(devices: int, chunks: int, by: int) -> list[tuple[int, int]]:
    """Who sends to whom: each to its neighbour; the last to the first where chunks follow each other."""
    if devices == 1:
        return [(0, 0)]
    pairs = [(d, d + by) for d in range(devices) if 0 <= d + by < devices]
    ends = [(devices - 1, 0) if by > 0 else (0, devices - 1)]
    return pairs + ends if chunks > 1 else pairs


def _put(kept: Any, new: Any, slot: Any, on: Any) -> Any:
    old = lax.dynamic_index_in_dim(kept, slot, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(kept, jnp.where(on, new, old), slot, 0)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
