"""Memory kinds of arrays: that of an array in another memory of its devices than the one they compute from, `"pinned_host"` say.

The type of such an array may say so (`float32<host>[8]`). Types are entries: the array stays there in a sharded call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardfn.frontend.strategy import Leaf

HOST = "pinned_host"
"""The memory kind of arrays whose type is in host memory."""


def memory_kinds(values: Any) -> tuple[str | None, ...]:
    """For each leaf of a pytree its memory kind; None where the devices compute from it."""
    return tuple(map(_memory_kind, tree_util.tree_leaves(values)))


def with_entries(leaves: Sequence[Leaf], kinds: Sequence[str | None]) -> tuple[str | None, ...]:
    """The memory kinds of a call's arrays: those of their entries, and of those without one the kinds in which they come."""
    return tuple(
        other_memory(leaf.entry) if isinstance(leaf.entry, NamedSharding) else kind
        for leaf, kind in zip(leaves, kinds, strict=True)
    )


def other_memory(sharding: Any) -> str | None:
    """The memory kind of a sharding; None where its devices compute from it."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return None
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return kind
    return None if kind == next(iter(sharding.device_set)).default_memory().kind else kind


def typed(shape: Any, kind: str | None) -> Any:
    """A `jax.ShapeDtypeStruct` with the type of arrays of a memory kind; it touches no device.

    >>> jax.typeof(typed(jax.ShapeDtypeStruct((8,), "float32"), "pinned_host"))
    ShapedArray(float32<host>[8])
    """
    if kind is None or not isinstance(shape, jax.ShapeDtypeStruct):
        return shape
    sharding = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=kind)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=sharding)


def brought(value: Any, kind: str | None) -> Any:
    """A traced array in the memory that its type has for a memory kind."""
    space = jax.memory.Space.Host if kind == HOST else jax.memory.Space.Device
    return value if _space(value) == space else jax.device_put(value, space)


def kind_of_type(aval: Any) -> str | None:
    """The memory kind of arrays of a type; None where the devices compute from it."""
    return HOST if aval.memory_space == jax.memory.Space.Host else None


def _space(value: Any) -> Any:
    return jax.typeof(value).memory_space


def _memory_kind(leaf: Any) -> str | None:
    if isinstance(leaf, Tracer):
        return kind_of_type(jax.typeof(leaf))
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return other_memory(leaf.sharding) if is_array and leaf.sharding is not None else None
