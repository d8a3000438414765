"""Which process holds which part of each argument: a section of reports for devices of several processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import Mesh

from shardfn.frontend.paths import few
from shardfn.planning.plan import Plan
from shardfn.render.cells import table
from shardfn.render.parts import Part

Interval = tuple[int, int]


def process_rows(plan: Plan, arrays: int) -> list[tuple[str, ...]]:
    """A row for each process: its number, its devices by place in the mesh, and what it holds of the sharded arguments.

    Args:
      plan: the plan; for devices of one process there are no rows.
      arrays: how many arguments to name, the largest first.
    """
    processes = plan.hardware.processes
    if len(processes) < 2:
        return []
    mesh = plan.mesh
    places = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    targets = tree_util.tree_leaves(plan.in_shardings)
    sharded = [(d, target) for d, target in zip(plan.inputs, targets, strict=True) if any(d.spec)]
    sharded.sort(key=lambda pair: -math.prod(pair[0].shape))
    rows = []
    for process in processes:
        held = [f"{d.path}{_held(target, d.shape, process)}" for d, target in sharded[:arrays]]
        own = [str(i) for i, device in enumerate(places) if device.process_index == process]
        name = f"{process} (this)" if process == jax.process_index() else str(process)
        more = [f"and of {len(sharded) - arrays} more"] if len(sharded) > arrays else []
        rows.append((name, few(own, 8), ", ".join([*held, *more]) or "all of every array"))
    return rows


def processes_table(plan: Plan, arrays: int, most: int) -> Iterable[Part]:
    """The table of `process_rows`."""
    note = "replicated arguments are in every process"
    yield table("Processes", ("process", "places in the mesh", "holds"), process_rows(plan, arrays), note, most)


def _held(sharding: Any, shape: Sequence[int], process: int) -> str:
    """The windows of an array that a process has: `[0:8,:]`."""
    windows = {
        tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
        if device.process_index == process
    }
    return window_text(windows, shape)


def window_text(windows: Iterable[tuple[Interval, ...]], shape: Sequence[int]) -> str:
    """Windows of an array as one text, neighbours merged.

    >>> window_text([((0, 4), (0, 8)), ((4, 8), (0, 8))], (16, 8))
    '[0:8,:]'
    >>> window_text([((0, 4), (0, 2)), ((0, 4), (4, 6))], (4, 8))
    '[:,0:2+4:6]'
    >>> window_text([((0, 2), (0, 2)), ((2, 4), (2, 4))], (4, 4))
    '[0:2,0:2] + [2:4,2:4]'
    """
    found = sorted(set(windows))
    by_dim = [sorted({window[dim] for window in found}) for dim in range(len(shape))]
    if math.prod(map(len, by_dim)) != len(found):
        texts = [window_text([window], shape) for window in found]
        return " + ".join([*texts[:2], *(["…"] if len(texts) > 2 else [])])
    texts = [_dim_text(intervals, size) for intervals, size in zip(by_dim, shape, strict=True)]
    return f"[{','.join(texts)}]"


def _dim_text(intervals: Sequence[Interval], size: int) -> str:
    merged = [intervals[0]]
    for start, stop in itertools.islice(intervals, 1, None):
        if start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return ":" if merged == [(0, size)] else "+".join(f"{start}:{stop}" for start, stop in merged)
