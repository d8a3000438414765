"""The load of each expert in a run: what a report, which is made before a run, cannot know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jax.core import Tracer

from shardfn.errors import StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.experts.routing import Routing
from shardfn.frontend.value_checks import integer, option_problems


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """The choices of each expert; print it for a table with a row for each layer.

    Attributes:
      choices: int [layers, experts], dropped ones included.
      dropped: int [layers].
      devices: the number of devices that the experts are sharded over.
    """

    choices: np.ndarray
    dropped: np.ndarray
    devices: int = 1

    @property
    def by_device(self) -> np.ndarray:
        """The choices of the experts of each device, int [layers, devices]."""
        return self.choices.reshape(len(self.choices), self.devices, -1).sum(-1)

    @property
    def imbalance(self) -> np.ndarray:
        """The load of the busiest device over the mean, float [layers]: a step waits for it. 1 is perfect balance."""
        mean = self.by_device.mean(1)
        return np.where(mean > 0, self.by_device.max(1) / np.where(mean > 0, mean, 1), 1.0)

    def __str__(self) -> str:
        head = f"{'layer':>5}{'choices':>10}{'dropped':>9}{'least':>8}{'mean':>8}{'most':>8}{'idle':>6}{'busiest device':>16}"
        rows = zip(self.choices, self.dropped, self.imbalance, strict=True)
        return "\n".join([head, *(
            f"{i:>5}{row.sum():>10,}{dropped / max(1, row.sum()):>9.1%}{row.min():>8,}{row.mean():>8,.0f}{row.max():>8,}"
            f"{(row == 0).sum():>6}{over:>15.2f}x" for i, (row, dropped, over) in enumerate(rows)
        )])  # fmt: skip


def load(routings: Routing | Iterable[Routing], devices: int = 1) -> Load:
    """The load of each expert, of what a step returned of its routings.

    Args:
      routings: the routing of a layer, or those of all layers. Return them from the loss as auxiliary output.
      devices: the number of devices that the experts are sharded over.

    Returns:
      The load, in host memory.

    Raises:
      StrategyError: routings of different numbers of experts; devices that do not divide them.
      StrategyTypeError: no routings.

    >>> import jax.numpy as jnp
    >>> from shardfn.experts import route
    >>> print(load([route(jnp.eye(4), k=1), route(jnp.ones((4, 4)), k=1, capacity_factor=1.0)], devices=2))
    layer   choices  dropped   least    mean    most  idle  busiest device
        0         4     0.0%       1       1       1     0           1.00x
        1         4    75.0%       0       1       4     3           2.00x
    """
    found = (
        [routings]
        if isinstance(routings, Routing)
        else list(routings)
        if isinstance(routings, Iterable)
        else [routings]
    )
    if not found or not all(isinstance(each, Routing) for each in found):
        fail(StrategyTypeError, f"the load is that of routings, not of {a(routings)}", where=f"load({routings!r:.60})",
             why="`route` returns one for each layer", fix="experts.load(routing), or a list of them")  # fmt: skip
    if any(isinstance(each.load, Tracer) for each in found):
        fail(StrategyTypeError, "the routings are traced", where="load(routings, devices)",
             why="a load is that of a run", fix="return them from the jitted function, and call load outside")  # fmt: skip
    raise_problems(option_problems(integer(1), "devices", devices))
    counts = {each.count for each in found}
    if len(counts) > 1 or found[0].count % devices:
        fail(StrategyError, f"{', '.join(map(str, sorted(counts)))} experts on {devices} devices",
             where="load(routings, devices)", why="all layers have as many experts, and each device has equally many",
             fix="give layers with as many experts in one call, and the devices along their axes")  # fmt: skip
    choices = np.stack([np.asarray(each.load) for each in found])
    return Load(choices, np.array([int(each.dropped) for each in found]), int(devices))
