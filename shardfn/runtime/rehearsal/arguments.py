"""Made-up arguments: of the right shape, dtype and sharding, with random values that a program can work with."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

SPAN = 0.02
"""Floats are uniform from 0 to this: of the size of weights, and such that roots and logarithms of them exist."""
UNKNOWN = 2
"""Integers that index nothing are 0 or 1."""


def made_up(shape: jax.ShapeDtypeStruct, below: int | None, seed: int) -> jax.Array:
    """An array of random values; this process makes its own shards alone, which are all equal.

    Args:
      shape: shape, dtype and sharding.
      below: the number that integers stay below; None for `UNKNOWN`.
      seed: other values for another number.

    >>> from jax.sharding import SingleDeviceSharding
    >>> where = SingleDeviceSharding(jax.devices()[0])
    >>> bool((made_up(jax.ShapeDtypeStruct((100,), "int8", sharding=where), 7, 0) < 7).all())
    True
    """
    sharding: Any = shape.sharding
    local = sharding.shard_shape(shape.shape)
    devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
    shard = _shard(local, shape.dtype, below)(seed)
    shards = [jax.device_put(shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, shards)


@functools.cache
def _shard(shape: tuple[int, ...], dtype: Any, below: int | None) -> Any:
    """The jitted function from a seed to a shard."""
    key_type = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    impl = _impl(dtype) if key_type else None
    bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype)).shape if key_type else ()

    def shard(seed: Any) -> jax.Array:
        key = jax.random.key(seed)
        if key_type:
            return jax.random.wrap_key_data(jax.random.bits(key, bits, "uint32"), impl=impl)
        if jnp.issubdtype(dtype, jnp.integer):
            most = min(below or UNKNOWN, jnp.iinfo(dtype).max)
            return jax.random.randint(key, shape, 0, most, "int32").astype(dtype)
        if dtype == jnp.bool_:
            return jax.random.bernoulli(key, shape=shape)
        values = jax.random.uniform(key, shape, "float32", 0.0, SPAN)
        return (
            (values + 1j * values).astype(dtype) if jnp.issubdtype(dtype, jnp.complexfloating) else values.astype(dtype)
        )

    return jax.jit(shard)


def _impl(dtype: Any) -> str:
    """The name of the generator of typed keys."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return found[0]
