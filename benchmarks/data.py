"""What does a device's window of a large image cost compared with the complete image, in bytes read and in time?

For each format one image is written and sharded; a device's window is read, and the complete image is read and sliced, in turn.
The median times are with files in the page cache: the disk's own time comes on top of the bytes. Then shuffled batches of two
data sets of equal bytes, few large records and many small ones: through `load`, and by hand (NumPy's order, `source[numbers]`,
`device_put`), in turn.
Run: python benchmarks/data.py [--size 4096] [--cuts 2 4] [--rounds 7] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from benchmarks import harness
from shardfn import data


def median_ms(call, rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def images(folder: pathlib.Path, size: int):
    """The image in each format, opened for windows."""
    import tifffile
    import zarr

    image = np.random.default_rng(0).integers(0, 32, (size, size, 3)).astype("uint8")
    np.save(folder / "image.npy", image)
    yield "memmap", np.load(folder / "image.npy", mmap_mode="r")
    tifffile.imwrite(folder / "strips.tif", image, photometric="rgb", rowsperstrip=64)
    yield "TIFF, strips of 64 rows", tifffile.memmap(folder / "strips.tif", mode="r")
    tifffile.imwrite(folder / "tiles.tif", image, photometric="rgb", tile=(256, 256), compression="zlib")
    yield "TIFF, deflated tiles", zarr.open(tifffile.TiffFile(folder / "tiles.tif").pages[0].aszarr(), mode="r")
    array = zarr.create_array(folder / "image.zarr", shape=image.shape, chunks=(256, 256, 3), dtype="uint8")
    array[:] = image
    yield "Zarr, chunks", zarr.open_array(folder / "image.zarr", mode="r")


def windows(options: argparse.Namespace, folder: pathlib.Path) -> list[dict]:
    """One row for each format."""
    rows = []
    for name, image in images(folder, options.size):
        first = data.reads(image, (*options.cuts, 1))[0]
        window = tuple(slice(*edges) for edges in first.window)
        piece = median_ms(lambda image=image, window=window: np.array(image[window]), options.rounds)
        whole = median_ms(lambda image=image, window=window: np.array(image[:])[window].copy(), options.rounds)
        total = options.size**2 * 3
        rows.append({"format": name, "B kept": first.bytes, "B stored": first.bytes_stored, "B of the image": total,
                     "window ms": piece, "image ms": whole, "ratio": whole / piece})  # fmt: skip
    harness.show(rows, f"image {options.size} x {options.size} x 3 uint8, sharded {options.cuts}")
    return rows


def batches(options: argparse.Namespace, folder: pathlib.Path) -> list[dict]:
    """One row for each data set and sharding: milliseconds of a batch in each way, and what a device gets of it."""
    rows = []
    for records, batch, shape in ((256, 32, (128, 128, 3)), (65_536, 2_048, (16, 16, 3))):
        np.save(folder / "set.npy", np.random.default_rng(0).normal(size=(records, *shape)).astype("float32"))
        source = np.load(folder / "set.npy", mmap_mode="r")
        for strategy in ("full_batch", "data_parallel", ((1, 2, 4, 1),), ((2, 2, 2, 1),)):
            loaders = [data.load(source, strategy, batch_size=batch, shuffle=True, prefetch=n) for n in (0, 2)]

            def by_hand(source=source, size=batch, sharding=loaders[0].shardings):
                for chosen in np.random.default_rng(0).permutation(len(source)).reshape(-1, size):
                    yield jax.device_put(source[chosen], sharding)

            ways = [by_hand, *(loader.__iter__ for loader in loaders)]
            hand, *ours = np.transpose(
                [[per_batch(way) for way in ways] for _ in range(options.rounds + 1)][1:], (1, 2, 0)
            )
            (ms, cpu), (ahead, _) = ours
            rows.append({
                "record": "x".join(map(str, shape)), "records": batch, "sharding": str(strategy),
                "by hand ms": np.median(hand[0]), "0 ahead ms": np.median(ms), "2 ahead ms": np.median(ahead),
                "ratio": np.median(ms / hand[0]), "ratio, 2 ahead": np.median(ahead / hand[0]),
                "by hand CPU ms": np.median(hand[1]), "0 ahead CPU ms": np.median(cpu),
                "B on a device": loaders[0].bytes_per_device()[0],
            })  # fmt: skip
    harness.show(rows, "batches, shuffled")
    return rows


def per_batch(way) -> tuple[float, float]:
    """Milliseconds of a batch, by the clock and of the processor; no batch is kept."""
    count, begin, cpu = 0, time.perf_counter(), time.process_time()
    for batch in way():
        jax.block_until_ready(batch)
        count += 1
    return (time.perf_counter() - begin) / count * 1e3, (time.process_time() - cpu) / count * 1e3


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--cuts", type=int, nargs=2, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    options = harness.parse(parser, devices=8)
    with tempfile.TemporaryDirectory() as folder:
        found = {kind.__name__: kind(options, pathlib.Path(folder)) for kind in (windows, batches)}
    harness.save(options.json, found, packages=["tifffile", "zarr"])


if __name__ == "__main__":
    main()
