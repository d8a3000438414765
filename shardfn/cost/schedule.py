"""The order in which XLA runs a program's ops, and the collectives that it combines."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from shardfn.cost.backends.cpu import is_flattened
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion_walk import FusionPlan
from shardfn.cost.platforms import backend_of, fuse
from shardfn.ir.model import Graph, Op, first_of_body
from shardfn.ir.op_traits import COLLECTIVE_OPS, ELEMENTWISE
from shardfn.ir.partitioned import PartitionedProgram


def arranged(graph: Graph, arrange: Callable[[list[list[int]], bool], list[int]]) -> list[int]:
    """The ops of a graph in another order, which `arrange` chooses within each region, inner loops first.

    A region is the program, or a loop's body with the loop's own op. `arrange` takes the parts of a region (single ops and inner
    loops, as lists of ops) and whether the region is a loop; it returns the ops in their new order.
    """
    parts: list[tuple[int, list[int]]] = []  # (first op, ops)
    for i, op in enumerate(graph.ops):
        if op.seen:
            first = first_of_body(graph.ops[:i], graph.ops[i])
            begin = next((n for n, (at, _) in enumerate(parts) if at >= first), len(parts))
            parts[begin:] = [(first, arrange([*(ops for _, ops in parts[begin:]), [i]], True))]
        else:
            parts.append((i, [i]))
    return arrange([ops for _, ops in parts], False)


def bodies(graph: Graph) -> dict[int, int]:
    """Number of ops in the body of each loop, by the loop's first result."""
    loops = ((i, op) for i, op in enumerate(graph.ops) if op.seen)
    return {op.outputs[0]: i - first_of_body(graph.ops[:i], graph.ops[i]) for i, op in loops}


@dataclasses.dataclass(frozen=True)
class ExecutionOrder:
    """A program with its ops in the order in which they run.

    `groups` has, for the result of a collective that can be combined, the number of the combined collective.
    """

    partitioned: PartitionedProgram
    groups: Mapping[int, int]
    bodies: Mapping[int, int]
    """By a loop's first result, the number of ops in its body, which stand right before the loop's own."""

    @functools.cached_property
    def together(self) -> dict[int, tuple[int, int]]:
        """For each op that is a part of a combined collective: the first and the last op of that collective."""
        found: dict[int, tuple[int, int]] = {}
        where = {
            i: self.groups[op.outputs[0]]
            for i, op in enumerate(self.partitioned.graph.ops)
            if op.outputs and op.outputs[0] in self.groups
        }
        for i, group in where.items():
            found[group] = (min(i, found.get(group, (i, i))[0]), i)
        return {i: found[group] for i, group in where.items()}


@dataclasses.dataclass(frozen=True)
class Schedule(ExecutionOrder):
    """A program in its final order, and how its ops are fused."""

    fusion: FusionPlan

    @functools.cached_property
    def loops(self) -> dict[int, int]:
        """By loop that is needed, its body's first op; the body's ops stand before the loop's own."""
        loops = ((i, op) for i, op in enumerate(self.partitioned.graph.ops) if op.seen and i not in self.fusion.dead)
        return {i: i - self.bodies[op.outputs[0]] for i, op in loops}

    @staticmethod
    def of(order: ExecutionOrder, partitioned: PartitionedProgram, turn: Sequence[int], fusion: FusionPlan) -> Schedule:
        """The schedule of a program whose ops run in the order `turn`; its fusion is that of the order so far."""
        graph = dataclasses.replace(partitioned.graph, ops=tuple(partitioned.graph.ops[i] for i in turn))
        made = dataclasses.replace(partitioned, graph=graph)
        return Schedule(made, order.groups, order.bodies, fusion.ordered(turn))


def lower_for_backend(partitioned: PartitionedProgram, chip: Chip | None = None) -> ExecutionOrder:
    """Apply the rewrites of the platform's XLA backend, then combine collectives."""
    return combine_collectives(backend_of(partitioned.platform).rewrite(partitioned, chip))


def combine_collectives(partitioned: PartitionedProgram) -> ExecutionOrder:
    """The order of ops in which collectives can run as one: all-reduces, on GPUs also all-gathers and reduce-scatters.

    XLA's combiners merge collectives over the same axes, of one region and dtype (all-gathers of any), where none needs
    another. The combined collective runs when the last of them can.
    """
    most, ops = backend_of(partitioned.platform).combined_bytes, partitioned.graph.ops
    several = {c.result: c for c in partitioned.communications if c.kind in most and c.group_size > 1}
    if len(several) < 2:
        return ExecutionOrder(partitioned, {v: n for n, v in enumerate(several)}, bodies(partitioned.graph))
    groups: dict[object, int] = {}
    found: dict[int, int] = {}

    def arrange(parts: list[list[int]], is_loop: bool) -> list[int]:
        single = [ops[part[0]] if len(part) == 1 else None for part in parts]
        sent = [several.get(op.outputs[0]) if op and op.outputs else None for op in single]
        if not any(sent):
            return [i for part in parts for i in part]
        made: dict[int, int] = {}
        needs: list[list[int]] = []
        group: list[int | None] = [None] * len(parts)
        combiner = _Combiner()
        for n, (part, c) in enumerate(zip(parts, sent, strict=True)):
            needs.append([made[v] for i in part for v in ops[i].inputs if v in made])
            behind = combiner.met(needs[n])
            made.update([(v, n) for i in part for v in ops[i].outputs])
            if c:
                dtype = "" if c.kind == "all-gather" else partitioned.graph.values[c.operand].dtype
                kind = c.kind, c.axes, c.group_size, c.trips, dtype
                number = combiner.group(kind, behind, partitioned.local_bytes(c.result), most[c.kind])
                key = is_loop, parts[-1][-1], *kind, number
                group[n] = found[c.result] = groups.setdefault(key, len(groups))
        shared = collections.Counter(group)
        when = [float(n) for n in range(len(parts))]
        for n, c in enumerate(sent):
            if c and c.kind == "all-gather" and shared[group[n]] > 1:
                when[n] = 0.0  # as early as the last of them can run
        step = 1 / (len(parts) + 1)
        later = [0.0 if g is None else step for g in group]  # readers of one part run after the whole collective
        last: dict[int, float] = {}
        begin = next(n for n, g in enumerate(group) if g is not None)  # what stands before waits for no collective
        for _ in range(3):
            before = when.copy(), last.copy()
            for n in range(begin, len(parts)):
                at, g = when[n], group[n]
                for m in needs[n]:
                    at = max(at, when[m] + later[m])
                if g is not None:
                    at = last[g] = max(last.get(g, 0.0), at)
                when[n] = at
            if (when, last) == before:
                break
        if is_loop:
            when[-1] = max(when)
        return [i for n in sorted(range(len(parts)), key=when.__getitem__) for i in parts[n]]

    order = arranged(partitioned.graph, arrange)
    graph = dataclasses.replace(partitioned.graph, ops=tuple(ops[i] for i in order))
    return ExecutionOrder(dataclasses.replace(partitioned, graph=graph), found, bodies(partitioned.graph))


class _Combiner:
    """Which collectives of one region XLA combines.

    XLA's combiner collects those of one kind in program order. It begins a new group where a collective depends on one of the
    group, or the group would be too large. A combined collective depends on everything that one of its parts depends on.
    """

    def __init__(self) -> None:
        self.needed: list[int] = []  # for each op, the collectives that it depends on, and its own: a bit for each
        self.groups: list[
            tuple[int, int, int]
        ] = []  # of each combined collective: its parts and what they depend on, as bits, and its bytes
        self.last: dict[object, int] = {}  # by kind, the group that is being collected
        self.count = 0

    def met(self, needs: Sequence[int]) -> int:
        """Add the next op, which reads from the ops `needs`; returns the collectives that it depends on, as bits."""
        bits = 0
        for m in needs:
            bits |= self.needed[m]
        self.needed.append(bits)
        return bits

    def group(self, kind: object, needs: int, size: int, most: float) -> int:
        """The group of the collective that was added last, of `size` bytes; no group has more than `most`."""
        again = True
        while again:
            again = False
            for parts, behind, _ in self.groups:
                if needs & parts and (parts | behind) & ~needs:
                    needs |= parts | behind
                    again = True
        own = 1 << self.count
        self.count += 1
        self.needed[-1] |= own
        at = self.last.get(kind)
        if at is None or self.groups[at][0] & needs or self.groups[at][2] + size > most:
            at = self.last[kind] = len(self.groups)
            self.groups.append((0, 0, 0))
        parts, behind, full = self.groups[at]
        self.groups[at] = parts | own, behind | needs, full + size
        return at


def schedule_ops(order: ExecutionOrder) -> Schedule:
    """The order of the platform's scheduler: `schedule_breadth_first` or `schedule_for_memory`."""
    is_breadth_first = backend_of(order.partitioned.platform).schedules_breadth_first
    return schedule_breadth_first(order) if is_breadth_first else schedule_for_memory(order)


def schedule_breadth_first(order: ExecutionOrder) -> Schedule:
    """Breadth first, as XLA's CPU backend schedules for its threads: an op runs as soon as its operands are ready.

    It works within each region; combined collectives run together. Ops that read only arguments and constants run at
    the start.
    """
    graph, fusion = order.partitioned.graph, fuse(order.partitioned)
    together, before_reshapes = order.together, _before_moved_reshapes(order.partitioned)

    def arrange(parts: list[list[int]], is_loop: bool) -> list[int]:
        own = parts.pop() if is_loop else []
        first: list[int] = []
        nodes: dict[object, list[int]] = {}
        for part in parts:
            last = part[-1]
            if fusion.inside[last] is None:  # its position does not matter
                first += part
            else:
                nodes.setdefault((together[last],) if last in together else last, []).extend(part)
        ready = _as_ready(order.partitioned, fusion, nodes, before_reshapes)
        return [*first, *(i for node in ready for i in nodes[node]), *own]

    turn = arranged(graph, arrange)
    return Schedule.of(order, order.partitioned, turn, fusion)


def _as_ready(
    partitioned: PartitionedProgram,
    fusion: FusionPlan,
    nodes: Mapping[object, Sequence[int]],
    before_reshapes: Sequence[int],
) -> list[object]:
    graph = partitioned.graph
    made = {v: node for node, ops in nodes.items() for i in ops for v in graph.ops[i].outputs}
    users: dict[object, list[object]] = {}
    waits: dict[object, int] = {}
    views: dict[int, list[object]] = {}
    for node, ops in nodes.items():
        sources = {made[v]: None for i in ops for v in fusion.reads[i] if v in made and made[v] != node}
        waits[node] = len(sources)
        for v in fusion.reads[ops[0]] if len(ops) == 1 else ():
            is_unfused = v in made and graph.ops[nodes[made[v]][-1]].name in _UNFUSED
            if is_unfused and is_flattened(partitioned, graph.ops[ops[0]], v):  # the view is one more step
                sources.pop(made[v], None)
                views.setdefault(v, []).append(node)
        for source in sources:
            users.setdefault(source, []).append(node)
    for v in before_reshapes:
        readers = users.get(made.get(v), [])
        readers[:] = readers[-1:] + readers[:-1]
    for v, readers in views.items():
        view = "view", v
        waits[view], users[view] = 1, readers
        users.setdefault(made[v], []).append(view)
    queue = collections.deque((node, False) for node, count in waits.items() if not count)
    turn: dict[object, None] = {}
    while queue:
        node, is_taken_apart = queue.popleft()
        own = nodes.get(node, ())
        if own:
            turn[node] = None
            if not is_taken_apart and (
                (isinstance(node, tuple) and len(own) > 1) or len(graph.ops[own[-1]].outputs) > 1
            ):
                queue.append((node, True))  # XLA reads its results from a tuple, one step later
                continue
        for user in users.get(node, ()):
            waits[user] -= 1
            if not waits[user]:
                queue.append((user, False))
    return [*turn, *(node for node in nodes if node not in turn)]


def _before_moved_reshapes(partitioned: PartitionedProgram) -> list[int]:
    """Values that only a reshape reads whose result several elementwise ops read. XLA moves the reshape behind those ops, which
    changes the order of the readers.
    """
    graph = partitioned.graph
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for v in dict.fromkeys(op.inputs):
            readers.setdefault(v, []).append(op)
    results, found = set(graph.outputs), []
    for v, (op, *others) in readers.items():
        if op.name != "reshape" or others or results.intersection((v, op.outputs[0])):
            continue
        behind = readers.get(op.outputs[0], ())
        if len(behind) > 1 and all(other.name in ELEMENTWISE for other in behind):
            found.append(v)
    return found


_UNFUSED = COLLECTIVE_OPS | {"scatter", "convolution"}


_SHRINKS = 16
"""How much larger the dying operands must be than the result; XLA's scheduler often ignores smaller gains."""


def schedule_for_memory(order: ExecutionOrder) -> Schedule:
    """Run an op as early as possible where that frees much memory, as XLA's memory scheduler does within each region."""
    partitioned = order.partitioned
    graph, fusion = partitioned.graph, fuse(partitioned)
    if stored := backend_of(partitioned.platform).stored_bytes(partitioned, fusion.narrow):
        partitioned = dataclasses.replace(partitioned, stored_bytes=stored)
    last: dict[int, int] = {}
    for i, reads in enumerate(fusion.reads):
        for v in reads:
            last[v] = i
    keep = set(graph.inputs) | set(graph.outputs)
    made = graph.makers
    fixed = set(order.together)

    def arrange(parts: list[list[int]], _: bool) -> list[int]:
        here = {i: n for n, part in enumerate(parts) for i in part}
        when: list[tuple[float, ...]] = [(float(n),) for n in range(len(parts))]
        for n, (i, *others) in enumerate(parts):
            inner = fusion.inside[i]
            if others or inner is None or i in fixed or graph.ops[i].name == "while":
                continue
            freed = sum([partitioned.local_bytes(v) for v in fusion.reads[i] if last[v] == i and v not in keep])
            if freed <= _SHRINKS * sum(map(partitioned.local_bytes, graph.ops[i].outputs)):
                continue
            sources = [here[made[v]] for v in fusion.reads[i] if made.get(v) in here]
            ready = max((when[m] for m in sources), default=None)
            if ready is None:
                continue
            for m in sorted((here[j] for j in inner if j in here), key=lambda m: when[m]):
                when[m] = min(when[m], (*ready, float(m)))
            when[n] = (*ready, float(n))
        return [i for n in sorted(range(len(parts)), key=when.__getitem__) for i in parts[n]]

    turn = arranged(graph, arrange)
    return Schedule.of(order, partitioned, turn, fusion)
