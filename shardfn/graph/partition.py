"""What XLA's partitioner makes of a laid-out program: how each op is worked on, and what is sent between devices.

Propagation says how every value lies. Where an op's operands do not lie as the op needs them, XLA inserts collectives,
op by op. The rules here are those of its SPMD partitioner, which serves CPU, GPU and TPU alike, told in terms of
sharding rules: one function a kind of op, and the table at the end is the contents. Nothing here looks at sizes of a
particular program; what XLA decides by bytes is decided by the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from shardfn.graph.model import (
    Communication,
    Dims,
    Flow,
    Graph,
    Op,
    Rule,
    Spec,
    Tap,
    Value,
    dtype_bits,
    joined_axes,
    split_axes,
)

Factors = dict[int, tuple[str, ...]]
"""For each factor of a rule, the axes that cut it."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How one op is worked on: how its operands must lie, how its results lie then, and what remains to be done.

    `summed`: axes over which the results are partial sums. `collected`: axes over which the partial results of a
    reduction of several arrays are gathered. `edges`: rows of an operand that come from neighbours, as (operand, dim,
    rows from the left, rows from the right). `turned`: operands whose pieces change places (a reversal).
    """

    wants: tuple[Spec, ...]
    gives: tuple[Spec, ...]
    summed: tuple[str, ...] = ()
    collected: tuple[str, ...] = ()
    edges: tuple[tuple[int, int, int, int], ...] = ()
    turned: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """What a way is chosen from: one op with the layouts that propagation gave its operands and results."""

    op: Op
    rule: Rule
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    have: tuple[Spec, ...]
    want: tuple[Spec, ...]
    sizes: Mapping[str, int]

    def pieces(self, axes: Sequence[str]) -> int:
        """Devices along `axes`."""
        return math.prod(self.sizes[a] for a in axes)

    def factors(self, dims: Dims, spec: Spec) -> Factors:
        """The factors that a layout of one tensor cuts. Of a compound dim the major factors are cut first."""
        found: Factors = {}
        for dim, axes in zip(dims, spec, strict=True):
            rest = list(axes)
            for i, factor in enumerate(dim):
                taken: list[str] = []
                while rest and (len(dim) == 1 or self.rule.sizes[factor] % self.pieces([*taken, rest[0]]) == 0):
                    taken.append(rest.pop(0))
                if taken:
                    found[factor] = tuple(taken)
                if i + 1 < len(dim) and self.pieces(taken) != self.rule.sizes[factor]:
                    break  # a minor factor is contiguous only where the major ones are cut to single elements
        return found

    def spec(self, dims: Dims, factors: Mapping[int, Sequence[str]]) -> Spec:
        """The layout of one tensor whose factors are cut so, as far as it can be said in dims."""
        spec: list[tuple[str, ...]] = []
        for dim in dims:
            axes: list[str] = []
            for factor in dim:
                axes += factors.get(factor, ())
                if self.pieces(factors.get(factor, ())) != self.rule.sizes[factor]:
                    break
            spec.append(tuple(axes))
        return tuple(spec)

    def expressed(self, dims: Dims, spec: Spec) -> bool:
        """Whether the factors of the rule can say all of a layout."""
        return sum(map(len, self.factors(dims, spec).values())) == sum(map(len, spec))

    def local_bytes(self, value: Value, spec: Spec) -> int:
        """Bytes of a piece."""
        return _local_elements(value.shape, spec, self.sizes) * dtype_bits(value.dtype) // 8


def whole(value: Value) -> Spec:
    """The layout of a value that every device holds all of."""
    return ((),) * len(value.shape)


# ---- one rule for each kind of op


def replicate(case: Case) -> Way:
    """Every device does all of it."""
    return Way(tuple(map(whole, case.operands)), tuple(map(whole, case.results)))


def follow_result(case: Case) -> Way:
    """The operands are laid out as the results ask: elementwise ops, broadcast, transpose, select, …"""
    factors: Factors = {}
    for dims, spec in zip(case.rule.results, case.want, strict=True):
        for factor, axes in case.factors(dims, spec).items():
            if factor not in case.rule.replicated:
                factors.setdefault(factor, axes)
    return _by_factors(case, factors)


def _by_factors(case: Case, factors: Factors, summed: Sequence[str] = ()) -> Way:
    return Way(
        tuple(case.spec(dims, factors) for dims in case.rule.operands),
        tuple(case.spec(dims, factors) for dims in case.rule.results),
        tuple(summed),
    )


def reshape(case: Case) -> Way:
    """Laid out as the result where the operand can be; else as the operand; else whole."""
    (source,), (target,) = case.rule.operands, case.rule.results
    backwards = case.factors(target, case.want[0])
    operand = case.spec(source, backwards)
    if case.expressed(target, case.want[0]) and sum(map(len, operand)) == sum(map(len, case.want[0])):
        return Way((operand,), case.want)
    forwards = case.factors(source, case.have[0])
    result = case.spec(target, forwards)
    if case.expressed(source, case.have[0]) and sum(map(len, result)) == sum(map(len, case.have[0])):
        return Way(case.have, (result,))
    return replicate(case)


def reduce(case: Case) -> Way:
    """Works on the operand as it lies; what is left of the cut dims is added up."""
    factors = case.factors(case.rule.operands[0], case.have[0])
    partial = tuple(a for f in case.rule.reduction for a in factors.get(f, ()))
    way = _by_factors(case, factors)
    if len(case.results) == 1:
        return dataclasses.replace(way, summed=partial)
    return dataclasses.replace(way, collected=partial)


def product(case: Case) -> Way:
    """dot_general and convolution: one decision for each axis, from where it stands in both operands and the result.

    In order: the same contracted or batch dim of both operands (partial sums, or nothing to do); a dim that one operand
    and the result share (the other operand is gathered); the result's own (operands are laid out for it); else, where
    gathering would move more than adding up, the whole operand is cut; else the axis is given up.
    """
    left, right, out = (_by_axis(case, d, s) for d, s in _rows(case, (0, 1)))
    in_left, in_right, in_out = (_all_factors(d) for d, _ in _rows(case, (0, 1)))
    lhs: dict[str, int] = {}
    rhs: dict[str, int] = {}
    res: dict[str, int] = {}
    summed: list[str] = []
    undecided: list[str] = []
    for axis in dict.fromkeys((*left, *right, *out)):
        a, b, c = left.get(axis), right.get(axis), out.get(axis)
        if a is not None and a == b:
            lhs[axis] = rhs[axis] = a
            if a in in_out:
                res[axis] = a
            else:
                summed.append(axis)
        elif c is not None:
            res[axis] = c
            if c in in_left:
                lhs[axis] = c
            if c in in_right:
                rhs[axis] = c
        else:
            undecided.append(axis)
    for axis in undecided:
        a, b = left.get(axis), right.get(axis)
        mine, other = (lhs, rhs) if b is None else (rhs, lhs)
        operand, factor = (0, a) if b is None else (1, b)
        if factor is None or (a is not None and b is not None) or not (factor in in_left and factor in in_right):
            continue
        kept = case.pieces(list(mine)) * 1
        result = case.pieces(list(res))
        if math.prod(case.operands[operand].shape) // kept > math.prod(case.results[0].shape) // result:
            mine[axis] = other[axis] = factor
            summed.append(axis)
    own = ({**left, **out}, {**right, **out}, {**out, **left, **right})
    specs = [
        case.spec(dims, _by_factor(placed, order))
        for (dims, _), placed, order in zip(_rows(case, (0, 1)), (lhs, rhs, res), own, strict=True)
    ]
    rest = tuple(whole(v) for v in case.operands[2:])
    return Way((specs[0], specs[1], *rest), (specs[2],), tuple(summed))


def _rows(case: Case, operands: Sequence[int]) -> list[tuple[Dims, Spec]]:
    """(dims, layout) of some operands and of the first result."""
    return [*((case.rule.operands[i], case.have[i]) for i in operands), (case.rule.results[0], case.want[0])]


def _by_axis(case: Case, dims: Dims, spec: Spec) -> dict[str, int]:
    return {axis: factor for factor, axes in case.factors(dims, spec).items() for axis in axes}


def _by_factor(placed: Mapping[str, int], order: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for axis in (*(a for a in order if a in placed), *(a for a in placed if a not in order)):
        found.setdefault(placed[axis], []).append(axis)
    return found


def _all_factors(dims: Dims) -> frozenset[int]:
    return frozenset(f for dim in dims for f in dim)


def look_up(case: Case) -> Way:
    """gather: of the ways that fit, the one that touches the fewest bytes; again for the axes that remain."""
    table, index, out = case.rule.operands[0], case.rule.operands[1], case.rule.results[0]
    return _indexed(case, table, index, out, 0, case.results[0], case.want[0])


def put_down(case: Case) -> Way:
    """scatter: as gather, the updates in place of the result."""
    count = (len(case.operands) - 1) // 2
    if count != 1:
        return replicate(case)
    table, index, updates = case.rule.operands
    return _indexed(case, table, index, updates, 2, case.operands[2], case.have[2])


def _indexed(
    case: Case, table: Dims, index: Dims, rows: Dims, rows_at: int, rows_value: Value, rows_spec: Spec
) -> Way:
    """gather and scatter. `rows` are what is read (the result) or written (the updates).

    An axis can cut a dim of all three (nothing is sent); a dim that the table shares with the rows; the rows of the
    table (each device reads or writes what it holds; a gather then adds up); or the index (whole table; a scatter then
    adds up).
    """
    in_table, in_index, in_rows = map(_all_factors, (table, index, rows))
    scatter = bool(rows_at)
    kinds = (
        ("all", in_table & in_index & in_rows),
        ("window", (in_table & in_rows) - in_index),
        ("table", in_table - in_rows - in_index),
        ("index", (in_index & in_rows) - in_table),
    )
    by_table = _by_axis(case, table, case.have[0])
    by_index = _by_axis(case, index, case.have[1])
    decided: dict[str, int] = {}
    summed: list[str] = []
    left = dict.fromkeys((*by_table, *by_index))
    while True:
        offers: list[tuple[int, int, str, list[str]]] = []
        for order, (kind, factors) in enumerate(kinds):
            source = by_index if kind == "index" else by_table
            axes = [a for a in left if source.get(a) in factors]
            if kind == "all":
                axes += [a for a in left if a not in axes and by_index.get(a) in factors]
            if axes:
                offers.append((_touched(case, kind, axes, decided, rows_value), order, kind, axes))
        if not offers:
            break
        _, _, kind, axes = min(offers)
        for axis in axes:
            del left[axis]
            source = by_index if kind == "index" else by_table
            decided[axis] = source[axis] if axis in source else by_index[axis]
            if kind == ("index" if scatter else "table"):
                summed.append(axis)
    factors = _by_factor(decided, decided)
    specs = [case.spec(d, factors) for d in (table, index, rows)]
    if scatter:
        return Way((specs[0], specs[1], specs[2]), (specs[0],), tuple(summed))
    rest = tuple(whole(v) for v in case.operands[2:])
    return Way((specs[0], specs[1], *rest), (specs[2],), tuple(summed))


def _touched(case: Case, kind: str, axes: Sequence[str], decided: Mapping[str, int], rows: Value) -> int:
    """Bytes that each device reads and writes if `axes` cut that kind of dim."""
    if kind == "all":
        return 0
    ways = case.pieces(axes) * case.pieces(list(decided))
    table, index = (math.prod(v.shape) * dtype_bits(v.dtype) // 8 for v in case.operands[:2])
    written = math.prod(rows.shape) * dtype_bits(rows.dtype) // 8
    return {
        "window": table // ways + written // ways + index,
        "table": table // ways + written + index,
        "index": table + written // ways + index // ways,
    }[kind]


def windowed(case: Case) -> Way:
    """slice, pad, reduce_window, select_and_scatter: laid out as the result; rows at the edges come from neighbours."""
    spec = case.want[0]
    rank = len(case.results[0].shape)
    wants = tuple(spec if len(v.shape) == rank else whole(v) for v in case.operands)
    way = _with_edges(case, Way(wants, (spec,)))
    return way if way is not None else replicate(case)


def convolve(case: Case) -> Way:
    """A product whose image is also cut along height or width."""
    way = product(case)
    edged = _with_edges(case, way)
    return edged if edged is not None else replicate(case)


def _with_edges(case: Case, way: Way) -> Way | None:
    """Add what an op with windows needs from neighbours; None where that is no less than everything."""
    edges = []
    for tap in case.op.taps:
        axes, out_axes = way.wants[tap.operand][tap.dim], way.gives[0][tap.out_dim]
        if not axes or axes != out_axes:
            continue
        pieces = case.pieces(axes)
        size, out_size = case.operands[tap.operand].shape[tap.dim], case.results[0].shape[tap.out_dim]
        before, after = _reach(size, out_size, pieces, tap)
        if before + after >= (pieces - 1) * -(-size // pieces) > 0:
            return None
        if before or after:
            edges.append((tap.operand, tap.dim, before, after))
    return dataclasses.replace(way, edges=tuple(edges))


@functools.lru_cache(maxsize=4096)
def _reach(size: int, out_size: int, pieces: int, tap: Tap) -> tuple[int, int]:
    """Rows that a piece of the result reads before and after the piece of the operand on the same device, at most."""
    own, out = -(-size // pieces), -(-out_size // pieces)
    before = after = 0
    for p in range(pieces):
        first = max(0, -(-(p * out * tap.stride + tap.low) // tap.spacing))
        end = min(size, (((p + 1) * out - 1) * tap.stride + tap.low + tap.extent - 1) // tap.spacing + 1)
        if first < end:
            before = max(before, p * own - first)
            after = max(after, end - (p + 1) * own)
    return before, after


def concatenate(case: Case) -> Way:
    """Along a cut dim XLA writes the pieces into zeros of full size and adds up over the devices."""
    along = _unlike(case)
    if not case.want[0][along]:
        return _all_as(case, case.want[0])
    kept = tuple(() if d == along else axes for d, axes in enumerate(case.want[0]))
    return Way((case.want[0],) * len(case.operands), (kept,), case.want[0][along])


def _unlike(case: Case) -> int:
    """The dim of the result that differs from the first operand's; the first if there is none."""
    shapes = zip(case.operands[0].shape, case.results[0].shape, strict=True)
    return next((d for d, (a, b) in enumerate(shapes) if a != b), 0)


def _all_as(case: Case, spec: Spec) -> Way:
    return Way((spec,) * len(case.operands), (spec,) * len(case.results))


def rotate(case: Case) -> Way:
    """roll: rows of one piece go to the next ones."""
    spec = case.want[0]
    (tap,) = case.op.taps
    dim, shift = tap.dim, tap.low
    pieces, size = case.pieces(spec[dim]), case.operands[0].shape[dim]
    if pieces == 1:
        return Way((spec,), (spec,))
    if size % pieces:
        return replicate(case)
    return Way((spec,), (spec,), edges=((0, dim, min(shift, size - shift), 0),))


def reverse(case: Case) -> Way:
    """The pieces along a cut dim change places."""
    spec = case.want[0]
    cut = any(spec[tap.dim] for tap in case.op.taps)
    return Way((spec,), (spec,), turned=(0,) if cut else ())


def sort(case: Case) -> Way:
    """A sort along a cut dim goes over to another dim that divides, and back; without one it is done whole."""
    spec = case.want[0]
    along = next((d for d, dim in enumerate(case.rule.results[0]) if set(dim) & case.rule.replicated), None)
    if along is None or not spec[along]:
        return _all_as(case, spec)
    for d, size in enumerate(case.results[0].shape):
        if d != along and size % case.pieces((*spec[d], *spec[along])) == 0:
            moved = [() if i == along else axes for i, axes in enumerate(spec)]
            moved[d] = (*spec[d], *spec[along])
            return _all_as(case, tuple(moved))
    return replicate(case)


def dynamic_slice(case: Case) -> Way:
    """The sliced dims must be whole; if the result is to be cut along one, all is done whole."""
    spec = case.want[0]
    source, result = case.operands[0].shape, case.results[0].shape
    if any(axes and a != b for axes, a, b in zip(spec, source, result, strict=True)):
        return replicate(case)
    return Way((spec, *(whole(v) for v in case.operands[1:])), (spec,))


def dynamic_update_slice(case: Case) -> Way:
    """Single rows are written where they belong; longer slices along a cut dim make that dim whole."""
    spec = case.want[0]
    target, update = case.operands[0].shape, case.operands[1].shape
    whole_dims = {d for d, axes in enumerate(spec) if axes and update[d] not in (1, target[d])}
    base = tuple(() if d in whole_dims else axes for d, axes in enumerate(spec))
    new = tuple(() if a != b else axes for axes, a, b in zip(base, target, update, strict=True))
    return Way((base, new, *(whole(v) for v in case.operands[2:])), (base,))


def pairwise(case: Case) -> Way:
    """Result i is operand i."""
    return Way(case.want, case.want)


# ---- from one layout to another


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective of a move (or none, where pieces are only cut smaller), and the layout after it."""

    kind: str
    axes: tuple[str, ...]
    after: Spec


def steps(frm: Spec, to: Spec, sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """What it takes to lay one array out anew: cutting is free and comes first, then exchanges, then gathering.

    >>> [step.kind for step in steps((("a",), ()), ((), ("a",)), {"a": 4})]
    ['all-to-all']
    """
    found: list[Step] = []
    here = [list(axes) for axes in frm]
    if _counts(frm, sizes) == _counts(to, sizes):  # the same pieces on other devices
        return () if frm == to else (Step("collective-permute", tuple(dict.fromkeys(_flat(frm))), to),)
    had = set(_flat(frm))
    for dim, axes in enumerate(to):
        common = _common(here[dim], axes)
        if common == len(here[dim]):
            fresh = list(itertools.takewhile(lambda a: a not in had, axes[common:]))
            here[dim] += fresh
            if fresh:
                found.append(Step("", tuple(fresh), _spec(here)))
    for dim, target in itertools.permutations(range(len(to)), 2):
        common = _common(here[dim], to[dim])
        leaving = here[dim][common:]
        start = _common(here[target], to[target])
        if start < len(here[target]):
            continue
        moving = list(itertools.takewhile(lambda a: a in leaving, to[target][start:]))  # noqa: B023
        if not moving:
            continue
        stays = [a for a in leaving if a not in moving]
        if stays and leaving != [*stays, *moving]:
            here[dim] = [*here[dim][:common], *stays, *moving]
            found.append(Step("collective-permute", tuple(leaving), _spec(here)))
        here[dim] = [*here[dim][:common], *stays]
        here[target] += moving
        found.append(Step("all-to-all", tuple(moving), _spec(here)))
    gathered = []
    for dim, axes in enumerate(to):
        common = _common(here[dim], axes)
        gathered += here[dim][common:]
        here[dim] = here[dim][:common]
    if gathered:
        found.append(Step("all-gather", tuple(gathered), _spec(here)))
    if _spec(here) != to:
        found.append(Step("", tuple(a for a in _flat(to) if a not in _flat(_spec(here))), to))
    return tuple(found)


def _spec(dims: Sequence[Sequence[str]]) -> Spec:
    return tuple(map(tuple, dims))


def _flat(spec: Spec) -> list[str]:
    return [a for dim in spec for a in dim]


def _counts(spec: Spec, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[a] for a in dim) for dim in spec]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


def _local_elements(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> int:
    return math.prod(-(-n // s) for n, s in zip(shape, _counts(spec, sizes), strict=True))


# ---- the program


@dataclasses.dataclass(frozen=True)
class Laid:
    """A program with the layout of every value, before anything is partitioned.

    `carries` are (value, layout that it must have there, trips): what enters a loop or leaves its body, what a branch
    hands back, what a `shard_map` takes. `results` are the layouts of the program's own results. `sent` are the
    collectives that the user wrote, by the position of the op that stands for them.
    """

    graph: Graph
    specs: tuple[Spec, ...]
    axes: dict[str, int]
    trips: tuple[int, ...]
    carries: tuple[tuple[int, Spec, int], ...]
    results: tuple[Spec, ...]
    sent: Mapping[int, Communication]


def partition(laid: Laid) -> Flow:
    """The flow of a laid-out program: every op with operands and results as XLA works on them, and the collectives."""
    return _Partitioner(laid).flow()


class _Partitioner:
    def __init__(self, laid: Laid):
        self.laid = laid
        self.sizes, atoms = split_axes(laid.axes, {*laid.specs, *laid.results, *(c[1] for c in laid.carries)})
        self.values = list(laid.graph.values)
        self.parts = functools.lru_cache(maxsize=None)(
            lambda spec: tuple(tuple(p for a in dim for p in atoms[a]) for dim in spec)
        )
        self.specs = [self.parts(spec) for spec in laid.specs]
        self.trips = list(laid.trips)
        self.ops: list[Op] = []
        self.sent: list[Communication] = []
        self.moved: dict[tuple[int, Spec], int] = {}
        self.ways: dict[object, Way] = {}

    def flow(self) -> Flow:
        graph = self.laid.graph
        ops = _rotations(graph)
        alive = _needed(graph, ops)
        for i, op in enumerate(ops):
            if alive[i]:
                self.visit(op, self.laid.sent.get(i))
        for value, spec, trips in self.laid.carries:
            self.move(value, self.parts(spec), trips, "", "carry")
        outputs = tuple(
            self.move(value, self.parts(spec), 1, "", "result")
            for value, spec in zip(graph.outputs, self.laid.results, strict=True)
        )
        join = functools.lru_cache(maxsize=None)(lambda axes: joined_axes(axes, self.laid.axes))
        specs = tuple(tuple(map(join, spec)) for spec in self.specs)
        sent = tuple(dataclasses.replace(c, axes=join(c.axes)) for c in self.sent)
        flowing = dataclasses.replace(graph, values=tuple(self.values), ops=tuple(self.ops), outputs=outputs)
        return Flow(flowing, specs, self.laid.axes, sent)

    def visit(self, op: Op, sent: Communication | None) -> None:
        if sent is not None:
            self.sent.append(sent)
        if not any(any(self.specs[v]) for v in (*op.inputs, *op.outputs)) or op.name in _PASSED:
            self.ops.append(op)
            return
        way = self.way(op)
        inputs = [
            self.move(v, spec, op.trips, op.where, op.name) for v, spec in zip(op.inputs, way.wants, strict=True)
        ]
        for operand, dim, before, after in way.edges:
            inputs += self.exchange(inputs[operand], dim, before, after, op)
        for operand in way.turned:
            inputs[operand] = self.send("collective-permute", inputs[operand], self.specs[inputs[operand]], (), op)
        clean = not way.summed and not way.collected
        outputs = []
        for v, spec in zip(op.outputs, way.gives, strict=True):
            outputs.append(v if clean and spec == self.specs[v] else self.new(self.values[v], spec, op.trips))
        self.ops.append(dataclasses.replace(op, inputs=tuple(inputs), outputs=tuple(outputs)))
        for v, made in zip(op.outputs, outputs, strict=True):
            if way.summed:
                made = self.add_up(made, v, way.summed, op)
            if way.collected:
                made = self.collect(made, v, way.collected, op)
            if made != v:
                self.move(made, self.specs[v], op.trips, op.where, op.name, into=v)

    def way(self, op: Op) -> Way:
        have, want = tuple(self.specs[v] for v in op.inputs), tuple(self.specs[v] for v in op.outputs)
        shapes = tuple(self.values[v] for v in op.inputs), tuple(self.values[v] for v in op.outputs)
        key = (op.name, id(op.rule), op.taps, shapes, have, want)
        found = self.ways.get(key)
        if found is None:
            if op.rule is None or op.name in _WHOLE:
                found = Way(tuple(map(whole, shapes[0])), tuple(map(whole, shapes[1])))
            else:
                choose = WAYS.get(op.name, follow_result)
                found = choose(Case(op, op.rule, *shapes, have, want, self.sizes))
            self.ways[key] = found
        return found

    def new(self, value: Value, spec: Spec, trips: int) -> int:
        self.values.append(value)
        self.specs.append(spec)
        self.trips.append(trips)
        return len(self.values) - 1

    def move(self, value: int, to: Spec, trips: int, where: str, cause: str, into: int | None = None) -> int:
        """Lay a value out anew, once: a second wish for the same is served by the first."""
        if self.specs[value] == to and into is None:
            return value
        known = self.moved.get((value, to))
        if known is not None and into is None:
            return known
        origin, frm = value, self.specs[value]
        trips = min(trips, self.trips[value])
        path = steps(frm, to, self.sizes) or (Step("", (), to),)
        for i, step in enumerate(path):
            last = into if i == len(path) - 1 else None
            value = self.send(step.kind, value, step.after, step.axes, None, trips, where, cause, last)
        self.moved[origin, to] = value
        self.moved.setdefault((value, frm), origin)
        return value

    def send(
        self, kind: str, value: int, after: Spec, axes: tuple[str, ...], op: Op | None, trips: int = 0,
        where: str = "", cause: str = "", into: int | None = None,
    ) -> int:  # fmt: skip
        """One collective from `value` to a new one; an empty `kind` cuts it without sending."""
        if op is not None:
            trips, where, cause = op.trips, op.where, op.name
        result = self.new(self.values[value], after, trips) if into is None else into
        self.ops.append(Op(kind.replace("-", "_") or "all_slice", (value,), (result,), None, trips, where))
        if kind:
            size = 2 if kind == "collective-permute" else math.prod(self.sizes[a] for a in axes)
            self.sent.append(Communication(kind, axes, size, value, result, trips, where, cause))
        return result

    def add_up(self, partial: int, result: int, axes: tuple[str, ...], op: Op) -> int:
        """Partial sums to sums. Where each device needs only its piece, that is a reduce-scatter."""
        have, want = self.specs[partial], self.specs[result]
        pieces = [w[len(h) :] if w[: len(h)] == h else ("?",) for h, w in zip(have, want, strict=True)]
        scattered = [a for piece in pieces for a in piece]
        if scattered and set(scattered) == set(axes):
            return self.send("reduce-scatter", partial, want, axes, op, into=result)
        return self.send("all-reduce", partial, have, axes, op, into=result if have == want else None)

    def collect(self, partial: int, result: int, axes: tuple[str, ...], op: Op) -> int:
        """The partial results of a reduction of several arrays (argmax) are gathered and reduced again."""
        have, want = self.specs[partial], self.specs[result]
        return self.send("all-gather", partial, have, axes, op, into=result if have == want else None)

    def exchange(self, value: int, dim: int, before: int, after: int, op: Op) -> list[int]:
        """Rows that neighbours send along one cut dim, farther ones where a piece is too short."""
        found = []
        shape, spec = self.values[value].shape, self.specs[value]
        pieces = math.prod(self.sizes[a] for a in spec[dim])
        own = -(-shape[dim] // pieces)
        for rows in (before, after):
            while rows > 0:
                part = (*shape[:dim], min(rows, own) * pieces, *shape[dim + 1 :])
                edge = self.new(Value(part, self.values[value].dtype), spec, op.trips)
                found.append(self.send("collective-permute", edge, spec, spec[dim], op))
                rows -= own
        return found


def _needed(graph: Graph, ops: Sequence[Op]) -> list[bool]:
    """Which ops the results depend on; XLA drops the others."""
    producer = {v: i for i, op in enumerate(ops) for v in op.outputs}
    behind: dict[int, list[int]] = {}
    entries = set(graph.inputs)
    for a, b in graph.ties:
        behind.setdefault(b, []).append(a)
        if a not in producer and a not in entries:  # what a loop's body takes; b is what it hands back
            behind.setdefault(a, []).append(b)
    alive = [False] * len(ops)
    stack, seen = list(graph.outputs), set(graph.outputs)
    for i, op in enumerate(ops):
        if not op.outputs or op.name in _EFFECTS:
            alive[i] = True
            stack += op.inputs
    while stack:
        value = stack.pop()
        wanted = behind.get(value, ())
        at = producer.get(value)
        if at is not None and not alive[at]:
            alive[at] = True
            read = {"while": ops[at].inputs[-1:], "case": ops[at].inputs[:1]}.get(ops[at].name, ops[at].inputs)
            wanted = (*wanted, *read)
        for v in wanted:
            if v not in seen:
                seen.add(v)
                stack.append(v)
    return alive


def _rotations(graph: Graph) -> list[Op]:
    """The ops, with `concatenate` of two slices that make a rotation (`jnp.roll`) told as one op, as XLA does."""
    slices = {op.outputs[0]: op for op in graph.ops if op.name == "slice"}
    found = []
    for op in graph.ops:
        if op.name == "concatenate" and len(op.inputs) == 2 and all(v in slices for v in op.inputs):
            first, second = (slices[v] for v in op.inputs)
            dim = _rotated(graph.values, first, second)
            if dim is not None:
                low = next(t.low for t in first.taps if t.dim == dim)
                shape = graph.values[op.outputs[0]].shape
                dims = tuple((d,) for d in range(len(shape)))
                rule = Rule((dims,), (dims,), shape)
                taps = (Tap(0, dim, dim, low=low),)
                op = Op("rotate", (first.inputs[0],), op.outputs, rule, op.trips, op.where, taps=taps)
        found.append(op)
    return found


def _rotated(values: Sequence[Value], first: Op, second: Op) -> int | None:
    """The dim along which `first` is the end and `second` the beginning of one array, if they are."""
    if first.inputs[0] != second.inputs[0]:
        return None
    size = values[first.inputs[0]].shape
    low, high = ([t.low for t in op.taps] for op in (first, second))
    if any(t.stride != 1 for op in (first, second) for t in op.taps):
        return None
    one, two = (values[op.outputs[0]].shape for op in (first, second))
    dims = [d for d in range(len(size)) if not (one[d] == two[d] == size[d])]
    if len(dims) != 1:
        return None
    (d,) = dims
    return d if high[d] == 0 and low[d] == two[d] and one[d] + two[d] == size[d] else None


_PASSED = frozenset({"iota", "while", "case", "shard_map", "create_token", "after_all", "partition_id", "replica_id"})
"""Ops at whose operands nothing is moved: they have none, or these are carries."""

_EFFECTS = frozenset({"infeed", "outfeed", "send", "recv"})

_WHOLE = frozenset({"fft", "top_k", "rng_bit_generator", "rng", "cholesky", "triangular_solve"})
"""Ops that XLA does on whole arrays, whatever their layout: it has no way to cut them."""

WAYS: dict[str, Callable[[Case], Way]] = {
    "reshape": reshape,
    "reduce": reduce,
    "dot_general": product,
    "dot": product,
    "convolution": convolve,
    "gather": look_up,
    "scatter": put_down,
    "slice": windowed,
    "pad": windowed,
    "reduce_window": windowed,
    "select_and_scatter": windowed,
    "concatenate": concatenate,
    "rotate": rotate,
    "reverse": reverse,
    "sort": sort,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "optimization_barrier": pairwise,
}
"""How each kind of op is worked on; the others follow their result."""

