"""What libtpu makes of a laid-out program's collectives where XLA's other backends do otherwise: which sums it scatters, which
it puts together, and what it gathers again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shardfn.graph.model import CHANGES, Communication, Flow, Graph, Op, Spec, Value
from shardfn.graph.padding import LANES, SUBLANES, tiled_dims


def as_on_tpu(flow: Flow) -> Flow:
    """A flow's collectives as libtpu runs them."""
    return gathered_apart(summed_together(_without_unread(flow)))


def _without_unread(flow: Flow) -> Flow:
    """Without moves to where nothing reads them any more: what rows are added to lay as they need it already."""
    graph = flow.graph
    read = {v for op in graph.ops for v in op.inputs}.union(graph.outputs, (v for tie in graph.ties for v in tie))
    if all(not op.outputs or op.outputs[0] in read for op in graph.ops if op.name in CHANGES):
        return flow
    ops: list[Op] = []
    read = {*graph.outputs, *(v for tie in graph.ties for v in tie)}
    for op in reversed(graph.ops):
        if op.name not in CHANGES or not read.isdisjoint(op.outputs):
            ops.append(op)
            read.update(op.inputs)
    kept = {v for op in ops for v in op.outputs}
    sent = {c.result: c for c in flow.communications if c.result in kept}
    return _with(flow, graph.values, flow.specs, ops[::-1], sent)


# ---- sums


def scatters(piece: tuple[int, ...], dim: int, bits: int, is_whole: bool, torus: tuple[int, ...]) -> bool:
    """Whether libtpu makes a reduce-scatter of a sum of which each device needs a piece, or an all-reduce and a slice.

    Pieces must be whole tiles: along the sublanes 8 rows, along the lanes 128 elements of 32 bits; those of vectors never are.
    Nor is it done over all of some tori (`sums_whole`). Seen in libtpu 0.0.42.

    Args:
      piece: shape of what one device needs.
      dim: along which pieces are cut.
      bits: of one element.
      is_whole: whether the sum is over all devices of the torus.
      torus: its dims.

    >>> scatters((32, 256), 0, 32, True, (2, 4)), scatters((32, 256), 0, 32, True, (4, 4))
    (True, False)
    """
    if len(piece) < 2 or (is_whole and sums_whole(torus)):
        return False
    row, column = tiled_dims(piece, bits)
    return piece[dim] % {row: SUBLANES, column: LANES * max(1, 32 // bits)}.get(dim, 1) == 0


def added_to(ops: Sequence[Op], filled: Collection[int], outputs: Collection[int]) -> list[Op]:
    """The ops before they are partitioned, with rows that are added to zeros, and then to something else, added to that at once:
    a table that is looked up in and multiplied by has its gradient's product gathered before its rows are added.

    Args:
      ops: in program order.
      filled: values that are one number everywhere.
      outputs: the results.
    """
    made = {op.outputs[0]: op for op in ops if op.name == "scatter" and len(op.inputs) == 3}
    found = list(ops)
    if not made:
        return found
    count = collections.Counter(v for op in ops for v in op.inputs)
    count.update(outputs)
    at = {op.outputs[0]: i for i, op in enumerate(ops) if op.outputs and op.outputs[0] in made}
    turns = {op.outputs[0]: op for op in ops if op.name == "transpose"}
    for i, op in enumerate(ops):
        if op.name != "add" or len(made.keys() & op.inputs) != 1:
            continue
        rows, other = op.inputs if op.inputs[0] in made else op.inputs[::-1]
        scatter = made[rows]
        if scatter.combines == "add" and scatter.inputs[0] in filled and count[rows] == 1:
            found[i] = scatter.of((_unturned(other, turns), *scatter.inputs[1:]), op.outputs)
            found[at[rows]] = dataclasses.replace(scatter, name="", outputs=())
    return [op for op in found if op.name]


def _unturned(value: int, turns: Mapping[int, Op]) -> int:
    """What a value was before it was transposed there and back."""
    last = turns.get(value)
    first = turns.get(last.inputs[0]) if last else None
    if last is None or first is None or last.rule is None or first.rule is None:
        return value
    there, back = (tuple(map(r.operands[0].index, r.results[0])) for r in (first.rule, last.rule))
    return first.inputs[0] if [there[d] for d in back] == sorted(there) else value


def sums_whole(torus: Sequence[int]) -> bool:
    """Whether sums over all devices of a torus are never scattered: over a square of 4 x 4 or more, or three dims.

    >>> sums_whole((4, 4)), sums_whole((2, 4)), sums_whole((2, 2)), sums_whole((2, 2, 2))
    (True, False, False, True)
    """
    dims = [n for n in torus if n > 1]
    return len(dims) > 2 or (len(dims) == 2 and dims[0] == dims[1] > 2)


_SUMS = frozenset({"all_reduce", "reduce_scatter"})


def summed_together(flow: Flow) -> Flow:
    """With partial sums added before they are added up, where both would be over the same devices: one collective for two.

    Only of sums that nothing else reads, as XLA's reassociation of all-reduces does it. The gradient of what queries, keys and
    values are made of is one sum so, and not three.
    """
    graph, specs = flow.graph, list(flow.specs)
    sent = {c.result: c for c in flow.communications}
    at = {v: i for i, op in enumerate(graph.ops) for v in op.outputs if op.name in _SUMS and v in sent}
    if not at:
        return flow
    cut = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.name == "all_slice" and op.inputs[0] in at}
    count = collections.Counter(v for op in graph.ops for v in op.inputs)
    count.update((*graph.outputs, *(v for tie in graph.ties for v in tie)))
    values = list(graph.values)
    ops: list[tuple[Op, ...]] = [(op,) for op in graph.ops]
    for i, op in enumerate(graph.ops):
        if (
            op.name != "add"
            or len({*op.inputs}) != 2
            or any(count[v] != 1 or count[cut.get(v, v)] != 1 for v in op.inputs)
        ):
            continue
        pair = [sent.get(cut.get(v, v)) for v in op.inputs]
        first, second = pair
        if not first or not second or first.trips != op.trips or specs[op.inputs[0]] != specs[op.inputs[1]]:
            continue
        if _kind(values, specs, first) != _kind(values, specs, second):
            continue
        (result,) = op.outputs
        partial, full = len(values), len(values) + 1
        values += [values[first.operand], values[first.result]]
        specs += [specs[first.operand], specs[first.result]]
        for c in (first, second):
            ops[at.pop(c.result)] = ()
            del sent[c.result]
        ops[i] = (
            op.of((first.operand, second.operand), (partial,)),
            Op(first.kind.replace("-", "_"), (partial,), (full,), None, op.trips, first.where),
            Op("all_slice", (full,), (result,), None, op.trips, first.where),
        )
        sent[full] = dataclasses.replace(first, operand=partial, result=full)
        at[full], cut[result], count[full] = i, full, 1
    if len(values) == len(graph.values):
        return flow
    return _with(flow, values, specs, _read([op for some in ops for op in some], graph.outputs), sent)


def _kind(values: Sequence[Value], specs: Sequence[Spec], c: Communication) -> object:
    """What two sums have in common that can be made as one."""
    return c.kind, c.axes, values[c.operand], specs[c.operand], specs[c.result]


def _read(ops: Sequence[Op], outputs: Sequence[int]) -> list[Op]:
    """Without the slices that nothing reads any more."""
    read = {v for op in ops for v in op.inputs}.union(outputs)
    return [op for op in ops if op.name != "all_slice" or not read.isdisjoint(op.outputs)]


def _with(
    flow: Flow, values: Sequence[Value], specs: Sequence[Spec], ops: Sequence[Op], sent: Mapping[int, Communication]
) -> Flow:
    """The flow of these ops, its communications in their order."""
    graph = dataclasses.replace(flow.graph, values=tuple(values), ops=tuple(ops))
    turn = {v: i for i, op in enumerate(ops) for v in op.outputs}
    communications = tuple(sorted(sent.values(), key=lambda c: turn.get(c.result, len(ops))))
    return dataclasses.replace(flow, graph=graph, specs=tuple(specs), communications=communications)


# ---- gathers


FAR = 100
"""Steps between two uses up to which one gather serves both: the distance of libtpu's schedule-aware common subexpressions.
Measured with chains of `tanh` between two products."""


def gathered_apart(flow: Flow) -> Flow:
    """With a gather of its own for each use of a value that comes long after the first one.

    XLA's partitioner gathers for every use; libtpu puts a gather together with the first one of the same value, if not more than
    `FAR` steps lie between their uses. So a weight that lies in pieces is gathered once for the forward pass and once for the
    backward one, but in the last layers.
    """
    graph = flow.graph
    sent = {c.result: c for c in flow.communications}
    gathers = {op.outputs[0]: op for op in graph.ops if op.name == "all_gather" and op.outputs[0] in sent}
    uses: dict[int, list[int]] = {v: [] for v in gathers}
    for i, op in enumerate(graph.ops):
        for v in dict.fromkeys(op.inputs):
            if v in uses:
                uses[v].append(i)
    if all(len(some) < 2 for some in uses.values()):
        return flow
    source = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.name in _SAME}
    heights = _heights(flow)
    groups: dict[int, list[int]] = {}
    for v, op in gathers.items():
        (root,) = op.inputs
        while root in source:
            root = source[root]
        groups.setdefault(root, []).append(v)
    values, specs = list(graph.values), list(flow.specs)
    before: dict[int, list[tuple[int, Op]]] = {}  # of a use the value that it reads anew, and the gather of that
    for members in groups.values():
        first = min((i for v in members for i in uses[v]), default=0)
        for v in members:
            far = [i for i in uses[v] if heights[first] > heights[i] + 1 + FAR]
            for i in far if len(far) < len(uses[v]) else far[1:]:
                values.append(values[v])
                specs.append(specs[v])
                again = len(values) - 1
                before.setdefault(i, []).append((v, gathers[v].of(gathers[v].inputs, (again,))))
                sent[again] = dataclasses.replace(sent[v], result=again)
    if not before:
        return flow
    ops = []
    for i, op in enumerate(graph.ops):
        own = before.get(i, ())
        if own:
            ops += [gather for _, gather in own]
            anew = {v: gather.outputs[0] for v, gather in own}
            op = op.of(tuple([anew.get(v, v) for v in op.inputs]), op.outputs)
        ops.append(op)
    return _with(flow, values, specs, ops, sent)


_SAME = frozenset({"convert", "transpose"})
"""Ops before a gather that XLA does after it."""


def _heights(flow: Flow) -> list[int]:
    """Of each op how far it is from the end, as XLA counts: one more than any reader, and one for each reader that does not
    raise it. In a loop or a branch from the end of that; from outside it is one step. Views are no step."""
    graph, outputs = flow.graph, set(flow.graph.outputs)
    regions = _regions(graph)
    loop: dict[int, int] = {}  # of a region the op that it is the body of
    readers: dict[int, list[int]] = {}
    heights = [0] * len(graph.ops)
    last = -1
    for i in reversed(range(len(graph.ops))):
        op, region = graph.ops[i], regions[i]
        if last >= 0 and region not in loop and region != regions[last]:
            loop[region] = last
        if op.name in ("while", "case"):
            last = i
        height = 0
        for v in op.outputs:
            height += v in outputs
            for reader in reversed(readers.get(v, ())):
                while regions[reader] != region and regions[reader] in loop:
                    reader = loop[regions[reader]]
                height = max(height, heights[reader]) + 1
        heights[i] = height
        if _is_view(flow, op):
            readers.setdefault(op.inputs[0], []).extend(readers.get(op.outputs[0], ()))
        else:
            for v in dict.fromkeys(op.inputs):
                readers.setdefault(v, []).append(i)
    return heights


def _is_view(flow: Flow, op: Op) -> bool:
    """Whether nothing is left of an op by then: dims of 1 come and go (or are summed), and elements are told in fewer bits."""
    if op.name == "all_slice":
        return flow.specs[op.inputs[0]] == flow.specs[op.outputs[0]]
    if op.name == "convert":
        return op.form is None
    if op.name not in ("reshape", "reduce") or len(op.outputs) > 1:
        return False
    before, after = (flow.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
    return [n for n in before if n > 1] == [n for n in after if n > 1]


def _regions(graph: Graph) -> list[int]:
    """Of each op the loop or branch that it is in; a move that was put in is where an op beside it is that runs as often."""
    found = [op.form[1] if op.form else None for op in graph.ops]
    for turn in (range(len(found) - 1, -1, -1), range(len(found))):
        near: dict[int, int] = {}
        for i in turn:
            region = found[i]
            if region is None:
                found[i] = near.get(graph.ops[i].trips)
            else:
                near[graph.ops[i].trips] = region
    return [0 if region is None else region for region in found]
