"""The simple policy: open arguments follow the shardings that were given; without any, one dimension group is sharded.

It evaluates each of the largest dimension groups over all devices and keeps the best. It never mixes two groups and never
shards an argument for memory alone: the other searches do.
"""

from __future__ import annotations

import math

from shardfn.ir.model import Axes, Spec
from shardfn.search.problem import Answer, SearchProblem, figures, objective

MOST_GROUPS = 8
"""Dimension groups that are evaluated, those with the most bytes."""


def search(problem: SearchProblem) -> Answer:
    """Follow the given shardings, or shard the best single dimension group."""
    given = tuple(spec for spec in problem.specs if spec is not None)
    if len(given) == len(problem.specs):
        text = "every sharding was given" if problem.devices > 1 else "one device: there is nothing to shard"
        return Answer(_axes(problem), given, ("",) * len(given), text)
    return follow(problem) if problem.shards_given else shard_one_group(problem)


def _axes(problem: SearchProblem) -> Axes:
    return problem.axes or tuple(("a", n) for n in (problem.devices,) if n > 1)


def follow(problem: SearchProblem) -> Answer:
    """Open arguments take the axes of their dimension groups, as far as they divide."""
    sizes = dict(problem.axes)
    origin: dict[int, tuple[tuple[str, ...], str]] = {}
    for name, spec, groups in zip(problem.names, problem.specs, problem.groups, strict=True):
        for d, dim in enumerate(spec or ()):
            if dim and len(dim) > len(origin.get(groups[d], ((), ""))[0]):
                origin[groups[d]] = dim, f"{name} dim {d}"
    for op in problem.graph.ops:
        for value in op.outputs:
            groups = problem.value_groups[value] if value in problem.inner else ()
            for dim, group in zip(problem.inner.get(value, ()), groups, strict=True):
                if dim and len(dim) > len(origin.get(group, ((), ""))[0]):
                    origin[group] = dim, f"a value inside{op.where and f' ({op.where})'}"
    direct = _read_inside(problem)
    specs: list[Spec] = []
    reasons: list[str] = []
    rows = zip(problem.inputs, problem.shapes, problem.specs, problem.groups, strict=True)
    for value, shape, spec, groups in rows:
        if spec is not None:
            specs.append(spec)
            reasons.append("")
            continue
        if value in direct:
            specs.append(direct[value][0])
            reasons.append(f"as it is read inside{direct[value][1] and f' ({direct[value][1]})'}")
            continue
        mine: list[tuple[str, ...]] = []
        why: list[str] = []
        for d, size in enumerate(shape):
            wanted, source = origin.get(groups[d], ((), ""))
            taken = {a for dim in mine for a in dim}
            usable = () if taken & set(wanted) else _dividing(wanted, sizes, size)
            mine.append(usable)
            if usable:
                why.append(f"dim {d} follows {source}")
        specs.append(tuple(mine))
        reasons.append("; ".join(why) or "replicated: no dimension is tied to a sharded one")
    policy = "follow the given shardings (no search)"
    return Answer(problem.axes, tuple(specs), tuple(reasons), policy, source="propagated")


def _read_inside(problem: SearchProblem) -> dict[int, tuple[Spec, str]]:
    """The arguments, by value, that the user shards where they are read inside, and where; the first of several."""
    found: dict[int, tuple[Spec, str]] = {}
    for op in reversed(problem.graph.ops):
        spec = problem.inner.get(op.outputs[0]) if op.outputs else None
        if spec is not None and None not in spec:
            found[op.inputs[0]] = tuple(dim or () for dim in spec), op.where
    return found


def _dividing(axes: tuple[str, ...], sizes: dict[str, int], size: int) -> tuple[str, ...]:
    """The longest major part of `axes` that divides `size`."""
    for end in range(len(axes), 0, -1):
        if size and size % math.prod(sizes[a] for a in axes[:end]) == 0:
            return axes[:end]
    return ()


def shard_one_group(problem: SearchProblem) -> Answer:
    """Shard one dimension group over as many devices as divide it; the first of the best wins."""
    open_ = {
        g
        for shape, groups, spec in zip(problem.shapes, problem.groups, problem.specs, strict=True)
        for g, n in zip(groups, shape, strict=True)
        if spec is None and n > 1
    }
    largest = sorted(open_, key=lambda g: (-problem.group_bytes[g], g))[:MOST_GROUPS]
    rated = []
    for group in sorted(largest):
        answer = _shard_group(problem, group)
        if answer is not None:
            cost = problem.evaluate(*answer, {})
            rated.append((objective(cost, problem), len(rated), group, answer, cost))
    if not rated:
        specs = tuple(spec if spec is not None else ((),) * len(s)
                      for spec, s in zip(problem.specs, problem.shapes, strict=True))  # fmt: skip
        reason = f"replicated: no dimension divides over {problem.devices} devices"
        reasons = tuple("" if s is not None else reason for s in problem.specs)
        return Answer(_axes(problem), specs, reasons, "replicate: nothing can be sharded")
    rated.sort(key=lambda r: r[:2])
    _, _, group, (axes, specs), cost = rated[0]
    what = group_name(problem, group)
    reasons = tuple(
        "" if given is not None else f"shards {what}" if any(spec) else f"replicated: it has no dimension of {what}"
        for given, spec in zip(problem.specs, specs, strict=True)
    )
    other = ""
    if len(rated) > 1:
        other = f"{group_name(problem, rated[1][2])}: {figures(rated[1][4])} against {figures(cost)}"
    chosen = (
        f"the best of {len(rated)} single dimension groups" if len(rated) > 1 else "the only single dimension group"
    )
    policy = f"{chosen} at level {problem.level}: {what}"
    return Answer(axes, specs, reasons, policy, other)


def _shard_group(problem: SearchProblem, group: int) -> tuple[Axes, tuple[Spec, ...]] | None:
    """Mesh and shardings with one group sharded; on a given mesh, over all its axes that divide."""
    dims = [(i, d) for i, groups in enumerate(problem.groups) for d, g in enumerate(groups)
            if g == group and problem.specs[i] is None and problem.shapes[i][d] > 1]  # fmt: skip
    shards = math.gcd(problem.devices, *(problem.shapes[i][d] for i, d in dims))
    if shards == 1:
        return None
    axes = tuple(a for a in (("a", shards), ("b", problem.devices // shards)) if a[1] > 1)
    names: tuple[str, ...] = ("a",)
    if problem.axes:
        axes = problem.axes
        names = _dividing(tuple(n for n, _ in axes), dict(axes), shards)
        if not names:
            return None
    first: dict[int, int] = {}
    for i, d in dims:
        first.setdefault(i, d)
    specs = tuple(
        spec if spec is not None else tuple(names if first.get(i) == d else () for d in range(len(problem.shapes[i])))
        for i, spec in enumerate(problem.specs)
    )
    return axes, specs


def group_name(problem: SearchProblem, group: int) -> str:
    """The first argument dimension of a dimension group, as a name for it."""
    rows = zip(problem.names, problem.groups, strict=True)
    return next((f"{name} dim {groups.index(group)}" for name, groups in rows if group in groups), f"group {group}")
