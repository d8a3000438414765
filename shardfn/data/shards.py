"""The window of an array that each device holds, and the global array from its windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardfn.data.dataset_strategy import input_shardings
from shardfn.data.sources import Read, Window, is_windowed, stored_bytes, to_dtype
from shardfn.errors import StrategyTypeError, a, fail
from shardfn.frontend.strategy import short
from shardfn.planning.plan import Plan


def windows_by_device(
    sharding: NamedSharding, shape: Sequence[int], *, everywhere: bool = False
) -> dict[Window, list[Any]]:
    """The windows of an array that the devices of this process hold, with these devices; `everywhere`: all devices."""
    indices = sharding.devices_indices_map(tuple(shape))
    own = sharding.device_set if everywhere else sharding.addressable_devices
    found: dict[Window, list[Any]] = {}
    for device in _mesh(sharding).devices.flat:
        if device in own:
            found.setdefault(_window(indices[device], shape), []).append(device)
    return found


def _window(index: Sequence[slice], shape: Sequence[int]) -> Window:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def assemble_array(
    shape: Sequence[int], sharding: NamedSharding, shards: Sequence[np.ndarray], windows: Iterable[Window]
) -> jax.Array:
    """The global array with the values `shards` in `windows`, in their order."""
    values = dict(zip(windows, shards, strict=True))
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: values[_window(index or (), shape)])


def mesh_positions(sharding: NamedSharding, devices: Sequence[Any]) -> tuple[int, ...]:
    """The positions of devices in the mesh; with several processes, device ids are not 0, 1, 2, …."""
    place = {device: i for i, device in enumerate(_mesh(sharding).devices.flat)}
    return tuple(place[device] for device in devices)


def _mesh(sharding: NamedSharding) -> Mesh:
    assert isinstance(sharding.mesh, Mesh)  # `input_shardings` refuses devices that are not here
    return sharding.mesh


def reads(image: Any, entry: Any, *, device: Any = None, plan: Plan | None = None) -> tuple[Read, ...]:
    """The reads of `read` with the same arguments, on all processes together: one for each distinct window, with the devices
    that hold it.

    >>> [(r.window, r.devices, r.bytes) for r in reads(np.zeros((4, 6), "uint8"), (2, 1))]
    [(((0, 2), (0, 6)), (0, 1, 2, 3), 12), (((2, 4), (0, 6)), (4, 5, 6, 7), 12)]
    """
    sharding = _image_sharding(image, entry, device, plan)
    item = np.dtype(image.dtype).itemsize
    return tuple(
        Read("image", window, mesh_positions(sharding, devices), math.prod(last - first for first, last in window) * item,
             stored_bytes(image, window))
        for window, devices in windows_by_device(sharding, image.shape, everywhere=True).items()
    )  # fmt: skip


def read(image: Any, entry: Any, *, device: Any = None, plan: Plan | None = None) -> jax.Array:
    """Read one large array window by window onto the devices that hold it; no process reads all of it.

    Args:
      image: anything read by `image[0:512, 1024:1536]`: a memmap, a Zarr array, a NumPy array.
      entry: its strategy as a tuple of ints, a Layout, a NamedSharding, or None for data parallel.
      device: as in `shard`.
      plan: a plan whose mesh is used.

    Returns:
      The global array.

    Raises:
      StrategyError, StrategyTypeError: the entry does not fit the array, or an integer does not fit 32 bits.
      DeviceError: the devices are not here.

    >>> picture = np.arange(24.0, dtype="float32").reshape(4, 6)
    >>> x = read(picture, (4, 2))
    >>> x.sharding.shard_shape(x.shape), bool((x == picture).all())
    ((1, 3), True)
    """
    sharding = _image_sharding(image, entry, device, plan)
    windows = windows_by_device(sharding, image.shape)
    dtype = jax.dtypes.canonicalize_dtype(image.dtype)
    shards = [
        to_dtype(image[tuple(slice(*edges) for edges in window)], dtype, "image", copy=True) for window in windows
    ]
    return assemble_array(image.shape, sharding, shards, windows)


def _image_sharding(image: Any, entry: Any, device: Any, plan: Plan | None) -> NamedSharding:
    if not is_windowed(image):
        fail(StrategyTypeError, f"the image is {a(image)}, which cannot be read in windows", where=f"image = {short(image)}",
             why="each shard is read as image[0:512, 1024:1536]",
             fix="give an array with shape and dtype; open a file first: tifffile.memmap, zarr.open_array")  # fmt: skip
    shape = jax.ShapeDtypeStruct(tuple(image.shape), jax.dtypes.canonicalize_dtype(image.dtype))
    return input_shardings({"image": shape}, (entry,), device=device, plan=plan).shardings[0]
