"""The program as data: values, ops with their sharding rules, meshes and shardings."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

DimFactors = tuple[tuple[int, ...], ...]
"""For each dim of one tensor, the factors it is made of, major to minor."""

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that shard it, major to minor."""

InnerSpec = tuple[tuple[str, ...] | None, ...]
"""A `Spec` of a value inside the function, with None for dimensions that are left to propagation."""

Axes = tuple[tuple[str, int], ...]
"""A mesh: each axis with its size."""


def mesh_text(axes: Iterable[tuple[str, int]]) -> str:
    """A mesh as people read it.

    >>> mesh_text((("a", 2), ("b", 4))), mesh_text(())
    ('a=2 x b=4', 'of one device')
    """
    return " x ".join(f"{name}={size}" for name, size in axes) or "of one device"


def mesh_sizes(axes: Iterable[tuple[str, int]]) -> tuple[int, ...]:
    """The number of devices along each axis.

    >>> mesh_sizes((("a", 2), ("b", 4)))
    (2, 4)
    """
    return tuple(size for _, size in axes)


def mesh_sizes_text(axes: Iterable[tuple[str, int]]) -> str:
    """The sizes of a mesh alone.

    >>> mesh_sizes_text((("a", 2), ("b", 4))), mesh_sizes_text(())
    ('2x4', '1')
    """
    return "x".join(map(str, mesh_sizes(axes))) or "1"


INNER_AXIS = "shardfn_inner"
"""Begins the name of the mesh axis that stands for the sharding of a value inside, before a number, in a lowered module."""


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

    @functools.cached_property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

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

    def matmul_roles(self, side: int) -> list[int]:
        """The role of each dimension of a matmul's operand: 0 batch, 1 its own and the result's, 2 contracting."""
        other, result = ({f for dim in dims for f in dim} for dims in (self.operands[1 - side], self.results[0]))
        factors = [dim[0] if dim else -1 for dim in self.operands[side]]
        return [1 if f not in other else 0 if f in result else 2 for f in factors]


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
    i counts along `out_dim` of that operand (the kernel of a convolution) instead of the result. A slice with a stride
    may end `unread` elements behind the last one that it reads.
    """

    operand: int
    dim: int
    out_dim: int
    stride: int = 1
    low: int = 0
    extent: int = 1
    spacing: int = 1
    over: int = -1
    unread: int = 0

    def is_trivial(self, shape: Sequence[int], result_shape: Sequence[int]) -> bool:
        """Whether element i of the result reads element i of the operand and no other, in arrays of these shapes."""
        return self[3:7] == (1, 0, 1, 1) and shape[self.dim] == result_shape[self.out_dim]


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
    """What a reduction, or a scatter, combines elements by, where that is one op (`add`, `xor`); of an FFT its type; of a sort by
    several arrays `keys`."""
    form: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    """What it does, and in which loop or branch, as numbers: ops with one form make the same of the same operands."""
    same: int = -1
    """The operand that it gives back as it is, as a sum with zeros does."""
    instances: int = 1
    """How many devices compute it, each on shards of its own: more than one in a `shard_map`."""
    precision: str = ""
    """Of a matmul or convolution, `high` or `highest` where it was asked for."""
    seen: tuple[int, ...] = ()
    """Of a loop, whose inputs are what goes in and then what its body returns: what the body sees."""

    def of(self, inputs: tuple[int, ...], outputs: tuple[int, ...] | None = None) -> Op:
        """The same of other values."""
        outputs = self.outputs if outputs is None else outputs
        if inputs == self.inputs and outputs == self.outputs:
            return self
        return self.replaced(inputs=inputs, outputs=outputs)

    def replaced(self, **fields: Any) -> Op:
        """As `dataclasses.replace`, which takes several times as long: each evaluation makes thousands."""
        made = object.__new__(Op)
        vars(made).update(vars(self), **fields)
        return made

    @property
    def transformed(self) -> list[int]:
        """The dimensions of a Fourier transform."""
        if self.rule is None:
            return []
        return [d for d, dim in enumerate(self.rule.operands[0]) if not self.rule.replicated.isdisjoint(dim)]

    @property
    def carries(self) -> list[tuple[int, int, int, int]]:
        """Of a loop, for each value that it changes: what goes in, what the body sees, what it returns, what comes out."""
        n = len(self.seen)
        every = zip(self.inputs[:n], self.seen, self.inputs[n:], self.outputs, strict=True) if n else ()
        return [row for row in every if row[0] != row[2]]


class OpConstraint(NamedTuple):
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
    inner: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """By value the number of the sharding constraint whose result it is, for those named by `INNER_AXIS`."""
    manual: tuple[tuple[int, int], ...] = ()
    """Pairs whose dimensions correspond: an array that goes into a `shard_map` or comes out, and the shard that its body sees
    or returns; what a collective in the body takes and gives, unless it moves shards to another dimension."""

    @functools.cached_property
    def computed(self) -> frozenset[int]:
        """Values that are not constants: the inputs, and what ops make or loops carry."""
        return frozenset(self.inputs).union(*(op.outputs for op in self.ops), (b for _, b in self.ties))

    @functools.cached_property
    def trip_counts(self) -> frozenset[int]:
        """How often the ops of each loop run: the sizes of dimensions that a loop may iterate over."""
        return frozenset(op.trips for op in self.ops if op.trips > 1)

    @functools.cached_property
    def read_counts(self) -> collections.Counter[int]:
        """How often each value is read by ops and as a result."""
        count = collections.Counter(v for op in self.ops for v in op.inputs)
        count.update(self.outputs)
        return count

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """By value the index of the op that makes it."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    @functools.cached_property
    def loop_of(self) -> list[int]:
        """By op the index of the innermost loop in whose body it stands, or -1."""
        found = [-1] * len(self.ops)
        for i, op in enumerate(self.ops):
            for n in range(first_of_body(self.ops[:i], op), i) if op.seen else ():
                found[n] = i if found[n] < 0 else found[n]
        return found

    def maker(self, value: int, name: str = "") -> Op | None:
        """The op that makes a value; with `name`, only one of that name."""
        op = self.ops[self.makers[value]] if value in self.makers else None
        return op if op is not None and name in ("", op.name) else None

    def arguments(self, count: int) -> tuple[int, ...]:
        """The inputs that are a call's own arrays, of which there are `count`: the last ones, after what it captures."""
        return self.inputs[len(self.inputs) - count :]


def body_start(ops: Sequence[Op], loop: Op) -> int:
    """Index in the ops before a loop's own from which they are its body's, with reshards inserted before the loop.

    Values are numbered as they are read, a loop's results before its body.
    """
    first = len(ops)
    while first and ops[first - 1].outputs and min(ops[first - 1].outputs) > min(loop.outputs):
        first -= 1
    return first


def first_of_body(ops: Sequence[Op], loop: Op) -> int:
    """Index of the first op of a loop's body in the ops before the loop's own, which are the body's from there on.

    Reshards before a loop run as often as it does, those in the body more often.
    """
    first = body_start(ops, loop)
    return next((n for n in range(first, len(ops)) if ops[n].trips > loop.trips), first)


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


def axis_size(axis: str, axes: Mapping[str, int]) -> int:
    """Size of a mesh axis, or of a part of one that Shardy writes as `name:(pre)size`.

    >>> axis_size("a:(2)4", {"a": 8}), axis_size("a", {"a": 8})
    (4, 8)
    """
    return axis_part(axis, axes)[2]


def axes_of(spec: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """All axes of a sharding, dimension by dimension.

    >>> axes_of((("a", "b"), (), ("c",)))
    ('a', 'b', 'c')
    """
    return tuple(itertools.chain.from_iterable(spec))


def axis_name(axis: str) -> str:
    """The mesh axis that an axis is or is a part of."""
    return axis.partition(":")[0]


def axis_part(axis: str, axes: Mapping[str, int]) -> tuple[str, int, int]:
    """The mesh axis, the product of the sizes before the part, and the part's size.

    >>> axis_part("a:(2)4", {"a": 8}), axis_part("a", {"a": 8})
    (('a', 2, 4), ('a', 1, 8))
    """
    name, _, part = axis.partition(":")
    before, _, size = part[1:].partition(")")
    return (name, int(before), int(size)) if part else (name, 1, axes.get(name, 1))


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
