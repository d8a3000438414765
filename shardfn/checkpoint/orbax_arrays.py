"""How arrays become the files of an Orbax checkpoint: a handler of Orbax for leaves that come box by box.

Orbax's own handlers write what is in memory and give their chunks no checksum. This one writes the same format (OCDBT, Zarr 3,
Orbax's metadata and sharding files), from shards in memory or from a reader of boxes, with a CRC-32C of every chunk. Orbax
alone reads the result.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from orbax.checkpoint import future
from orbax.checkpoint._src.metadata.array_metadata_store import Store
from orbax.checkpoint._src.serialization.tensorstore_utils import build_array_write_spec

from shardfn.checkpoint.catalogue import SHARDINGS
from shardfn.checkpoint.chunks import Box, volume
from shardfn.checkpoint.contents import HOST, KEY, NUMBER, StoredArray, StoredMesh
from shardfn.checkpoint.failure import Failure
from shardfn.files import atomic_file
from shardfn.ir.model import Spec


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """An array to write.

    Attributes:
      entry: its description.
      boxes: the boxes that this process writes, each with a function that returns its values.
      sharding: its sharding as it stands in Orbax's file of shardings, or None.
    """

    entry: StoredArray
    boxes: Sequence[tuple[Box, Callable[[], np.ndarray]]]
    sharding: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes, uncompressed."""
        return int(sum(volume(box) for box, _ in self.boxes) * self.entry.itemsize)


class HostArraySource(ArraySource):
    """A NumPy array to write, which Orbax restores as one."""


class NumberSource(ArraySource):
    """A Python number to write, which Orbax restores as one."""


def source_of(entry: StoredArray, boxes: Sequence[tuple[Box, Any]], sharding: str | None) -> ArraySource:
    """The source of an array, of the class of its kind."""
    return {HOST: HostArraySource, NUMBER: NumberSource}.get(entry.kind, ArraySource)(entry, boxes, sharding)


def jax_sharding_text(sharding: Sharding | None) -> str | None:
    """A sharding as Orbax writes it; None for kinds that it does not record."""
    if isinstance(sharding, NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    if isinstance(sharding, SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    return None


def stored_text(mesh: StoredMesh, spec: Spec) -> str | None:
    """The sharding of an array that was never on devices, as Orbax writes it; None where it has no mesh."""
    if not mesh.axes:
        return None
    names, sizes = zip(*mesh.axes, strict=True)
    ids = np.asarray(mesh.order or range(mesh.devices)).reshape(sizes)
    devices = np.vectorize(lambda i: {"id": int(i)}, otypes=[object])(ids).tolist()
    return json.dumps({
        "sharding_type": "NamedSharding", "shape": sizes, "axis_names": names,
        "axis_types": [str(jax.sharding.AxisType.Auto)] * len(names),
        "partition_spec": [dim or None for dim in spec], "device_mesh": {"mesh": devices},
    })  # fmt: skip


ARRAY = "jax.Array"
"""Orbax's name of JAX's arrays."""


def registry(failure: Failure, in_flight: int | None = None) -> Any:
    """The handlers of all leaves, for Orbax's handler of pytrees.

    Args:
      failure: that of the save.
      in_flight: most bytes that are being written at once; None for no bound.
    """
    arrays, host, number = (_Handler(name, failure, in_flight) for name in (ARRAY, "np.ndarray", "scalar"))
    rows = [(HostArraySource, host), (NumberSource, number)]
    # Orbax asks the handler of JAX's arrays for its store of metadata.
    return ocp.type_handlers.create_type_handler_registry(*rows, (ArraySource, arrays), (jax.Array, arrays))


class _Handler(ocp.type_handlers.ArrayHandler):
    """Writes `ArraySource`s."""

    def __init__(self, typestr: str, failure: Failure, in_flight: int | None):
        super().__init__(array_metadata_store=Store())
        self._typestr, self._failure, self._in_flight = typestr, failure, in_flight

    def typestr(self) -> str:
        return self._typestr

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[future.Future]:  # fmt: skip
        """Begin to write."""
        write = self._failure.watch(self._write(list(values), list(infos)))
        return [future.CommitFutureAwaitingContractedSignals(write, name=f"write {self._typestr}")]

    async def _write(self, values: Sequence[ArraySource], infos: Sequence[Any]) -> None:
        await asyncio.gather(*(info.await_path_creation() for info in infos))
        specs = [_spec(value.entry, info) for value, info in zip(values, infos, strict=True)]
        context, directory = infos[0].ts_context, infos[0].parent_dir
        stores = await asyncio.gather(*(ts.open(spec.json, context=context, create=True, open=True) for spec in specs))
        waiting: collections.deque[tuple[Any, int]] = collections.deque()
        try:
            held = 0
            for value, store in zip(values, stores, strict=True):
                for box, read in value.boxes if 0 not in value.entry.shape else ():
                    size = int(volume(box) * value.entry.itemsize) + 1
                    while waiting and self._in_flight is not None and held + size > self._in_flight:
                        first, done = waiting.popleft()
                        await first
                        held -= done
                    waiting.append((store[box].write(read(), can_reference_source_data_indefinitely=True), size))
                    held += size
            await asyncio.gather(*(write for write, _ in waiting))
        finally:  # no write goes on after an error
            await asyncio.gather(*(write for write, _ in waiting), return_exceptions=True)
        if self._typestr == ARRAY:
            await _note(directory, values, [spec.metadata for spec in specs])


async def _note(directory: Any, values: Sequence[ArraySource], metadata: Sequence[Any]) -> None:
    """Write what Orbax keeps of JAX's arrays beside them: the chunks of each process, and the shardings."""
    process = jax.process_index()
    await Store().write(checkpoint_dir=directory, array_metadatas=metadata, process_index=process)
    shardings = {value.entry.name: value.sharding for value in values if value.sharding}
    if process == 0 and shardings:
        rows = {base64.urlsafe_b64encode(name.encode()).decode(): text for name, text in shardings.items()}
        with atomic_file(directory / SHARDINGS) as file:
            file.write(json.dumps(rows).encode())


class _Spec(NamedTuple):
    """An array's TensorStore, and what Orbax notes of it beside."""

    json: dict[str, Any]
    metadata: Any


def _spec(entry: StoredArray, info: Any) -> _Spec:
    file = tuple(max(n, 1) for n in entry.chunks.file)
    extension = {"random_key_impl": entry.kind.removeprefix(KEY)} if entry.kind.startswith(KEY) else None
    made = build_array_write_spec(
        info, global_shape=entry.shape, local_shape=file, dtype=entry.numpy_dtype, use_ocdbt=True,
        process_index=jax.process_index(), ext_metadata=extension,
    )  # fmt: skip
    grid = {"name": "regular", "configuration": {"chunk_shape": file}}
    zarr = {"shape": entry.shape, "data_type": entry.dtype, "chunk_grid": grid, "codecs": _codecs(entry)}
    return _Spec({**made.json, "metadata": zarr}, dataclasses.replace(made.metadata, chunk_shape=file))


def _codecs(entry: StoredArray) -> list[dict[str, Any]]:
    """The Zarr 3 codecs: chunks within files, compressed, with a checksum for every chunk and every index of chunks."""
    plain, checksum = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    sharding = {
        "chunk_shape": [max(n, 1) for n in entry.chunks.chunk],
        "codecs": [plain, {"name": "zstd", "configuration": {"level": 1}}, checksum],
        "index_codecs": [plain, checksum],
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": sharding}]
