"""Random numbers that every device draws alike: in a `shard_map` whose keys are the same on all devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.frontend.paths import few
from shardfn.ir.rewrite import equation_line, equations, inner
from shardfn.planning.plan import FIX

DRAWING = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"})
"""The primitives that make random numbers of a key."""


def same_random_numbers(jaxpr: Any) -> Iterator[str]:
    """A note on each line that draws random numbers in a `shard_map` without a key for each device.

    A key is one for each device where the body asks for the number of its device (`axis_index`), or gets sharded keys.
    """
    lines: dict[str, None] = {}
    for _, eqn, _ in equations(jaxpr):
        if eqn.primitive.name != "shard_map" or _has_sharded_keys(eqn):
            continue
        inside = [one for body in inner(eqn) for _, one, _ in equations(body)]
        if not any(one.primitive.name == "axis_index" for one in inside):
            lines |= {equation_line(one): None for one in inside if one.primitive.name in DRAWING}
    if lines:
        where = few([line for line in lines if line], 3)
        yield (
            f"every device draws the same random numbers{where and f' at {where}'}: dropout has one mask for all of them;"
            f'{FIX}in train.step draw them for the global batch, with mode="auto_parallel"; in a shard_map of your own fold the '
            "device into the key: jax.random.fold_in(key, jax.lax.axis_index(axis))"
        )


def _has_sharded_keys(eqn: Any) -> bool:
    specs = eqn.params.get("in_specs", ())
    return any(
        any(dim is not None for dim in spec) and jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
        for v, spec in zip(eqn.invars, specs, strict=False)
    )
