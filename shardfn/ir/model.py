"""The program as data: values, ops with their sharding rules, shardings, and collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardfn.ir.op_traits import SLICES, VIEWS

DimFactors = tuple[tuple[int, ...], ...]
"""For each dim of one tensor, the factors it is made of, major to minor."""

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that shard it, major to minor."""

Axes = tuple[tuple[str, int], ...]
"""A mesh: each axis with its size."""


def is_gpu(platform: str) -> bool:
    """Whether a platform, as JAX names it, is a GPU: any but CPU, TPU and none.

    >>> [name for name in ("", "cpu", "cuda", "rocm", "tpu") if is_gpu(name)]
    ['cuda', 'rocm']
    """
    return platform not in ("", "cpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the program: its full shape and its element type as MLIR writes it (`f32`, `bf16`, `i1`).

    >>> print(Value((32, 64), "bf16"))
    bf16[32,64]
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """How the dimensions of an op's operands and results correspond: Shardy's sharding rule.

    A factor is one independent dimension of the computation. Sharded `reduction` factors leave partial sums,
    `replicated` ones need replication, `permuted` ones need a halo exchange.
    """

    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    permuted: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The spatial dimensions of a convolution's image, kernel and result, and whether it has neither strides nor
    dilation.

    `grouped` are the dimensions of its groups: (0 image, 1 kernel, 2 result; dimension; number of groups).
    `in_batches`: the image's grouped dimension is the batch, as in a grouped kernel's gradient.
    """

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    result: tuple[int, ...]
    is_dense: bool
    grouped: tuple[tuple[int, int, int], ...] = ()
    in_batches: bool = False


class WindowDim(NamedTuple):
    """Along `dim` of an operand, element i of the result's `out_dim` reads `extent` elements from i·stride + low.

    With `spacing` above 1, positions count spacing - 1 holes after each element of the operand. With `over` at least 0,
    i counts along `out_dim` of that operand (the kernel of a convolution) instead of the result.
    """

    operand: int
    dim: int
    out_dim: int
    stride: int = 1
    low: int = 0
    extent: int = 1
    spacing: int = 1
    over: int = -1


@dataclasses.dataclass(frozen=True)
class Op:
    """One op: `inputs` and `outputs` index `Graph.values`; `trips` is how often the loops around it run."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rule: ShardingRule | None
    trips: int
    where: str
    reduced: tuple[tuple[int, int], ...] = ()
    """(input position, dim) pairs whose sizes multiply the work of each output element (a dot's contracted dims)."""
    convolution: Convolution | None = None
    window_dims: tuple[WindowDim, ...] = ()
    """Which elements of an operand are read along dims with a window or an offset."""
    site: int = -1
    """Where it stands in the module: its number in program order. Ops that were put in have none."""
    combines: str = ""
    """What a reduction, or a scatter, combines elements by, where that is one op (`add`, `xor`)."""
    form: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    """What it does, and in which loop or branch, as numbers: ops with one form make the same of the same operands."""
    same: int = -1
    """The operand that it gives back as it is, as a sum with zeros does."""

    def of(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
        """The same of other values."""
        return Op(self.name, inputs, outputs, self.rule, self.trips, self.where, self.reduced, self.convolution,
                  self.window_dims, self.site, self.combines, self.form, self.same)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OpConstraint:
    """Sharding constraints on one op: on its operands as it reads them, and on its results."""

    operands: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function. `ties` are pairs of values that hold the same array (loop carries, calls, branches)."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    """The arguments of the traced function: the values 0, 1, 2, … in their order."""
    outputs: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    unruled: tuple[str, ...] = ()
    """Ops without a sharding rule, as `name (file:line)`."""
    uncounted: tuple[str, ...] = ()
    """Loops whose trip count is not known before they run, counted once, as `file:line`."""

    def arguments(self, count: int) -> tuple[int, ...]:
        """The inputs that are a call's own arrays, of which there are `count`: the last ones, after what it captures."""
        return self.inputs[len(self.inputs) - count :]


def trips_of(graph: Graph) -> list[int]:
    """How often each value is made in one call: as often as the loops around its op run; what a loop carries, as its body sees
    it, as often as the least of the ops that read it, the loop's own aside, which takes it back."""
    trips = [0] * len(graph.values)
    for op in graph.ops:
        for v in op.inputs[: len(op.outputs)] if op.name == "while" else op.inputs:
            trips[v] = min(trips[v] or op.trips, op.trips)
    for op in graph.ops:
        for v in op.outputs:
            trips[v] = op.trips
    for v in graph.inputs:
        trips[v] = 1
    return [t or 1 for t in trips]


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
    is_last_resort: bool = False
    """Whether an array is gathered completely only to be sharded otherwise, because XLA knows no other path."""


@dataclasses.dataclass(frozen=True)
class PartitionedProgram:
    """A graph with the sharding of every value on a mesh: `specs[i]` is that of `graph.values[i]`."""

    graph: Graph
    specs: tuple[Spec, ...]
    axes: dict[str, int]
    communications: tuple[Communication, ...]
    platform: str = ""
    """The platform whose collectives these are; empty before `partition.partitioner.insert_collectives`."""

    def shards(self, value: int) -> tuple[int, ...]:
        """Number of shards along each dimension of a value."""
        return tuple(math.prod(axis_size(a, self.axes) for a in dim) for dim in self.specs[value])

    def local_shape(self, value: int) -> tuple[int, ...]:
        """Shape on one device, padded up where the shards do not divide."""
        return tuple(-(-n // s) for n, s in zip(self.graph.values[value].shape, self.shards(value), strict=True))

    def is_view(self, op: Op) -> bool:
        """Whether an op takes no work, as its result is its operand's buffer."""
        if op.name in SLICES:
            return self.local_bytes(op.outputs[0]) == self.local_bytes(op.inputs[0])
        return op.name in VIEWS and len(op.outputs) == 1

    def local_bytes(self, value: int) -> int:
        """Bytes on one device."""
        return math.prod(self.local_shape(value)) * dtype_bits(self.graph.values[value].dtype) // 8


def axis_size(axis: str, axes: Mapping[str, int]) -> int:
    """Size of a mesh axis, or of a part of one that Shardy writes as `name:(pre)size`.

    >>> axis_size("a:(2)4", {"a": 8}), axis_size("a", {"a": 8})
    (4, 8)
    """
    name, _, part = axis.partition(":")
    return int(part.partition(")")[2]) if part else axes.get(name, 1)


@functools.cache
def dtype_bits(dtype: str) -> int:
    """Bits of one element of an MLIR type; a bool takes a byte.

    >>> dtype_bits("bf16"), dtype_bits("complex<f32>"), dtype_bits("i1"), dtype_bits("ui8")
    (16, 64, 8, 8)
    """
    if dtype.startswith("complex"):
        return 2 * dtype_bits(dtype[8:-1])
    digits = re.search(r"\d+", dtype)
    return 0 if digits is None else max(8, int(digits[0])) if int(digits[0]) != 4 else 4


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

    @property
    def total_bytes(self) -> int:
        """Bytes one device sends in one call: `bytes_sent * trips`."""
        return self.bytes_sent * self.trips
