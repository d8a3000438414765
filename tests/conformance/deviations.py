"""Where this library differs from MindSpore on purpose, and why.

`ROWS` is read from the top; the first row whose `when` holds decides what a case does here. `when` looks at what a case
asks for (`Ask`), never at its name. A case without a row does what MindSpore does.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance.facts import Case, LayoutFact

ACCEPTS = "accepts"
"""Accepted here, with the slices that the cuts say and the right result."""
REFUSES = "refuses"
"""A `ShardError` here."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a case asks for: the shapes of the arguments, an entry for each, and how their dims belong together."""

    case: Case
    shapes: tuple[tuple[int, ...], ...] = ()
    entries: Any = ()
    letters: tuple[str, ...] = ()
    out: Any = None
    needs: tuple[str, ...] = ()
    """Attributes that MindSpore wants set."""
    lays_result: bool = False
    """MindSpore takes an out_strategy for this operator."""
    speaks_of_result: bool = False
    """MindSpore's entry holds cuts of the result."""

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...] | None:
        """The cuts of each argument, where every entry is ints or a layout."""
        entries = self.entries if isinstance(self.entries, tuple) else (None,)
        found = tuple(e.cuts if isinstance(e, LayoutFact) and e.map is not None else e for e in entries)
        if len(found) != len(self.shapes):
            return None
        good = all(isinstance(c, tuple) and all(type(k) is int and k > 0 for k in c) for c in found)
        return found if good else None

    @property
    def cuts_here(self) -> tuple[tuple[int, ...], ...]:
        """The cuts of each argument as this library reads them: None is data parallel."""
        found = []
        for shape, said in zip(self.shapes, self.entries, strict=True):
            fits = bool(shape) and shape[0] % self.case.devices == 0
            default = (self.case.devices if fits else 1, *(1,) * (len(shape) - 1)) if shape else ()
            found.append(default if said is None else said.cuts if isinstance(said, LayoutFact) else said)
        return tuple(found)

    @property
    def fits(self) -> bool:
        """Each argument's cuts fit its shape and the devices; nothing is said of the arguments together."""
        results = [c.cuts if isinstance(c, LayoutFact) else c for c in self.out or ()]
        return self.fits_shapes and all(self.case.devices % math.prod(c) == 0 for c in (*(self.cuts or ()), *results))

    @property
    def fits_shapes(self) -> bool:
        """Each argument's cuts fit its shape."""
        return self.cuts is not None and all(
            len(shape) == len(cuts) and all(n % c == 0 for n, c in zip(shape, cuts, strict=True))
            for shape, cuts in zip(self.shapes, self.cuts, strict=True)
        )

    @property
    def dims(self) -> Iterator[tuple[str, int]]:
        """Letter and cut of every dim; those that stand alone are left out."""
        for letters, cuts in zip(self.letters, self.cuts or (), strict=False):
            yield from ((a, c) for a, c in zip(letters, cuts, strict=True) if a != ".")

    @property
    def classes(self) -> dict[str, set[int]]:
        """The cuts that each class of dims is given."""
        found: dict[str, set[int]] = {}
        for letter, cut in self.dims:
            found.setdefault(letter, set()).add(cut)
        return found

    @property
    def kwargs(self) -> dict[str, Any]:
        return ast.literal_eval(self.case.kwargs or "{}")

    @property
    def layouts(self) -> tuple[LayoutFact, ...]:
        return tuple(e for e in self.entries or () if isinstance(e, LayoutFact))


@dataclasses.dataclass(frozen=True)
class Row:
    """One deviation."""

    name: str
    when: Callable[[Ask], bool]
    does: str
    why: str

    def __str__(self) -> str:
        return self.name


def row_of(ask: Ask) -> Row | None:
    """The first row that speaks of a case."""
    return next((row for row in ROWS if row.when(ask)), None)


def refused(when: Callable[[Ask], bool]) -> Callable[[Ask], bool]:
    """MindSpore refuses the case, though the cuts of each argument fit it."""
    return lambda ask: not ask.case.accepted and ask.fits and when(ask)


def along_is_cut(ask: Ask) -> bool:
    return any(letter.isupper() and cut > 1 for letter, cut in ask.dims)


def tied_differ(ask: Ask) -> bool:
    return any(len(cuts) > 1 for cuts in ask.classes.values())


def too_many_together(ask: Ask) -> bool:
    return ask.case.devices % math.prod(max(cuts) for cuts in ask.classes.values()) != 0


def dropped(ask: Ask) -> bool:
    """MindSpore accepts the case and lays out nothing."""
    return ask.case.accepted and bool(ask.case.inputs) and not any(held_in(ask.case))


def held_in(case: Case) -> tuple[Any, ...]:
    return tuple(case.inputs.values()) if isinstance(case.inputs, dict) else case.inputs


def says_none(ask: Ask) -> bool:
    return any(isinstance(entries, tuple) and None in entries for entries in (ask.entries, ask.out))


def several_data_dims(ask: Ask) -> bool:
    data = ask.case.ctx.get("dataset_strategy")
    return isinstance(data, tuple) and any(sum(cut > 1 for cut in cuts) > 1 for cuts in data)


def names_nothing(ask: Ask) -> bool:
    plan = ast.literal_eval(ask.case.plan or "{}")
    return isinstance(plan, dict) and any(not isinstance(ask.case.inputs, dict) or path.removeprefix("self.")
               .removeprefix("net.") not in ask.case.shapes for path in plan)


ROWS = (
    Row(
        "one device", lambda ask: ask.case.devices == 1 and not ask.case.accepted and ask.fits_shapes, ACCEPTS,
        "on one device a strategy is checked against the shapes, and the function runs unsharded",
    ),
    Row(
        "any device count", refused(lambda ask: ask.case.devices not in (1, 2, 4) and ask.case.devices % 8 != 0),
        ACCEPTS, "MindSpore wants 1, 2, 4 or a multiple of 8 devices; a mesh can have any size",
    ),
    Row(
        "strategy dropped", lambda ask: dropped(ask) and ask.fits, ACCEPTS,
        "MindSpore drops the strategy of this operator without a word; here the argument is cut as asked",
    ),
    Row(
        "bad strategy dropped", lambda ask: dropped(ask) and not ask.fits, REFUSES,
        "MindSpore drops the strategy of this operator before it is checked; here it is checked",
    ),
    Row(
        "uneven rows", lambda ask: "manual_split" in ask.case.attrs, ACCEPTS,
        "manual_split gives an embedding table rows of uneven number, which is no cut; the cuts beside it are even",
    ),
    Row(
        "no target needed", refused(lambda ask: not {*ask.needs} <= {*ask.case.attrs}), ACCEPTS,
        "MindSpore has this operator for one target only; XLA has it for all",
    ),
    Row(
        "repeats cut", refused(lambda ask: ask.speaks_of_result), ACCEPTS,
        "MindSpore cuts the number of repeats; here the result itself is cut, as far as its size allows",
    ),
    Row(
        "out_strategy for any function", refused(lambda ask: ask.out is not None and not ask.lays_result), ACCEPTS,
        "MindSpore lays out the results of a few operators; here every result can be",
    ),
    Row(
        "out_strategy alone", lambda ask: not ask.case.accepted and ask.entries is None and ask.out is not None, ACCEPTS,
        "what in_strategy leaves out is AUTO",
    ),
    Row(
        "working dim cut", refused(along_is_cut), ACCEPTS,
        "MindSpore wants the dims whole that the operator works along; XLA gathers or exchanges where it must",
    ),
    Row(
        "tied dims cut differently", refused(tied_differ), ACCEPTS,
        "MindSpore wants dims that belong together cut alike; here one takes part of the other's axes, XLA reshards",
    ),
    Row(
        "more pieces than devices", refused(too_many_together), ACCEPTS,
        "MindSpore multiplies the cuts of all arguments; here classes share axes where the device count forces it",
    ),
)  # fmt: skip
