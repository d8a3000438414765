"""How an array is stored: files of at most one shard each, divided into small chunks.

A chunk is read, decompressed and checked as a unit. A restore with more shards reads only the chunks it needs if their
boundaries are chunk boundaries; so every dimension gets as many chunks as any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from shardfn.ir.divisors import primes

FILE_BYTES = 256 << 20
"""Most bytes of a file, uncompressed. A writer holds one file at a time in memory."""

CHUNK_BYTES = (16 << 10, 64 << 10, 1 << 20)
"""Bytes of a chunk of a small, a middling and a large array. 64 KiB decompress fastest; 16 KiB take a third longer."""

CHUNKS = (64, 1024)
"""Most chunks of a small array, and fewest of a large one: 8 along each of two dimensions, 10 along each of three."""

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The shapes of an array's files and of the chunks in each; both divide the array evenly."""

    file: tuple[int, ...]
    chunk: tuple[int, ...]


def choose_chunks(
    shape: Sequence[int], strategy: Sequence[int], itemsize: float, file_bytes: int = FILE_BYTES, within: int = 0
) -> Chunks:
    """The files and chunks of an array that is sharded by `strategy`.

    Args:
      shape: the global shape.
      strategy: the number of shards of each dimension, which divides it.
      itemsize: bytes per element.
      file_bytes: most bytes of a file, uncompressed, as far as the dimensions have divisors.
      within: most bytes of a chunk; 0 for a size that suits the array.

    >>> choose_chunks((4096, 1024), (8, 1), 4)
    Chunks(file=(512, 1024), chunk=(256, 64))
    """
    shard = tuple(n // c for n, c in zip(shape, strategy, strict=True))
    total = math.prod(shape) * itemsize
    file = _shrunk(shape, shard, file_bytes / itemsize)
    least, middle, most = CHUNK_BYTES
    target = min(most, max(least, min(middle, total / CHUNKS[0]), total / CHUNKS[1]))
    return Chunks(file, _shrunk(shape, file, min(target, within or target) / itemsize))


def _shrunk(shape: Sequence[int], block: Sequence[int], most: float) -> tuple[int, ...]:
    """Divide a block by prime factors of its dimensions until it has at most `most` elements, least divided dimension first."""
    sizes = list(block)
    while math.prod(sizes) > most:
        # A small factor keeps chunks near the wanted size; a dimension with a large prime factor comes last.
        choices = [(primes(n)[0] > 7, shape[i] // n, -n, i) for i, n in enumerate(sizes) if n > 1]
        if not choices:
            break
        i = min(choices)[-1]
        sizes[i] //= primes(sizes[i])[0]
    return tuple(sizes)


def boxes(shape: Sequence[int], size: Sequence[int]) -> Iterator[Box]:
    """The boxes of shape `size` that tile an array, row-major; those at the end may be smaller.

    >>> list(boxes((3, 2), (2, 2)))
    [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 3, None), slice(0, 2, None))]
    """
    if not shape:
        yield ()
        return
    for start in range(0, shape[0], max(size[0], 1)):
        for rest in boxes(shape[1:], size[1:]):
            yield (slice(start, min(start + size[0], shape[0])), *rest)


def by_chunk(parts: Iterable[Box], chunk: Sequence[int]) -> list[Box]:
    """Boxes in the order of the chunks that they begin in.

    >>> [(rows.start, columns.start) for rows, columns in by_chunk(boxes((2, 4), (1, 2)), (2, 2))]
    [(0, 0), (1, 0), (0, 2), (1, 2)]
    """
    return sorted(parts, key=lambda box: [s.start // max(c, 1) for s, c in zip(box, chunk, strict=True)])


def full_box(shape: Sequence[int]) -> Box:
    """The box of all of an array."""
    return tuple(slice(0, n) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(s.stop - s.start for s in box)


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(box_shape(box))


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None if they share no element.

    >>> overlap((slice(0, 4),), (slice(2, 8),)), overlap((slice(0, 2),), (slice(2, 8),))
    ((slice(2, 4, None),), None)
    """
    both = tuple(slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in zip(one, other, strict=True))
    return both if all(s.start < s.stop for s in both) else None


def inside(box: Box, origin: Box) -> Box:
    """The place in an array of a box that is given by its place within another."""
    return tuple(slice(o.start + s.start, o.start + s.stop) for s, o in zip(box, origin, strict=True))


def relative(box: Box, origin: Box) -> Box:
    """A box by its place within another.

    >>> relative((slice(6, 8),), (slice(4, 8),))
    (slice(2, 4, None),)
    """
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, origin, strict=True))


def closed_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """A box with explicit bounds; the indices of JAX's shardings leave them open.

    >>> closed_box((slice(None), slice(2, 4)), (8, 4))
    (slice(0, 8, None), slice(2, 4, None))
    """
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def covering_volume(box: Box, size: Sequence[int], shape: Sequence[int]) -> int:
    """The number of elements of all chunks of shape `size` that a read of `box` touches.

    >>> covering_volume((slice(0, 2), slice(0, 1)), (2, 2), (4, 4))
    4
    """
    spans = ((s, max(c, 1), n) for s, c, n in zip(box, size, shape, strict=True))
    return math.prod(min(n, -(-s.stop // c) * c) - s.start // c * c if s.stop > s.start else 0 for s, c, n in spans)
