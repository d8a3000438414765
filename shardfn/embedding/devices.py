"""How the rows of a table on devices are sharded."""

from __future__ import annotations

import operator
from typing import Any

from shardfn.cost.devices.hardware import resolve, used_here
from shardfn.errors import NotAvailableError, Problem, StrategyError, fail, raise_problems
from shardfn.frontend.meshes import MeshLayout


def sharding_of(strategy: tuple[int, int], shape: tuple[int, int], device: Any) -> Any:
    """The sharding of rows on devices.

    Args:
      strategy: the numbers of shards of rows and columns.
      shape: rows and width.
      device: the devices, as of `shard`.

    Raises:
      StrategyError, NotAvailableError: the devices are not here, or do not fit.
    """
    hardware = resolve(device)
    if not hardware.is_here:
        fail(StrategyError, f"a table cannot be made on {hardware.name}, which is not here", where=f"device = {device!r}",
             why="a target is only planned for", fix=used_here(hardware) or "give a device of this machine")  # fmt: skip
    if len(hardware.processes) > 1:
        fail(NotAvailableError, "a table on devices, or its cache, is on those of one process", where=f"strategy = {strategy}",
             why=f"these are of {len(hardware.processes)} processes", fix="device=jax.local_devices(); or a sharded array as "
             "parameter, without a table")  # fmt: skip
    numbers = tuple(map(operator.index, strategy))
    shards = numbers[0] * numbers[1]
    raise_problems([
        Problem(f"{size} {what} cannot be sharded {n} ways", f"strategy = {numbers}", f"{size} is not divisible by {n}",
                f"use {-(-size // n) * n} {what}, or other numbers of shards")
        for size, n, what in zip(shape, numbers, ("rows", "columns"), strict=True) if size % n
    ])  # fmt: skip
    if hardware.count % shards:
        fail(StrategyError, f"the table is sharded {shards} ways on {hardware.count} devices", where=f"strategy = {numbers}",
             why="their number must be divisible by that of the shards", fix=f"name {shards} devices")  # fmt: skip
    return MeshLayout.of_strategy(numbers, hardware.count).sharding(hardware.devices)
