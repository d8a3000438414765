"""A plan: the grid, the layout of every argument and result, why, and what it costs. Plain data, whoever made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardfn.cost.hardware import Hardware
from shardfn.cost.price import Price
from shardfn.errors import DeviceError, StrategyError, fail
from shardfn.graph.model import Collective, Flow, Spec
from shardfn.layout import Layout


@dataclasses.dataclass(frozen=True)
class Decision:
    """The layout of one array and where it comes from.

    `cuts` says how many ways each dim is cut, `spec` over which axes; `source` is `you`, `propagated` or
    `searched`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[int, ...]
    spec: Spec
    source: str
    reason: str = ""
    runner_up: str = ""
    local_bytes: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the piece that one device holds."""
        return tuple(n // c for n, c in zip(self.shape, self.cuts, strict=True))

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as JAX writes it."""
        return partition_spec(self.spec)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """An op inside the function that is held to layouts: propagation alone would lay it out otherwise.

    `kind` is the op as the report names it, `number` which of that kind it is in program order; `operands` and
    `results` hold a layout, or None where it is left open.
    """

    kind: str
    number: int
    where: str
    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]


def partition_spec(spec: Spec) -> PartitionSpec:
    """A layout as JAX writes it.

    >>> partition_spec((("a",), (), ("b", "c")))
    PartitionSpec('a', None, ('b', 'c'))
    """
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in spec))


@dataclasses.dataclass(frozen=True)
class DimClass:
    """Dims of arguments and results that the function treats as one: `members` as `path.dim`."""

    name: str
    size: int
    members: tuple[str, ...]
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a function runs on a grid of devices.

    `axes` is the grid, row-major, last axis fastest; `order` says which device stands where if not 0, 1, 2, …
    """

    function: str
    hardware: Hardware
    level: int
    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None
    inputs: tuple[Decision, ...]
    outputs: tuple[Decision, ...]
    classes: tuple[DimClass, ...]
    collectives: tuple[Collective, ...]
    price: Price
    policy: str
    findings: tuple[str, ...]
    flow: Flow = dataclasses.field(repr=False, compare=False)
    constraints: tuple[Constraint, ...] = ()
    """Ops inside that are held to a layout, because propagation alone would choose another."""
    gap: float | None = None
    """How far the search may be from the optimum of the cost model: 0 is proved, None where it does not know."""

    @property
    def device_matrix(self) -> tuple[int, ...]:
        """The sizes of the grid's axes (MindSpore's dev_matrix)."""
        return tuple(size for _, size in self.axes)

    def decision(self, path: str) -> Decision:
        """The decision on an argument or, under `result`, on a result.

        Raises:
          StrategyError: no array has that path.
        """
        for d in (*self.inputs, *self.outputs):
            if d.path == path:
                return d
        fail(StrategyError, f"the plan of `{self.function}` has no array `{path}`",
             fix=f"use one of {', '.join(d.path for d in (*self.inputs, *self.outputs)[:20])}")  # fmt: skip

    def layout(self, path: str) -> Layout:
        """The `Layout` (device matrix, axis names, tensor map) of one array."""
        axes = self.axes or (("a", 1),)
        matrix, names = tuple(s for _, s in axes), tuple(n for n, _ in axes)
        dims = ("None" if not d else d[0] if len(d) == 1 else d for d in self.decision(path).spec)
        return Layout(matrix, names, list(self.order) if self.order else None)(*dims)

    def slices(self, path: str) -> tuple[tuple[slice, ...], ...]:
        """What each rank holds of an array: entry i is what the i-th of the plan's devices holds."""
        held = self.layout(path).slices(self.decision(path).shape)
        if self.order is None:
            return held
        by_rank = dict(zip(self.order, held, strict=True))
        return tuple(by_rank[rank] for rank in range(len(held)))

    def mesh(self) -> Mesh | AbstractMesh:
        """The device mesh; an `AbstractMesh` where the devices are not here."""
        axes = self.axes or (("a", 1),)
        names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
        types = (AxisType.Auto,) * len(axes)
        devices = self.hardware.devices
        if devices is None:
            return AbstractMesh(sizes, names, axis_types=types)
        given = self.hardware.mesh
        if given is not None and tuple(given.shape.items()) == axes:
            return Mesh(given.devices, names, axis_types=types)
        if self.hardware.platform == "tpu" and self.order is None and len(devices) > 1:
            return jax.make_mesh(sizes, names, axis_types=types, devices=devices)  # follows the torus
        order = self.order or range(len(devices))
        return Mesh(np.array([devices[i] for i in order], dtype=object).reshape(sizes), names, axis_types=types)

    def sharding(self, path: str) -> NamedSharding:
        """The `NamedSharding` of one array."""
        return NamedSharding(self.mesh(), self.decision(path).partition_spec)

    def with_devices(self, devices: Sequence[Any]) -> Plan:
        """The same plan on other devices, for instance one made for a target that is now here.

        Raises:
          DeviceError: another number of devices.
        """
        if len(devices) != self.hardware.count:
            fail(DeviceError, f"the plan is for {self.hardware.count} devices, not {len(devices)}",
                 fix="plan again for that number")  # fmt: skip
        return dataclasses.replace(self, hardware=dataclasses.replace(self.hardware, devices=tuple(devices), mesh=None))


@dataclasses.dataclass(frozen=True)
class OpStrategy:
    """How one op is cut: for each input and output the cuts of its dims (MindSpore's get_strategy)."""

    op: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    trips: int
    where: str


def op_strategies(plan: Plan) -> tuple[OpStrategy, ...]:
    """Every op of the function with its cuts, in program order."""
    flow = plan.flow
    return tuple(
        OpStrategy(op.name, tuple(map(flow.shards, op.inputs)), tuple(map(flow.shards, op.outputs)), op.trips, op.where)
        for op in flow.graph.ops
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """One line of a diff: what differs, in the first plan and in the second."""

    what: str
    first: str
    second: str


def diff(first: Plan, second: Plan) -> tuple[Change, ...]:
    """What differs between two plans of one function: grid, layouts, costs.

    Raises:
      StrategyError: the plans are of functions with other arguments.
    """
    if [d.path for d in first.inputs] != [d.path for d in second.inputs]:
        fail(StrategyError, f"`{first.function}` and `{second.function}` have other arguments",
             fix="compare two plans of one function")  # fmt: skip
    changes = []

    def row(what: str, a: Any, b: Any) -> None:
        if a != b:
            changes.append(Change(what, str(a), str(b)))

    row("grid", _grid(first), _grid(second))
    for a, b in zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=False):
        row(a.path, f"{a.cuts} {a.partition_spec}", f"{b.cuts} {b.partition_spec}")
    row("bytes sent per device", f"{first.price.bytes_sent:,}", f"{second.price.bytes_sent:,}")
    row("peak memory per device", f"{first.price.memory.peak:,}", f"{second.price.memory.peak:,}")
    row("FLOPs per device", f"{first.price.flops:,.0f}", f"{second.price.flops:,.0f}")
    row("collectives", len(first.collectives), len(second.collectives))
    return tuple(changes)


def _grid(plan: Plan) -> str:
    return " x ".join(f"{n}={s}" for n, s in plan.axes) or "1 device"
