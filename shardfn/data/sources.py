"""Sources of data: arrays and sequences of records, read window by window.

A source is a pytree of tuples and dicts. Each leaf is an array with its records along dim 0 (NumPy, memmap, Zarr, anything
that supports `array[3, 0:64, 128:256]`), or a sequence of records (`len` and `[i]`). A record is a pytree of arrays, or of
images that can be read in windows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.paths import join
from shardfn.frontend.strategy import shape_of, short

Window = tuple[tuple[int, int], ...]
"""The start and stop of each dimension."""

PADDING = -1
"""A row without a record; it is filled with zeros."""


@dataclasses.dataclass(frozen=True)
class Read:
    """One read of a window.

    Attributes:
      path: the path of the array.
      window: the start and stop of each dimension.
      devices: the mesh positions of the devices that hold the window.
      bytes: bytes of the window on a device.
      bytes_stored: bytes of the stored blocks (tiles, chunks) that the read touches, in the source's dtype, uncompressed.
    """

    path: str
    window: Window
    devices: tuple[int, ...]
    bytes: int
    bytes_stored: int


def columns(source: Any) -> Any:
    """The source with a column for each of its leaves.

    Raises:
      StrategyTypeError: a leaf is neither an array nor a sequence.
      StrategyError: the numbers of records differ, or are 0.

    >>> found = columns({"image": np.zeros((6, 4, 4)), "label": [0, 1, 2, 3, 4, 5]})
    >>> {name: (column.length, column.record.shape) for name, column in found.items()}
    {'image': (6, (4, 4)), 'label': (6, ())}
    """
    found = tree_util.tree_map_with_path(
        lambda key, leaf: _column(leaf, join("", key) or "source"), source, is_leaf=_is_leaf
    )
    flat = tree_util.tree_leaves_with_path(found)
    lengths = {column.length for _, column in flat}
    if len(lengths) > 1:
        fail(StrategyError, "the inputs of the source have different numbers of records",
             where=", ".join(f"{join('', key)}: {column.length}" for key, column in flat),
             why="record i of one input belongs to record i of the others", fix="give them equally many records")  # fmt: skip
    if not flat or not lengths.pop():
        fail(StrategyError, "the source has no records", where=f"source = {short(source)}",
             why="there is nothing to read", fix="give an array or a sequence with at least one record")  # fmt: skip
    return found


def names_of(tree: Any) -> tuple[str, ...]:
    """The names of the inputs of a tuple or dict, in their order; "source" for a single input.

    >>> names_of({"y": 1, "x": 2}), names_of((3, 4)), names_of(5)
    (('y', 'x'), ('0', '1'), ('source',))
    """
    if isinstance(tree, dict):
        return tuple(map(str, tree))
    if isinstance(tree, tuple):
        return tuple(map(str, getattr(tree, "_fields", range(len(tree)))))
    return ("source",)


def _is_leaf(part: Any) -> bool:
    return not isinstance(part, tuple | dict)


def is_windowed(value: Any) -> bool:
    """Whether a value has a shape, a dtype and `[...]`."""
    return (
        isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype") and hasattr(value, "__getitem__")
    )


def _column(leaf: Any, name: str) -> ArrayColumn | RecordsColumn:
    """A leaf of a source as a number of records with equal shapes."""
    if isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    if is_windowed(leaf):
        known = shape_of(leaf)
        if known is None or not known[0]:
            fail(StrategyTypeError, f"input `{name}` holds an array that JAX cannot take, or one without a dimension of records",
                 where=f"{name}: {leaf.dtype}{list(leaf.shape)}", why="dim 0 counts the records, and they become arrays",
                 fix="convert it to numbers; for a single picture use data.read")  # fmt: skip
        return ArrayColumn(leaf, known[0][0], jax.ShapeDtypeStruct(known[0][1:], known[1]), name)
    if isinstance(leaf, str | Mapping) or not (hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__")):
        fail(StrategyTypeError, f"input `{name}` is {a(leaf)}, which has no records that can be read by number",
             where=f"{name} = {short(leaf)}", why="a batch may hold records in any order",
             fix="give an array, a sequence with len() and [i], or a grain.MapDataset")  # fmt: skip
    length = len(leaf)
    if length > 2**40:
        fail(StrategyError, f"input `{name}` is infinite", where=f"{name} = {short(leaf)}",
             why="an epoch is one pass over the records", fix="remove `repeat`, and use epochs=")  # fmt: skip
    if not length:
        return RecordsColumn(leaf, 0, None, name, (), ())
    first = leaf[0]
    parts = tree_util.tree_leaves(first)
    shapes = [shape_of(part) for part in parts]
    if None in shapes or not shapes:
        fail(StrategyTypeError, f"a record of input `{name}` is not made of arrays", where=f"{name}[0] = {short(first)}",
             why="records become arrays on devices",
             fix="give arrays, numbers, or images to be read in windows, such as [np.load(p) for p in paths]")  # fmt: skip
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in filter(None, shapes)]
    blocks = tuple(tuple(getattr(part, "chunks", None) or (1,) * len(struct.shape))
                   for part, struct in zip(parts, structs, strict=True))  # fmt: skip
    record = tree_util.tree_unflatten(tree_util.tree_structure(first), structs)
    return RecordsColumn(leaf, length, record, name, names_of(first), blocks)


@dataclasses.dataclass(frozen=True)
class ArrayColumn:
    """Records along dim 0 of one array."""

    array: Any
    length: int
    record: jax.ShapeDtypeStruct
    """The shape and dtype of one record."""
    name: str
    names = ("source",)

    def read(self, rows: np.ndarray, windows: Sequence[Sequence[Window]]) -> list[list[np.ndarray]]:
        """The values of each window of each array of a record; the first range of a window is over `rows`."""
        return [[self._one(rows[first:last], inner) for (first, last), *inner in windows[0]]]

    def _one(self, rows: np.ndarray, window: Sequence[tuple[int, int]]) -> np.ndarray:
        """The values in memory of their own, so that nothing of a memmap is read later."""
        inner, dtype = tuple(slice(*edges) for edges in window), self.record.dtype
        full = not (rows == PADDING).any()
        if full and _run(rows.tolist()):
            return to_dtype(self.array[(slice(int(rows[0]), int(rows[-1]) + 1), *inner)], dtype, self.name, copy=True)
        if full and hasattr(self.array, "oindex"):  # Zarr: reads each of its blocks once
            return to_dtype(self.array.oindex[(rows, *inner)], dtype, self.name)
        if full and isinstance(self.array, np.ndarray):
            return to_dtype(self.array[(rows, *inner)], dtype, self.name)
        values = np.zeros((len(rows), *(last - first for first, last in window)), dtype)
        for place, row in enumerate(rows.tolist()):
            if row != PADDING:
                values[place] = to_dtype(self.array[(row, *inner)], dtype, self.name)
        return values

    def stored(self, leaf: int, rows: Sequence[int], window: Window) -> int:
        """Bytes of the stored blocks that a read of the window of these rows touches."""
        if _run(rows):
            return stored_bytes(self.array, ((rows[0], rows[-1] + 1), *window))
        block = (getattr(self.array, "chunks", None) or (1,))[0]
        starts = [row // block * block for row in rows]
        starts = sorted(set(starts)) if hasattr(self.array, "oindex") else starts
        return sum(stored_bytes(self.array, ((start, start + 1), *window)) for start in starts)


@dataclasses.dataclass(frozen=True)
class RecordsColumn:
    """Records that are read by number, each once per batch."""

    records: Any
    length: int
    record: Any
    """The pytree of one record, of shapes and dtypes."""
    name: str
    names: tuple[str, ...]
    """The inputs of a record, in their order, where the column is the complete source."""
    blocks: tuple[tuple[int, ...], ...]
    """The block shape of each array of a record."""

    def read(self, rows: np.ndarray, windows: Sequence[Sequence[Window]]) -> list[list[np.ndarray]]:
        """See `ArrayColumn`."""
        structs, structure = tree_util.tree_flatten(self.record)
        values = [[np.zeros([last - first for first, last in window], struct.dtype) for window in part]
                for struct, part in zip(structs, windows, strict=True)]  # fmt: skip
        for place, row in enumerate(rows.tolist()):
            wanted = [[w[0][0] <= place < w[0][1] for w in part] for part in windows]
            if row == PADDING or not any(map(any, wanted)):
                continue
            leaves = self._checked(row, structs, structure)
            for leaf, part, hits, out in zip(leaves, windows, wanted, values, strict=True):
                for window, hit, into in zip(part, hits, out, strict=True):
                    if hit:
                        inner = tuple(slice(*edges) for edges in window[1:])
                        found = leaf[inner] if inner else leaf
                        into[place - window[0][0]] = to_dtype(found, into.dtype, self.name)
        return values

    def stored(self, leaf: int, rows: Sequence[int], window: Window) -> int:
        """See `ArrayColumn`."""
        struct = tree_util.tree_leaves(self.record)[leaf]
        return len(rows) * blocks_bytes(struct.shape, struct.dtype, self.blocks[leaf], window)

    def _checked(self, row: int, structs: Sequence[Any], structure: Any) -> list[Any]:
        found = self.records[row]
        leaves = tree_util.tree_leaves(found)
        if tree_util.tree_structure(found) != structure or any(
            shape_of(leaf) != (struct.shape, str(struct.dtype)) for leaf, struct in zip(leaves, structs, strict=True)
        ):
            what = [f"{known[1]}{list(known[0])}" if (known := shape_of(leaf)) else a(leaf) for leaf in leaves]
            fail(StrategyError, f"record {row} of input `{self.name}` differs from record 0",
                 where=f"record {row}: {', '.join(what) or 'nothing'}; "
                 f"record 0: {', '.join(f'{s.dtype}{list(s.shape)}' for s in structs)}",
                 why="the records of a batch become one array", fix="convert the records to one shape and dtype")  # fmt: skip
        return [leaf if is_windowed(leaf) else np.asarray(leaf) for leaf in leaves]


def to_dtype(values: Any, dtype: Any, name: str, *, copy: bool = False) -> np.ndarray:
    """Values as a C-contiguous array of `dtype`. 64-bit integers become 32-bit ones where JAX uses these, if they fit.

    Args:
      values: an array, or a number.
      dtype: the dtype that JAX uses for them.
      name: their input, for errors.
      copy: whether the result must have memory of its own.

    Raises:
      StrategyError: a number does not fit.

    >>> to_dtype(np.array([7, 8]), np.dtype("int32"), "label").dtype
    dtype('int32')
    """
    values, dtype = np.asarray(values), np.dtype(dtype)
    if values.dtype.kind in "iu" and values.dtype.itemsize > dtype.itemsize and values.size:
        low, high, limits = int(values.min()), int(values.max()), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            fail(StrategyError, f"numbers of input `{name}` do not fit {dtype}",
                 where=f"{name}: {values.dtype}, here from {low} to {high}",
                 why=f"JAX makes {dtype} of it while jax_enable_x64 is off, which holds {limits.min} to {limits.max}",
                 fix="cast it to what fits (float32 rounds), or set jax.config.update('jax_enable_x64', True)")  # fmt: skip
    return np.array(values, dtype, order="C") if copy else np.asarray(values, dtype, order="C")


def _run(rows: Sequence[int]) -> bool:
    """Whether the rows are consecutive, so that one slice reads them."""
    return bool(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows)))


def stored_bytes(array: Any, window: Window) -> int:
    """Bytes that a read of `window` touches: those of complete blocks, where the array is stored in blocks.

    >>> class Tiled: shape, chunks, dtype = (512, 512), (256, 256), np.dtype("uint8")
    >>> stored_bytes(Tiled, ((0, 128), (200, 300))) == 256 * 512
    True
    """
    return blocks_bytes(array.shape, array.dtype, getattr(array, "chunks", None) or (1,) * len(window), window)


def blocks_bytes(shape: Sequence[int], dtype: Any, blocks: Sequence[int], window: Window) -> int:
    """Bytes of the blocks of an array of `shape` that `window` overlaps."""
    rows = [min(-(-last // block) * block, size) - first // block * block if last > first else 0
            for (first, last), block, size in zip(window, blocks, shape, strict=True)]  # fmt: skip
    return math.prod(rows) * np.dtype(dtype).itemsize
