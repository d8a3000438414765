"""`set_algo_parameters` as the search takes it, and what of it a plan could not keep."""

from __future__ import annotations

import dataclasses
import math

from shardfn.mindspore.context import ParallelContext
from shardfn.planning.plan import Plan
from shardfn.search.problem import Algorithm


def algorithm_of(context: ParallelContext) -> Algorithm:
    """The parameters of the search that the context holds.

    >>> algorithm_of(ParallelContext(tensor_slice_align_enable=True)).tensor_slice_align_size
    16
    """
    return Algorithm(**{field.name: getattr(context, field.name) for field in dataclasses.fields(Algorithm)})


def idle(plan: Plan, algorithm: Algorithm) -> str:
    """A finding where `fully_use_devices` is on and an axis of the plan's grid cuts nothing at all; else nothing."""
    used = {axis.split(":")[0] for spec in plan.partitioned.specs for dim in spec for axis in dim}
    left = {name: size for name, size in plan.axes if name not in used}
    if not algorithm.fully_use_devices or not left:
        return ""
    busy = plan.hardware.count // math.prod(left.values())
    return (
        f"fully_use_devices is on, but {busy} of {plan.hardware.count} devices would do: nothing is cut over "
        f"{', '.join(f'axis {name} of {size}' for name, size in left.items())}; a cut of yours is kept, and a dim that "
        "does not divide stays whole"
    )
