"""What static movement makes of arrays, as data: which rows of which array stand where. No op is emitted here.

An array is a JAX array. Beside it a value is one of:

- `Moved`: rows of other values, one part after the other along one dimension. Slices, pads, concatenations and updates at
  constant places are such maps, and they compose.
- `Elementwise`: an op on elements of values.
- `Spread`: a broadcast. `Iota`: positions. `Known`: a small array of constants.
- `Squeezed`: a value without a dimension of one row.
- `Stacked`: a value for each turn of a loop.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp
import numpy as np

from shardfn.movement.components import FEW, MOST

MOST_READ = 4
"""Parts of an op's rows that are computed on their own: at both ends, for readers of one row and of more."""

Value = Any
"""A JAX array, or one of the classes here: each has a `shape` and a `dtype`."""


class Part(NamedTuple):
    """`rows` rows of `source` from row `first` on."""

    rows: int
    source: Value
    first: int


@dataclasses.dataclass(eq=False)
class Lazy:
    """A value that is no array yet.

    `own` is its array, once made, `placed` its arrays in frames, and `home` the frame where an op on elements was computed.
    `source` is the line of the user's program. `aligned` is what `alignments` found, `squeezed` the value without a dimension.
    """

    shape: tuple[int, ...]
    dtype: Any
    own: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    placed: dict[Any, Any] = dataclasses.field(default_factory=dict, kw_only=True, repr=False)
    home: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    source: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    aligned: dict[int, Any] = dataclasses.field(default_factory=dict, kw_only=True, repr=False)
    squeezed: dict[int, Any] = dataclasses.field(default_factory=dict, kw_only=True, repr=False)
    depth: int = dataclasses.field(default=0, init=False)
    """How many values are below it, one on the other."""
    parts_in_all: int = dataclasses.field(default=1, init=False)
    """How many parts it has, with those of its sources."""
    is_constant: bool = dataclasses.field(default=True, init=False)
    """Whether it takes rows from no array: from positions, numbers that are known, and repeated scalars alone."""

    def __post_init__(self) -> None:
        below = [value for value in self.below() if isinstance(value, Lazy)]
        self.depth = 1 + max((value.depth for value in below), default=0)
        self.is_constant = all(v.is_constant if isinstance(v, Lazy) else not np.shape(v) for v in self.below())
        if not isinstance(self, Elementwise):
            self.parts_in_all = 1 + sum(value.parts_in_all for value in below)

    def below(self) -> Sequence[Value]:
        """The values that it is made of."""
        return ()


@dataclasses.dataclass(eq=False)
class Moved(Lazy):
    """Parts of other values, one after the other along `dim`. No source is itself moved along `dim`."""

    dim: int
    parts: tuple[Part, ...]
    is_rotation: bool = False
    """Whether it stands in the program as a rotation of an array (`jnp.roll`)."""

    def below(self) -> Sequence[Value]:
        """Its sources."""
        return [part.source for part in self.parts]


class Op(NamedTuple):
    """An op on elements."""

    bind: Callable[[Sequence[Any]], Any]
    """Makes it of arrays of any one shape, or of no dimensions."""
    safe: float | None = None
    """Operands at which its derivative is finite; None if it is so at all."""
    adds_gradients: bool = False
    """Whether it adds parts of a gradient. Those that are zero are left out, as JAX leaves out those that it knows to be zero."""


@dataclasses.dataclass(eq=False)
class Elementwise(Lazy):
    """An op on the elements of operands of its shape, or of no dimensions."""

    op: Op
    operands: tuple[Value, ...]
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = dataclasses.field(
        default_factory=dict, kw_only=True, repr=False
    )
    """Of a value that has no frame, the op on the rows that were asked for, by the first along each dimension and the shape."""
    written: Callable[[], Any] | None = dataclasses.field(default=None, kw_only=True, repr=False)
    """What makes the array of a value that has no frame as the user wrote it, if not its op."""
    whole: tuple[Elementwise, tuple[int, ...]] | None = dataclasses.field(default=None, kw_only=True, repr=False)
    """The value that it has rows of, and the first along each dimension."""

    def below(self) -> Sequence[Value]:
        """Its operands."""
        return self.operands


@dataclasses.dataclass(eq=False)
class Spread(Lazy):
    """`operand` broadcast: its dimension i is `dims[i]`, where it has one row or all."""

    operand: Value
    dims: tuple[int, ...]

    def below(self) -> Sequence[Value]:
        """What is broadcast."""
        return (self.operand,)


@dataclasses.dataclass(eq=False)
class Iota(Lazy):
    """The position along `dim`, which is `first` in the first row."""

    dim: int
    first: int = 0


@dataclasses.dataclass(eq=False)
class Known(Lazy):
    """Integers or bools that are known while tracing, and how the program makes them."""

    array: np.ndarray
    make: Callable[[], Any]


@dataclasses.dataclass(eq=False)
class Squeezed(Lazy):
    """`value` without its dimension `dim` of one row."""

    value: Value
    dim: int

    def below(self) -> Sequence[Value]:
        """What it has one dimension less than."""
        return (self.value,)


@dataclasses.dataclass(eq=False)
class Stacked(Lazy):
    """What the turns of a loop made, one behind the other: `value`, and by `id` the stacks of the arrays in it. `make` gives the
    array."""

    value: Value
    arrays: Mapping[int, Any]
    make: Callable[[], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_constant = False


def elementwise(shape: tuple[int, ...], dtype: Any, op: Op, operands: Sequence[Value]) -> Value:
    """An op on elements; of parts of a gradient only one of which is not zero, that part."""
    if op.adds_gradients:
        kept = [o for o in operands if not is_zero(o)] or operands[:1]
        if len(kept) == 1 and np.shape(kept[0]) == shape:
            return kept[0]
    return Elementwise(shape, dtype, op, tuple(operands))


def is_zero(value: Value) -> bool:
    """Whether all elements of a value are the number zero, which the program does not compute."""
    if isinstance(value, Moved | Squeezed) or (isinstance(value, Spread) and np.shape(value.operand)):
        return all(map(is_zero, value.below()))
    scalar: Any = scalar_of(value) if np.shape(value) else value
    return scalar is not None and is_known(scalar) and not np.asarray(scalar).any()


def with_rows(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """A shape with another number of rows along a dimension."""
    return (*shape[:dim], rows, *shape[dim + 1 :])


def constant(array: np.ndarray, dtype: Any) -> Known:
    """Known integers or bools as a constant."""
    return Known(array.shape, dtype, array, functools.partial(jnp.asarray, array))


def joined(values: Sequence[Value], dim: int) -> Value:
    """Values one after the other along a dimension; of stacks of arrays, the stack of each array's rows one after the other."""
    stack = next((value for value in values if is_stack(value) and value.dim != dim), None)
    if stack is not None and all(scalar_of(v) is not None or (is_stack(v) and v.dim == stack.dim) for v in values):
        rows = range(stack.shape[stack.dim])
        return _end_to_end([joined([sliced(v, stack.dim, i, 1) for v in values], dim) for i in rows], stack.dim)
    return _end_to_end(values, dim)


def _end_to_end(values: Sequence[Value], dim: int) -> Value:
    parts: list[Part] = []
    for value in values:
        own = value.parts if isinstance(value, Moved) and value.dim == dim else (Part(value.shape[dim], value, 0),)
        for part in own:
            last = parts[-1] if parts else None
            if last is not None and last.source is part.source and last.first + last.rows == part.first:
                parts[-1] = Part(last.rows + part.rows, part.source, last.first)
            elif last is not None and part.rows and is_one_constant(last.source, part.source):
                rows, scalar = last.rows + part.rows, scalar_of(last.source)
                parts[-1] = Part(
                    rows, Spread(with_rows(part.source.shape, dim, rows), part.source.dtype, scalar, ()), 0
                )
            elif part.rows:
                parts.append(part)
    if len(parts) == 1 and parts[0].rows == parts[0].source.shape[dim]:
        return parts[0].source
    rows = sum(part.rows for part in parts)
    return Moved(with_rows(values[0].shape, dim, rows), values[0].dtype, dim, tuple(parts))


def sliced(value: Value, dim: int, first: int, rows: int) -> Value:
    """`rows` rows of a value from `first` on."""
    shape = with_rows(value.shape, dim, rows)
    if rows == value.shape[dim]:
        return value
    if isinstance(value, Moved) and value.dim == dim:
        parts, start = [], 0
        for part in value.parts:
            low, high = max(first - start, 0), min(first + rows - start, part.rows)
            if low < high:
                parts.append(_cut(part, dim, low, high))
            start += part.rows
        return joined([Moved(with_rows(shape, dim, p.rows), value.dtype, dim, (p,)) for p in parts], dim) if parts else (
            Moved(shape, value.dtype, dim, ()))  # fmt: skip
    if _is_sliced_below(value, dim):
        cropped = of_sources(value.parts, lambda source: sliced(source, dim, first, rows))
        return Moved(shape, value.dtype, value.dim, cropped)
    if isinstance(value, Spread):
        if dim not in value.dims or value.operand.shape[value.dims.index(dim)] == 1 != value.shape[dim]:
            return Spread(shape, value.dtype, value.operand, value.dims)
        return Spread(shape, value.dtype, sliced(value.operand, value.dims.index(dim), first, rows), value.dims)
    if isinstance(value, Iota):
        return Iota(shape, value.dtype, value.dim, value.first + (first if dim == value.dim else 0))
    if isinstance(value, Squeezed):
        return Squeezed(shape, value.dtype, sliced(value.value, dim + (dim >= value.dim), first, rows), value.dim)
    if isinstance(value, Known):
        return constant(value.array[(slice(None),) * dim + (slice(first, first + rows),)], value.dtype)
    if has_no_frame(value, dim):
        whole, place = value.whole or (value, (0,) * len(shape))
        place = with_rows(place, dim, place[dim] + first)
        if (place, shape) not in whole.rows:
            if _is_read_in_many_parts(whole, dim, rows):
                return Moved(shape, value.dtype, dim, (Part(rows, value, first),))
            own = tuple(sliced(o, dim, first, rows) if np.shape(o) else o for o in value.operands)
            made = elementwise(shape, value.dtype, value.op, own)
            if isinstance(made, Elementwise) and made.whole is None:
                made.source, made.whole = value.source, (whole, place)
            whole.rows[place, shape] = made
        return whole.rows[place, shape]
    return Moved(shape, value.dtype, dim, (Part(rows, value, first),))


def _is_read_in_many_parts(value: Elementwise, dim: int, rows: int) -> bool:
    """Whether a value is computed once for all who read at most half of its rows: they are many, as in a tree of halves of
    halves, where each op would be done again for each leaf. Not so components, constants, and arrays with rows around them."""
    size = value.shape[dim]
    if size <= FEW or 2 * rows > size or value.is_constant or any(has_more(value, d) for d in range(len(value.shape))):
        return False
    return sum(2 * shape[dim] <= size for _, shape in value.rows) >= MOST_READ


def of_sources(parts: Sequence[Part], change: Callable[[Value], Value]) -> tuple[Part, ...]:
    """The parts of other sources; of one source they stay those of one."""
    made = {id(part.source): change(part.source) for part in {id(part.source): part for part in parts}.values()}
    return tuple(part._replace(source=made[id(part.source)]) for part in parts)


def _cut(part: Part, dim: int, low: int, high: int) -> Part:
    """The rows from `low` to `high` of a part."""
    source, first, rows = part.source, part.first + low, high - low
    is_constant = isinstance(source, Lazy) and source.is_constant
    if is_constant or has_no_frame(source, dim) or _is_sliced_below(source, dim):
        return Part(rows, sliced(source, dim, first, rows), 0)
    return Part(rows, source, first)


def _is_sliced_below(value: Value, dim: int) -> TypeGuard[Moved]:
    """Whether a slice of moved rows is one of their sources: an earlier dimension is moved first, so that its shift is shared,
    of constants and of what has no frame along `dim` only the rows that are read are made, and a stack of arrays stays one."""
    if not isinstance(value, Moved):
        return False
    return dim < value.dim or value.is_constant or is_stack(value) or _is_apart(value, dim)


def has_no_frame(value: Value, dim: int) -> TypeGuard[Elementwise]:
    """Whether a value is an op on elements that is computed in no frame, so that readers of some rows along `dim` compute only
    these."""
    if not isinstance(value, Elementwise) or value.home is not None:
        return False
    dims = range(len(value.shape))
    if value.is_constant or any(has_more(value, d) for d in dims):
        return True
    return any(has_few(value, d) for d in ((dim,) if alignments(value, dim) else dims))


def _is_apart(value: Value, dim: int) -> bool:
    """Whether a value has more rows along a dimension than each array that they come from, or few of each."""
    return has_more(value, dim) or has_few(value, dim)


def has_more(value: Value, dim: int) -> bool:
    """Whether a value has more rows along a dimension than each array that they come from."""
    found = alignments(value, dim)
    return bool(found) and all(one.size < value.shape[dim] for one in found)


def ends_and_rows(value: Value, dim: int) -> list[tuple[int, int]]:
    """Of a value that has some rows more than an array along a dimension, where the first of them, as many rows as the array has,
    and the last begin and stop. Of another value, and of one with more than half of the array's rows more, nothing."""
    if not has_more(value, dim):
        return []
    rows = value.shape[dim]
    size, offset, _ = max(alignments(value, dim), key=lambda one: (one.size, one.weight, -one.offset))
    first = min(max(-offset, 0), rows - size)
    cuts = [(0, first), (first, first + size), (first + size, rows)]
    return [cut for cut in cuts if cut[0] < cut[1]] if 2 * max(first, rows - size - first) <= size else []


def has_few(value: Value, dim: int) -> bool:
    """Whether a value has at most half of the rows along a dimension of each array that they come from."""
    found, rows = alignments(value, dim), value.shape[dim]
    return bool(found) and all(one.size >= 2 * rows for one in found)


def form(value: Value) -> Any:
    """What is equal for values that are the same rows of the same arrays."""
    if isinstance(value, Moved):
        return value.dim, tuple((part.rows, form(part.source), part.first) for part in value.parts)
    if isinstance(value, Spread):
        return value.shape, form(value.operand), value.dims
    return id(value)


def scalar_of(value: Value) -> Any:
    """The scalar that a value repeats; None if it repeats none."""
    return value.operand if isinstance(value, Spread) and not np.shape(value.operand) else None


def is_repeated(value: Value, dim: int) -> bool:
    """Whether all rows of a value along a dimension are one, which is broadcast."""
    return isinstance(value, Spread) and (dim not in value.dims or value.operand.shape[value.dims.index(dim)] == 1)


def is_one_constant(one: Value, other: Value) -> bool:
    """Whether two values repeat one scalar, which is known."""
    first, second = scalar_of(one), scalar_of(other)
    if first is None or second is None or one.dtype != other.dtype:
        return False
    if first is second:
        return True
    are_known = is_known(first) and is_known(second)
    return are_known and np.asarray(first, one.dtype).tobytes() == np.asarray(second, one.dtype).tobytes()


def is_known(scalar: Any) -> bool:
    """Whether a scalar is a number, not one that the program computes."""
    return isinstance(scalar, int | float | complex | np.generic | np.ndarray)


def _arrays_of(value: Value) -> frozenset[int]:
    """The arrays, by `id`, that a value takes its rows from, constants apart."""
    if isinstance(value, Moved):
        return frozenset[int]().union(*(_arrays_of(part.source) for part in value.parts))
    if isinstance(value, Spread) and np.shape(value.operand):
        return _arrays_of(value.operand)
    return frozenset() if isinstance(value, Spread | Known) else frozenset((id(value),))


def is_stack(value: Value) -> TypeGuard[Moved]:
    """Whether a value is a few arrays of one row each, one behind the other, and scalars: ops on it are ops on each. A row of
    an array, which has a place there, is none."""
    if not isinstance(value, Moved) or not 1 < value.shape[value.dim] <= MOST:
        return False
    sources = [part.source for part in value.parts if scalar_of(part.source) is None]
    return bool(sources) and all(o.shape[value.dim] == 1 and not alignments(o, value.dim) for o in sources)


def is_stack_of_many(value: Value, arrays: int) -> bool:
    """Whether a value is one row each of more than `MOST` arrays that are no rows of one: an array of its own, as each of
    them would be computed for all rows in a frame of all."""
    if not isinstance(value, Moved) or not MOST < arrays == value.shape[value.dim]:
        return False
    return len({id(part.source) for part in value.parts}) > 1


class Alignment(NamedTuple):
    """Of some rows of a value: the size of the array that they come from, the row there of the value's first row, and a
    weight."""

    size: int
    offset: int
    weight: int


def alignments(value: Value, dim: int) -> tuple[Alignment, ...]:
    """Where the rows of a value along a dimension come from, for all arrays of which it has more than a part of constants."""
    if not isinstance(value, Lazy):
        return ()
    if value.home is not None:
        frame, offset = value.home
        own = Alignment(frame[dim], offset[dim], value.shape[dim])
        return (own,) if frame[dim] != value.shape[dim] else ()
    if dim not in value.aligned:
        weights = collections.Counter[tuple[int, int]]()
        for one in _alignments(value, dim):
            weights[one.size, one.offset] += one.weight
        value.aligned[dim] = tuple(Alignment(*place, weight) for place, weight in weights.items())
    return value.aligned[dim]


def _alignments(value: Lazy, dim: int) -> Iterator[Alignment]:
    if isinstance(value, Moved) and value.dim == dim:
        if is_stack(value):
            return
        found, rows, total, start = list[Alignment](), collections.Counter[frozenset[int]](), 0, 0
        for part in value.parts:
            own = alignments(part.source, dim)
            is_constant = is_repeated(part.source, dim) or (isinstance(part.source, Lazy) and part.source.is_constant)
            if not own and not is_constant:
                own = (Alignment(part.source.shape[dim], 0, part.rows),)
            placed = [Alignment(one.size, one.offset + part.first - start, part.rows) for one in own]
            counted = 0 if is_constant else part.rows
            rows[_arrays_of(part.source)] += counted
            found, total, start = found + placed, total + counted, start + part.rows
        if rows and 2 * max(rows.values()) <= total and max(rows.values()) < value.shape[dim]:
            return  # of several values alike, no one of which it is a view
        yield from found
    elif isinstance(value, Moved):
        for part in value.parts:
            yield from alignments(part.source, dim)
    elif isinstance(value, Elementwise):
        for operand in value.operands:
            if np.shape(operand):
                yield from alignments(operand, dim)
    elif isinstance(value, Squeezed):
        yield from alignments(value.value, dim + (dim >= value.dim))
    elif isinstance(value, Spread) and dim in value.dims:
        own = value.dims.index(dim)
        if value.operand.shape[own] == value.shape[dim]:
            yield from alignments(value.operand, own)
