"""States to save, and whether two are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh(*sizes, names="abc", devices=None):
    devices = jax.devices() if devices is None else devices
    count = int(np.prod(sizes))
    return Mesh(np.array(devices[:count]).reshape(sizes), tuple(names[: len(sizes)]))


def training(seed=0, rows=64, on=None):
    """Parameters on a 2 x 4 grid, AdamW's state of them, a PRNG key, numbers, an empty and a half-precision array."""
    on = on or mesh(2, 4)
    rng = np.random.default_rng(seed)

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(on, P(*spec)))

    params = {
        "w1": put(rng.normal(size=(rows, 128)).astype("float32"), None, "b"),
        "w2": put(rng.normal(size=(128, rows)).astype("float32"), ("a", "b"), None),
        "layers": [{"bias": put(rng.normal(size=(24,)).astype("float32"))} for _ in range(2)],
        "half": put(rng.normal(size=(16, 8)).astype(jnp.bfloat16), "b", "a"),
        "none": jnp.zeros((0, 3)),
    }
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.key(seed),
        "step": 7,
        "rate": 0.25,
        "mask": put(rng.integers(0, 2, (8, 8)).astype(bool), "a"),
        "seen": np.arange(5),
    }


def plain(tree):
    """A tree with PRNG keys as their data, everything NumPy."""

    def leaf(x):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def same(one, two):
    """Equal leaf by leaf, dtypes too; what holds the leaves may differ."""
    one, two = jax.tree.leaves(plain(one)), jax.tree.leaves(plain(two))
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def files(path):
    """The files of a folder."""
    return sorted(file for file in path.rglob("*") if file.is_file())
