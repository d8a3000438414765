"""TIFF images read in windows: only the overlapping tiles or strips are fetched and decoded."""

from __future__ import annotations

import itertools
import operator
import threading
from typing import Any

import numpy as np

from shardfn.errors import ExtraError, StrategyError, fail
from shardfn.files import check_regular

_PLACE = {"S": 4, "Z": 1, "Y": 2, "X": 3}
"""The position of a page's axis in tifffile's (sample plane, depth, length, width, sample)."""


class Tiff:
    """One page of a TIFF file, read by `image[0:512, 1024:1536]`.

    Several threads may read it. An uncompressed, contiguous page is read through a memmap.

    Args:
      path: the file.
      page: which page, from 0; the smaller levels of a pyramid may be pages, too.

    Attributes:
      shape, dtype: of the decoded image.
      chunks: the shape of a tile or strip; 1 in each dimension for a memmap.
      bytes_read: bytes that were read from the file so far.

    Raises:
      ExtraError: tifffile is not installed.
      StrategyError: there is no such page, or its axes are not supported.
      OSError: there is no such file, or it is a folder, a pipe or a device.
    """

    def __init__(self, path: Any, page: int = 0):
        try:
            import tifffile
        except ImportError:
            fail(ExtraError, "TIFF files are read by the package tifffile, which is not installed", where=str(path),
                 why="shardfn does not depend on it", fix="pip install tifffile")  # fmt: skip
        self.path, self.bytes_read = str(path), 0
        check_regular(path)
        self._file = tifffile.TiffFile(path)
        self._lock = threading.Lock()
        count = len(self._file.pages)
        if not 0 <= page < count:
            self._file.close()
            fail(StrategyError, f"the file has no page {page}", where=self.path,
                 why=f"its pages are 0 to {count - 1}", fix="name one of these")  # fmt: skip
        self._page: Any = self._file.pages[page]
        self.shape: tuple[int, ...] = tuple(self._page.shape)
        self.dtype = np.dtype(self._page.dtype).newbyteorder("=")
        self._five: tuple[int, ...] = tuple(self._page.shaped)
        planes = self._page.axes.startswith("S")
        places = [0 if axis == "S" and planes else _PLACE.get(axis, -1) for axis in self._page.axes]
        if -1 in places or len(places) != len(self.shape):
            self._file.close()
            fail(StrategyError, f"a page with the axes {self._page.axes} cannot be read in windows", where=self.path,
                 why="a page is rows, columns, and perhaps samples and depth", fix="convert the file")  # fmt: skip
        self._places = tuple(places)
        # Of an uncompressed page a window is read without its block.
        self._map: Any = tifffile.memmap(path, page=page, mode="r") if self._page.is_memmappable else None
        depth, rows, columns = 1, self._page.rowsperstrip, self._five[3]
        if self._page.is_tiled:
            depth, rows, columns = self._page.tiledepth, self._page.tilelength, self._page.tilewidth
        self._blocks = (1, max(1, depth), min(rows, self._five[2]), min(columns, self._five[3]), self._five[4])
        self.chunks: tuple[int, ...] = tuple(self._blocks[place] if self._map is None else 1 for place in self._places)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded image."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Tiff({self.path!r}): {self.dtype}{list(self.shape)} in blocks of {list(self.chunks)}"

    def __getitem__(self, window: Any) -> np.ndarray:
        asked = window if isinstance(window, tuple) else (window,)
        asked += (slice(None),) * (self.ndim - len(asked))
        ranges = [self._range(s, n) for s, n in zip(asked, self.shape, strict=True)]
        if any(step != 1 for _, _, step in ranges):
            fail(StrategyError, "a window has no steps", where=f"{self.path}{list(asked)}",
                 why="only contiguous windows are read", fix="read without a step, then slice the result")  # fmt: skip
        if self._map is not None:
            found = np.array(self._map[asked], self.dtype)
            with self._lock:
                self.bytes_read += found.nbytes
            return found
        edges = [(0, n) for n in self._five]
        for place, (start, stop, _) in zip(self._places, ranges, strict=True):
            edges[place] = (start, max(start, stop))
        out = np.zeros([last - first for first, last in edges], self.dtype)
        counts = [-(-n // block) for n, block in zip(self._five, self._blocks, strict=True)]
        spans = [range(first // block, -(-last // block)) if last > first else range(0)
                 for (first, last), block in zip(edges, self._blocks, strict=True)]  # fmt: skip
        for block in itertools.product(*spans):
            self._put(out, edges, int(np.ravel_multi_index(block, counts)))
        kept = [out.shape[place] for place, s in zip(self._places, asked, strict=True) if isinstance(s, slice)]
        return out.reshape(kept)  # an int removes its dimension

    def _range(self, asked: Any, size: int) -> tuple[int, int, int]:
        if isinstance(asked, slice):
            return asked.indices(size)
        place = operator.index(asked)
        if not -size <= place < size:
            raise IndexError(f"{self!r} has no index {place} there")
        return place % size, place % size + 1, 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        image = self[tuple(slice(None) for _ in self.shape)]
        return image if dtype is None else image.astype(dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, out: np.ndarray, edges: list[tuple[int, int]], number: int) -> None:
        """Fetch and decode block `number`, and copy the part within `edges`."""
        page = self._page
        with self._lock:
            handle = self._file.filehandle
            handle.seek(page.dataoffsets[number])
            data = handle.read(page.databytecounts[number])
            self.bytes_read += len(data)
        block, at, _ = page.decode(data, number, jpegtables=page.jpegtables, jpegheader=page.jpegheader)
        if block is None:  # a missing block is zeros
            return
        block = block[None] if block.ndim == 4 else block
        into, of = [], []
        for (first, last), start, size in zip(edges, at, block.shape, strict=True):
            low, high = max(first, start), min(last, start + size)
            if low >= high:
                return
            into.append(slice(low - first, high - first))
            of.append(slice(low - start, high - start))
        out[tuple(into)] = block[tuple(of)]
