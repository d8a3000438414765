"""The partitioned program as data: the sharding of every value on a mesh, and collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from shardfn.ir.model import Graph, Op, Spec, axes_of, axis_name, axis_size, dtype_bits
from shardfn.ir.op_traits import SLICES, VIEWS

USER_WRITTEN = "shard_map"
"""The cause of a collective that is written in a `shard_map`, the user's or that of a training step."""


@dataclasses.dataclass(frozen=True)
class Communication:
    """A collective between two values of a program, before its bytes are known."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    operand: int
    result: int
    trips: int
    where: str
    cause: str
    """The op whose result is reduced, or that needs the operand in another sharding."""
    is_last_resort: bool = False
    """Whether an array is gathered completely only to be sharded otherwise, because XLA knows no other path."""
    matmul_permutes: int = 0
    """Of an all-gather or reduce-scatter that is part of a collective matmul: how many collective-permutes it runs as."""
    purpose: str = ""
    """What this library wrote it for in a `shard_map`: "gradient of state/params/w"; empty for what the user or XLA writes."""

    @property
    def shard(self) -> int:
        """The value of which each device sends its shard: of an all-gather the operand, of a reduce-scatter the result."""
        return self.result if self.kind == "reduce-scatter" else self.operand

    @property
    def whole(self) -> int:
        """The gathered array, or the sum before it is scattered."""
        return self.operand if self.kind == "reduce-scatter" else self.result


@dataclasses.dataclass(frozen=True)
class Detour:
    """A reshard that gathers and slices in the place of an all-to-all.

    `path` has the shardings before, between and after. An op is named by its `Op.site`, -1 where it has none.
    """

    path: tuple[Spec, ...]
    site: int
    """The op that needs the array resharded, or whose result is."""
    operand: int
    """Which operand of it; of a result -1."""
    maker: int
    """The op that makes the array."""
    argument: int
    """The argument of the function that the array is; -1 for none."""
    where: str


@dataclasses.dataclass(frozen=True)
class PartitionedProgram:
    """A graph with the sharding of every value on a mesh: `specs[i]` is that of `graph.values[i]`."""

    graph: Graph
    specs: tuple[Spec, ...]
    axes: dict[str, int]
    communications: tuple[Communication, ...]
    platform: str = ""
    """The platform whose collectives these are; empty before `partition.partitioner.insert_collectives`."""
    stored_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """By value the bytes on one device, where they differ from those of its elements."""
    constant_bytes: int = 0
    """Bytes of the arrays that the function closes over. Each device holds all of them."""
    detours: tuple[Detour, ...] = ()
    """The reshards by gathers, where all-to-alls are not allowed."""
    forms: dict[object, tuple[tuple[int, ...], int, int]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    """Local shapes, bytes and elements that were asked for: by shape, dtype and sharding."""

    @functools.cached_property
    def used_axes(self) -> frozenset[str]:
        """The mesh axes that shard a value."""
        return frozenset(axis_name(axis) for spec in self.specs for dim in spec for axis in dim)

    @property
    def repeats(self) -> int:
        """How many devices repeat the same work: those along the mesh axes that shard nothing."""
        return math.prod(size for name, size in self.axes.items() if name not in self.used_axes)

    def shards(self, value: int) -> tuple[int, ...]:
        """Number of shards along each dimension of a value."""
        return tuple(math.prod(axis_size(a, self.axes) for a in dim) for dim in self.specs[value])

    @functools.cached_property
    def _local(self) -> dict[int, tuple[tuple[int, ...], int, int]]:
        return {}

    def _locally(self, value: int) -> tuple[tuple[int, ...], int, int]:
        """Shape, bytes and elements on one device, computed once."""
        found = self._local.get(value)
        if found is None:
            full = self.graph.values[value]
            key = full.shape, full.dtype, self.specs[value]
            if key not in self.forms:
                shape = tuple(-(-n // s) for n, s in zip(full.shape, self.shards(value), strict=True))
                elements = math.prod(shape)
                self.forms[key] = shape, elements * dtype_bits(full.dtype) // 8, elements
            found = self._local[value] = self.forms[key]
        return found

    def local_shape(self, value: int) -> tuple[int, ...]:
        """Shape on one device, padded up where the shards do not divide."""
        return self._locally(value)[0]

    def local_elements(self, value: int) -> int:
        """Elements on one device."""
        return self._locally(value)[2]

    def element_bytes(self, value: int) -> int:
        """Bytes of the elements on one device."""
        return self._locally(value)[1]

    def gathered_shards(self, c: Communication) -> int | None:
        """The shards that a collective gathers: the operand of an all-gather, or what each device writes into zeros before an
        all-reduce. None of other collectives.
        """
        if c.kind == "all-gather":
            return c.operand
        written = self.graph.maker(c.operand, "pad") if c.kind == "all-reduce" else None
        is_sharded = written and not set(c.axes).isdisjoint(axes_of(self.specs[written.inputs[0]]))
        return written.inputs[0] if written and is_sharded else None

    def is_view(self, op: Op) -> bool:
        """Whether an op takes no work, as its result is its operand's buffer."""
        if op.name in SLICES:
            return self.local_bytes(op.outputs[0]) == self.local_bytes(op.inputs[0])
        return op.name in VIEWS and len(op.outputs) == 1

    def local_bytes(self, value: int) -> int:
        """Bytes that a value takes on one device."""
        stored = self.stored_bytes.get(value)
        return self._locally(value)[1] if stored is None else stored


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, predicted or read from a compiled module.

    `bytes_sent` is what one device sends each time it runs (formulas: `cost.collectives.bytes_sent`). `trips` is how
    often it runs in one call. `axes` are mesh axes, empty where only the groups are known.
    """

    kind: str
    """`all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`."""
    axes: tuple[str, ...]
    group_size: int
    shape: tuple[int, ...]
    """Per-device shape of the operand."""
    dtype: str
    bytes_sent: int
    trips: int
    where: str
    """`file:line` of the user's code, or empty."""
    cause: str = ""
    merged: int = 1
    """So many predicted ones run as one, and share its latency."""
    in_matmul: bool = False
    """Whether it is part of a collective matmul and runs while that multiplies; `group_size` is then that of the gather or
    scatter (predicted ones)."""
    purpose: str = ""
    """What a training step wrote it for: "gradient of state/params/w"; empty for others."""

    @property
    def total_bytes(self) -> int:
        """Bytes one device sends in one call: `bytes_sent * trips`."""
        return self.bytes_sent * self.trips
