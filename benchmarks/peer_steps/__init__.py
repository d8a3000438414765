"""The same training steps as users of several libraries write them; `benchmarks/peers.py` compares what they compile to.

A module for each library has `make(program, layout, step, state, batch)`. It returns a `Step`. A user writes the
lines between `# sharding: NAME, ...` and `# end`; NAME is a layout, or a program and a layout. Lines between `# model` and
`# end` are a model that the library wants written for it. All use eight devices. `fsdp` shards batch, parameters and
optimizer state over them; `tensor` is Megatron's sharding over 4 devices beside data parallel over 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 8
TENSOR = {"data": 2, "model": 4}


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted step `call(*state, *batch)` that returns the new state and the loss, with its arguments on their devices."""

    call: Callable[..., Any]
    lower: Callable[..., jax.stages.Lowered]
    state: tuple[Any, ...]
    batch: tuple[Any, ...]


def over_rows(mesh: Mesh, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of a batch with their rows over the axis `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
