"""Sources are read window by window, and never more: arrays, memmaps, Zarr, TIFF, sequences, Grain datasets."""

import collections
import types
import typing

import grain
import numpy as np
import pytest
import tifffile
import zarr

from shardfn.data import sources
from shardfn.data.sources import PADDING, columns, names_of
from shardfn.errors import StrategyError, StrategyTypeError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 255, (6, 8, 12, 3)).astype("uint8")
WINDOWS = [((0, 2), (0, 4), (6, 12), (0, 3)), ((2, 4), (4, 8), (0, 6), (1, 2))]
ROWS = [[0, 1, 2, 3], [5, 0, 3, 1], [4, 4, 2, PADDING], [PADDING] * 4]


class Watched:
    """An array that notes every window it is asked for."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.asked = array, array.shape, array.dtype, []

    def __getitem__(self, window):
        found = self.array[window]
        self.asked.append(found.shape)
        return found


def memmap(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    return np.load(tmp_path / "images.npy", mmap_mode="r")


def zarr_array(tmp_path):
    array = zarr.create_array(tmp_path / "images.zarr", shape=IMAGES.shape, chunks=(1, 4, 4, 3), dtype="uint8")
    array[:] = IMAGES
    return array


def grain_dataset(tmp_path):
    return grain.MapDataset.source(list(IMAGES))


def tiffs(tmp_path):
    for i, image in enumerate(IMAGES):
        tifffile.imwrite(tmp_path / f"{i}.tif", image, photometric="rgb")
    return [tifffile.memmap(tmp_path / f"{i}.tif") for i in range(len(IMAGES))]


KINDS = [lambda _: IMAGES, lambda _: Watched(IMAGES), lambda _: list(IMAGES), memmap, zarr_array, grain_dataset, tiffs]
NAMES = ["numpy", "watched", "list", "memmap", "zarr", "grain", "tiff"]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_kind_of_source_gives_its_windows(kind, rows, tmp_path):
    source = kind(tmp_path)
    column = columns(source)
    source = source if isinstance(source, np.ndarray) else IMAGES
    assert (column.length, column.record.shape, column.record.dtype) == (6, (8, 12, 3), "uint8")
    rows = np.array(rows)
    want = np.where((rows == PADDING)[:, None, None, None], 0, IMAGES[rows])
    (found,) = column.read(rows, [WINDOWS])
    for window, piece in zip(WINDOWS, found, strict=True):
        np.testing.assert_array_equal(piece, want[tuple(slice(*edges) for edges in window)])
        assert piece.dtype == np.uint8 and type(piece) is np.ndarray and not np.shares_memory(piece, source)


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_an_array_is_asked_for_the_windows_and_no_more(rows):
    watched = Watched(IMAGES)
    columns(watched).read(np.array(rows), [WINDOWS])
    kept = [row for row in rows if row != PADDING]
    assert sum(np.prod(shape) for shape in watched.asked) == sum(
        sum(row != PADDING for row in rows[w[0][0] : w[0][1]]) * np.prod([b - a for a, b in w[1:]]) for w in WINDOWS
    )
    if rows == ROWS[0]:
        assert len(watched.asked) == len(WINDOWS), "neighbouring records are one read for each window"
    assert len(watched.asked) <= len(kept)


def test_a_record_is_asked_for_once_whatever_the_windows():
    asked = collections.Counter()

    class Records(list):
        def __getitem__(self, i):
            asked[i] += 1
            return super().__getitem__(i)

    column = columns(Records(IMAGES))
    asked.clear()
    column.read(np.array([5, 0, 3, 1]), [[((0, 2), (0, 4), (0, 12), (0, 3)), ((0, 2), (4, 8), (0, 12), (0, 3))]])
    assert asked == {5: 1, 0: 1}, "rows of no window here are another process's"


def test_records_that_are_pytrees():
    column = columns([{"x": IMAGES[i], "y": (i, float(i))} for i in range(6)])
    assert column.names == ("x", "y")
    image, whole, real = column.read(np.array([3, 1]), [[((0, 2), (0, 1), (0, 1), (0, 1))], [((0, 2),)], [((1, 2),)]])
    assert image[0].shape == (2, 1, 1, 1) and whole[0].tolist() == [3, 1] and real[0].tolist() == [1.0]
    assert names_of(collections.namedtuple("Pair", "a b")(1, 2)) == ("a", "b")


def test_bytes_in_whole_blocks(tmp_path):
    array = zarr_array(tmp_path)
    column = columns(array)
    assert column.stored(0, [2], ((0, 4), (0, 4), (0, 3))) == 48
    assert column.stored(0, [2, 3], ((1, 5), (0, 5), (0, 1))) == 2 * 2 * 2 * 48
    assert column.stored(0, [5, 2], ((0, 4), (0, 4), (0, 3))) == 96
    assert sources.stored_bytes(IMAGES, ((0, 1), (0, 4), (0, 6), (0, 3))) == 72
    uneven = zarr.create_array(tmp_path / "uneven.zarr", shape=(10,), chunks=(4,), dtype="float32")
    assert sources.stored_bytes(uneven, ((8, 10),)) == 8 and sources.stored_bytes(uneven, ((3, 5),)) == 32


def test_zarr_touches_the_blocks_that_are_counted_and_no_other(tmp_path):
    class Counting(zarr.storage.WrapperStore):
        asked: typing.ClassVar = collections.Counter()

        async def get(self, key, *args, **kwargs):
            self.asked[key] += "/c/" in f"/{key}"
            return await super().get(key, *args, **kwargs)

    zarr_array(tmp_path)
    store = Counting(zarr.storage.LocalStore(tmp_path / "images.zarr"))
    column = columns(zarr.open_array(store, mode="r"))
    store.asked.clear()
    column.read(np.array([5, 2]), [[((0, 2), (0, 4), (4, 12), (0, 3))]])
    assert sum(store.asked.values()) * 4 * 4 * 3 == column.stored(0, [5, 2], ((0, 4), (4, 12), (0, 3))) == 192


BAD = [
    (StrategyTypeError, "has no records that can be read by number", iter([1, 2])),
    (StrategyTypeError, "has no records", {"x": IMAGES, "y": "text"}),
    (StrategyTypeError, "has no records", types.MappingProxyType({"x": IMAGES})),
    (StrategyTypeError, "is not made of arrays", ["a", "b"]),
    (StrategyTypeError, "without a dimension of records", np.float32(3)),
    (StrategyTypeError, "that JAX cannot take", np.array(["a"])),
    (StrategyError, "different numbers of records", {"x": IMAGES, "y": [1, 2]}),
    (StrategyError, "has no records", []),
    (StrategyError, "has no records", ()),
    (StrategyError, "is infinite", grain.MapDataset.range(3).repeat()),
]


@pytest.mark.parametrize(("kind", "match", "source"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_is_no_source_is_said(kind, match, source):
    with pytest.raises(kind, match=match) as caught:
        columns(source)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    "other", [np.zeros((8, 11, 3), "uint8"), np.zeros((8, 12, 3), "int32"), {"x": 1}, "text"], ids=str
)
def test_a_record_unlike_the_others_is_named(other):
    column = columns([*IMAGES[:2], other])
    with pytest.raises(StrategyError, match="record 2 of input `source` differs from record 0"):
        column.read(np.array([0, 2]), [[((0, 2), (0, 1), (0, 1), (0, 1))]])
