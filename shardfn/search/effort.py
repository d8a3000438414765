"""How much a search tries for a program of so many ops at a level: every number that depends on the size, on one page. Which
of them is asked at a level is in `choose`.

A flow of a program costs time in proportion to its ops. Of a small program (`SMALL_OPS`) everything is tried: each thing found is
let go of what it need not hold before it is compared, other aims and grids are asked too, and what other levels find and the
plans around the answer stand beside it (`beside`). Of a large one (`LARGE_OPS`) little is: the first few of what was found, plain
layouts with the batch cut alone, and other levels only for less memory. Of those in between, more is tried where no flow did what
the model promised (`choose`). What does not depend on the size, as the work that a grid may take, stands where it is done
(`ongrid`).
"""

from __future__ import annotations

import dataclasses

from shardfn.search.objectives import other_level

SMALL_OPS, LARGE_OPS = 500, 2000
"""Ops up to which a program is small (`SearchEffort.is_small`), and from which it is large (`SearchEffort.is_large`)."""

THREE_AXES_OPS = 400
"""Ops up to which grids of three axes are tried: they have up to 256 labels for each op."""

EXACT_OPS = 100_000
"""Ops up to which the exact search takes seconds, and less than dividing the devices."""

KINDS = 3
"""Kinds of what is found at level 1 (`found.MeshSolution.kind`): at least one of each is priced."""

FLOWS, FLOWS_OPS = 12, 2000
"""Flows of what was found that are priced at least: so many, or as many as have no more ops than that together."""

MOST = 3
"""Of what was found, how much is priced by its flow at most, where the rest promises more than the first few turned out to
hold, and no more than that are priced anyway."""

LET_GO = 3
"""Of what was priced, where all flows disappoint, how much is let go of what it need not hold before the best is taken: of
what promises more than the best."""

FEWEST, PLAIN_OPS = 5, 9_000
"""Plain layouts that are priced at level 1: this many, and more as long as their flows have no more ops than that together."""

AROUND_OPS, FIXED = 4_000, 15
"""Ops of all flows together that are priced around a plan (`neighbours`), the same on every machine; and what a flow costs beside
its ops, as ops."""

POLISH_OPS = 30_000
"""Ops of all flows together that are priced to polish a finalist (`polish`): the same on every machine."""

TIMES = 4
"""At level 1: how often less memory is looked for (`SearchEffort.beside`, `SearchEffort.for_less`)."""


@dataclasses.dataclass(frozen=True)
class SearchEffort:
    """What is tried for a program at a level."""

    is_small: bool
    """Whether flows of the program cost so little that all that was found is let go of what it need not hold before it
    is compared, and other levels' answers stand beside it."""
    is_large: bool
    """Whether flows of the program are so dear that every further one costs more than it brings: few of the plain layouts are
    priced beside what was searched, and not everywhere."""
    skips_unlikely: bool
    """Whether what is sure to fail is left out: at level 2 of programs that are not small. Elsewhere more is tried."""
    is_exact: bool
    """Whether the default search is the exact one, else the devices are divided."""
    three_axes: bool
    """Whether grids of three axes are tried, and all grids looked at again. It decides the second look too (`dynamic.settled`):
    how close to the optimum that comes, and whether it is for all that may be better or only for what is by a good part."""
    found: int
    """Of what was found, how many are priced by their flow at least: at level 1 one or two of each kind."""
    found_at_most: int
    """And how many at most, where the rest promises more than the first few turned out to hold."""
    reduced_candidates: int
    """How many of what promises more than the best are let go of what they need not hold, where all flows disappoint."""
    plain_classes: int
    """Dim classes, the heaviest first, of which there are plain layouts."""
    plain_layouts: int | None
    """How many plain layouts are priced at most; None: all."""
    beside: tuple[tuple[int, int], ...]
    """Of small programs, the other levels that are asked beside the answer, and how often each at most: at level 1 level 0 within
    ever less memory. Level 1 itself, which takes the longest to find, is asked by none."""
    for_less: tuple[tuple[int, int], ...]
    """Of others, the levels that are asked to hold ever less beside an answer of level 1, and how often each at most."""
    one_array_changes: int
    """Plans that differ in one array that are priced, each by its flow; of small programs alone."""
    refinements: int
    """Flows that a finalist is polished with."""


def search_effort(ops: int, level: int, is_quick_look: bool = False) -> SearchEffort:
    """What is tried for a program of `ops` ops at `level`, or of any number where a first look will do (`is_quick_look`).

    >>> search_effort(5_000, level=1)
    SearchEffort(is_small=False, is_large=True, skips_unlikely=False, is_exact=True, three_axes=False, found=3,
                 found_at_most=3, reduced_candidates=0, plain_classes=2, plain_layouts=5, beside=(), for_less=((2, 1),),
                 one_array_changes=0, refinements=6)
    """
    is_small, is_large = ops <= SMALL_OPS and not is_quick_look, ops > LARGE_OPS or is_quick_look
    is_least = level == 1
    kinds = (KINDS if is_large else 2 * KINDS) if is_least else 1
    found = max(kinds, min(FLOWS, FLOWS_OPS // max(1, ops)))
    return SearchEffort(
        is_small=is_small,
        is_large=is_large,
        skips_unlikely=level == 2 and not is_small,
        is_exact=ops <= EXACT_OPS,
        three_axes=ops <= THREE_AXES_OPS,
        found=found,
        found_at_most=max(found, 1 if is_large else MOST),
        reduced_candidates=0 if is_small or is_large else LET_GO,
        plain_classes=3 if is_small else 2,
        plain_layouts=max(FEWEST, PLAIN_OPS // max(1, ops)) if is_least else None,
        beside=() if not is_small else ((0, TIMES), (2, 1)) if is_least else ((other_level(level), 1),),
        for_less=() if is_small or not is_least else ((2, 1),) if is_large else ((2, TIMES), (0, 1)),
        one_array_changes=AROUND_OPS // (FIXED + ops) if is_small else 0,
        refinements=max(1, POLISH_OPS // max(1, ops)),
    )
