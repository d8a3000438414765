"""How an array is cut up on disk: files as large as what one device holds, small chunks inside them.

A chunk is what is read, unpacked and checked as one. A layout that cuts a dim further than the one that was saved
then reads only the chunks it needs, as long as its pieces are made of whole chunks: so every dim is cut as often as any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

FILE_BYTES = 256 << 20
"""The most one file holds, before it is packed. A writer has one file at a time in memory."""

CHUNK_BYTES = (16 << 10, 64 << 10, 1 << 20)
"""Bytes of a chunk in small, middling and large arrays. 64 KiB were unpacked fastest, 16 KiB took a third more time."""

CHUNKS = (64, 1024)
"""How many a small array is cut into at most, and a large one at least: 8 ways along each of two dims, 10 along three."""

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The shape of the files of an array, and of the chunks inside each; both divide the array evenly."""

    file: tuple[int, ...]
    chunk: tuple[int, ...]


def choose_chunks(
    shape: Sequence[int], cuts: Sequence[int], itemsize: float, file_bytes: int = FILE_BYTES, within: int = 0
) -> Chunks:
    """The files and chunks of an array that is cut `cuts` ways.

    Args:
      shape: of the whole array.
      cuts: the pieces of each dim; each divides it.
      itemsize: bytes of one element.
      file_bytes: a file holds no more than this, before it is packed, where its dims have divisors for that.
      within: no chunk holds more bytes than this; 0 for what suits the size of the array.

    >>> choose_chunks((4096, 1024), (8, 1), 4)
    Chunks(file=(512, 1024), chunk=(256, 64))
    """
    piece = tuple(n // c for n, c in zip(shape, cuts, strict=True))
    total = math.prod(shape) * itemsize
    file = _shrunk(shape, piece, file_bytes / itemsize)
    least, middle, most = CHUNK_BYTES
    target = min(most, max(least, min(middle, total / CHUNKS[0]), total / CHUNKS[1]))
    return Chunks(file, _shrunk(shape, file, min(target, within or target) / itemsize))


def _shrunk(shape: Sequence[int], piece: Sequence[int], most: float) -> tuple[int, ...]:
    """Divide the dims of a piece by their prime factors until it has at most `most` elements, those of fewest cuts first."""
    sizes = list(piece)
    while math.prod(sizes) > most:
        # A small factor keeps chunks near the size that is wanted; a dim of a large prime is cut last.
        choices = [(_least_factor(n) > 7, shape[i] // n, -n, i) for i, n in enumerate(sizes) if n > 1]
        if not choices:
            break
        i = min(choices)[-1]
        sizes[i] //= _least_factor(sizes[i])
    return tuple(sizes)


def _least_factor(n: int) -> int:
    """The least prime factor of n > 1.

    >>> [_least_factor(n) for n in (2, 15, 49, 131)]
    [2, 3, 7, 131]
    """
    return next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)


def boxes(shape: Sequence[int], size: Sequence[int]) -> Iterator[Box]:
    """The boxes of `size` that an array of `shape` falls into, row-major; those at the end may be smaller.

    >>> list(boxes((3, 2), (2, 2)))
    [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 3, None), slice(0, 2, None))]
    """
    if not shape:
        yield ()
        return
    for start in range(0, shape[0], max(size[0], 1)):
        for rest in boxes(shape[1:], size[1:]):
            yield (slice(start, min(start + size[0], shape[0])), *rest)


def volume(box: Box) -> int:
    """How many elements a box holds."""
    return math.prod(s.stop - s.start for s in box)


def closed_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """A box with its ends written out, as JAX's shardings leave them open.

    >>> closed_box((slice(None), slice(2, 4)), (8, 4))
    (slice(0, 8, None), slice(2, 4, None))
    """
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def covering_volume(box: Box, size: Sequence[int], shape: Sequence[int]) -> int:
    """How many elements the boxes of `size` hold that touch `box`: what has to be read for it.

    >>> covering_volume((slice(0, 2), slice(0, 1)), (2, 2), (4, 4))
    4
    """
    spans = ((s, max(c, 1), n) for s, c, n in zip(box, size, shape, strict=True))
    return math.prod(min(n, -(-s.stop // c) * c) - s.start // c * c if s.stop > s.start else 0 for s, c, n in spans)
