"""MindSpore's parallel modes, each as what it is composed of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from shardfn.errors import ContextError, fail
from shardfn.frontend import defaults


@dataclasses.dataclass(frozen=True)
class Mode:
    """What a mode does with devices, with the loss and with layouts."""

    name: str
    one_device: bool = False
    per_device: bool = False
    """The loss function is called on each device with its own part of the batch, and the gradients are then reduced:
    what a batch statistic sees is that part. Else it is called once, on the whole batch, and XLA partitions it."""
    layouts: str = "whole"
    """Of parameters: "whole" on every device, "given" by you, or "searched" where you leave them open."""


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
    """The mode of that name; None is the context's where you set it, else "auto_parallel".

    >>> mode_of("data_parallel").per_device, mode_of(None).layouts
    (True, 'searched')
    """
    name = name or defaults.current().parallel_mode or "auto_parallel"
    if name not in MODES:
        fail(ContextError, f"there is no mode {name!r}", where=f"mode = {name!r}",
             why="a mode is one of MindSpore's parallel modes", fix=f"use one of {', '.join(MODES)}")  # fmt: skip
    return MODES[name]
