"""Where this library differs from MindSpore on purpose, and why.

`ROWS` is read from the top; the first row whose `when` holds decides what a case does here. `when` looks at what a case
asks for (`Ask`), never at its name. A case without a row does what MindSpore does.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance.facts import Case, LayoutFact

ACCEPTS = "accepts"
"""Accepted here, with the slices that the cuts say and the right result. Where MindSpore refuses, this library may too,
if the cuts of all arrays cannot be held by the devices together (`CLASH`)."""
REFUSES = "refuses"
"""A `ShardError` here."""
CLASH = "cannot hold together"
"""How that error says it."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a case asks for: the shapes of the arguments, an entry for each, and how their dims belong together."""

    case: Case
    shapes: tuple[tuple[int, ...], ...] = ()
    entries: Any = ()
    letters: tuple[str, ...] = ()
    out: Any = None
    results: tuple[tuple[int, ...], ...] = ()
    """Their shapes, where `out` says something."""
    needs: tuple[str, ...] = ()
    """Attributes that MindSpore wants set."""
    speaks_of_result: bool = False
    """MindSpore's entry holds cuts of the result."""

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...] | None:
        """The cuts of each argument, where every entry is ints or a layout, and there is one for each."""
        return whole_cuts(self.entries, len(self.shapes))

    @property
    def cuts_here(self) -> tuple[tuple[int, ...] | None, ...]:
        """The cuts of each argument as this library reads them: None is data parallel. What is left open is None."""
        return tuple(
            data_parallel(shape, self.case.devices) if said is None
            else said.cuts if isinstance(said, LayoutFact)
            else said if isinstance(said, tuple)
            else None
            for shape, said in zip(self.shapes, self.entries or ("open",) * len(self.shapes), strict=True)
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """The cuts fit each array by itself and the devices; nothing is said of the arrays together."""
        out = whole_cuts(self.out, len(self.results)) if self.out is not None else ()
        if self.cuts is None or out is None or not self.fits_shapes:
            return False
        placed = all(self.case.devices % math.prod(c) == 0 for c in (*self.cuts, *out))
        return placed and all(map(divides, self.results, out))

    @property
    def fits_shapes(self) -> bool:
        """The cuts fit the shape of each argument."""
        return self.cuts is not None and all(map(divides, self.shapes, self.cuts))

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


def whole_cuts(entries: Any, count: int) -> tuple[tuple[int, ...], ...] | None:
    """Entries as cuts, if there are `count` and each is a tuple of positive ints or a layout.

    >>> whole_cuts(((2, 1), (4,)), 2), whole_cuts(((True, 1),), 1), whole_cuts((None,), 1)
    (((2, 1), (4,)), None, None)
    """
    if not isinstance(entries, tuple) or len(entries) != count:
        return None
    found = tuple(e.cuts if isinstance(e, LayoutFact) and e.map is not None else e for e in entries)
    good = all(isinstance(cuts, tuple) and all(type(c) is int and c > 0 for c in cuts) for cuts in found)
    return found if good else None


def divides(shape: tuple[int, ...], cuts: tuple[int, ...]) -> bool:
    """Whether every dim has a cut that divides it."""
    return len(shape) == len(cuts) and all(n % c == 0 for n, c in zip(shape, cuts, strict=True))


def data_parallel(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Dim 0 over all devices where it divides, else whole.

    >>> data_parallel((8, 3), 4), data_parallel((3,), 4)
    ((4, 1), (1,))
    """
    whole = (1,) * len(shape)
    return (devices, *whole[1:]) if shape and shape[0] % devices == 0 else whole


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
    """The first row that speaks of a case. None does of uneven rows: `ms.Gather` accepts and refuses what MindSpore does."""
    return None if "manual_split" in ask.case.attrs else next((row for row in ROWS if row.when(ask)), None)


def refused(when: Callable[[Ask], bool]) -> Callable[[Ask], bool]:
    """MindSpore refuses the case, though the cuts fit each array."""
    return lambda ask: not ask.case.accepted and ask.fits and when(ask)


def along_is_cut(ask: Ask) -> bool:
    return any(letter.isupper() and cut > 1 for letter, cut in ask.dims)


def tied_differ(ask: Ask) -> bool:
    return any(len(cuts) > 1 for cuts in ask.classes.values())


def too_many_together(ask: Ask) -> bool:
    return ask.case.devices % math.prod(max(cuts) for cuts in ask.classes.values()) != 0


def dropped(ask: Ask) -> bool:
    """MindSpore accepts the case and lays out nothing."""
    return ask.case.accepted and bool(ask.case.held) and not any(ask.case.held)


def same_kind(ask: Ask) -> bool:
    """Layouts only, or none."""
    return len({isinstance(entry, LayoutFact) for entry in (*ask.entries, *(ask.out or ()))}) == 1


def says_none(ask: Ask) -> bool:
    return any(isinstance(entries, tuple) and None in entries for entries in (ask.entries, ask.out))


def several_data_dims(ask: Ask) -> bool:
    data = ask.case.ctx.get("dataset_strategy")
    return isinstance(data, tuple) and any(sum(cut > 1 for cut in cuts) > 1 for cuts in data)


def names_nothing(ask: Ask) -> bool:
    plan = ast.literal_eval(ask.case.plan or "{}")
    paths = [re.sub(r"^(self\.|net\.)*", "", path) for path in plan] if isinstance(plan, dict) else []
    return bool(paths) and not {*paths} <= {*ask.case.shapes}


def another_search(ask: Ask) -> bool:
    context = ask.case.ctx
    is_other = context.get("search_mode") in ("dynamic_programming", "recursive_programming")
    return is_other and not ask.case.accepted and context.get("pipeline_stages", 1) == 1


def level_out_of_range(ask: Ask) -> bool:
    level = ask.kwargs.get("level", 0)
    return isinstance(level, int) and (isinstance(level, bool) or level not in (0, 1, 2))


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
        "no target needed", refused(lambda ask: not {*ask.needs} <= {*ask.case.attrs}), ACCEPTS,
        "MindSpore has this operator for one target only; XLA has it for all",
    ),
    Row(
        "repeats cut", refused(lambda ask: ask.speaks_of_result), ACCEPTS,
        "MindSpore cuts the number of repeats; here the result itself is cut, as far as its size allows",
    ),
    Row(
        "out_strategy alone", lambda ask: not ask.case.accepted and ask.entries is None and ask.out is not None,
        ACCEPTS, "what in_strategy leaves out is AUTO",
    ),
    Row(
        "None is data parallel", lambda ask: not ask.case.accepted and says_none(ask), ACCEPTS,
        "MindSpore's texts say that None is data parallel, its code refuses it; here it is",
    ),
    Row(
        "data cut along several dims", lambda ask: not ask.case.accepted and several_data_dims(ask), ACCEPTS,
        "MindSpore slices a data set along one dim only",
    ),
    Row(
        "no such parameter", lambda ask: ask.case.accepted and names_nothing(ask), REFUSES,
        "MindSpore warns of a plan for a parameter that does not exist, and goes on without it",
    ),
    Row(
        "any search", another_search, ACCEPTS,
        "MindSpore's shard goes with sharding_propagation only; here every search keeps the cuts that are given",
    ),
    Row(
        "nothing said", lambda ask: ask.case.accepted and ask.entries is None and ask.out is None and not ask.case.plan,
        ACCEPTS, "MindSpore's default is data parallel; here what is open is searched",
    ),
    Row(
        "no such level", lambda ask: ask.case.accepted and level_out_of_range(ask), REFUSES,
        "MindSpore checks that level is an int and never reads it; here 0, 1 and 2 mean something",
    ),
    Row(
        "no device named", lambda ask: not ask.case.accepted and ask.kwargs.get("device", "") is None, ACCEPTS,
        "None is JAX's own choice of devices",
    ),
    Row(
        "integers beside layouts", refused(lambda ask: bool(ask.entries) and not same_kind(ask)), ACCEPTS,
        "MindSpore wants tuples or layouts throughout; here integers take axes of the layouts' mesh",
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
    Row(
        "any out_strategy", refused(lambda ask: ask.out is not None and same_kind(ask)), ACCEPTS,
        "MindSpore lays out the results of a few operators, in a few ways; here every result can be, in every way",
    ),
)  # fmt: skip
