"""How much a search tries, by the number of ops and the level: every threshold on program size is on this page.

Evaluating a candidate takes time in proportion to the ops. For a small program (`SMALL_OPS`) the search tries everything;
for a large one (`LARGE_OPS`) it evaluates few candidates; between the two it tries more where estimates were too low.
`selection` says which of these a level uses. Work limits that do not depend on the size stand in `exact`.
"""

from __future__ import annotations

import dataclasses

from shardfn.search.objectives import other_level

SMALL_OPS, LARGE_OPS = 500, 2000
"""Ops up to which a program is small, and above which it is large."""

THREE_AXES_OPS = 400
"""Ops up to which the search tries meshes of three axes, with up to 256 labels per op."""

EXACT_OPS = 100_000
"""Ops up to which the default search is the exact one."""

LEVEL_1_KINDS = 3
"""Kinds of mesh solutions at level 1 (`MeshSolution.kind`): at least one of each is evaluated."""

EVALUATED, EVALUATED_OPS = 12, 2000
"""Mesh solutions evaluated at least: this many, or as many as have no more ops together."""

MOST_EVALUATED = 3
"""Mesh solutions evaluated at most, where their estimates beat the best candidate."""

REDUCED = 3
"""Candidates without redundant constraints that are tried, where all estimates were too low."""

BASELINES, BASELINE_OPS = 5, 9_000
"""Baselines evaluated at level 1: this many, and more while they have no more ops together."""

LOCAL_SEARCH_OPS, OPS_PER_CANDIDATE = 4_000, 15
"""Ops of all candidates in the local search together; and the fixed cost of a candidate, in ops."""

REFINEMENT_OPS = 30_000
"""Ops of all candidates together that refine one that will be compiled."""

REPEATS = 4
"""At level 1: how often a search within less memory is repeated while it succeeds."""


@dataclasses.dataclass(frozen=True)
class SearchEffort:
    """What to try for a program at a level."""

    is_small: bool
    """Whether candidates are so cheap to evaluate that everything is tried."""
    is_large: bool
    """Whether candidates are so expensive to evaluate that few are."""
    skips_unlikely: bool
    """Whether to skip candidates that are sure to lose: at level 2 for programs that are not small."""
    is_exact: bool
    """Whether the default search is the exact one, not the recursive one."""
    three_axes: bool
    """Whether to try meshes of three axes, and to solve every mesh again with a smaller gap."""
    min_evaluated: int
    """Mesh solutions evaluated at least."""
    max_evaluated: int
    """Mesh solutions evaluated at most, where their estimates beat the best candidate."""
    reduced_candidates: int
    """Candidates whose redundant constraints are dropped before the best is chosen, where all estimates were too low."""
    baseline_groups: int
    """Dimension groups that baselines shard, the largest first."""
    max_baselines: int | None
    """Baselines evaluated at most; None: all."""
    other_levels: tuple[tuple[int, int], ...]
    """For small programs, the other levels to search and how often. Level 1, the slowest, is never one of them."""
    memory_levels: tuple[tuple[int, int], ...]
    """For other programs at level 1, the levels to search within ever less memory, and how often."""
    one_array_changes: int
    """Candidates of the local search."""
    refinements: int
    """Candidates that refine one that will be compiled."""


def search_effort(ops: int, level: int, is_quick_look: bool = False) -> SearchEffort:
    """What to try for a program of `ops` ops at `level`; with `is_quick_look`, as for a large program.

    >>> search_effort(5_000, level=1)
    SearchEffort(is_small=False, is_large=True, skips_unlikely=False, is_exact=True, three_axes=False, min_evaluated=3,
                 max_evaluated=3, reduced_candidates=0, baseline_groups=2, max_baselines=5, other_levels=(),
                 memory_levels=((2, 1),), one_array_changes=0, refinements=6)
    """
    is_small, is_large = ops <= SMALL_OPS and not is_quick_look, ops > LARGE_OPS or is_quick_look
    for_memory, size = level == 1, max(1, ops)
    kinds = (LEVEL_1_KINDS if is_large else 2 * LEVEL_1_KINDS) if for_memory else 1
    evaluated = max(kinds, min(EVALUATED, EVALUATED_OPS // size))
    return SearchEffort(
        is_small=is_small,
        is_large=is_large,
        skips_unlikely=level == 2 and not is_small,
        is_exact=ops <= EXACT_OPS,
        three_axes=ops <= THREE_AXES_OPS,
        min_evaluated=evaluated,
        max_evaluated=max(evaluated, 1 if is_large else MOST_EVALUATED),
        reduced_candidates=0 if is_small or is_large else REDUCED,
        baseline_groups=3 if is_small else 2,
        max_baselines=max(BASELINES, BASELINE_OPS // size) if for_memory else None,
        other_levels=() if not is_small else ((0, REPEATS), (2, 1)) if for_memory else ((other_level(level), 1),),
        memory_levels=() if is_small or not for_memory else ((2, 1),) if is_large else ((2, REPEATS), (0, 1)),
        one_array_changes=LOCAL_SEARCH_OPS // (OPS_PER_CANDIDATE + ops) if is_small else 0,
        refinements=max(1, REFINEMENT_OPS // size),
    )
