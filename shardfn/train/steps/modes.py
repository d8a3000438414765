"""MindSpore's parallel modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from shardfn.errors import ContextError, fail
from shardfn.frontend import defaults


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a mode treats devices, the loss and shardings."""

    name: str
    one_device: bool = False
    per_device: bool = False
    """Call the loss on each device with its part of the batch, then reduce gradients; a batch statistic sees one part.
    Otherwise the loss is called once on the global batch, and XLA partitions it."""
    layouts: str = "replicated"
    """Of parameters: "replicated", "given" by the user, or "searched" where the user leaves them open."""


MODES: Mapping[str, Mode] = MappingProxyType({
    mode.name: mode
    for mode in (
        Mode("stand_alone", one_device=True),
        Mode("data_parallel", per_device=True),
        Mode("hybrid_parallel", per_device=True),
        Mode("semi_auto_parallel", layouts="given"),
        Mode("auto_parallel", layouts="searched"),
    )
})  # fmt: skip


def mode_of(name: str | None) -> Mode:
    """The mode of that name; None is the context's if set, else "auto_parallel".

    >>> mode_of("data_parallel").per_device, mode_of(None).layouts
    (True, 'searched')
    """
    name = name or defaults.current().parallel_mode or "auto_parallel"
    if name not in MODES:
        fail(ContextError, f"there is no mode {name!r}", where=f"mode = {name!r}",
             why="a mode is one of MindSpore's parallel modes", fix=f"use one of {', '.join(MODES)}")  # fmt: skip
    return MODES[name]
