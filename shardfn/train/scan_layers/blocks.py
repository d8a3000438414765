"""Equal blocks of a program: runs of equations that repeat, with nothing different but what they read.

A program is a jaxpr as a flat list of steps: what was called in it once (`jit` around the whole loss) is opened, what is
done to a parameter alone (a cast) stands where it is first used, what picks from a value where that is made. Steps are
equal by primitive, parameters and shapes; that they are wired alike is checked position by position.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from shardfn.ir.rewrite import inner


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation: what it reads (numbers of values, or literals) and makes."""

    eqn: Any
    reads: tuple[Any, ...]
    makes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr with numbered values: the inputs first, then constants, then what steps make."""

    inputs: int
    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    avals: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How the blocks of a run read: for each step of a block and each of its inputs, a pair of a kind and where.

    Kinds: "literal"; "local", a step of the same block and its output; "carried", the position among `carried`; "fixed",
    a value from before that all blocks read; "scanned", the position among `scanned`.
    """

    slots: tuple[tuple[tuple[str, Any], ...], ...]
    carried: tuple[tuple[int, int, int], ...]
    """Step and output of the block before, and the value that the first block reads in its place."""
    scanned: tuple[tuple[Any, ...], ...]
    """What each block reads there: values from before, or literals."""


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` blocks of `period` steps from `start` on."""

    start: int
    period: int
    count: int
    wiring: Wiring

    @property
    def stop(self) -> int:
        """The first step after it."""
        return self.start + self.period * self.count


def program(closed: Any, alone: int = 0) -> Program:
    """A closed jaxpr as a program; the first `alone` inputs are parameters."""
    once = collections.Counter(id(e.params["jaxpr"]) for e in closed.jaxpr.eqns if _is_call(e))
    avals: list[Any] = []

    def new(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    numbers = {v: new(v.aval) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars)}
    consts, steps = list(closed.consts), []
    places = list(range(len(closed.jaxpr.invars), len(numbers)))

    def walk(jaxpr: Any, of: dict[Any, Any]) -> None:
        for eqn in jaxpr.eqns:
            reads = tuple(v if isinstance(v, core.Literal) else of[v] for v in eqn.invars)
            if _is_call(eqn) and once[id(eqn.params["jaxpr"])] <= 1:
                opened = eqn.params["jaxpr"]
                for e in opened.jaxpr.eqns:
                    if _is_call(e):
                        once[id(e.params["jaxpr"])] += 1
                within = dict(zip(opened.jaxpr.invars, reads, strict=True))
                for v, value in zip(opened.jaxpr.constvars, opened.consts, strict=True):
                    place = new(v.aval)
                    within[v] = place
                    consts.append(value)
                    places.append(place)
                walk(opened.jaxpr, within)
                of |= {v: _of(within, w) for v, w in zip(eqn.outvars, opened.jaxpr.outvars, strict=True)}
            else:
                made = tuple(new(v.aval) for v in eqn.outvars)
                of |= dict(zip(eqn.outvars, made, strict=True))
                steps.append(Step(eqn, reads, made))

    walk(closed.jaxpr, numbers)
    outputs = tuple(_of(numbers, v) for v in closed.jaxpr.outvars)
    held = tuple(zip(places, consts, strict=True))
    return Program(len(closed.jaxpr.invars), held, tuple(_sunk(_hoisted(steps), alone, outputs)), outputs, tuple(avals))


def _of(numbers: dict[Any, Any], v: Any) -> Any:
    return v if isinstance(v, core.Literal) else numbers[v]


def _is_call(eqn: Any) -> bool:
    """Whether it is a `jit` that says nothing of layouts."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all("Unspecified" in type(s).__name__ for s in said)


_PICKS = frozenset({"slice", "squeeze"})


def _hoisted(steps: list[Step]) -> list[Step]:
    """The steps, with what picks from a value moved to where that is made: `keys[i]` says which block it is in."""
    after: dict[int, list[Step]] = collections.defaultdict(list)
    made = {value for step in steps for value in step.makes}
    first: list[Step] = []
    rest: list[Step] = []
    for step in steps:
        if step.eqn.primitive.name not in _PICKS:
            rest.append(step)
        elif step.reads[0] in made:
            after[step.reads[0]].append(step)
        else:
            first.append(step)

    def with_picks(step: Step) -> Iterator[Step]:
        yield step
        for value in step.makes:
            for pick in after.get(value, ()):
                yield from with_picks(pick)

    return [each for step in (*first, *rest) for each in with_picks(step)]


def _sunk(steps: list[Step], alone: int, outputs: Sequence[Any]) -> Iterator[Step]:
    """The steps, with what is done to one parameter alone moved to where it is first read."""
    waiting: dict[int, Step] = {}
    roots: dict[int, int] = {i: i for i in range(alone)}

    def placed(value: Any) -> Iterator[Step]:
        if not isinstance(value, core.Literal) and (step := waiting.get(value)):
            for made in step.makes:
                waiting.pop(made, None)
            for v in step.reads:
                yield from placed(v)
            yield step

    for step in steps:
        values = [v for v in step.reads if not isinstance(v, core.Literal)]
        if len(values) == 1 and values[0] in roots and not step.eqn.effects and not inner(step.eqn):
            for made in step.makes:
                roots[made], waiting[made] = roots[values[0]], step
            continue
        for v in step.reads:
            yield from placed(v)
        yield step
    for v in outputs:
        yield from placed(v)


# ---- equal steps


def tokens(made: Program) -> list[int]:
    """A number for each step, the same for steps that are equal."""
    kinds: dict[Any, list[tuple[Any, int]]] = {}
    found: list[int] = []
    count = 0
    for i, step in enumerate(made.steps):
        key = (
            step.eqn.primitive.name,
            tuple(_text(v) for _, v in sorted(step.eqn.params.items())),
            tuple(str(v.aval) if isinstance(v, core.Literal) else str(made.avals[v]) for v in step.reads),
            tuple(isinstance(v, core.Literal) for v in step.reads),
            i if step.eqn.effects else None,  # what has effects is like nothing else
        )
        for params, number in kinds.setdefault(key, []):
            if all(_alike(params[k], v) for k, v in step.eqn.params.items()):
                found.append(number)
                break
        else:
            kinds[key].append((step.eqn.params, count))
            found.append(count)
            count += 1
    return found


def _text(value: Any) -> Any:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return _jaxpr_text(value)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return re.sub(r"0x[0-9a-f]+", "", str(value))


@functools.lru_cache(maxsize=4096)
def _jaxpr_text(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _alike(a: Any, b: Any, depth: int = 6) -> bool:
    """Whether two parameters whose texts are equal mean the same: functions by their code and what they close over."""
    if a is b or depth == 0:
        return True
    if isinstance(a, core.ClosedJaxpr | core.Jaxpr) and type(a) is type(b):
        consts = zip(getattr(a, "consts", ()), getattr(b, "consts", ()), strict=True)
        pairs = zip(a.eqns, b.eqns, strict=True)
        return all(x is y for x, y in consts) and all(
            _alike(e.params[k], f.params.get(k), depth) for e, f in pairs for k in e.params
        )
    if isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType):
        if a.__code__ is not b.__code__ or not _alike(a.__defaults__, b.__defaults__, depth - 1):
            return False
        cells = zip(a.__closure__ or (), b.__closure__ or (), strict=True)
        return all(_alike(_cell(x), _cell(y), depth - 1) for x, y in cells)
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return _alike(
            (a.func, a.args, tuple(a.keywords.items())), (b.func, b.args, tuple(b.keywords.items())), depth - 1
        )
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_alike(x, y, depth) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | int | float | complex | str | bytes | None.__class__):
        return type(a) is type(b) and a == b
    if isinstance(a, np.generic | np.ndarray):
        return type(a) is type(b) and bool(np.array_equal(a, b))
    if hasattr(a, "shape") and hasattr(a, "addressable_shards"):
        return False  # two arrays on devices: what is in them is not compared
    if type(a).__name__ == "WrappedFun":
        return _alike(getattr(a, "f", None), getattr(b, "f", None), depth - 1) and _alike(
            getattr(a, "f_transformed", None), getattr(b, "f_transformed", None), depth - 1
        )
    return type(a) is type(b)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# ---- runs


def runs(made: Program, numbers: Sequence[int] | None = None) -> list[Run]:
    """The runs of equal blocks, none of which overlap, in program order; the longest were chosen first."""
    row = np.array(tokens(made) if numbers is None else numbers, np.int64)
    found: list[Run] = []
    ranges = [(0, len(row))]
    while ranges:
        low, high = ranges.pop()
        best = _best(made, row, low, high)
        if best is not None:
            found.append(best)
            ranges += [(low, best.start), (best.stop, high)]
    return sorted(found, key=lambda run: run.start)


def _best(made: Program, numbers: np.ndarray, low: int, high: int) -> Run | None:
    part = numbers[low:high]
    size = len(part)
    candidates: list[tuple[int, int, int, int]] = []  # steps saved, period, from, equal in a row
    for period in range(1, size // 2 + 1):
        equal = np.concatenate([[0], part[:-period] == part[period:], [0]]).astype(np.int8)
        ends = np.flatnonzero(np.diff(equal))
        for a, b in zip(ends[::2], ends[1::2], strict=True):
            if b - a >= period:
                candidates.append((int((b - a) // period * period), period, low + int(a), int(b - a)))
    for saved, period, first, length in sorted(candidates, key=lambda c: (-c[0], c[1]))[:200]:
        count = saved // period + 1
        options = []
        for start in range(first, first + length % period + 1):
            wiring = _wired(made, start, period, count)
            if wiring is not None:
                weight = sum(int(np.prod(made.avals[init].shape)) for *_, init in wiring.carried)
                options.append((weight, start, wiring))
        if not options and count > 2:  # one block less, and any turn of it
            for start in range(first, first + period):
                if start + period * (count - 1) <= first + length + period:
                    wiring = _wired(made, start, period, count - 1)
                    if wiring is not None:
                        weight = sum(int(np.prod(made.avals[init].shape)) for *_, init in wiring.carried)
                        options.append((weight, start, wiring))
            count -= 1
        if options:
            _, start, wiring = min(options, key=lambda o: o[:2])
            run = Run(start, period, count, wiring)
            if any(is_parameter(made, v) for slot in wiring.scanned for v in slot):
                return run
    return None


def is_parameter(made: Program, value: Any) -> bool:
    """Whether a value is an input of the program."""
    return not isinstance(value, core.Literal) and value < made.inputs


def _wired(made: Program, start: int, period: int, count: int) -> Wiring | None:
    """How the blocks read, if all do alike."""
    steps = made.steps
    where: dict[int, tuple[int, int, int]] = {}
    for j in range(count):
        for r in range(period):
            for o, value in enumerate(steps[start + j * period + r].makes):
                where[value] = j, r, o
    carried: dict[tuple[int, int, int], int] = {}
    scanned: dict[Any, tuple[int, tuple[Any, ...]]] = {}

    def over(key: Any, read: list[Any]) -> tuple[str, int]:
        return "scanned", scanned.setdefault(key, (len(scanned), tuple(read)))[0]

    rows: list[tuple[tuple[str, Any], ...]] = []
    for r in range(period):
        row: list[tuple[str, Any]] = []
        for slot in range(len(steps[start + r].reads)):
            read = [steps[start + j * period + r].reads[slot] for j in range(count)]
            if isinstance(read[0], core.Literal):
                if all(_same_literal(read[0], v) for v in read):
                    row.append(("literal", read[0]))
                elif all(np.ndim(v.val) == 0 for v in read):
                    row.append(over(("literals", *(str(v.val) for v in read), str(read[0].aval)), read))
                else:
                    return None
                continue
            homes = [where.get(v) for v in read]
            inside = [h for h in homes if h is not None]
            if len(inside) == count and all(h == (j, *homes[0][1:]) for j, h in enumerate(homes)):  # type: ignore[index]
                row.append(("local", homes[0][1:]))  # type: ignore[index]
            elif homes[0] is None and len(inside) == count - 1 and _one_before(homes):
                _, step, output = inside[0]
                if made.avals[read[0]].str_short() != made.avals[read[1]].str_short():
                    return None
                key = (step, output, read[0])
                row.append(("carried", carried.setdefault(key, len(carried))))
            elif not inside and all(v == read[0] for v in read):
                row.append(("fixed", read[0]))
            elif not inside:
                row.append(over(tuple(read), read))
            else:
                return None
        rows.append(tuple(row))
    return Wiring(tuple(rows), tuple(carried), tuple(read for _, read in scanned.values()))


def _one_before(homes: Sequence[Any]) -> bool:
    return all(h is not None and h[0] == j - 1 and h[1:] == homes[1][1:] for j, h in enumerate(homes) if j)


def _same_literal(a: Any, b: Any) -> bool:
    return a is b or (str(a.aval) == str(b.aval) and bool(np.all(np.asarray(a.val) == np.asarray(b.val))))
