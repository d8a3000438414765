"""The description of a checkpoint: path, shape, dtype, sharding and chunks of every array."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Chunks
from shardfn.ir.model import Spec

BARE = "value"
"""The path of a single array."""

HOST = "host"
"""The kind of a NumPy array."""
ARRAYS = ("array", HOST)
"""The kinds of arrays, which may be cast."""
NUMBER = "number"
"""The kind of a Python number."""
TEXT = "text"
"""The kind of a text, which `save` does not write and `restore` does not read."""
KEY = "key:"
"""Begins the kind of a typed PRNG key; the name of its implementation follows."""
EMPTY = "empty:"
"""Begins the kind of a node without arrays; Orbax's name of its type follows."""


@dataclasses.dataclass(frozen=True)
class StoredMesh:
    """A device mesh: named axes, row-major, and the device at each position if not 0, 1, 2, …"""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None

    @property
    def devices(self) -> int:
        """The device count."""
        return math.prod(size for _, size in self.axes)


def mesh_order(devices: Sequence[Any]) -> tuple[int, ...] | None:
    """The rank of the device at each mesh position, as in `StoredMesh`.

    Args:
      devices: by position, what sorts the devices, such as their ids.

    >>> mesh_order([8, 6, 7]), mesh_order([6, 7, 8])
    ((2, 0, 1), None)
    """
    ranks = {device: rank for rank, device in enumerate(sorted(devices))}
    order = tuple(ranks[device] for device in devices)
    return None if order == tuple(range(len(order))) else order


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
      kind: "array", `HOST`, `NUMBER`, `TEXT`, `KEY` and the implementation of a PRNG key, or `EMPTY` and a type.
      driver: TensorStore's name of its format, "zarr3" or "zarr".
      is_ocdbt: whether it lies in an OCDBT database, or in a folder of its own.
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
    driver: str = "zarr3"
    is_ocdbt: bool = True

    @property
    def name(self) -> str:
        """Its name in Orbax's files."""
        return orbax_name(self.keys)

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
        return jax.dtypes.itemsize_bits(self.numpy_dtype) / 8

    @property
    def nbytes(self) -> int:
        """Bytes of the array, uncompressed."""
        return math.ceil(math.prod(self.shape) * self.itemsize)

    @property
    def text(self) -> str:
        """`params/w1: float32[30, 64]`."""
        return f"{self.path}: {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """The layout file beside the arrays.

    Attributes:
      file: its path.
      is_given: whether `save` was given it; otherwise it says what the shardings of the arrays are.
      sha256: its checksum, which the step notes; None where it was saved without one.
    """

    file: pathlib.Path
    is_given: bool
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class Contents:
    """The description of one checkpoint.

    Attributes:
      entries: its arrays.
      devices, processes: how many saved it, where that is known.
      texts: the texts that another program saved beside them.
      empty_nodes: the nodes of the tree without arrays: None, {}, [] and ().
      layout: the layout file that they were saved with.
    """

    entries: tuple[StoredArray, ...]
    devices: int = 1
    processes: int = 1
    texts: tuple[StoredArray, ...] = ()
    empty_nodes: tuple[StoredArray, ...] = ()
    layout: StoredLayout | None = None

    @property
    def meshes(self) -> tuple[StoredMesh, ...]:
        """The meshes of the arrays, each once."""
        return tuple(dict.fromkeys(entry.mesh for entry in self.entries)) or (StoredMesh(()),)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(entry.nbytes for entry in self.entries)


def orbax_name(keys: Iterable[tuple[str, str]]) -> str:
    """The name of an array in Orbax's files, from its place in the tree.

    >>> orbax_name((("key", "layers"), ("item", "0"), ("key", "w")))
    'layers.0.w'
    """
    return ".".join(name for _, name in keys)
