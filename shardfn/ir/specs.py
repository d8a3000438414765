"""Functions on shardings and on the sharding constraints of ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardfn.ir.model import Axes, OpConstraint, Spec, axis_size


def strategy_of(spec: Spec, axes: Axes | Mapping[str, int]) -> tuple[int, ...]:
    """The number of shards of each dimension on a mesh.

    >>> strategy_of((("a",), ()), (("a", 4), ("b", 2)))
    (4, 1)
    """
    sizes = dict(axes)
    return tuple(math.prod(axis_size(axis, sizes) for axis in dim) for dim in spec)


def map_specs(constraint: OpConstraint, change: Callable[[Spec], Spec]) -> OpConstraint:
    """A constraint with each of its shardings changed."""
    operands, results = (
        tuple(s if s is None else change(s) for s in specs) for specs in (constraint.operands, constraint.results)
    )
    return OpConstraint(operands, results)


def results_only(constraint: OpConstraint) -> OpConstraint:
    """A constraint that leaves the operands to the compiler."""
    return OpConstraint((None,) * len(constraint.operands), constraint.results)


def merge_axes(
    axes: Axes, specs: Sequence[Spec], constraints: Mapping[int, OpConstraint]
) -> tuple[Axes, list[Spec], dict[int, OpConstraint]]:
    """Merge neighbouring axes that always shard together, in order.

    >>> merge_axes((("a", 2), ("b", 2)), [(("a", "b"), ())], {})[:2]
    ((('a', 4),), [(('a',), ())])
    """
    constrained = [s for c in constraints.values() for s in (*c.operands, *c.results) if s is not None]
    dims = {dim for spec in (*specs, *constrained) for dim in spec}
    groups: list[list[tuple[str, int]]] = []
    for axis in axes:
        last = groups[-1][-1][0] if groups else ""
        if groups and all((last in dim) == (axis[0] in dim) and
                          (last not in dim or dim.index(axis[0]) == dim.index(last) + 1) for dim in dims):  # fmt: skip
            groups[-1].append(axis)
        else:
            groups.append([axis])
    names = [chr(ord("a") + i) for i in range(len(groups))]
    first = {group[0][0]: name for group, name in zip(groups, names, strict=True)}

    def renamed(spec: Spec) -> Spec:
        return tuple(tuple(first[a] for a in dim if a in first) for dim in spec)

    sizes = tuple((name, math.prod(size for _, size in group)) for group, name in zip(groups, names, strict=True))
    return sizes, [renamed(spec) for spec in specs], {i: map_specs(c, renamed) for i, c in constraints.items()}
