"""What XLA computes where it is read: which values take a place in memory, and what each op reads from there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from shardfn.graph.model import PRODUCTS, Flow, Graph, Op

CHEAP = frozenset(
    {"abs", "add", "add_parts", "and", "bitcast_convert", "broadcast_in_dim", "ceil", "clamp", "compare", "complex",
     "concatenate", "convert", "copy", "dynamic_slice", "floor", "gather", "imag", "iota", "is_finite", "maximum", "minimum",
     "multiply", "negate", "not", "or", "pad", "real", "reverse", "rotate", "round_nearest_even", "round_nearest_afz",
     "select", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice", "square", "subtract",
     "transpose", "xor", "dynamic_update_slice"}
)  # fmt: skip
"""Ops that are rather computed once for each reader than stored."""

COSTLY = frozenset(
    {"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "cosine", "divide", "erf", "erfc",
     "exponential", "exponential_minus_one", "lgamma", "log", "log_plus_one", "logistic", "popcnt", "power", "remainder",
     "rsqrt", "sine", "sinh", "sqrt", "tan", "tanh", "erf_inv", "digamma", "mhlo.erf", "mhlo.tan"}
)  # fmt: skip
"""Ops that are computed once: fused only into a single reader that reads each element once."""

_ONCE = (COSTLY | {"gather"}) - {"sine", "cosine", "tan", "popcnt"}
"""Ops that XLA's CPU backend does not compute anew for each reader: measured on JAX 0.10.2 with two readers that are one each."""

VIEWS = frozenset(
    {"reshape", "bitcast", "swapped", "sharding_constraint", "optimization_barrier", "propagation_barrier"}
)
"""Ops whose result lies where their operand does. `cost.cpu` puts in two: products read a matrix though an operand has more
dims (`bitcast`), or the other way round (`swapped`), which takes no op of its own."""

CUTS = frozenset({"all_slice", "reshard"})
"""Ops whose result does so where they cut nothing; else they are as cheap as a slice."""

BY_LIBRARY = 4096
"""Elements from which XLA's CPU backend leaves a sum or a maximum of `f32` to a library, whose call computes inside itself
what it alone reads of `_LIBRARY`, and reads all else from memory. Measured on JAX 0.10.2 and 0.12.0.1."""

BY_TREE = 32
"""Elements of a summed dim up to which XLA's CPU backend reduces at once, and computes the operand inside; longer ones in two
steps, from memory. Measured on JAX 0.10.2."""

_LIBRARY = (CHEAP | COSTLY) - {"and", "bitcast_convert", "clamp", "compare", "complex", "concatenate", "copy", "dynamic_slice",
                               "dynamic_update_slice", "gather", "imag", "is_finite", "not", "or", "pad", "real", "reverse",
                               "rotate", "select", "slice", "xor"}  # fmt: skip

_SPREADS = frozenset({"broadcast_in_dim", "gather", "dynamic_slice"})
_READERS = CHEAP | COSTLY | CUTS
_READERS_ON_TPU = PRODUCTS | {"reduce"}
ELEMENTWISE = (CHEAP | COSTLY) - {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "iota", "pad", "reverse", "rotate",
    "slice", "transpose",
}  # fmt: skip
"""Ops each element of whose result is made of those at the same place."""
_WRITES_NARROW = ELEMENTWISE | PRODUCTS
_INSIDE = _READERS | VIEWS | PRODUCTS


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How the ops of a graph are put together."""

    stored: frozenset[int]
    """Values with a place of their own."""
    reads: tuple[tuple[int, ...], ...]
    """For each op the stored values that it reads, also through what is computed inside it."""
    inside: tuple[tuple[int, ...] | None, ...]
    """For each op those that are computed inside it; None where it is itself computed elsewhere, or not at all."""
    dead: frozenset[int]
    """Ops whose results nobody needs."""
    narrow: frozenset[int] = frozenset()
    """Of the stored values, `f32` ones that are kept as `bf16`: on a TPU what products alone read, at default precision."""

    def ordered(self, turn: Sequence[int]) -> Fusion:
        """The same of a graph whose ops run in another order: `turn` has their numbers so far."""
        place = {i: at for at, i in enumerate(turn)}
        inside = (self.inside[i] for i in turn)
        return Fusion(
            self.stored,
            tuple(self.reads[i] for i in turn),
            tuple(None if inner is None else tuple(place[j] for j in inner) for inner in inside),
            frozenset(place[i] for i in self.dead),
            self.narrow,
        )


def fuse(flow: Flow) -> Fusion:
    """Fuse as XLA's instruction fusion does, readers first, and on CPU its library before that (`BY_LIBRARY`).

    An op is computed where its readers are if all of them can do so (elementwise ops, moves of data, reductions over the
    last dim) and they run as one; a cheap one (`CHEAP`) in several places too, if at most one operand that is no broadcast
    is as large as itself; on CPU a costly one not where its elements are repeated. Products, collectives, loops and library
    calls read from memory. A reshape is no work at all.

    On accelerators a costly op is computed anew like a cheap one, from the one large array that it comes from in the end. On a
    TPU products and all reductions compute their operands too, and a product is computed inside the elementwise op that alone
    reads it (the fusions of kind `kOutput`).
    """
    return _Fuser(flow).fusion()


_MOST = 16
"""Places in which one op is computed anew."""


class _Fuser:
    def __init__(self, flow: Flow):
        self.flow, self.graph = flow, flow.graph
        self.tpu, self.cpu = flow.platform == "tpu", flow.platform == "cpu"
        ops = flow.graph.ops
        self.alive = _alive(flow.graph)
        self.readers: dict[int, list[int]] = {}
        for i in sorted(self.alive):
            for v in dict.fromkeys(ops[i].inputs):
                self.readers.setdefault(v, []).append(i)
        self.held = frozenset(flow.graph.outputs)
        made = (op.outputs for op in ops)
        self.made = frozenset(flow.graph.inputs).union(*made, (b for _, b in flow.graph.ties))
        self.spread = {v for op in ops if op.name in ("broadcast_in_dim", "iota") for v in op.outputs}
        self.maker = {v: i for i in self.alive for v in ops[i].outputs} if self.cpu else {}
        self.calls = self.library_calls() if self.cpu else {}
        """Ops that a call of the library computes, and the one whose result it gives."""
        self.called = frozenset(self.calls.values())
        self.sources = {} if self.cpu else self.large_sources()
        """Not on CPU: for what an elementwise op makes, the values as large that it is computed from in the end."""
        self.homes: dict[int, tuple[int, ...]] = {}
        """For each op those inside which it is computed, or itself."""
        self.anew: dict[int, frozenset[int]] = {}
        """Of a value that is stored for some of its readers, the others: they compute it anew."""
        self.can: dict[int, bool] = {}
        self.after: list[int] = []
        self.shown: set[int] = set()
        """On CPU: what a view gives that a product, a collective or a library needs in memory. What it is of is computed as
        it is written, if it can be."""
        self.later: set[int] = set()
        """Ops that are computed in others."""
        self.repeated: set[int] = set()
        """Ops that read an element of an operand more than once, or are computed inside such."""

    def fusion(self) -> Fusion:
        graph, later = self.graph, self.later
        for i in reversed(range(len(graph.ops))):
            if i in self.alive:
                homes = self.computed_in(i, graph.ops[i])
                self.homes[i] = homes if homes is not None else (i,)
                own = graph.ops[i]
                if own.name in _SPREADS or (homes is not None and self.repeats(own.outputs[0])):
                    self.repeated.add(i)
                if homes is not None:
                    later.add(i)
                if graph.ops[i].outputs and (again := self.anew.get(graph.ops[i].outputs[0])):
                    self.homes[i] = tuple(dict.fromkeys([i, *[home for r in again for home in self.homes[r]]]))
        self.seen_through()
        stored = set(graph.inputs).union(b for _, b in graph.ties).difference(*(op.outputs for op in graph.ops))
        views: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of what a view gives: what it is of, and the views on the way."""
        lies: dict[int, tuple[int, ...]] = {}
        done: dict[int, tuple[int, ...]] = {}
        reads: list[tuple[int, ...]] = []
        inside: list[tuple[int, ...] | None] = []
        for i, op in enumerate(graph.ops):
            if i not in self.alive:
                reads.append(())
                inside.append(None)
                continue
            under: dict[int, None] = {}
            first: dict[int, None] = {}
            for v in op.inputs:
                v, through = views.get(v, (v, ()))
                if v in lies and (v not in self.anew or i in self.anew[v]):
                    under.update(dict.fromkeys(lies[v]))
                    first.update(dict.fromkeys(done[v]))
                elif v in stored:
                    under[v] = None
                first.update(dict.fromkeys(through))
            below, before = tuple(under), tuple(first)
            if op.outputs and op.outputs[0] in self.anew:
                lies[op.outputs[0]] = below
                done[op.outputs[0]] = (*before, i)
            if i in later and self.anew and is_view(self.flow, op):
                v, through = views.get(op.inputs[0], (op.inputs[0], ()))
                views[op.outputs[0]] = v, (*through, i)
                reads.append(())
                inside.append(None)
            elif i in later:
                lies[op.outputs[0]] = below
                done[op.outputs[0]] = (*before, i)
                reads.append(())
                inside.append(None)
            else:
                stored.update(op.outputs)
                reads.append(below)
                inside.append(before)
        stored.update(b for _, b in graph.ties if b not in lies)
        return Fusion(
            frozenset(stored),
            tuple(reads),
            tuple(inside),
            frozenset(range(len(graph.ops))) - self.alive,
            self.narrowed(stored) if self.tpu else frozenset(),
        )

    def large_sources(self) -> dict[int, frozenset[int]]:
        """Of what is computed from one large value, through however many ops, each reader can do so again."""
        found: dict[int, frozenset[int]] = {}
        for i, op in enumerate(self.graph.ops):
            if i not in self.alive or len(op.outputs) != 1 or op.name not in _READERS | VIEWS:
                continue
            value = op.outputs[0]
            size = math.prod(self.graph.values[value].shape)
            parts = [found.get(v, frozenset({v})) for v in dict.fromkeys(op.inputs) if v not in self.spread]
            large = frozenset(v for v in frozenset().union(*parts) if math.prod(self.graph.values[v].shape) >= size)
            several = len(large) > 1 and (len(self.readers.get(value, ())) > 1 or value in self.held)
            found[value] = frozenset({value}) if several or value in self.held else large
        return found

    def narrowed(self, stored: Collection[int]) -> frozenset[int]:
        """What products read, and nothing else but reductions, which run with the op that makes it."""
        found = set()
        for i in self.alive:
            op = self.graph.ops[i]
            if op.name not in _WRITES_NARROW or op.outputs[0] not in stored or op.outputs[0] in self.held:
                continue
            if self.graph.values[op.outputs[0]].dtype == "f32":
                names = self.final_readers(op.outputs[0])
                if names & PRODUCTS and names <= PRODUCTS | {"reduce"}:
                    found.add(op.outputs[0])
        return frozenset(found) | self.narrow_stacks()

    def narrow_stacks(self) -> set[int]:
        """What a loop stacks for products after it, under all its names."""
        tied: dict[int, list[int]] = {}
        for a, b in self.graph.ties:
            tied.setdefault(a, []).append(b)
        makers = {v: self.graph.ops[i].name for i in self.alive for v in self.graph.ops[i].outputs}
        found: set[int] = set()
        for i in self.alive:
            op = self.graph.ops[i]
            if op.name != "while":
                continue
            for start, back, result in zip(op.inputs, op.inputs[len(op.outputs) :], op.outputs, strict=False):
                stacks = makers.get(back) == "dynamic_update_slice" and makers.get(start) == "broadcast_in_dim"
                if not stacks or self.graph.values[result].dtype != "f32" or result in self.held:
                    continue
                names = self.final_readers(result, ("dynamic_slice",))
                if names and names <= PRODUCTS:
                    found.update((start, back, result, *tied.get(start, ())))
        return found

    def final_readers(self, value: int, also: Collection[str] = ()) -> set[str]:
        """Names of the ops that read a value, behind views and turns of it, and ops of the names in `also`."""
        names: set[str] = set()
        for r in self.readers.get(value, ()):
            op = self.graph.ops[r]
            passes = (is_view(self.flow, op) or op.name in ("transpose", *also)) and op.outputs[0] not in self.held
            names |= self.final_readers(op.outputs[0], also) if passes else {op.name}
        return names

    def computed_in(self, i: int, op: Op) -> tuple[int, ...] | None:
        """The ops inside which op `i` is computed, or None where it runs by itself."""
        if len(op.outputs) != 1 or (op.outputs[0] in self.held and (not self.cpu or is_view(self.flow, op))):
            return None
        if i in self.calls:
            return None if self.calls[i] == i else (self.calls[i],)
        if op.name not in _INSIDE:
            return None
        value = op.outputs[0]
        readers = self.readers.get(value, [])
        if op.name == "broadcast_in_dim" and op.inputs[0] not in self.made:  # of a constant
            readers = [r for r in readers if not _passes(self.graph.ops[r], value)]
        if len(readers) == 1:
            homes = self.homes[readers[0]]
        else:
            homes = tuple(dict.fromkeys([home for r in readers for home in self.homes[r]]))
        if is_view(self.flow, op):
            return self.written_through(op, readers, homes) if self.cpu else homes
        if self.cpu:
            return self.computed_on_cpu(op, self.final_users(readers), homes)
        if self.tpu and op.name in PRODUCTS:
            return homes if len(homes) == 1 and self.can_finish(self.graph.ops[homes[0]]) else None
        if op.name in VIEWS or op.name in PRODUCTS:
            return None
        if len(homes) > _MOST or not all(self.can_read(r) for r in readers):
            return None
        again = self.sources[value] - {value}
        return homes if len(homes) <= 1 or (value not in self.sources[value] and len(again) <= 1) else None

    def written_through(self, op: Op, readers: Sequence[int], homes: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in`, of a view on CPU: it is an op of its own, in which what it is of is computed, where a reader needs it
        in memory. Where that is stored itself, `seen_through` takes it back."""
        inner = [r for r in readers if r not in self.calls and self.can_read(r)]
        before, after = (self.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
        if len(inner) == len(readers) or not (op.name == "bitcast" or (op.name == "reshape" and before != after)):
            return homes
        if inner:
            self.anew[op.outputs[0]] = frozenset(inner)
        self.shown.add(op.outputs[0])
        return None

    def seen_through(self) -> None:
        """Views of what is stored itself are nothing."""
        for i in sorted(self.alive):
            value = self.graph.ops[i].outputs[0] if self.graph.ops[i].outputs else -1
            if value not in self.shown:
                continue
            source = self.graph.ops[i].inputs[0]
            while (made := self.maker.get(source, -1)) in self.later and is_view(self.flow, self.graph.ops[made]):
                source = self.graph.ops[made].inputs[0]
            if made not in self.later and i not in self.anew.get(source, ()):
                self.anew.pop(value, None)
                self.later.add(i)

    def repeats(self, value: int) -> bool:
        """Whether an op that reads a value does so more than once for an element, itself or that inside which it is computed."""
        return any(r in self.repeated for r in self.readers.get(value, ()))

    def final_users(self, readers: Sequence[int]) -> list[int]:
        """The ops that read a value, also behind views of it that are no results."""
        found: list[int] = []
        for r in readers:
            op = self.graph.ops[r]
            through = is_view(self.flow, op) and op.outputs[0] not in self.held and op.outputs[0] not in self.shown
            found += self.final_users(self.readers.get(op.outputs[0], ())) if through else [r]
        return found

    def computed_on_cpu(self, op: Op, users: Sequence[int], homes: tuple[int, ...]) -> tuple[int, ...] | None:
        """`computed_in`, as XLA's CPU backend does it: what some readers need in memory, others may still compute anew."""
        value = op.outputs[0]
        if op.name in VIEWS or op.name in PRODUCTS:
            return None
        spreads = op.name == "broadcast_in_dim"  # the library does so itself
        inner = [r for r in users if (spreads or r not in self.calls) and self.can_read(r)]
        if not inner:
            return None
        is_whole = len(inner) == len(users) and value not in self.held
        if is_whole and len(homes) <= 1:
            return homes if op.name not in _ONCE or not self.repeats(value) else None
        if op.name in _ONCE:
            return None
        if not self.is_unary(op) and (
            not is_whole or any(self.follows(home) >> r & 1 for home in homes for r in users)
        ):
            return None
        if not is_whole:
            homes = tuple(dict.fromkeys([home for r in inner for home in self.homes[r]]))
        if len(homes) > _MOST:
            return None
        if is_whole:
            return homes
        self.anew[value] = frozenset(inner)
        return None

    def follows(self, i: int) -> int:
        """The ops that need what op `i` makes, however many others lie between: a bit for each."""
        if not self.after:
            self.after = [0] * len(self.graph.ops)
            for j in reversed(range(len(self.after))):
                for v in self.graph.ops[j].outputs:
                    for r in self.readers.get(v, ()):
                        self.after[j] |= 1 << r | self.after[r]
        return self.after[i]

    def is_unary(self, op: Op) -> bool:
        """Whether at most one operand that is no broadcast is as large as the result."""
        size = math.prod(self.graph.values[op.outputs[0]].shape)
        large = [v for v in set(op.inputs) if math.prod(self.graph.values[v].shape) >= size and v not in self.spread]
        return len(large) <= 1

    def can_finish(self, op: Op) -> bool:
        """Whether a product can be computed inside this op: each element of its result is needed where it is made."""
        return op.name in ELEMENTWISE and len(op.outputs) == 1

    def library_calls(self) -> dict[int, int]:
        """What calls of XLA's CPU library compute, the last reduction's first, each with the op whose result its call gives."""
        found: dict[int, int] = {}
        for i in sorted(self.alive, reverse=True):
            if i not in found and self.is_summed(i):
                root, inside = i, {i}
                ahead = [i]
                while True:
                    while ahead:
                        for v in self.graph.ops[ahead.pop()].inputs:
                            j = self.maker.get(v, -1)
                            if j >= 0 and j not in inside and self.can_join(j, i, found) and self.only_in(j, inside):
                                inside.add(j)
                                ahead.append(j)
                    way = self.on(root, i, found)
                    if not way:
                        break
                    inside.update(way)
                    ahead = list(inside)
                    root = way[-1]
                found.update(dict.fromkeys(inside, root))
        return found

    def on(self, i: int, first: int, taken: Collection[int]) -> list[int]:
        """The op that alone reads what op `i` makes, where the library that began with `first` computes it too, behind broadcasts
        and views of it."""
        way: list[int] = []
        while True:
            (value,) = self.graph.ops[i].outputs
            readers = self.readers.get(value, ())
            if len(readers) != 1 or value in self.held or not self.can_join(readers[0], first, taken):
                return []
            i = readers[0]
            way.append(i)
            op = self.graph.ops[i]
            if op.name != "broadcast_in_dim" and not is_view(self.flow, op):
                return way

    def only_in(self, i: int, inside: Collection[int]) -> bool:
        """Whether nothing but the ops in `inside` reads what op `i` makes."""
        (value,) = self.graph.ops[i].outputs
        return value not in self.held and all(r in inside for r in self.readers.get(value, ()))

    def can_join(self, i: int, first: int, taken: Collection[int]) -> bool:
        """Whether the library's call that began with op `first` can compute op `i` too."""
        op, begun = self.graph.ops[i], self.graph.ops[first]
        if i in taken or len(op.outputs) != 1 or op.trips != begun.trips:
            return False
        if op.form and begun.form and op.form[1] != begun.form[1]:
            return False
        if is_view(self.flow, op) or op.name == "broadcast_in_dim" or self.is_summed(i):
            return True
        if op.name == "dot_general":
            return self.is_library_product(op)
        (value,) = op.outputs
        return op.name in _LIBRARY and math.prod(self.flow.local_shape(value)) >= BY_LIBRARY

    def is_library_product(self, op: Op) -> bool:
        """Whether a product is the library's: of `f32`, and its left operand's summed dim does not stand before its free one."""
        if any(self.graph.values[v].dtype != "f32" for v in (*op.inputs, *op.outputs)) or op.rule is None:
            return False
        left = op.rule.operands[0]
        summed = [d for side, d in op.reduced if side == 0]
        free = [d for d, dim in enumerate(left) if dim and not any(dim[0] in other for other in op.rule.operands[1])]
        return len(free) != 1 or len(summed) != 1 or summed[0] > free[0]

    def is_summed(self, i: int) -> bool:
        """Whether op `i` is a reduction that is left to the library."""
        op = self.graph.ops[i]
        if op.name != "reduce" or len(op.outputs) != 1:
            return False
        return (self.graph.values[op.inputs[0]].dtype == "f32"
                and math.prod(self.flow.local_shape(op.inputs[0])) >= BY_LIBRARY)  # fmt: skip

    def can_read(self, i: int) -> bool:
        """Whether what an op reads can be computed inside it."""
        if i not in self.can:
            self.can[i] = self.can_run_with(i)
        return self.can[i]

    def can_run_with(self, i: int) -> bool:
        op = self.graph.ops[i]
        if i in self.called:
            return True
        if self.tpu and op.name in _READERS_ON_TPU:
            return True
        if is_view(self.flow, op):  # as its own readers do
            if op.outputs[0] in self.shown:
                return True
            following = self.readers.get(op.outputs[0], ())
            return op.outputs[0] not in self.held and bool(following) and all(map(self.can_read, following))
        if op.name == "reduce" and self.cpu:
            shape = self.flow.local_shape(op.inputs[0])
            return len(op.outputs) > 1 or all(shape[d] <= BY_TREE for _, d in op.reduced)
        if op.name == "reduce":  # over other dims XLA wants its operand in memory
            rank = len(self.graph.values[op.inputs[0]].shape)
            return any(d == rank - 1 for _, d in op.reduced)
        return op.name in _READERS


def is_view(flow: Flow, op: Op) -> bool:
    """Whether an op's result lies where its operand does."""
    if op.name in CUTS:
        return flow.local_bytes(op.outputs[0]) == flow.local_bytes(op.inputs[0])
    return op.name in VIEWS and len(op.outputs) == 1


def _alive(graph: Graph) -> frozenset[int]:
    """Ops whose results are needed."""
    needed = set(graph.outputs)
    alive = set()
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if not op.outputs or not needed.isdisjoint(op.outputs) or "custom_call" in op.name:
            alive.add(i)
            needed.update(op.inputs)
    return frozenset(alive)


def _passes(op: Op, value: int) -> bool:
    """A loop hands the value round unchanged: XLA makes a constant anew inside."""
    n = len(op.outputs)
    return op.name == "while" and all(op.inputs[k + n] == value for k in range(n) if op.inputs[k] == value)
