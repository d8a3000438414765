"""The description of a checkpoint, stored as `checkpoint.json`: path, shape, dtype, sharding and chunks of every array.

The file may be damaged or come from another machine: reading checks every field, and a checksum over all of them.
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
from shardfn.ir.model import Spec
from shardfn.regular_files import read_bytes

FILE = "checkpoint.json"
FORMAT = "shardfn-checkpoint"
VERSION = 1
MAX_BYTES = 1 << 30
"""The largest description that is read."""

KINDS = ("array", "int", "float", "bool", "complex")
KEY = "key:"
"""Begins the kind of a typed PRNG key; the name of its implementation follows."""


@dataclasses.dataclass(frozen=True)
class StoredMesh:
    """A device mesh: named axes, row-major, and the device at each position if not 0, 1, 2, …"""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None

    @property
    def devices(self) -> int:
        """The device count."""
        return math.prod(size for _, size in self.axes)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint.

    Attributes:
      path: its path in the tree, such as `params/w`.
      shape, dtype: its global shape and dtype.
      keys: its place in the tree, as pairs of the kind of container and the name in it.
      strategy: the number of shards of each dimension.
      chunks: the shapes of its files and chunks.
      spec: the mesh axes that shard each dimension.
      mesh: the mesh that it was sharded over.
      kind: "array", the type of a Python number, or `KEY` and the implementation of a PRNG key.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    keys: tuple[tuple[str, str], ...]
    strategy: tuple[int, ...]
    chunks: Chunks
    spec: Spec = ()
    mesh: StoredMesh = StoredMesh(())
    kind: str = "array"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype, as NumPy and `ml_dtypes` know it."""
        return jnp.dtype(self.dtype)

    @property
    def without_key_data(self) -> StoredArray:
        """The array as JAX shows it: without the last dimension of a typed PRNG key, which holds the key data."""
        if not self.kind.startswith(KEY):
            return self
        return dataclasses.replace(self, shape=self.shape[:-1], spec=self.spec[: len(self.shape) - 1])

    @property
    def itemsize(self) -> float:
        """Bytes per element; 0.5 for int4."""
        return bits(self.dtype) / 8

    @property
    def nbytes(self) -> int:
        """Bytes of the array, uncompressed."""
        return math.ceil(math.prod(self.shape) * self.itemsize)

    @property
    def text(self) -> str:
        """`params/w1: float32[30, 64]`."""
        return f"{self.path}: {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Contents:
    """The description of one checkpoint.

    Attributes:
      entries: its arrays.
      devices, processes: how many saved it.
      files: the name and fingerprint of each file; empty in old checkpoints.
    """

    entries: tuple[StoredArray, ...]
    devices: int = 1
    processes: int = 1
    files: tuple[tuple[str, str], ...] = ()

    @property
    def meshes(self) -> tuple[StoredMesh, ...]:
        """The meshes of the arrays, each once."""
        return tuple(dict.fromkeys(entry.mesh for entry in self.entries)) or (StoredMesh(()),)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(entry.nbytes for entry in self.entries)

    def __getitem__(self, path: str) -> StoredArray:
        return next(entry for entry in self.entries if entry.path == path)


def bits(dtype: Any) -> int:
    """Bits per element of a dtype.

    >>> bits("float32"), bits("int4")
    (32, 4)
    """
    dtype = jnp.dtype(dtype)
    small = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    return small[dtype.name] if dtype.name in small else int(dtype.itemsize) * 8


def contents_to_json(contents: Contents) -> str:
    """A description as JSON with a checksum. `cuts` and `grid` are the file format's names for strategy and mesh.

    >>> contents_from_json(contents_to_json(Contents(()))) == Contents(())
    True
    """
    meshes = contents.meshes
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "devices": contents.devices,
        "processes": contents.processes,
        "grids": [{"axes": dict(g.axes), "order": g.order} for g in meshes],
        "arrays": {
            e.path: {
                "shape": e.shape, "dtype": e.dtype, "kind": e.kind, "keys": e.keys, "cuts": e.strategy, "axes": e.spec,
                "grid": meshes.index(e.mesh), "file": e.chunks.file, "chunk": e.chunks.chunk,
            }
            for e in contents.entries
        },
    }  # fmt: skip
    if contents.files:
        data["files"] = dict(contents.files)
    data["crc32"] = _crc(data)
    rows = ((key, data[key]) for key in data)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in rows) + "\n}\n"


def _lines(value: Any) -> str:
    """JSON with one line for each item of a dict."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n }"
    return json.dumps(value)


def _crc(data: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"


def read_contents(folder: pathlib.Path) -> Contents:
    """Read the description in the folder of a checkpoint.

    Raises:
      CheckpointFileError: it is missing, damaged, or of an unknown version.
    """
    file = folder / FILE
    try:
        return contents_from_json(read_bytes(file, MAX_BYTES).decode(), str(file))
    except (FileNotFoundError, NotADirectoryError):
        _damaged(file, "every complete step has one", "is missing")
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointFileError):
            raise
        _damaged(file, str(error))


def _damaged(file: Any, why: str, what: str = "cannot be read") -> NoReturn:
    fix = "restore another step: checkpoint.steps(path) lists them"
    fail(CheckpointFileError, f"{file} {what}", why=why, fix=fix)


def contents_from_json(text: str, file: str = FILE) -> Contents:
    """Read a description from JSON; `file` is its name in errors.

    Raises:
      CheckpointFileError: it is damaged, or of an unknown version.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"its version is {data.get('version')!r:.40}, and this release reads {VERSION}")
        stated = data.pop("crc32", None)
        if stated != _crc(data):
            raise ValueError(f"its checksum is {_crc(data)}, but {stated!r:.40} was recorded: the file was changed")
        return _contents(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        _damaged(file, why)


def _contents(data: dict[str, Any]) -> Contents:
    meshes = tuple(_mesh(row) for row in data["grids"])
    entries = tuple(_entry(path, row, meshes) for path, row in data["arrays"].items())
    files = tuple((_inside(name), str(stated)) for name, stated in data.get("files", {}).items())
    return Contents(entries, _int(data["devices"], 1), _int(data["processes"], 1), files)


def _mesh(row: dict[str, Any]) -> StoredMesh:
    axes = tuple((str(name), _int(size, 1)) for name, size in row["axes"].items())
    return StoredMesh(axes, None if row["order"] is None else _ints(row["order"]))


def _inside(name: str) -> str:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise ValueError(f"{name!r:.60} is not the name of a file in the folder")
    return name


def _entry(path: str, row: dict[str, Any], meshes: tuple[StoredMesh, ...]) -> StoredArray:
    shape, strategy = _ints(row["shape"]), _ints(row["cuts"], 1)
    chunks = Chunks(_ints(row["file"]), _ints(row["chunk"]))
    if not len(shape) == len(strategy) == len(chunks.file) == len(chunks.chunk):
        raise ValueError(f"`{path}` has dimensions of different ranks")
    for n, *parts in zip(shape, strategy, chunks.file, chunks.chunk, strict=True):
        if n and any(part < 1 or n % part for part in parts):
            raise ValueError(f"`{path}` is not divided evenly by its shards, files or chunks")
    if row["kind"] not in KINDS and not str(row["kind"]).startswith(KEY):
        raise ValueError(f"`{path}` has the unknown kind {row['kind']!r:.40}")
    jnp.dtype(row["dtype"])  # raises for an unknown name
    if _int(row["grid"]) >= len(meshes):
        raise ValueError(f"`{path}` names a mesh that is not described")
    keys = tuple((str(kind), str(name)) for kind, name in row["keys"])
    spec = tuple(tuple(str(axis) for axis in dim) for dim in row["axes"])
    mesh = meshes[row["grid"]]
    return StoredArray(path, shape, row["dtype"], keys, strategy, chunks, spec, mesh, str(row["kind"]))


def _int(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _ints(values: Any, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.40} is not a list of counts")
    return tuple(_int(value, least) for value in values)
