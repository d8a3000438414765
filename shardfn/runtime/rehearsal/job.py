"""What the process that measures is told, and what it answers: plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardfn.cost.devices.chips import Chip
from shardfn.cost.rehearsal import Kernel
from shardfn.runtime.other_process import Program


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be measured."""

    program: Program
    chip: Chip
    """The device that the plan is for."""
    count: int
    """How many devices the plan has."""
    below: tuple[int | None, ...]
    """For each argument of the program the number that its integers stay below (`ir.index_bounds`)."""
    steps: int
    """Calls in one round."""
    options: tuple[tuple[str, Any], ...]
    """Options of JAX."""
    profiled: tuple[tuple[str, str], ...]
    """Compiler options for the run that the profiler sees."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of one call; the fields are those of `Rehearsal`."""

    device: str
    jax: str
    rounds_s: tuple[float, ...]
    compiled_bytes: int | None
    peak_bytes: int | None
    kernels: tuple[Kernel, ...]
    kernels_s: float
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why nothing was measured."""

    reason: str
    """`option`, `device`, `count`, `kind`, `memory` or `compiler`; a row of `rehearse.ERRORS` for each."""
    said: str
    """What JAX or XLA said, in a line; of `option` its name, of `kind` that of the device that is here."""
