"""The tables of shards by device in HTML: all shardings as text. `draw.mesh` pictures one array."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from shardfn.frontend.meshes import shard_numbers
from shardfn.frontend.paths import few
from shardfn.planning.plan import Decision, Plan
from shardfn.render.cells import shape_text, shard_text
from shardfn.render.parts import Drawing, Placed

MOST_DEVICES = 64
MOST_DRAWN = 16


def drawing(plan: Plan) -> Drawing:
    """Arrays of one shape and one sharding are drawn once; of a large mesh only the first devices are shown."""
    sizes = [size for _, size in plan.axes]
    shown = list(sizes)
    while math.prod(shown) > MOST_DEVICES:
        largest = shown.index(max(shown))
        shown[largest] = -(-shown[largest] // 2)
    places = np.array(list(np.ndindex(*shown)))
    numbers = np.asarray(np.ravel_multi_index(tuple(places.T), sizes)).tolist()
    arrays: dict[tuple[Any, ...], list[Decision]] = {}
    for d in (*plan.inputs, *plan.outputs):
        if any(d.spec):
            arrays.setdefault((d.shape, d.spec), []).append(d)
    drawn = tuple(
        Placed(f"{few([d.path for d in same], 3)}  {shape_text(shape)}", _shards(plan, same[0], places))
        for (shape, _), same in itertools.islice(arrays.items(), MOST_DRAWN)
    )
    replicated = [d.path for d in (*plan.inputs, *plan.outputs) if not any(d.spec)]
    notes = [
        f"{len(places)} of {plan.hardware.count} devices are shown" if len(places) < plan.hardware.count else "",
        f"{len(arrays) - MOST_DRAWN} more shardings are not drawn" if len(arrays) > MOST_DRAWN else "",
        f"replicated: {few(replicated, 8)}" if replicated else "",
    ]
    devices = tuple(plan.order[i] if plan.order else i for i in numbers)
    axes = tuple(zip((name for name, _ in plan.axes), shown, strict=True))
    return Drawing("Shards by device", axes, devices, drawn, "; ".join(filter(None, notes)))


def _shards(plan: Plan, d: Decision, places: np.ndarray) -> tuple[str, ...]:
    """The shard of an array at each place of the mesh."""
    return tuple(shard_text(shard, d.strategy, d.local_shape) for shard in shard_numbers(plan.axes, d.spec, places))
