"""What a stage hands to the next, in one form for all stages: the values themselves where all hand on alike, else flat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.train.pipelines.program import Program


@dataclasses.dataclass(frozen=True)
class Wire:
    """The form of a message. `borders[s]` are the values that stage s + 1 gets; `is_alike` if all have the same shapes."""

    borders: tuple[tuple[int, ...], ...]
    avals: Mapping[int, Any]
    is_alike: bool
    lengths: tuple[tuple[str, int], ...]

    def empty(self) -> tuple[Any, ...]:
        """A message of zeros."""
        if self.is_alike:
            return tuple(jnp.zeros(self.avals[v].shape, self.avals[v].dtype) for v in self.borders[0])
        return tuple(jnp.zeros((length,), dtype) for dtype, length in self.lengths)

    def written(self, border: int, values: Sequence[Any]) -> tuple[Any, ...]:
        """The message over a border; -1 and one past the last have none."""
        if not 0 <= border < len(self.borders):
            return self.empty()
        if self.is_alike:
            return tuple(x.astype(self.avals[v].dtype) for v, x in zip(self.borders[border], values, strict=True))
        found = []
        for dtype, length in self.lengths:
            mine = [
                jnp.ravel(x) for v, x in zip(self.borders[border], values, strict=True) if _name(self.avals[v]) == dtype
            ]
            filled = sum(x.size for x in mine)
            found.append(jnp.concatenate([*(x.astype(dtype) for x in mine), jnp.zeros((length - filled,), dtype)]))
        return tuple(found)

    def read(self, border: int, message: Sequence[Any]) -> list[Any]:
        """The inverse of `written`."""
        if not 0 <= border < len(self.borders):
            return []
        if self.is_alike:
            return list(message)
        starts = dict.fromkeys((name for name, _ in self.lengths), 0)
        flat = dict(zip(starts, message, strict=True))
        found = []
        for v in self.borders[border]:
            aval, name = self.avals[v], _name(self.avals[v])
            size = math.prod(aval.shape)
            piece = jax.lax.slice_in_dim(flat[name], starts[name], starts[name] + size)
            found.append(piece.reshape(aval.shape))
            starts[name] += size
        return found

    @property
    def bytes(self) -> int:
        """Of a message."""
        if self.is_alike:
            return sum(math.prod(self.avals[v].shape) * self.avals[v].dtype.itemsize for v in self.borders[0])
        return sum(length * jnp.dtype(dtype).itemsize for dtype, length in self.lengths)


def wire_of(program: Program, borders: Sequence[Sequence[int]], keep: Any) -> Wire:
    """The form of messages of those border values that `keep` takes (by their shapes)."""
    kept = tuple(tuple(v for v in border if keep(program.avals[v])) for border in borders)
    shapes = [[(program.avals[v].shape, program.avals[v].dtype) for v in border] for border in kept]
    lengths: dict[str, int] = {}
    for border in kept:
        sizes: dict[str, int] = {}
        for v in border:
            name = _name(program.avals[v])
            sizes[name] = sizes.get(name, 0) + math.prod(program.avals[v].shape)
        lengths = {name: max(lengths.get(name, 0), sizes.get(name, 0)) for name in {*lengths, *sizes}}
    alike = bool(kept) and all(s == shapes[0] for s in shapes)
    return Wire(kept, {v: program.avals[v] for b in kept for v in b}, alike, tuple(sorted(lengths.items())))


def _name(aval: Any) -> str:
    return jnp.dtype(aval.dtype).name
