"""From values to arrays: shifts of arrays of one size, and selects by position.

Values are computed in frames (`frames`), and their rows are moved by rotations (`rotation`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util

from shardfn.movement.components import FEW, MOST
from shardfn.movement.frames import Frame, frame_of, frame_of_source, frame_of_whole, inside, is_near
from shardfn.movement.mapped import mapped, transposed
from shardfn.movement.rotation import farther
from shardfn.movement.values import (
    Elementwise,
    Iota,
    Known,
    Lazy,
    Moved,
    Part,
    Spread,
    Squeezed,
    Stacked,
    Value,
    alignments,
    form,
    is_known,
    is_stack,
    of_sources,
    scalar_of,
    sliced,
    with_rows,
)

DEEPEST = 60
"""Values, one on the other, that wait for the place where they are computed; Python's stack is finite."""

MOST_PARTS = 64
"""Parts of a value, with those of its sources."""


class Key(NamedTuple):
    """What an array was made of (`form`), and how: its frame, or the name of an op with its parameters."""

    form: Any
    how: tuple[Any, ...]


@dataclasses.dataclass
class Emitter:
    """Emits arrays. `shifted` counts the arrays that it made by shifts and selects, in place of the user's ops.

    `known` are the shifts of each array along each dimension that an earlier trace of the same program has `wanted`; arrays have
    numbers in the order of their first shifts. `grids` are the sizes of dimensions whose rows are no components (`components`).
    """

    grids: Collection[int] = ()
    shifted: int = 0
    known: Mapping[tuple[int, int], set[int]] = dataclasses.field(default_factory=dict, repr=False)
    wanted: dict[tuple[int, int], set[int]] = dataclasses.field(default_factory=dict, repr=False)
    numbers: dict[int, tuple[int, Any]] = dataclasses.field(default_factory=dict, repr=False)
    cut: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    """The arrays that are slices of others, by `id`."""
    made: dict[Key, tuple[Value, Any]] = dataclasses.field(default_factory=dict, repr=False)
    """The arrays that were made in the jaxpr that is traced now, each beside the value that it was made of: a value that is kept
    shares its `id` with no other."""

    def has_components(self, rows: int) -> bool:
        """Whether a dimension of so many rows is one of components."""
        return 1 < rows <= FEW or (1 < rows <= MOST and rows not in self.grids)

    @property
    def is_moved_again(self) -> bool:
        """Whether an array is moved by several numbers of rows one way: those shifts share rows."""
        return any(len({abs(s) for s in one if s * sign > 0}) > 1 for one in self.wanted.values() for sign in (1, -1))

    @contextlib.contextmanager
    def inside_trace(self) -> Iterator[None]:
        """Arrays of a trace inside are made in it, and not used outside."""
        around, self.made = self.made, {}
        try:
            yield
        finally:
            self.made = around

    def array(self, value: Value) -> Any:
        """The array of a value, in its own shape."""
        if not isinstance(value, Lazy):
            return value
        if value.own is None:
            with line_of(value):
                value.own = self._own(value)
            if isinstance(value, Moved | Squeezed):
                self.cut[id(value.own)] = value.own
        return value.own

    def bounded(self, value: Value) -> Value:
        """A value that is not too deep or of too many parts to be walked; of a stack each array."""
        if is_stack(value):
            parts = of_sources(value.parts, self.bounded)
            is_same = all(new.source is old.source for new, old in zip(parts, value.parts, strict=True))
            return value if is_same else Moved(value.shape, value.dtype, value.dim, parts)
        for bound in (lambda: value, lambda: self.on_settled([value])[0], lambda: self.settled(value)):
            found = bound()
            if not isinstance(found, Lazy) or (found.depth <= DEEPEST and found.parts_in_all <= MOST_PARTS):
                return found
        return self.array(value)

    def on_settled(self, values: Sequence[Value]) -> list[Value]:
        """Values of ops on elements that are settled, of those that have a frame, and of the arrays of what loops stacked."""

        def change(one: Value) -> Value | None:
            if isinstance(one, Stacked):
                return self.array(one)
            has_frame = isinstance(one, Elementwise) and (one.home is not None or frame_of(one) is not None)
            return self.settled(one) if has_frame else None

        return mapped(values, change)

    def settled(self, value: Value) -> Value:
        """An op on elements as an array that is computed once, or as rows of such an array. One of constants, and another value,
        stays as it is."""
        if not isinstance(value, Elementwise) or value.is_constant:
            return value
        frame = value.home or frame_of(value)
        if frame is None:
            return self.array(value)
        found = self.place(value, frame)
        for dim, (first, rows) in enumerate(zip(frame.offset, value.shape, strict=True)):
            found = sliced(found, dim, first, rows)
        return found

    def in_place(self, value: Value) -> Value:
        """A moved value as an array if all its rows stand where they come from, so that no reader selects by position again;
        another value as it is."""
        if not isinstance(value, Moved):
            return value
        places = {(one.size - rows, one.offset) for d, rows in enumerate(value.shape) for one in alignments(value, d)}
        return self.place(value, Frame(value.shape, (0,) * len(value.shape))) if places == {(0, 0)} else value

    def place(self, value: Value, frame: Frame) -> Any:
        """The array of a value in a frame."""
        if not isinstance(value, Lazy):
            return self.once(value, ("embedded", frame), _embedded, value, frame)
        if frame not in value.placed:
            is_shared = Key(form(value), frame) in self.made
            self.shifted += is_shared and isinstance(value, Moved) and value.is_rotation
            with line_of(value):
                value.placed[frame] = self.once(value, frame, self._place, value, frame)
        return value.placed[frame]

    def once(self, value: Value, how: tuple[Any, ...], make: Callable[..., Any], *args: Any) -> Any:
        """What `make` makes of a value; made once."""
        key = Key(form(value), how)
        if key not in self.made:
            self.made[key] = value, make(*args)
        return self.made[key][1]

    def inside(self, value: Value, frame: Frame) -> Any:
        """Where a frame holds a value, None if everywhere; made once for all values of a shape."""
        key = Key(value.shape, ("inside", frame))
        if key not in self.made:
            self.made[key] = value, inside(value, frame)
        return self.made[key][1]

    def _positions(self, frame: Frame, dim: int) -> Any:
        """The number of each row of a frame along a dimension; made once."""
        shape = with_rows((1,) * len(frame.shape), dim, frame.shape[dim])
        key = Key(shape, ("positions", dim))
        if key not in self.made:
            self.made[key] = shape, lax.broadcasted_iota(np.int32, shape, dim)
        return self.made[key][1]

    def _own(self, value: Lazy) -> Any:
        if isinstance(value, Known | Stacked):
            return value.make()
        if isinstance(value, Squeezed):
            return lax.squeeze(self.array(value.value), (value.dim,))
        if isinstance(value, Iota):
            return self.place(value, Frame(value.shape, (0,) * len(value.shape)))
        if isinstance(value, Spread):
            return lax.broadcast_in_dim(self.array(value.operand), value.shape, value.dims)
        frame = value.home or frame_of(value) or frame_of(value, with_few=True)
        if frame is not None and (frame is value.home or frame.shape == value.shape or _is_stencil(value)):
            self.shifted += frame.shape != value.shape
            return _cropped(self.place(value, frame), frame, value.shape)
        if isinstance(value, Elementwise):
            return (
                value.written() if value.written else value.op.bind([self.array(operand) for operand in value.operands])
            )
        assert isinstance(value, Moved)
        return self._in_parts(value)

    def _in_parts(self, value: Moved) -> Any:
        """A moved value by slices, pads and concatenations, as the user wrote it."""
        dim, parts = value.dim, value.parts
        if not parts:
            return jnp.zeros(value.shape, value.dtype)
        first, fills = parts[0], [scalar_of(part.source) for part in parts]
        inner = [part for part, fill in zip(parts, fills, strict=True) if fill is None]
        if len(inner) == 1 and len(parts) <= 3 and len({id(f) for f in fills if f is not None}) == 1:
            before = first.rows if fills[0] is not None else 0
            fill = next(f for f in fills if f is not None)
            if fills.index(None) == (before > 0):
                home = Frame(value.shape, with_rows((0,) * len(value.shape), dim, before))
                return self._padded(self._part(inner[0], dim), fill, home)
        pieces = [self._part(part, dim) for part in parts]
        return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)

    def _padded(self, x: Any, fill: Any, frame: Frame) -> Any:
        """An array padded to a frame by a scalar; by a select where the program computes one that has derivatives: JAX does not
        transpose a pad that is linear in its scalar alone."""
        if is_known(fill) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return _embedded(x, frame, fill)
        return lax.select(self.inside(x, frame), _embedded(x, frame), jnp.broadcast_to(fill, frame.shape))

    def _part(self, part: Part, dim: int) -> Any:
        if isinstance(part.source, Spread):
            return self.array(sliced(part.source, dim, part.first, part.rows))
        found = self.array(part.source)
        return lax.slice_in_dim(found, part.first, part.first + part.rows, axis=dim)

    def _place(self, value: Lazy, frame: Frame) -> Any:
        if isinstance(value, Moved):
            return self._place_moved(value, frame)
        if isinstance(value, Elementwise):
            if value.home is None:
                operands = [self.place(o, frame) if np.shape(o) else self.array(o) for o in value.operands]
                if any(alignments(value, d) for d in range(len(value.shape))):
                    value.home = frame
                bind, safe, _ = value.op
                if safe is None or frame.shape == value.shape or not jnp.issubdtype(value.dtype, jnp.inexact):
                    return bind(operands)
                return guarded(bind, safe)(self.inside(value, frame), *operands)
            found = value.placed[value.home]
            for dim, (first, rows) in enumerate(zip(value.home.offset, value.shape, strict=True)):
                found = sliced(found, dim, first, rows)
            return self.place(found, frame)
        if isinstance(value, Squeezed):
            dim = value.dim
            shape, offset = ((*own[:dim], one, *own[dim:]) for own, one in zip(frame, (1, 0), strict=True))
            return lax.squeeze(self.place(value.value, Frame(shape, offset)), (dim,))
        if isinstance(value, Iota):
            before = frame.offset[value.dim] - value.first
            if not before:
                return lax.broadcasted_iota(value.dtype, frame.shape, value.dim)
            positions = lax.broadcasted_iota(np.int32, frame.shape, value.dim) - np.int32(before)
            return lax.convert_element_type(positions, value.dtype)  # of few bits, it rounds the largest
        if isinstance(value, Spread):
            own = [
                (1, 0) if rows == 1 != value.shape[d] else (frame.shape[d], frame.offset[d])
                for d, rows in zip(value.dims, np.shape(value.operand), strict=True)
            ]
            operand = self.place(value.operand, Frame(tuple(n for n, _ in own), tuple(o for _, o in own)))
            return lax.broadcast_in_dim(operand, frame.shape, value.dims)
        if isinstance(value, Known):
            edges = [(o, n - o - rows) for n, o, rows in zip(*frame, value.shape, strict=True)]
            return jnp.asarray(np.pad(value.array, edges))
        return self.place(self.array(value), frame)

    def _place_moved(self, value: Moved, frame: Frame) -> Any:
        dim, size = value.dim, frame.shape[value.dim]
        offset = frame.offset[dim]
        starts = np.cumsum([0, *(part.rows for part in value.parts)]).tolist()
        places = list(zip(value.parts, starts, strict=False))
        sources = [frame_of_source(frame, part, dim, start) for part, start in places]
        framed = [i for i, source in enumerate(sources) if source is not None and alignments(value, dim)]
        is_simple = bool(places) and all(part.rows == 1 or scalar_of(part.source) is not None for part in value.parts)
        is_whole_stack = is_stack(value) and size == value.shape[dim]  # a select would compute each array for all rows
        if is_whole_stack or (not framed and not is_simple):
            if size != value.shape[dim]:
                return _embedded(self._in_parts(value), frame)
            pieces = []
            for part in value.parts:
                own = self.place(part.source, frame_of_whole(frame, part, dim))
                pieces.append(lax.slice_in_dim(own, part.first, part.first + part.rows, axis=dim))
            made = pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)
            self.cut[id(made)] = made
            return made
        base = max(framed or range(len(places)), key=lambda i: places[i][0].rows)
        arrays: dict[int, tuple[Any, list[Any]]] = {}
        is_shifted = False
        position = self._positions(frame, dim)
        for i in [base, *(i for i in range(len(places)) if i != base)]:
            part, start = places[i]
            first, stop = offset + start, offset + start + part.rows
            source = sources[i]
            shift = (first - part.first - source.offset[dim]) % size if source else 0
            shift -= size if 2 * shift > size else 0
            if source and (i == base or is_near(part, source, dim, shift)):
                own = self._rotated(self.place(part.source, source), shift, dim)
                is_shifted |= shift != 0
            else:
                own = self._piece(part, dim, frame, first)
            bounds = [position >= first] if start > 0 else []
            bounds += [position < stop] if start + part.rows < value.shape[dim] else []
            fill = scalar_of(part.source)
            arrays.setdefault(id(own if fill is None else fill), (own, []))[1].append(bounds)
        (found, _), *others = arrays.values()
        found = jnp.broadcast_to(found, frame.shape)
        for own, ranges in others:
            mask = functools.reduce(operator.or_, [functools.reduce(operator.and_, bounds) for bounds in ranges])
            found = lax.select(jnp.broadcast_to(mask, frame.shape), jnp.broadcast_to(own, frame.shape), found)
        self.shifted += len(others)
        self.shifted += is_shifted and not others and not value.is_rotation
        return found

    def _rotated(self, x: Any, shift: int, dim: int) -> Any:
        """An array whose row i is moved to row i + shift, around the end; made once. What is moved farther is made of what is
        moved less far, so that both together send each row once."""
        if not shift:
            return x
        if id(x) in self.cut:  # XLA on GPUs would merge the slice with those of the rotation, and send all of it
            self.shifted += Key(form(x), ("barrier",)) not in self.made
            x = self.once(x, ("barrier",), lax.optimization_barrier, x)
        number = self.numbers.setdefault(id(x), (len(self.numbers), x))[0]
        self.wanted.setdefault((number, dim), set()).add(shift)
        sign = 1 if shift > 0 else -1
        found, at = x, 0
        for far in sorted(
            abs(s) for s in self.wanted[number, dim] | self.known.get((number, dim), set()) if s * sign > 0
        ):
            found, at = self.once(x, ("rotation", far * sign, dim), farther, found, at * sign, far * sign, dim), far
            if far == abs(shift):
                break
        return found

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        """The array of a value with its dimensions in another order; made once."""
        if isinstance(value, Elementwise) and (value.home or value).shape != value.shape:
            return transposed(self.settled(value), order, self.transposed)
        x, order = self.array(value), tuple(order)
        found = self.once(x, ("transpose", order), lax.transpose, x, order)
        back = tuple(order.index(d) for d in range(len(order)))
        self.once(found, ("transpose", back), lambda: x)
        return found

    def row(self, x: Any, dim: int, row: int) -> Any:
        """A row of an array; made once."""
        return self.once(x, ("row", dim, row), lax.slice_in_dim, x, row, row + 1, 1, dim)

    def squeezed(self, x: Any, dim: int) -> Any:
        """An array without a dimension of one row; made once."""
        return self.once(x, ("squeezed", dim), lax.squeeze, x, (dim,))

    def lane(self, x: Any, dim: int, stride: int, lane: int) -> Any:
        """Row `lane` of each group of `stride` rows of an array; made once."""
        first, strides = with_rows((0,) * x.ndim, dim, lane), with_rows((1,) * x.ndim, dim, stride)
        return self.once(x, ("lane", dim, stride, lane), lax.slice, x, first, x.shape, strides)

    def repeated(self, x: Any, dim: int, times: int) -> Any:
        """Each row of an array some times; made once."""
        groups = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
        rows = with_rows(x.shape, dim, x.shape[dim] * times)
        return self.once(
            x, ("repeat", dim, times), lambda: jnp.broadcast_to(jnp.expand_dims(x, dim + 1), groups).reshape(rows)
        )

    def _piece(self, part: Part, dim: int, frame: Frame, first: int) -> Any:
        """A part that is no shift of an array of the frame: a constant, few rows from far away, or another array. In the frame
        from row `first` on; of one row, what can be broadcast."""
        if scalar_of(part.source) is not None:
            return jnp.asarray(scalar_of(part.source), part.source.dtype)
        own = self.place(part.source, frame_of_whole(frame, part, dim))
        rows = lax.slice_in_dim(own, part.first, part.first + part.rows, axis=dim)
        if part.rows == 1:
            return rows
        config = [(0, 0, 0)] * len(frame.shape)
        config[dim] = (first, frame.shape[dim] - first - part.rows, 0)
        return lax.pad(rows, jnp.zeros((), rows.dtype), config)


def _is_stencil(value: Value) -> bool:
    """Whether a value combines rows from different places of an array."""

    seen: set[int] = set()

    def has_parts(one: Value) -> bool:
        if id(one) in seen:
            return False
        seen.add(id(one))
        if isinstance(one, Moved):
            return len(one.parts) > 1 or any(has_parts(part.source) for part in one.parts)
        if isinstance(one, Elementwise):
            return any(map(has_parts, one.operands))
        return isinstance(one, Spread) and has_parts(one.operand)

    return has_parts(value) or any(
        len({(one.size, one.offset) for one in alignments(value, dim)}) > 1 for dim in range(len(value.shape))
    )


def guarded(bind: Callable[[Sequence[Any]], Any], safe: float) -> Callable[..., Any]:
    """An op on elements whose derivative outside of what counts is finite and zero: what readers make of a gradient of zero stays
    there.

    It takes where its elements count, then its operands.

    >>> inverse = guarded(lambda xs: 1 / xs[0], 0.5)
    >>> jax.grad(lambda x: inverse(x > 0, x)[1])(jnp.array([0.0, 1.0]))
    Array([-0., -1.], dtype=float32)
    """

    @jax.custom_jvp
    def op(inside: Any, *operands: Any) -> Any:
        return bind(operands)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        inside, *operands = primals
        near = [
            lax.select(inside, x, jnp.full_like(x, safe)) if np.shape(x) and jnp.issubdtype(x.dtype, jnp.inexact) else x
            for x in operands
        ]
        moving = {i: t for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)}

        def of_moving(*xs: Any) -> Any:
            own = dict(zip(moving, xs, strict=True))
            return bind([own.get(i, x) for i, x in enumerate(near)])

        tangent = jax.jvp(of_moving, tuple(near[i] for i in moving), tuple(moving.values()))[1]
        return op(*primals), lax.select(inside, tangent, jnp.zeros_like(tangent))

    op.defjvp(derivative, symbolic_zeros=True)
    return op


def _cropped(x: Any, frame: Frame, shape: tuple[int, ...]) -> Any:
    if frame.shape == shape:
        return x
    return lax.slice(x, frame.offset, [first + rows for first, rows in zip(frame.offset, shape, strict=True)])


def _embedded(x: Any, frame: Frame, fill: Any = 0) -> Any:
    """An array padded to a frame that is at least as large."""
    if tuple(np.shape(x)) == frame.shape:
        return x
    config = [(o, n - o - rows, 0) for n, o, rows in zip(*frame, np.shape(x), strict=True)]
    return lax.pad(x, jnp.asarray(fill, x.dtype), config)


@contextlib.contextmanager
def line_of(value: Lazy) -> Iterator[None]:
    """What is emitted stands at the line of the user's program that a value comes from."""
    if value.source is None:
        yield
    else:
        with source_info_util.user_context(value.source.traceback, name_stack=value.source.name_stack):
            yield
