"""What a checkpoint holds: every array's path, shape and dtype, how it lay, and how its files are cut. Plain JSON.

The file comes from another machine, or from a disk that forgets: what is read is checked, and a checksum over the rest
of it stands in it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import zlib
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Chunks
from shardfn.errors import CheckpointFileError, fail

FILE = "checkpoint.json"
FORMAT = "shardfn-checkpoint"
VERSION = 1
MAX_BYTES = 1 << 30
"""A description larger than this is not read."""

KINDS = ("array", "int", "float", "bool", "complex")
KEY = "key:"  # a typed PRNG key: the name of its implementation follows
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class StoredMesh:
    """A grid of devices: named axes, row-major, and which device stands where if not 0, 1, 2, …"""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None

    @property
    def devices(self) -> int:
        """How many devices the grid has."""
        return math.prod(size for _, size in self.axes)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array: `keys` is its place in the tree, `spec` the axes of grid number `grid` that cut each dim."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    keys: tuple[tuple[str, str], ...]
    cuts: tuple[int, ...]
    chunks: Chunks
    spec: Spec = ()
    grid: int = 0
    kind: str = "array"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype, those of JAX's own among them."""
        return jnp.dtype(self.dtype)

    @property
    def seen(self) -> StoredArray:
        """As a user sees it: the numbers of a typed PRNG key, its last dim, are no dim of the key."""
        if not self.kind.startswith(KEY):
            return self
        return dataclasses.replace(self, shape=self.shape[:-1], spec=self.spec[: len(self.shape) - 1])

    @property
    def itemsize(self) -> float:
        """Bytes of an element, half a byte for int4."""
        return bits(self.dtype) / 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.ceil(math.prod(self.shape) * self.itemsize)

    @property
    def text(self) -> str:
        """`params/w1: float32[30, 64]`."""
        return f"{self.path}: {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Contents:
    """What one checkpoint holds, and on how many devices and processes it was made.

    `files` has the fingerprint of each file by its name, where they were taken.
    """

    entries: tuple[StoredArray, ...]
    grids: tuple[StoredMesh, ...] = (StoredMesh(()),)
    devices: int = 1
    processes: int = 1
    files: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unpacked."""
        return sum(entry.nbytes for entry in self.entries)

    def __getitem__(self, path: str) -> StoredArray:
        return next(entry for entry in self.entries if entry.path == path)


def bits(dtype: Any) -> int:
    """Bits of one element.

    >>> bits("float32"), bits("int4")
    (32, 4)
    """
    dtype = jnp.dtype(dtype)
    small = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    return small[dtype.name] if dtype.name in small else int(dtype.itemsize) * 8


def contents_to_json(contents: Contents) -> str:
    """The JSON text of a description, with its checksum.

    >>> contents_from_json(contents_to_json(Contents(()))) == Contents(())
    True
    """
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "devices": contents.devices,
        "processes": contents.processes,
        "grids": [{"axes": dict(g.axes), "order": g.order and list(g.order)} for g in contents.grids],
        "arrays": {
            e.path: {
                "shape": list(e.shape),
                "dtype": e.dtype,
                "kind": e.kind,
                "keys": [list(key) for key in e.keys],
                "cuts": list(e.cuts),
                "axes": [list(dim) for dim in e.spec],
                "grid": e.grid,
                "file": list(e.chunks.file),
                "chunk": list(e.chunks.chunk),
            }
            for e in contents.entries
        },
    }
    if contents.files:
        data["files"] = dict(contents.files)
    data["crc32"] = _crc(data)
    rows = ((key, data[key]) for key in data)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in rows) + "\n}\n"


def _lines(value: Any) -> str:
    """A dict of dicts with a line for each of them."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"
    return json.dumps(value)


def _crc(data: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"


def read_contents(folder: pathlib.Path) -> Contents:
    """Read the description in a checkpoint's folder.

    Raises:
      CheckpointFileError: it is not there, damaged, or of a version that is not known.
    """
    file = folder / FILE
    try:
        if file.stat().st_size > MAX_BYTES:
            _damaged(file, "it is larger than any description")
        return contents_from_json(file.read_text("utf-8"), str(file))
    except (FileNotFoundError, NotADirectoryError):
        _damaged(file, "it is not there, and a step has one from the moment that it has its name", "is missing")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, CheckpointFileError):
            raise
        _damaged(file, str(error))


def _damaged(file: Any, why: str, what: str = "cannot be read") -> NoReturn:
    fix = "restore another step: checkpoint.steps(path) lists them"
    fail(CheckpointFileError, f"{file} {what}", why=why, fix=fix)


def contents_from_json(text: str, file: str = FILE) -> Contents:
    """Read the JSON text of a description; `file` is what errors call it.

    Raises:
      CheckpointFileError: it is damaged, or of a version that is not known.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is no description of a checkpoint: its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"its version is {data.get('version')!r:.40}, and this release reads {VERSION}")
        stated = data.pop("crc32", None)
        if stated != _crc(data):
            raise ValueError(f"its checksum is {_crc(data)}, and {stated!r:.40} is written in it: it was changed")
        return _contents(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        _damaged(file, why)


def _contents(data: dict[str, Any]) -> Contents:
    grids = tuple(
        StoredMesh(
            tuple((str(name), _int(size, 1)) for name, size in g["axes"].items()),
            None if g["order"] is None else _ints(g["order"]),
        )
        for g in data["grids"]
    )
    entries = tuple(_entry(path, row, len(grids)) for path, row in data["arrays"].items())
    files = tuple((_inside(name), str(stated)) for name, stated in data.get("files", {}).items())
    return Contents(entries, grids, _int(data["devices"], 1), _int(data["processes"], 1), files)


def _inside(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise ValueError(f"{name!r:.60} is no file beside it")
    return name


def _entry(path: str, row: dict[str, Any], grids: int) -> StoredArray:
    shape, cuts = _ints(row["shape"]), _ints(row["cuts"], 1)
    layout = Chunks(_ints(row["file"]), _ints(row["chunk"]))
    if not len(shape) == len(cuts) == len(layout.file) == len(layout.chunk):
        raise ValueError(f"`{path}` has dims that do not fit each other")
    for n, *parts in zip(shape, cuts, layout.file, layout.chunk, strict=True):
        if n and any(part < 1 or n % part for part in parts):
            raise ValueError(f"`{path}` is cut unevenly")
    if row["kind"] not in KINDS and not str(row["kind"]).startswith(KEY):
        raise ValueError(f"`{path}` is of the unknown kind {row['kind']!r:.40}")
    jnp.dtype(row["dtype"])  # raises where it is none
    if not 0 <= _int(row["grid"]) < grids:
        raise ValueError(f"`{path}` lies on a grid that is not there")
    keys = tuple((str(kind), str(name)) for kind, name in row["keys"])
    spec = tuple(tuple(str(axis) for axis in dim) for dim in row["axes"])
    return StoredArray(path, shape, row["dtype"], keys, cuts, layout, spec, row["grid"], str(row["kind"]))


def _int(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _ints(values: Any, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.40} is no list of counts")
    return tuple(_int(value, least) for value in values)
