"""Find repeated blocks: runs of equations that are equal but for the values they read.

Before the search the jaxpr is flattened. A `jit` that is called once is inlined, ops on one parameter alone (a cast) move to
their first reader, and slices move to where their operand is computed. Equations are equal by primitive, parameters and
shapes. Blocks repeat if each input of each equation comes from the same place in all of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from shardfn.ir.repeats import stretches, without_addresses
from shardfn.ir.rewrite import inner
from shardfn.train.flat_jaxpr import FlatEquation, FlatJaxpr, flatten_jaxpr


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Where the blocks of a run read each input: for each equation of a block, pairs of a kind and a place.

    Kinds: "literal"; "local", an equation of the same block and its output; "carried", an index into `carried`; "fixed",
    a value from before the run that all blocks read; "scanned", an index into `scanned`.
    """

    inputs: tuple[tuple[tuple[str, Any], ...], ...]
    carried: tuple[tuple[int, int, int], ...]
    """Equation and output of the block before, and the value that the first block reads instead."""
    scanned: tuple[tuple[Any, ...], ...]
    """What each block reads: values from before the run, or literals."""


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """`count` blocks of `period` equations from `start` on."""

    start: int
    period: int
    count: int
    wiring: Wiring

    @property
    def stop(self) -> int:
        """The first equation after the run."""
        return self.start + self.period * self.count


def flatten_for_blocks(closed: Any, params: int) -> FlatJaxpr:
    """Flatten a closed jaxpr, whose first `params` inputs are parameters, and order its equations for the search."""
    calls: collections.Counter[int] = collections.Counter()

    def count(jaxpr: Any) -> None:
        calls.update(id(e.params["jaxpr"]) for e in jaxpr.eqns if _is_plain_jit(e))

    def inlines(eqn: Any) -> bool:
        if not _is_plain_jit(eqn) or calls[id(eqn.params["jaxpr"])] > 1:
            return False
        count(eqn.params["jaxpr"].jaxpr)
        return True

    count(closed.jaxpr)
    flat = flatten_jaxpr(closed, params, inlines)
    return dataclasses.replace(flat, equations=tuple(_sink(_hoist(flat.equations), params, flat.outputs)))


def _is_plain_jit(eqn: Any) -> bool:
    """Whether an equation is a `jit` without shardings."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all("Unspecified" in type(s).__name__ for s in shardings)


_SLICES = frozenset({"slice", "squeeze"})


def _hoist(equations: Sequence[FlatEquation]) -> list[FlatEquation]:
    """Move slices to where their operand is computed: `keys[i]` tells which block it is in."""
    computed = {value for one in equations for value in one.outputs}
    after: dict[int, list[FlatEquation]] = collections.defaultdict(list)
    first: list[FlatEquation] = []
    rest: list[FlatEquation] = []
    for one in equations:
        is_slice = one.eqn.primitive.name in _SLICES
        (rest if not is_slice else after[one.inputs[0]] if one.inputs[0] in computed else first).append(one)

    def with_slices(one: FlatEquation) -> Iterator[FlatEquation]:
        yield one
        for value in one.outputs:
            for each in after.get(value, ()):
                yield from with_slices(each)

    return [each for one in (*first, *rest) for each in with_slices(one)]


def _sink(equations: Sequence[FlatEquation], params: int, outputs: Sequence[Any]) -> Iterator[FlatEquation]:
    """Move ops on one parameter alone to their first reader."""
    waiting: dict[int, FlatEquation] = {}
    roots: dict[int, int] = {i: i for i in range(params)}

    def needed(value: Any) -> Iterator[FlatEquation]:
        if not isinstance(value, core.Literal) and (one := waiting.get(value)):
            for output in one.outputs:
                waiting.pop(output, None)
            for v in one.reads:
                yield from needed(v)
            yield one

    for one in equations:
        if len(one.reads) == 1 and one.reads[0] in roots and not one.eqn.effects and not inner(one.eqn):
            for output in one.outputs:
                roots[output], waiting[output] = roots[one.reads[0]], one
            continue
        for v in one.reads:
            yield from needed(v)
        yield one
    for v in outputs:
        yield from needed(v)


# ---- equal equations


def tokens(flat: FlatJaxpr) -> list[int]:
    """A number for each equation, the same for equal ones."""
    numbers: dict[Any, int] = {}
    known: dict[tuple[int, int], int] = {}

    def number(value: Any, depth: int) -> int:
        """A number for a parameter, the same for equal ones."""
        at = id(value), depth
        if at not in known:
            known[at] = numbers.setdefault((type(value), key(value, depth)), len(numbers))
        return known[at]

    def key(value: Any, depth: int) -> Any:
        """What makes parameters equal: of functions the code and the closures, of other objects in closures the type."""
        if depth == 0:
            return None
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            inside = [number(eqn.params[name], depth) for eqn in value.eqns for name in sorted(eqn.params)]
            return _jaxpr_text(value), *map(id, getattr(value, "consts", ())), *inside
        if isinstance(value, types.FunctionType):
            inside = [value.__defaults__, *map(_cell, value.__closure__ or ())]
            return id(value.__code__), *(number(each, depth - 1) for each in inside)
        if isinstance(value, functools.partial):
            inside = [value.func, value.args, *value.keywords.values()]
            return tuple(value.keywords), *(number(each, depth - 1) for each in inside)
        if type(value).__name__ == "WrappedFun":
            return tuple(number(getattr(value, name, None), depth - 1) for name in ("f", "f_transformed"))
        if isinstance(value, tuple | list):
            return tuple(number(each, depth) for each in value)
        if isinstance(value, np.generic | np.ndarray):
            return str(value.dtype), value.shape, value.tobytes()
        if hasattr(value, "addressable_shards"):
            return id(value)  # the content of arrays on devices is not compared
        if isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        return without_addresses(value) if depth == _DEPTH else None

    found: list[int] = []
    for i, one in enumerate(flat.equations):
        token = (
            one.eqn.primitive.name,
            tuple((name, number(value, _DEPTH)) for name, value in sorted(one.eqn.params.items())),
            tuple(str(v.aval if isinstance(v, core.Literal) else flat.avals[v]) for v in one.inputs),
            tuple(isinstance(v, core.Literal) for v in one.inputs),
            i if one.eqn.effects else None,  # an equation with effects equals no other
        )
        found.append(numbers.setdefault(token, len(numbers)))
    return found


_DEPTH = 6
"""How deep the closures of functions are compared."""


_jaxpr_text = functools.lru_cache(maxsize=4096)(without_addresses)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# ---- runs


def find_runs(flat: FlatJaxpr) -> list[BlockRun]:
    """The runs of equal blocks, without overlap, in program order; the search takes the longest first."""
    numbers = np.array(tokens(flat), np.int64)
    found: list[BlockRun] = []
    ranges = [(0, len(numbers))]
    while ranges:
        low, high = ranges.pop()
        best = _longest_run(flat, numbers, low, high)
        if best is not None:
            found.append(best)
            ranges += [(low, best.start), (best.stop, high)]
    return sorted(found, key=lambda run: run.start)


def _longest_run(flat: FlatJaxpr, numbers: np.ndarray, low: int, high: int) -> BlockRun | None:
    part = numbers[low:high]
    candidates: list[tuple[int, int, int, int]] = []  # equations saved, period, start, equal in sequence
    for period in range(1, len(part) // 2 + 1):
        for first, length in stretches(part, period):
            if length >= period:
                candidates.append((length // period * period, period, low + first, length))
    for saved, period, first, length in sorted(candidates, key=lambda c: (-c[0], c[1]))[:200]:
        count = saved // period + 1
        run = _least_carried(flat, range(first, first + length % period + 1), period, count)
        if run is None and count > 2:  # one block less, from any equation of the first block
            starts = (s for s in range(first, first + period) if s + period * (count - 1) <= first + length + period)
            run = _least_carried(flat, starts, period, count - 1)
        if run is not None and any(
            not isinstance(v, core.Literal) and v < flat.inputs for slot in run.wiring.scanned for v in slot
        ):
            return run
    return None


def _least_carried(flat: FlatJaxpr, starts: Iterable[int], period: int, count: int) -> BlockRun | None:
    """Of the runs from these starts the one that carries the fewest elements from block to block."""
    runs = [BlockRun(s, period, count, w) for s in starts if (w := _wiring(flat, s, period, count)) is not None]
    carried = lambda run: sum(int(np.prod(flat.avals[init].shape)) for *_, init in run.wiring.carried)  # noqa: E731
    return min(runs, key=carried, default=None)


def _wiring(flat: FlatJaxpr, start: int, period: int, count: int) -> Wiring | None:
    """The wiring of these blocks, None where it differs between blocks."""
    blocks = [flat.equations[start + j * period : start + (j + 1) * period] for j in range(count)]
    homes_of = {
        v: (j, r, o) for j, block in enumerate(blocks) for r, one in enumerate(block) for o, v in enumerate(one.outputs)
    }
    carried: dict[tuple[int, int, int], int] = {}
    scanned: dict[Any, tuple[int, tuple[Any, ...]]] = {}

    def scan(key: Any, read: list[Any]) -> tuple[str, int]:
        return "scanned", scanned.setdefault(key, (len(scanned), tuple(read)))[0]

    def source(read: list[Any]) -> tuple[str, Any] | None:
        first = read[0]
        if isinstance(first, core.Literal):
            if all(_same_literal(first, v) for v in read):
                return "literal", first
            is_scalar = all(np.ndim(v.val) == 0 for v in read)
            return scan(("literals", *(str(v.val) for v in read), str(first.aval)), read) if is_scalar else None
        homes = [homes_of.get(v) for v in read]
        inside = [h for h in homes if h is not None]
        if not inside:
            return ("fixed", first) if all(v == first for v in read) else scan(tuple(read), read)
        if homes == [(j, *inside[0][1:]) for j in range(count)]:
            return "local", inside[0][1:]
        if homes == [None, *((j, *inside[0][1:]) for j in range(count - 1))]:
            if flat.avals[first].str_short() != flat.avals[read[1]].str_short():
                return None
            return "carried", carried.setdefault((*inside[0][1:], first), len(carried))
        return None

    rows: list[tuple[tuple[str, Any], ...]] = []
    for r in range(period):
        row = [source([block[r].inputs[i] for block in blocks]) for i in range(len(blocks[0][r].inputs))]
        if None in row:
            return None
        rows.append(tuple(each for each in row if each is not None))
    return Wiring(tuple(rows), tuple(carried), tuple(read for _, read in scanned.values()))


def _same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are the same bit by bit: NaN is NaN."""
    return str(a.aval) == str(b.aval) and np.asarray(a.val).tobytes() == np.asarray(b.val).tobytes()
