"""Attribution: which sharded dimensions of arguments cause a collective. Each mesh axis is followed through the ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardfn.ir.model import Op, axis_name
from shardfn.ir.partitioned import Communication, PartitionedProgram

Place = tuple[int, int, str]
"""A value, a dimension of it, and a mesh axis that shards that dimension."""


def attribute(
    partitioned: PartitionedProgram, count: int, wanted: Iterable[Communication]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The sharded dimensions of arguments that each communication most likely comes from: the nearest ones.

    They lead, along its mesh axes and by the fewest ops, to the dimensions over which a reduction sums, or to those of the
    operand of another communication.

    Returns:
      For each communication its (argument, dimension) pairs; () if no argument causes it.
    """
    arguments = partitioned.graph.arguments(count)
    pairs = [(i, dim) for i, v in enumerate(arguments) for dim, axes in enumerate(partitioned.specs[v]) if axes]
    # for each place, a bit for each of the pairs from which it is reached by the fewest ops
    nearest: dict[Place, int] = {}
    for bit, (i, dim) in enumerate(pairs):
        for place in _places(partitioned, arguments[i], {dim}):
            nearest[place] = nearest.get(place, 0) | 1 << bit
    ahead: dict[Place, list[Place]] = {}
    around: dict[Place, list[Place]] = {}
    for place, sources in _every_link(partitioned):
        for source in sources:
            ahead.setdefault(source, []).append(place)
            around.setdefault(source, []).append(place)
            around.setdefault(place, []).append(source)
    _spread(nearest, ahead)
    _spread(nearest, around)  # propagation goes against the data too

    def of(c: Communication) -> tuple[tuple[int, int], ...]:
        axes = {axis_name(axis) for axis in c.axes}
        found = 0
        for place in _summed(partitioned, c.operand) if "reduce" in c.kind else _places(partitioned, c.operand):
            if place[2] in axes or not axes:
                found |= nearest.get(place, 0)
        return tuple(pair for bit, pair in enumerate(pairs) if found >> bit & 1)

    return tuple(map(of, wanted))


def _spread(nearest: dict[Place, int], links: Mapping[Place, Sequence[Place]]) -> None:
    """Give each place that is not in `nearest` the bits of the places in `nearest` from which it is the fewest links away."""
    reached = dict(nearest)
    while reached:
        further: dict[Place, int] = {}
        for source, found in reached.items():
            for place in links.get(source, ()):
                if place not in nearest:
                    further[place] = further.get(place, 0) | found
        nearest |= further
        reached = further


def _places(partitioned: PartitionedProgram, value: int, dims: Iterable[int] | None = None) -> list[Place]:
    spec = partitioned.specs[value]
    every = range(len(spec)) if dims is None else dims
    return [(value, dim, axis_name(axis)) for dim in every for axis in spec[dim]]


def _every_link(partitioned: PartitionedProgram) -> Iterator[tuple[Place, Sequence[Place]]]:
    """`_links` of all ops, and of values that hold the same array."""
    for op in partitioned.graph.ops:
        yield from _links(partitioned, op)
    for one, other in partitioned.graph.ties:
        for v, w in ((one, other), (other, one)):
            same = _places(partitioned, w)
            for place in _places(partitioned, v):
                yield place, [p for p in same if p[1:] == place[1:]]


def _links(partitioned: PartitionedProgram, op: Op) -> Iterator[tuple[Place, Sequence[Place]]]:
    """For each sharded dimension of a result, the operand dimensions that it comes from: those of the same factor, or all where
    no rule ties them. Received halos follow the operands and are not part of the rule."""
    if op.name == "while":
        for i, v in enumerate(op.outputs):
            sources = [p for w in op.inputs[i :: len(op.outputs)] for p in _places(partitioned, w)]
            for place in _places(partitioned, v):
                yield place, [p for p in sources if p[1:] == place[1:]]
        return
    given = [_places(partitioned, v) for v in op.inputs]
    for at, v in enumerate(op.outputs):
        for place in _places(partitioned, v):
            sources = [p for places in given for p in places if p[2] == place[2]]
            if op.rule is not None:
                factors = set(op.rule.results[at][place[1]])
                sources = [p for places, dims in zip(given, op.rule.operands, strict=False)
                           for p in places if p[2] == place[2] and factors & set(dims[p[1]])]  # fmt: skip
            yield place, sources


def _summed(partitioned: PartitionedProgram, value: int) -> list[Place]:
    """The sharded dimensions over which an op sums; all of its operands' where no rule tells."""
    op = partitioned.graph.maker(value)
    while op is not None and op.name == "convert" and op.rule is None:  # inserted around a collective
        op = partitioned.graph.maker(op.inputs[0])
    if op is None:
        return []
    if op.rule is not None:
        tied = [p for v, dims in zip(op.inputs, op.rule.operands, strict=False) for p in _places(partitioned, v)
                if op.rule.reduction & set(dims[p[1]])]  # fmt: skip
        if tied:
            return tied
    return [p for v in op.inputs for p in _places(partitioned, v)]
