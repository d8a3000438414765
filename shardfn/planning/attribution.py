"""Which cuts of which arguments a collective is due to: cuts are followed through the ops that carry them, axis by axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardfn.ir.model import Communication, Op, PartitionedProgram

Place = tuple[int, int, str]
"""A value, a dim of it, and an axis of the grid that cuts that dim."""


def causes(
    partitioned: PartitionedProgram, count: int, wanted: Iterable[Communication]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each communication the (argument, dim) pairs whose cuts lead to it; none where no argument's cut does.

    Of what is added up these are the cuts along which the op that made it summed, of all else those of what is moved.

    Args:
      flow: the layouts.
      count: of arguments.
      wanted: the communications.
    """
    arguments = partitioned.graph.arguments(count)
    pairs = [(i, dim) for i, v in enumerate(arguments) for dim, cut in enumerate(partitioned.specs[v]) if cut]
    reach: dict[Place, int] = {}  # from a place to the pairs that it comes from, a bit each
    for bit, (i, dim) in enumerate(pairs):
        for place in _places(partitioned, arguments[i], {dim}):
            reach[place] = reach.get(place, 0) | 1 << bit
    links = [(place, sources) for op in partitioned.graph.ops for place, sources in _links(partitioned, op)]
    links += [(p, [q]) for one, other in partitioned.graph.ties for v, w in ((one, other), (other, one))
              for p in _places(partitioned, v) for q in _places(partitioned, w) if p[1:] == q[1:]]  # fmt: skip
    is_new = True
    while is_new:  # more than once where a loop carries what it makes
        is_new = False
        for place, sources in links:
            found = before = reach.get(place, 0)
            for source in sources:
                found |= reach.get(source, 0)
            if found != before:
                reach[place], is_new = found, True
    made = {v: op for op in partitioned.graph.ops for v in op.outputs}

    def of(c: Communication) -> tuple[tuple[int, int], ...]:
        axes = {axis.partition(":")[0] for axis in c.axes}
        found = 0
        for place in _summed(partitioned, made, c.operand) if "reduce" in c.kind else _places(partitioned, c.operand):
            if place[2] in axes or not axes:
                found |= reach.get(place, 0)
        return tuple(pair for bit, pair in enumerate(pairs) if found >> bit & 1)

    return tuple(map(of, wanted))


def _places(partitioned: PartitionedProgram, value: int, dims: Iterable[int] | None = None) -> list[Place]:
    spec = partitioned.specs[value]
    every = range(len(spec)) if dims is None else dims
    return [(value, dim, axis.partition(":")[0]) for dim in every for axis in spec[dim]]


def _links(partitioned: PartitionedProgram, op: Op) -> Iterator[tuple[Place, Sequence[Place]]]:
    """From where an op has the cuts of its results: dims of one factor, or of any where no rule ties them. What neighbours sent
    stands behind the operands (`graph.roads`), and has no part in the rule."""
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


def _summed(partitioned: PartitionedProgram, made: dict[int, Op], value: int) -> list[Place]:
    """The cuts along which an op summed; any of what it reads, where no rule says."""
    op = made.get(value)
    while op is not None and op.name == "convert" and op.rule is None:  # put in for the way only
        op = made.get(op.inputs[0])
    if op is None:
        return []
    if op.rule is not None:
        tied = [p for v, dims in zip(op.inputs, op.rule.operands, strict=False) for p in _places(partitioned, v)
                if op.rule.reduction & set(dims[p[1]])]  # fmt: skip
        if tied:
            return tied
    return [p for v in op.inputs for p in _places(partitioned, v)]
