"""What MindSpore calls the facts of a plan."""

from __future__ import annotations

from shardfn.mindspore.layout import Layout
from shardfn.planning.plan import Plan


def array_layout(plan: Plan, path: str) -> Layout:
    """The `Layout` (device matrix, axis names, tensor map) of one array of a plan.

    Args:
      plan: the plan.
      path: the array's path, as the report has it; a result's path begins with `result`.

    Returns:
      The layout. Its `device_matrix` has the sizes of the plan's mesh axes, its `slices(shape)` what each rank holds.

    Raises:
      StrategyError: no array has that path.

    >>> import jax, shardfn
    >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8, 2), "float32"), in_strategy=((4, 1),), device="tpu-v5e:4")
    >>> array_layout(made, "x").tensor_map
    (0, -1)
    """
    axes = plan.axes or (("a", 1),)
    sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
    dims = ("None" if not dim else dim[0] if len(dim) == 1 else dim for dim in plan.decision(path).spec)
    return Layout(sizes, names, list(plan.order) if plan.order else None)(*dims)
