"""The message that a stage sends to the next, in one form for all stages of a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.train.flat_jaxpr import FlatJaxpr


@dataclasses.dataclass(frozen=True)
class StageBoundary:
    """Stage-boundary activations: the values themselves where all boundaries have the same shapes, else flat buffers."""

    values: tuple[tuple[int, ...], ...]
    """For each boundary, the values that the next stage receives."""
    avals: Mapping[int, Any]
    is_uniform: bool
    lengths: tuple[tuple[str, int], ...]
    """Elements of the flat buffer of each dtype."""

    def at(self, boundary: int) -> tuple[int, ...]:
        """The values of a boundary; none before the first stage and after the last."""
        return self.values[boundary] if 0 <= boundary < len(self.values) else ()

    def empty(self) -> tuple[Any, ...]:
        """A message of zeros."""
        if self.is_uniform:
            return tuple(jnp.zeros(self.avals[v].shape, self.avals[v].dtype) for v in self.values[0])
        return tuple(jnp.zeros((length,), dtype) for dtype, length in self.lengths)

    def pack(self, boundary: int, values: Sequence[Any]) -> tuple[Any, ...]:
        """The message with the values of a boundary."""
        if not 0 <= boundary < len(self.values):
            return self.empty()
        pairs = list(zip(self.values[boundary], values, strict=True))
        if self.is_uniform:
            return tuple(x.astype(self.avals[v].dtype) for v, x in pairs)
        message = []
        for dtype, length in self.lengths:
            flat = [jnp.ravel(x).astype(dtype) for v, x in pairs if _name(self.avals[v]) == dtype]
            padding = length - sum(x.size for x in flat)
            message.append(jnp.concatenate([*flat, jnp.zeros((padding,), dtype)]))
        return tuple(message)

    def unpack(self, boundary: int, message: Sequence[Any]) -> list[Any]:
        """The inverse of `pack`."""
        if self.is_uniform:
            return list(message) if self.at(boundary) else []
        starts = dict.fromkeys((name for name, _ in self.lengths), 0)
        flat = dict(zip(starts, message, strict=True))
        found = []
        for v in self.at(boundary):
            aval, name = self.avals[v], _name(self.avals[v])
            end = starts[name] + math.prod(aval.shape)
            found.append(jax.lax.slice_in_dim(flat[name], starts[name], end).reshape(aval.shape))
            starts[name] = end
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return sum(x.size * x.dtype.itemsize for x in jax.eval_shape(self.empty))


def stage_boundary(jaxpr: FlatJaxpr, boundaries: Sequence[Sequence[int]], keep: Callable[[Any], bool]) -> StageBoundary:
    """The form of messages with the boundary values whose shapes `keep` accepts."""
    kept = tuple(tuple(v for v in values if keep(jaxpr.avals[v])) for values in boundaries)
    avals = {v: jaxpr.avals[v] for values in kept for v in values}
    lengths: dict[str, int] = {}
    for values in kept:
        sizes: dict[str, int] = {}
        for v in values:
            sizes[_name(avals[v])] = sizes.get(_name(avals[v]), 0) + math.prod(avals[v].shape)
        lengths = {name: max(lengths.get(name, 0), sizes.get(name, 0)) for name in {*lengths, *sizes}}
    shapes = {tuple((avals[v].shape, avals[v].dtype) for v in values) for values in kept}
    return StageBoundary(kept, avals, len(shapes) == 1, tuple(sorted(lengths.items())))


def _name(aval: Any) -> str:
    return jnp.dtype(aval.dtype).name
