"""Parameters in rows and back, and what lies on each device."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardfn.train.pipelines.flat_parameters import flat_layout, pack, unpack

PARAMS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(8, dtype=np.float32).reshape(4, 2),
    "c": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    "n": np.int32(3),
    "t": np.ones((2, 2), np.float32),
}
PATHS = tuple(PARAMS)


@pytest.mark.parametrize(("devices", "chunks"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("cuts", "ways"), [((-1,) * 5, 1), ((1, 0, -1, -1, -1), 2)])
def test_there_and_back(devices, chunks, cuts, ways):
    layout = flat_layout(PARAMS, PATHS, (0, 1, 1, 0, -1), cuts, devices, chunks, ways)
    packed = pack(layout, PARAMS)
    assert set(packed.shared) == {"n", "t"}, "ints and leaves that several stages read"
    back = unpack(packed)
    for name, array in PARAMS.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(back[name], np.float32), np.asarray(array, np.float32))


def test_pieces_lie_together():
    """Each way's part of every leaf is one run of the row, so that no device needs another's."""
    layout = flat_layout({"w": PARAMS["a"]}, ("w",), (0,), (1,), 1, 1, 2)
    row = pack(layout, {"w": PARAMS["a"]}).buffers["float32_sharded"][0, 0]
    np.testing.assert_array_equal(row[0, :6].reshape(3, 2), PARAMS["a"][:, :2])
    np.testing.assert_array_equal(row[1, :6].reshape(3, 2), PARAMS["a"][:, 2:])
