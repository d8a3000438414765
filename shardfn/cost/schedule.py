"""The order in which XLA runs a program's ops, and the collectives that it combines."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from shardfn.cost.backends.cpu import is_flattened, on_cpu
from shardfn.cost.backends.gpu import on_gpu
from shardfn.cost.backends.tpu import row_major_bytes, scattered_values
from shardfn.cost.devices.chips import Chip
from shardfn.cost.fusion import FusionPlan, fuse
from shardfn.cost.local_sizes import Sized, sized
from shardfn.ir.model import Communication, Graph, Op, PartitionedProgram, dtype_bits, is_gpu
from shardfn.ir.op_traits import COLLECTIVE_OPS, ELEMENTWISE


def first_of_body(graph: Graph, loop: int) -> int:
    """Index of the first op in the body of loop `loop`; the body comes right before the loop's own op.

    Values are numbered as they are read, a loop's results before its body. Reshards before a loop run as often as it
    does, those in the body more often.
    """
    op, first = graph.ops[loop], loop
    while first and graph.ops[first - 1].outputs and min(graph.ops[first - 1].outputs) > min(op.outputs):
        first -= 1
    body = graph.ops[first:loop]
    if any(o.trips > op.trips for o in body):
        first += next(n for n, o in enumerate(body) if o.trips > op.trips)
    return first


@dataclasses.dataclass(frozen=True)
class Region:
    """The ops of a loop body or of the program, in order; inner loops are regions."""

    parts: tuple[int | Region, ...]

    def ops(self) -> tuple[int, ...]:
        """All op numbers, those of inner loops too."""
        return tuple(i for part in self.parts for i in ((part,) if isinstance(part, int) else part.ops()))


def regions(graph: Graph) -> Region:
    """The ops of a graph as nested regions; a loop's own op is the last of its region."""
    stack: list[tuple[int, int | Region]] = []  # (first op, part)
    for i, op in enumerate(graph.ops):
        if op.name == "while" and op.outputs:
            first = first_of_body(graph, i)
            cut = next((n for n, (at, _) in enumerate(stack) if at >= first), len(stack))
            body = (*(part for _, part in stack[cut:]), i)
            stack[cut:] = [(first, Region(body))]
        else:
            stack.append((i, i))
    return Region(tuple(part for _, part in stack))


def bodies(graph: Graph) -> dict[int, int]:
    """Number of ops in the body of each loop, by the loop's first result."""
    loops = ((i, op) for i, op in enumerate(graph.ops) if op.name == "while" and op.outputs)
    return {op.outputs[0]: i - first_of_body(graph, i) for i, op in loops}


@dataclasses.dataclass(frozen=True)
class ExecutionOrder:
    """A program with its ops in the order in which they run.

    `groups` has, for the result of a collective that can be combined, the number of the combined collective.
    """

    partitioned: PartitionedProgram
    groups: Mapping[int, int]
    bodies: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """How many ops the body of a loop has, right before the loop's own: by the loop's first result."""

    def together(self) -> dict[int, tuple[int, int]]:
        """For an op that is a part of such an all-reduce: the first and the last op of it."""
        found: dict[int, tuple[int, int]] = {}
        where = {
            i: self.groups[op.outputs[0]]
            for i, op in enumerate(self.partitioned.graph.ops)
            if op.outputs and op.outputs[0] in self.groups
        }
        for i, group in where.items():
            found[group] = (min(i, found.get(group, (i, i))[0]), i)
        return {i: found[group] for i, group in where.items()}


def lower_for_backend(partitioned: PartitionedProgram, chip: Chip | None = None) -> ExecutionOrder:
    """Apply the rewrites of the platform's XLA backend, then combine collectives.

    Args:
      partitioned: the program with its shardings and collectives.
      chip: what it runs on.
    """
    return combine_collectives(on_gpu(on_cpu(partitioned), chip))


def combine_collectives(partitioned: PartitionedProgram) -> ExecutionOrder:
    """The order of ops in which collectives can run as one: all-reduces, on GPUs also all-gathers and reduce-scatters.

    XLA's combiners merge collectives over the same axes, of one region and dtype (all-gathers of any), where none needs
    another. The combined collective runs when the last of them can.
    """
    partitioned = sized(partitioned)
    most = max_combined_bytes(partitioned.platform)
    several = {c.result: c for c in partitioned.communications if c.kind in most and c.group_size > 1}
    if len(several) < 2:
        return ExecutionOrder(partitioned, {v: n for n, v in enumerate(several)}, bodies(partitioned.graph))
    groups: dict[object, int] = {}
    of: dict[int, int] = {}
    order = _ordered(partitioned, regions(partitioned.graph), several, groups, of)
    graph = dataclasses.replace(partitioned.graph, ops=tuple(partitioned.graph.ops[i] for i in order))
    return ExecutionOrder(dataclasses.replace(partitioned, graph=graph), of, bodies(partitioned.graph))


_MOST_MERGED: Mapping[str, Mapping[str, float]] = {
    "": {"all-reduce": math.inf},
    "cpu": {"all-reduce": math.inf},
    "tpu": {"all-reduce": 125_829_120},
}
"""Kinds of collectives that a platform's XLA merges, and bytes of one merged: on a TPU libtpu's
`xla_jf_crs_combiner_threshold_in_bytes`, 120 MiB."""

_MOST_ON_GPU: Mapping[str, float] = dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), 30 * 2**20 + 7)
"""The same on GPUs, of results: the defaults of `xla_gpu_all_reduce_combine_threshold_bytes` and its like."""


def max_combined_bytes(platform: str) -> Mapping[str, float]:
    """Kinds of collectives that XLA combines, with the most bytes of one combined collective.

    >>> max_combined_bytes("cpu")
    {'all-reduce': inf}
    """
    return _MOST_ON_GPU if is_gpu(platform) else _MOST_MERGED[platform]


class _Combiner:
    """Which all-reduces of one region become one, as XLA's combiner collects them: those of one kind in the order in which they
    stand, until one needs another that was collected, or together they are too large.

    What one part of such an all-reduce needs, all of it needs.
    """

    def __init__(self) -> None:
        self.needed: list[int] = []  # for each op the all-reduces before it, and its own: a bit for each
        self.groups: list[tuple[int, int, int]] = []  # parts and what they need as bits; bytes
        self.last: dict[object, int] = {}  # of each kind the group that is collected
        self.count = 0

    def met(self, needs: Sequence[int]) -> int:
        """One op more, by the numbers of those that it reads from: the all-reduces that it needs."""
        bits = 0
        for m in needs:
            bits |= self.needed[m]
        self.needed.append(bits)
        return bits

    def group(self, kind: object, needs: int, size: int, most: float) -> int:
        """The group of which the op just met is a part: an all-reduce of so many bytes; no group has more than `most`."""
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


def _ordered(
    partitioned: PartitionedProgram,
    region: Region,
    several: dict[int, Communication],
    groups: dict[object, int],
    of: dict[int, int],
) -> list[int]:
    ops = partitioned.graph.ops
    inner = [
        [part] if isinstance(part, int) else _ordered(partitioned, part, several, groups, of) for part in region.parts
    ]
    if not any(v in several for numbers in inner if len(numbers) == 1 for v in ops[numbers[0]].outputs[:1]):
        return [i for numbers in inner for i in numbers]
    made: dict[int, int] = {}
    needs: list[list[int]] = []
    group: list[int | None] = [None] * len(inner)
    combiner = _Combiner()
    for n, numbers in enumerate(inner):
        needs.append([made[v] for i in numbers for v in ops[i].inputs if v in made])
        behind = combiner.met(needs[n])
        for i in numbers:
            for v in ops[i].outputs:
                made[v] = n
        result = ops[numbers[0]].outputs[0] if len(numbers) == 1 and ops[numbers[0]].outputs else None
        if result in several:
            c = several[result]
            dtype = "" if c.kind == "all-gather" else partitioned.graph.values[c.operand].dtype
            key = region.parts[-1], c.kind, c.axes, c.group_size, c.trips, dtype
            most = max_combined_bytes(partitioned.platform)[c.kind]
            key = *key, combiner.group(key, behind, partitioned.local_bytes(c.result), most)
            group[n] = of[result] = groups.setdefault(key, len(groups))
    when = [float(n) for n in range(len(inner))]
    shared = collections.Counter(group)
    for n, numbers in enumerate(inner):
        if group[n] is not None and shared[group[n]] > 1 and ops[numbers[0]].name == "all_gather":
            when[n] = 0.0  # as soon as the last of them can
    later = [0.0 if g is None else 1 / (len(inner) + 1) for g in group]  # what reads its result comes after all of it
    last: dict[int, float] = {}
    for _ in range(3):
        for n, g in enumerate(group):
            if needs[n]:
                when[n] = max(when[n], max([when[m] + later[m] for m in needs[n]]))
            if g is not None:
                when[n] = last[g] = max(last.get(g, 0.0), when[n])
    if region.parts and not isinstance(region.parts[-1], Region) and ops[inner[-1][-1]].name == "while":
        when[-1] = max(when)
    return [i for n in sorted(range(len(inner)), key=lambda n: (when[n], n)) for i in inner[n]]


def schedule_ops(order: ExecutionOrder) -> tuple[ExecutionOrder, FusionPlan]:
    """The order of the platform's scheduler, and the fusion: `schedule_breadth_first` on CPU, else
    `schedule_for_memory`.
    """
    return schedule_breadth_first(order) if order.partitioned.platform == "cpu" else schedule_for_memory(order)


def _reordered(order: ExecutionOrder, partitioned: PartitionedProgram, turn: Sequence[int]) -> ExecutionOrder:
    graph = dataclasses.replace(partitioned.graph, ops=tuple(partitioned.graph.ops[i] for i in turn))
    return ExecutionOrder(dataclasses.replace(partitioned, graph=graph), order.groups, order.bodies)


def schedule_breadth_first(order: ExecutionOrder) -> tuple[ExecutionOrder, FusionPlan]:
    """Breadth first, as XLA's CPU backend schedules for its threads: an op runs as soon as its operands are ready.

    It works within each region; combined collectives run together. Ops that read only arguments and constants run at
    the start.
    """
    graph, fusion = order.partitioned.graph, fuse(order.partitioned)
    together = order.together()

    def arranged(region: Region, own: int) -> list[int]:
        """`own`: how many of the last parts are the loop's."""
        parts = [[part] if isinstance(part, int) else arranged(part, 1) for part in region.parts]
        first: list[int] = []
        nodes: dict[object, list[int]] = {}
        for part in parts[: len(parts) - own]:
            last = part[-1]
            if fusion.inside[last] is None:  # where it stands does not matter
                first += part
            else:
                nodes.setdefault((together[last],) if last in together else last, []).extend(part)
        ready = _as_ready(order.partitioned, fusion, nodes)
        return [*first, *(i for node in ready for i in nodes[node]), *(i for o in parts[len(parts) - own :] for i in o)]

    turn = arranged(regions(graph), 0)
    return _reordered(order, order.partitioned, turn), fusion.ordered(turn)


def _as_ready(
    partitioned: PartitionedProgram, fusion: FusionPlan, nodes: Mapping[object, Sequence[int]]
) -> list[object]:
    graph = partitioned.graph
    made = {v: node for node, ops in nodes.items() for i in ops for v in graph.ops[i].outputs}
    users: dict[object, list[object]] = {}
    waits: dict[object, int] = {}
    views: dict[int, list[object]] = {}
    for node, ops in nodes.items():
        sources = {made[v]: None for i in ops for v in fusion.reads[i] if v in made and made[v] != node}
        waits[node] = len(sources)
        if len(ops) == 1 and graph.ops[ops[0]].name == "dot_general":
            for v in _flattened(partitioned, ops[0], fusion.reads[ops[0]], made, nodes):
                sources.pop(made[v], None)
                views.setdefault(v, []).append(node)
        for source in sources:
            users.setdefault(source, []).append(node)
    for v in _seen_otherwise(partitioned):
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
                queue.append((node, True))  # its results are picked out of a tuple, one step later
                continue
        for user in users.get(node, ()):
            waits[user] -= 1
            if not waits[user]:
                queue.append((user, False))
    return [*turn, *(node for node in nodes if node not in turn)]


def _seen_otherwise(partitioned: PartitionedProgram) -> list[int]:
    """Values that only one reshape reads, with elementwise ops behind it: XLA moves the reshape behind those, which
    reorders the readers.
    """
    graph = partitioned.graph
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for v in dict.fromkeys(op.inputs):
            readers.setdefault(v, []).append(op)
    held, found = set(graph.outputs), []
    for v, (op, *others) in readers.items():
        if op.name != "reshape" or others or held.intersection((v, op.outputs[0])):
            continue
        behind = readers.get(op.outputs[0], ())
        if len(behind) > 1 and all(other.name in ELEMENTWISE for other in behind):
            found.append(v)
    return found


def _flattened(
    partitioned: PartitionedProgram,
    product: int,
    reads: Sequence[int],
    made: Mapping[int, object],
    nodes: Mapping[object, Sequence[int]],
) -> list[int]:
    """Values of higher rank that a matmul reads as a matrix and that an unfused op makes: the view is one more step."""
    op = partitioned.graph.ops[product]
    return [
        v
        for v in reads
        if v in made and partitioned.graph.ops[nodes[made[v]][-1]].name in _UNFUSED and is_flattened(partitioned, op, v)
    ]


_UNFUSED = COLLECTIVE_OPS | {"scatter", "convolution"}


def _on_tpu(partitioned: PartitionedProgram, fusion: FusionPlan) -> dict[int, int]:
    """Bytes of values that take less on a TPU, as `bf16`, or more, as row-major tables."""
    found = {v: partitioned.local_bytes(v) // 2 for v in fusion.narrow}
    rows = scattered_values(partitioned.graph)
    return found | {
        v: row_major_bytes(partitioned.local_shape(v), dtype_bits(partitioned.graph.values[v].dtype)) for v in rows
    }


_SHRINKS = 16
"""How much larger the dying operands must be than the result; XLA's scheduler often ignores smaller gains."""


def schedule_for_memory(order: ExecutionOrder) -> tuple[ExecutionOrder, FusionPlan]:
    """Run an op as early as possible where that frees much memory, as XLA's memory scheduler does within each region."""
    partitioned = order.partitioned
    graph, fusion = partitioned.graph, fuse(partitioned)
    if partitioned.platform == "tpu" and isinstance(partitioned, Sized):
        partitioned = dataclasses.replace(partitioned, sizes=partitioned.sizes | _on_tpu(partitioned, fusion))
    last: dict[int, int] = {}
    for i, reads in enumerate(fusion.reads):
        for v in reads:
            last[v] = i
    keep = set(graph.inputs) | set(graph.outputs)
    made = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    fixed = set(order.together())

    def arranged(region: Region) -> list[int]:
        here = {i: n for n, part in enumerate(region.parts) for i in ((part,) if isinstance(part, int) else part.ops())}
        when: list[tuple[float, ...]] = [(float(n),) for n in range(len(region.parts))]
        for n, part in enumerate(region.parts):
            inner = fusion.inside[part] if isinstance(part, int) else None
            if inner is None or not isinstance(part, int) or part in fixed or graph.ops[part].name == "while":
                continue
            freed = sum([partitioned.local_bytes(v) for v in fusion.reads[part] if last[v] == part and v not in keep])
            if freed <= _SHRINKS * sum(map(partitioned.local_bytes, graph.ops[part].outputs)):
                continue
            sources = [here[made[v]] for v in fusion.reads[part] if made.get(v) in here]
            ready = max((when[m] for m in sources), default=None)
            if ready is None:
                continue
            for m in sorted((here[j] for j in inner if j in here), key=lambda m: when[m]):
                when[m] = min(when[m], (*ready, float(m)))
            when[n] = (*ready, float(n))
        return [
            i
            for n in sorted(range(len(region.parts)), key=lambda n: when[n])
            for part in (region.parts[n],)
            for i in ([part] if isinstance(part, int) else arranged(part))
        ]

    turn = arranged(regions(graph))
    return _reordered(order, partitioned, turn), fusion.ordered(turn)
