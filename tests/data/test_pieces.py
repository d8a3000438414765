"""One large image onto a grid: one read for each distinct window, the whole never; and a convolution over its pieces."""

import jax
import numpy as np
import pytest
import tifffile
import zarr

from shardfn import data
from shardfn.errors import StrategyError, StrategyTypeError
from shardfn.mindspore import Layout, set_auto_parallel_context

IMAGE = np.random.default_rng(0).integers(0, 255, (64, 128, 3)).astype("uint8")
GRID = Layout((2, 4), ("row", "column"))


class Watched:
    def __init__(self, array):
        self.array, self.shape, self.dtype, self.asked = array, array.shape, array.dtype, []

    def __getitem__(self, window):
        self.asked.append(window)
        return self.array[window]


@pytest.mark.parametrize(
    ("entry", "piece", "windows"),
    [
        ((2, 4, 1), (32, 32, 3), 8),
        ((1, 8, 1), (64, 16, 3), 8),
        ((2, 1, 1), (32, 128, 3), 2),
        ((1, 1, 1), (64, 128, 3), 1),
        (None, (8, 128, 3), 8),
        (GRID("column", "row", "None"), (16, 64, 3), 8),
    ],
    ids=str,
)
def test_one_read_for_each_window(entry, piece, windows):
    watched = Watched(IMAGE)
    made = data.read(watched, entry)
    assert made.sharding.shard_shape(made.shape) == piece
    np.testing.assert_array_equal(made, IMAGE)
    assert len(watched.asked) == len(set(map(str, watched.asked))) == windows
    told = data.reads(watched, entry)
    assert len(told) == windows and len(watched.asked) == windows, "telling reads nothing"
    assert sorted(place for read in told for place in read.devices) == list(range(8))
    assert {read.bytes for read in told} == {np.prod(piece)}


def test_a_tiff_is_read_by_its_tiles(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", IMAGE, tile=(16, 16), photometric="rgb")
    image = zarr.open(tifffile.TiffFile(tmp_path / "a.tif").pages[0].aszarr(), mode="r")
    np.testing.assert_array_equal(data.read(image, (2, 4, 1)), IMAGE)
    assert IMAGE.nbytes == sum(read.bytes_stored for read in data.reads(image, (2, 4, 1)))
    np.testing.assert_array_equal(data.read(image, (2, 1, 1), device=jax.devices()[:2]), IMAGE)


def test_device_and_context():
    assert data.read(IMAGE, (4, 1, 1), device=jax.devices()[4:]).sharding.device_set == set(jax.devices()[4:])
    set_auto_parallel_context(device_num=2)
    assert len(data.read(IMAGE, None).sharding.device_set) == 2


@pytest.mark.parametrize(
    ("kind", "match", "image", "entry"),
    [
        (StrategyError, "64 is not divisible by 3", IMAGE, (3, 1, 1)),
        (StrategyError, "has 3 dimensions, but its entry has 2", IMAGE, (2, 4)),
        (StrategyTypeError, "cannot be read in windows", "a.tif", (2, 4)),
        (StrategyTypeError, "cannot be read in windows", [[1, 2]], (1, 1)),
    ],
)
def test_what_is_wrong_is_said(kind, match, image, entry):
    with pytest.raises(kind, match=match):
        data.read(image, entry)
