"""Windows of TIFF pages: every way to store one gives the same pixels, and only the blocks that are met are read."""

import concurrent.futures
import os

import numpy as np
import pytest
import tifffile

from shardfn.data import Tiff
from shardfn.errors import ExtraError, StrategyError

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 255, (100, 150, 3)).astype("uint8")
GREY = RANDOM.integers(0, 60_000, (100, 150)).astype("uint16")
WAYS = {
    "one strip": (GREY, {}),
    "strips": (GREY, {"rowsperstrip": 16}),
    "tiles": (RGB, {"tile": (32, 48), "photometric": "rgb"}),
    "deflated tiles": (RGB, {"tile": (32, 48), "photometric": "rgb", "compression": "zlib"}),
    "deflated strips with a predictor": (GREY, {"rowsperstrip": 7, "compression": "zlib", "predictor": True}),
    "planes": (np.moveaxis(RGB, 2, 0), {"tile": (16, 16), "photometric": "rgb", "planarconfig": "separate"}),
    "big-endian float": (GREY.astype("float32"), {"tile": (32, 32), "byteorder": ">"}),
    "volume": (RANDOM.integers(0, 9, (20, 40, 50)).astype("uint8"), {"volumetric": True, "tile": (16, 16, 16)}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_windows(way, tmp_path):
    image, options = WAYS[way]
    tifffile.imwrite(tmp_path / "a.tif", image, **options)
    mine = Tiff(tmp_path / "a.tif")
    assert (mine.shape, mine.dtype, mine.ndim, mine.nbytes) == (image.shape, image.dtype, image.ndim, image.nbytes)
    assert mine.bytes_read == 0, "opening reads the header"
    np.testing.assert_array_equal(mine[:], image)
    np.testing.assert_array_equal(np.asarray(mine), image)
    for _ in range(20):
        edges = [sorted(RANDOM.integers(0, n + 1, 2)) for n in image.shape]
        window = tuple(slice(int(a), int(b)) for a, b in edges)
        np.testing.assert_array_equal(mine[window], image[window])
    np.testing.assert_array_equal(mine[2, 3:5], image[2, 3:5])
    np.testing.assert_array_equal(mine[-1], image[-1])
    with pytest.raises(IndexError):
        mine[image.shape[0]]
    with pytest.raises(StrategyError, match="no steps"):
        mine[::2]
    mine.close()


def test_only_the_tiles_that_are_met_are_read(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, RGB, tile=(32, 48), photometric="rgb")
    mine = Tiff(path)
    assert mine.chunks == (32, 48, 3)
    mine[0:32, 48:96]
    assert mine.bytes_read == 32 * 48 * 3
    mine[31:33, 48:96]
    assert mine.bytes_read == 3 * 32 * 48 * 3
    assert mine.bytes_read < os.path.getsize(path) / 2


def test_an_unpacked_page_is_read_without_its_strips(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", GREY)
    mine = Tiff(tmp_path / "a.tif")
    assert mine.chunks == (1, 1)
    mine[10:20, 30:50]
    assert mine.bytes_read == 10 * 20 * 2


def test_threads_share_a_file(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", RGB, tile=(16, 16), photometric="rgb", compression="zlib")
    mine = Tiff(tmp_path / "a.tif")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: mine[i : i + 20, i : i + 30], range(80)))
    for i, piece in enumerate(found):
        np.testing.assert_array_equal(piece, RGB[i : i + 20, i : i + 30])


def test_pages_and_what_is_wrong(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.stack([GREY, GREY + 1]), photometric="minisblack")
    np.testing.assert_array_equal(Tiff(path, page=1)[:5, :5], GREY[:5, :5] + 1)
    with pytest.raises(StrategyError, match="no page 2"):
        Tiff(path, page=2)
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    with pytest.raises(ExtraError, match="pip install tifffile"):
        Tiff(path)
