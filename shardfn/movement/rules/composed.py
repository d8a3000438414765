"""Values that are made of values: ops on elements, and dimensions of one row taken from values and given back."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardfn.movement.emit import Emitter
from shardfn.movement.frames import frame_of
from shardfn.movement.mapped import transposed
from shardfn.movement.values import (
    Elementwise,
    Lazy,
    Moved,
    Op,
    Part,
    Spread,
    Squeezed,
    Value,
    elementwise,
    has_no_frame,
    is_repeated,
    is_stack,
    joined,
    of_sources,
    scalar_of,
    sliced,
    with_rows,
)


def on_elements(op: Op, operands: Sequence[Value], shape: tuple[int, ...], dtype: Any, emitter: Emitter) -> Value:
    """An op on the elements of values. Of stacks it is the op on each array of them; of values that fit into no frame the same
    op on their parts; of values without a dimension the op with it, and then without."""
    for dim in itertools.chain.from_iterable(_squeezed_dims(o) for o in operands if np.shape(o)):
        with_it = (*shape[:dim], 1, *shape[dim:])
        rows = [_with_row(emitter, o, dim) if np.shape(o) else o for o in operands]
        return Squeezed(shape, dtype, on_elements(op, rows, with_it, dtype, emitter), dim)
    found = elementwise(shape, dtype, op, operands)
    if not isinstance(found, Elementwise) or any(found is o for o in operands):
        return found
    scalars = [scalar_of(o) if np.shape(o) else o for o in operands]
    if not any(scalar is None for scalar in scalars):
        arrays = [
            jnp.asarray(emitter.array(x), getattr(o, "dtype", None)) for x, o in zip(scalars, operands, strict=True)
        ]
        return Spread(shape, dtype, op.bind(arrays), ())
    if (apart := _on_components(found, emitter)) is not None:
        return apart
    if frame_of(found) is None and (apart := _on_parts(found, emitter)) is not None:
        return apart
    return found


def combined(combine: Callable[[Any, Any], Any], values: Sequence[Value], dtype: Any, emitter: Emitter) -> Value:
    """Values of one shape, combined one after the other."""

    def bind(arrays: Sequence[Any]) -> Any:
        return functools.reduce(combine, arrays)

    shape = tuple(values[0].shape)
    if not shape:
        return bind([emitter.array(one) for one in values])
    return on_elements(Op(bind, 0.5 if combine is operator.mul else None), values, shape, dtype, emitter)


def _on_components(value: Elementwise, emitter: Emitter) -> Value | None:
    """An op on each array of stacks; another operand has one row for all."""
    stacks = [o for o in value.operands if is_stack(o)]
    if not stacks:
        return None
    dim = stacks[0].dim
    if not all(o.dim == dim if is_stack(o) else not np.shape(o) or is_repeated(o, dim) for o in value.operands):
        return None
    starts = (itertools.accumulate((part.rows for part in o.parts), initial=0) for o in stacks)
    return _in_pieces(value, dim, itertools.pairwise(sorted({*itertools.chain.from_iterable(starts)})), emitter)


def _on_parts(value: Elementwise, emitter: Emitter) -> Value | None:
    """An op on each part of its operands, which have parts of the same rows, or no dimensions."""
    moved = [o for o in value.operands if np.shape(o)]
    if not moved or not all(isinstance(o, Moved) and o.dim == moved[0].dim and len(o.parts) > 1 for o in moved):
        return None
    forms = {tuple((p.rows, p.first, p.source.shape, scalar_of(p.source) is None) for p in o.parts) for o in moved}
    if len(forms) > 1:
        return None
    parts: list[Part] = []
    for i, part in enumerate(moved[0].parts):
        same = next((j for j in range(i) if all(o.parts[j].source is o.parts[i].source for o in moved)), None)
        if same is None:
            sources = [o.parts[i].source if np.shape(o) else o for o in value.operands]
            parts.append(part._replace(source=_of_operands(value, sources, part.source.shape, emitter)))
        else:
            parts.append(part._replace(source=parts[same].source))
    return Moved(value.shape, value.dtype, moved[0].dim, tuple(parts))


def _in_pieces(value: Elementwise, dim: int, cuts: Iterable[tuple[int, int]], emitter: Emitter) -> Value:
    """An op on the rows that begin and stop at some places, one after the other."""
    found = []
    for start, stop in cuts:
        own = [sliced(o, dim, start, stop - start) if np.shape(o) else o for o in value.operands]
        found.append(_of_operands(value, own, with_rows(value.shape, dim, stop - start), emitter))
    return joined(found, dim)


def _of_operands(value: Elementwise, operands: Sequence[Value], shape: tuple[int, ...], emitter: Emitter) -> Value:
    return on_elements(value.op, operands, shape, value.dtype, emitter)


def rows_of(emitter: Emitter, value: Value, dim: int, first: int, rows: int) -> Value:
    """`rows` rows of a value from `first` on. A component, one row of a dimension of them, is an array of its own, and what is
    computed of it is computed in its shape."""
    if rows > 1 or not emitter.has_components(value.shape[dim]):
        return sliced(value, dim, first, rows)
    if isinstance(value, Lazy) and not has_no_frame(value, dim):
        value = emitter.settled(value)
    if not isinstance(value, Lazy):
        return emitter.row(value, dim, first)
    if isinstance(value, Moved) and value.dim == dim:
        for part in value.parts:
            if first < part.rows:
                return rows_of(emitter, part.source, dim, part.first + first, 1)
            first -= part.rows
    if isinstance(value, Moved):
        parts = of_sources(value.parts, lambda source: rows_of(emitter, source, dim, first, 1))
        return Moved(with_rows(value.shape, dim, 1), value.dtype, value.dim, parts)
    return sliced(value, dim, first, 1)


def squeezed(emitter: Emitter, value: Value, dim: int) -> Value:
    """A value without a dimension of one row."""
    if not isinstance(value, Lazy):
        return emitter.squeezed(value, dim)
    if dim not in value.squeezed:
        value.squeezed[dim] = _squeezed(emitter, value, dim)
    return value.squeezed[dim]


def _squeezed(emitter: Emitter, value: Value, dim: int) -> Value:
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    if not shape:
        return lax.squeeze(emitter.array(value), (dim,))
    if isinstance(value, Elementwise) and value.home is not None:
        value = emitter.settled(value)
    if isinstance(value, Moved) and value.dim != dim:
        parts = of_sources(value.parts, lambda source: squeezed(emitter, source, dim))
        return Moved(shape, value.dtype, value.dim - (value.dim > dim), parts)
    if isinstance(value, Moved):
        return Squeezed(shape, value.dtype, value, dim)
    if isinstance(value, Squeezed):
        inner = dim + (dim >= value.dim)
        found, last = squeezed(emitter, value.value, inner), value.dim - (inner < value.dim)
        return Squeezed(shape, value.dtype, found, last) if isinstance(found, Lazy) else lax.squeeze(found, (last,))
    if has_no_frame(value, dim):
        own = [squeezed(emitter, o, dim) if np.shape(o) else o for o in value.operands]
        found = on_elements(value.op, own, shape, value.dtype, emitter)
        if value.written and isinstance(found, Elementwise):
            found.written = lambda: lax.squeeze(emitter.array(value), (dim,))
        return found
    if isinstance(value, Spread):
        dims = tuple(d - (d > dim) for d in value.dims if d != dim)
        operand = squeezed(emitter, value.operand, value.dims.index(dim)) if dim in value.dims else value.operand
        return operand if np.shape(operand) == shape else Spread(shape, value.dtype, operand, dims)
    return lax.squeeze(emitter.array(value), (dim,))


def expanded(emitter: Emitter, value: Value, dims: Sequence[int]) -> Value:
    """A value with further dimensions of one row."""
    for i, dim in enumerate(sorted(dims)):
        value = _with_dim(emitter, value, dim, is_last=i == len(dims) - 1)
    return value


def _with_dim(emitter: Emitter, value: Value, dim: int, is_last: bool) -> Value:
    """A value with one more dimension of one row. What was squeezed gets its row back, as the last dimension that is added."""
    shape = (*np.shape(value)[:dim], 1, *np.shape(value)[dim:])
    if isinstance(value, Squeezed):
        if is_last:
            return moved_dim(emitter, value.value, value.dim, dim)
        inner = dim + (dim > value.dim)
        own = _with_dim(emitter, value.value, inner, is_last)
        return Squeezed(shape, value.dtype, own, value.dim + (inner <= value.dim))
    kept = tuple(d for d in range(len(shape)) if d != dim)
    if isinstance(value, Moved) and has_squeezed(value):
        parts = of_sources(value.parts, lambda source: _with_dim(emitter, source, dim, is_last))
        return Moved(shape, value.dtype, value.dim + (dim <= value.dim), parts)
    if isinstance(value, Spread) and has_squeezed(value):
        own = _with_dim(emitter, value.operand, sum(d < dim for d in value.dims), is_last)
        return Spread(shape, value.dtype, own, tuple(sorted((*(kept[d] for d in value.dims), dim))))
    if isinstance(value, Spread):
        return Spread(shape, value.dtype, value.operand, tuple(kept[d] for d in value.dims))
    return Spread(shape, value.dtype, value, kept) if isinstance(value, Lazy) else lax.expand_dims(value, (dim,))


def has_squeezed(value: Value) -> bool:
    """Whether rows of a value were squeezed."""
    return next(_squeezed_dims(value), None) is not None


def _squeezed_dims(value: Value) -> Iterator[int]:
    """The dimensions of one row that a value is without."""
    if isinstance(value, Squeezed):
        yield value.dim
    elif isinstance(value, Moved):
        for part in value.parts:
            yield from _squeezed_dims(part.source)
    elif isinstance(value, Spread):
        for dim in _squeezed_dims(value.operand):
            yield next(iter(value.dims[dim:]), len(value.shape))


def _with_row(emitter: Emitter, value: Value, dim: int) -> Value:
    """A value with the row along `dim` that another one was squeezed of."""
    is_alike = {*_squeezed_dims(value)} <= {dim}
    return expanded(emitter, value if is_alike else emitter.array(value), (dim,))


def moved_dim(emitter: Emitter, value: Value, source: int, target: int) -> Value:
    """A value whose dimension `source` becomes dimension `target`."""
    if source == target:
        return value
    order = [d for d in range(len(value.shape)) if d != source]
    order.insert(target, source)
    return transposed(value, order, emitter.transposed)
