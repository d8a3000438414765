"""Cuts and dim classes to a grid and layouts: which axis of which device grid carries each cut.

Cuts on one class share axes as far as they go: 4 ways on one array and 2 on another, and the second takes the major
part of the first's axes. Classes get axes of their own, in order of first appearance, row-major; devices left over
are a repeat axis at the end. Only where the device count forces it do two classes share axes, those that meet on the least data
first, and never on one array.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
import string
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.errors import Problem
from shardfn.frontend.strategy import Leaf
from shardfn.ir.model import Spec
from shardfn.partition.resharding import primes

TRIES = 6
"""How often fewer pairs of classes are kept apart, where the devices are too few for all."""

Atom = tuple[int, int]
"""(chain, position): one prime factor of what a class needs."""


@dataclasses.dataclass(frozen=True)
class Need:
    """One cut: dimension `dim` of leaf `leaf`, which belongs to `chain`, in `cut` pieces."""

    leaf: int
    dim: int
    chain: int
    cut: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """A grid and the layout of every leaf on it; None for a leaf that is still open."""

    axes: tuple[tuple[str, int], ...]
    specs: tuple[Spec | None, ...]
    order: tuple[int, ...] | None = None
    """Which device stands at each position of the grid, where it is not 0, 1, 2, …"""


def place(
    leaves: Sequence[Leaf],
    cuts: Sequence[tuple[int, ...] | None],
    classes: Sequence[tuple[int, ...]],
    devices: int,
    problems: list[Problem],
    values: Sequence[tuple[int, ...]] = (),
    sizes: Sequence[int] = (),
) -> Placement:
    """Build the grid that carries all cuts.

    Args:
      leaves: the arrays, for their names in errors.
      cuts: for each leaf its cuts, or None where it is open.
      classes: for each leaf the dim class of each of its dims.
      devices: the device count; every leaf's product divides it.
      problems: receives what cannot be placed, naming both arrays.
      values: for every value inside the function the classes of its dims: classes that meet there share axes last.
      sizes: elements of each of these values: where some have to share, those do that meet on the fewest.

    Returns:
      The placement. Where nothing can be placed, `problems` has grown and every leaf is open.
    """
    if devices == 1:
        return Placement((), tuple(None if c is None else ((),) * len(c) for c in cuts))
    needs, chains = _needs(cuts, classes)
    used = [_atoms(need, chains[need.chain]) for need in needs]
    total = math.prod(p for chain in chains for p in chain)
    if devices % total == 0:
        slots_of = _own_slots(chains)
    else:
        tries = _kept_apart(_meeting(needs, classes, values, sizes or (1,) * len(values)))
        found = (_share(needs, used, chains, devices, apart) for apart in tries)
        slots_of = next((slots for slots in found if slots is not None), None)
    if slots_of is None:
        problems.append(_clash(leaves, cuts, classes, devices))
        return Placement((), (None,) * len(leaves))
    sizes, slots_of = _ordered(slots_of, chains, devices)
    rows = [tuple(slots_of[atom] for atom in atoms) for atoms in used]
    groups = _merge(rows, sizes)
    axes = tuple((name, math.prod(sizes[s] for s in group)) for name, group in zip(_names(), groups))  # noqa: B905
    start = {group[0]: name for (name, _), group in zip(axes, groups, strict=True)}
    specs: list[list[tuple[str, ...]] | None] = [None if c is None else [()] * len(c) for c in cuts]
    for need, row in zip(needs, rows, strict=True):
        spec = specs[need.leaf]
        assert spec is not None
        spec[need.dim] = tuple(start[s] for s in row if s in start)
    return Placement(axes, tuple(None if s is None else tuple(s) for s in specs))


def _names() -> Iterator[str]:
    """a, b, … z, a1, b1, …"""
    for i in itertools.count():
        for letter in string.ascii_lowercase:
            yield f"{letter}{i or ''}"


def _needs(
    cuts: Sequence[tuple[int, ...] | None], classes: Sequence[tuple[int, ...]]
) -> tuple[list[Need], list[list[int]]]:
    """The cuts that are more than 1, and for each class the primes that its cuts need, major first.

    A class that stands twice on one array (`x @ x.T`) is two chains: one array's dims never share an axis.
    """
    number: dict[tuple[int, int], int] = {}
    needs: list[Need] = []
    for i, (leaf_cuts, leaf_classes) in enumerate(zip(cuts, classes, strict=True)):
        met: dict[int, int] = {}
        for dim, (cut, class_) in enumerate(zip(leaf_cuts or (), leaf_classes)):  # noqa: B905
            if cut > 1:
                met[class_] = met.get(class_, -1) + 1
                needs.append(Need(i, dim, number.setdefault((class_, met[class_]), len(number)), cut))
    chains: list[list[int]] = [[] for _ in number]
    for need in sorted(needs, key=lambda n: n.cut):
        left = need.cut
        for prime in chains[need.chain]:
            left = left // prime if left % prime == 0 else left
        chains[need.chain] += primes(left)
    return needs, chains


def finest(axes: Sequence[tuple[str, int]]) -> tuple[tuple[tuple[str, int], ...], dict[str, tuple[str, ...]]]:
    """The grid with every axis taken apart into its prime factors, and for each old axis the new ones, major to minor.

    The names go by position, so that two grids of one finest form are one grid.

    >>> finest((("a", 2), ("b", 4)))
    ((('x0', 2), ('x1', 2), ('x2', 2)), {'a': ('x0',), 'b': ('x1', 'x2')})
    """
    fine: list[tuple[str, int]] = []
    parts: dict[str, tuple[str, ...]] = {}
    for name, size in axes:
        first = len(fine)
        fine += [(f"x{first + i}", p) for i, p in enumerate(primes(size) or [1])]
        parts[name] = tuple(n for n, _ in fine[first:])
    return tuple(fine), parts


def expresses(axes: Sequence[tuple[str, int]], other: Sequence[int]) -> bool:
    """Whether each axis of the grid `other` (sizes) is made of whole axes of the grid `axes`.

    >>> expresses((("a", 2), ("b", 4)), (8,)), expresses((("a", 8),), (2, 4))
    (True, False)
    """

    def strides(sizes: Sequence[int]) -> set[int]:
        return set(itertools.accumulate(reversed(sizes), operator.mul))

    return strides(other) <= strides([size for _, size in axes] or [1])


def _atoms(need: Need, chain: list[int]) -> tuple[Atom, ...]:
    left, taken = need.cut, []
    for position, prime in enumerate(chain):
        if left % prime == 0:
            left //= prime
            taken.append((need.chain, position))
    return tuple(taken)


def _own_slots(chains: list[list[int]]) -> dict[Atom, int]:
    return {atom: slot for slot, atom in enumerate((c, i) for c, chain in enumerate(chains) for i in range(len(chain)))}


def _meeting(
    needs: Sequence[Need], classes: Sequence[tuple[int, ...]], values: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> dict[tuple[int, int], int]:
    """The pairs of chains that stand on one value inside, and how many elements these have: batch and hidden dim do, two layers'
    hidden dims do not."""
    chains_of: dict[int, set[int]] = {}
    for need in needs:
        chains_of.setdefault(classes[need.leaf][need.dim], set()).add(need.chain)
    met: collections.Counter[tuple[int, ...]] = collections.Counter()
    for row, size in zip(values, sizes, strict=True):
        met[tuple(sorted(chains_of.keys() & set(row)))] += size
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    for row, count in met.items():
        for a, b in itertools.permutations(row, 2):
            found.update({(c, d): count for c in chains_of[a] for d in chains_of[b]})
    return found


def _kept_apart(met: Mapping[tuple[int, int], int]) -> Iterator[Collection[tuple[int, int]]]:
    """What is to have axes of its own, the most first: all that meet, without those that meet on the least, and so on, at last
    none. The dims of a weight may share axes, of which each array cuts one, before batch and hidden dim do.

    >>> [sorted(apart) for apart in _kept_apart({(0, 1): 9, (0, 2): 2})]
    [[(0, 1), (0, 2)], [(0, 1)], []]
    """
    counts = [0, *sorted(set(met.values()))]
    steps = sorted({round(n * (len(counts) - 1) / TRIES) for n in range(TRIES + 1)})
    for least in (counts[n] for n in steps):
        yield {pair for pair, count in met.items() if count > least}


def _share(
    needs: Sequence[Need],
    used: Sequence[tuple[Atom, ...]],
    chains: list[list[int]],
    devices: int,
    met: Collection[tuple[int, int]] = (),
) -> dict[Atom, int] | None:
    """Give every atom one of the device count's prime factors, sharing where they run out: a graph colouring.

    Atoms of one class or of two that `met`, and atoms that cut one array, need different factors. Depth-first, fresh
    factors first; the atom with the fewest possible factors next.
    """
    factors = primes(devices)
    by_chain = {c: [(c, i) for i in range(len(chain))] for c, chain in enumerate(chains)}
    atoms = [atom for row in by_chain.values() for atom in row]
    apart: dict[Atom, set[Atom]] = {a: {b for b in by_chain[a[0]] if b != a} for a in atoms}
    for c, d in met:
        for a in by_chain[c]:
            apart[a].update(by_chain[d])
    arrays: dict[Atom, set[int]] = {a: set() for a in atoms}
    by_leaf: dict[int, list[Atom]] = {}
    for need, row in zip(needs, used, strict=True):
        by_leaf.setdefault(need.leaf, []).extend(row)
        for atom in row:
            arrays[atom].add(need.leaf)
    for together in by_leaf.values():
        for a, b in itertools.permutations(together, 2):
            apart[a].add(b)
    options = {a: [s for s, p in enumerate(factors) if p == chains[a[0]][a[1]]] for a in atoms}
    twins = {a: [b for b in by_chain[a[0]] if b < a and (options[b], arrays[b]) == (options[a], arrays[a])]
             for a in atoms}  # fmt: skip
    chosen: dict[Atom, int] = {}
    still: dict[Atom, list[int]] = dict(options)

    def choose(atom: Atom, slot: int | None) -> None:
        """Give an atom its factor, or take it away; `still` is what each atom can have beside those."""
        if slot is not None:
            chosen[atom] = slot
        elif chosen.pop(atom, None) is None:
            return
        for other in apart[atom]:
            still[other] = free(other)

    def free(atom: Atom) -> list[int]:
        taken = {chosen[b] for b in apart[atom] if b in chosen}
        least = max((chosen[b] for b in twins[atom] if b in chosen), default=-1)
        return [s for s in options[atom] if s > least and s not in taken]

    def next_step(part: Sequence[Atom]) -> tuple[Atom, Iterator[int]] | None:
        """The atom to choose for, and what to try; None where all of the part is chosen."""
        choices = {a: still[a] for a in part if a not in chosen}
        if not choices:
            return None
        fresh = set(range(len(factors))) - set(chosen.values())
        tight = min(choices, key=lambda a: (len(choices[a]) if len(choices[a]) < 2 else 2, a))
        first_fresh = min(fresh & set(choices[tight]), default=-1)
        tried = set(choices[tight]) - fresh | {first_fresh} - {-1}
        return tight, iter(sorted(tried, key=lambda s: (s not in fresh, s)))

    def colour(part: Sequence[Atom]) -> bool:
        """Choose for all atoms of a part: depth first, by a stack, because a model can have thousands."""
        stack: list[tuple[Atom, Iterator[int]]] = []
        for _ in range(50_000):
            step = next_step(part)
            if step is None:
                return True
            stack.append(step)
            while stack:
                atom, slots = stack[-1]
                choose(atom, None)
                slot = next(slots, None)
                if slot is not None:
                    choose(atom, slot)
                    break
                stack.pop()
            else:
                return False
        return False

    return dict(chosen) if all(map(colour, _parts(apart))) else None


def _parts(apart: dict[Atom, set[Atom]]) -> list[list[Atom]]:
    """The atoms in groups that have nothing to do with each other, as many parameters of one call have not."""
    parts: list[list[Atom]] = []
    met: set[Atom] = set()
    for first in apart:
        if first in met:
            continue
        met.add(first)
        part = [first]
        for atom in part:  # it grows while it is walked
            new = apart[atom] - met
            met |= new
            part += sorted(new)
        parts.append(sorted(part))
    return parts


def _ordered(slots_of: dict[Atom, int], chains: list[list[int]], devices: int) -> tuple[list[int], dict[Atom, int]]:
    """Number the slots by first appearance over the classes; the primes left over follow, largest first."""
    order: dict[int, int] = {}
    sizes: list[int] = []
    for atom in sorted(slots_of):
        if slots_of[atom] not in order:
            order[slots_of[atom]] = len(order)
            sizes.append(chains[atom[0]][atom[1]])
    sizes += sorted(primes(devices // math.prod(sizes)), reverse=True)
    return sizes, {atom: order[slot] for atom, slot in slots_of.items()}


def _merge(rows: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[list[int]]:
    """Neighbouring slots that always cut together, in order, are one axis."""
    pairs = [set(itertools.pairwise(row)) for row in rows]

    def together(s: int) -> bool:
        return all(((s, s + 1) in pair) if (s in row or s + 1 in row) else True
                   for row, pair in zip(rows, pairs, strict=True))  # fmt: skip

    groups: list[list[int]] = []
    for slot in range(len(sizes)):
        if groups and together(slot - 1):
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return groups


def _clash(
    leaves: Sequence[Leaf],
    cuts: Sequence[tuple[int, ...] | None],
    classes: Sequence[tuple[int, ...]],
    devices: int,
) -> Problem:
    """Name the two arrays to blame: the first that no longer fits, and the first earlier one without which it would."""

    def fits(chosen: Sequence[int]) -> bool:
        kept = [cuts[i] if i in chosen else None for i in range(len(cuts))]
        needs, chains = _needs(kept, classes)
        used = [_atoms(n, chains[n.chain]) for n in needs]
        total = math.prod(p for chain in chains for p in chain)
        return devices % total == 0 or _share(needs, used, chains, devices) is not None

    given = [i for i, c in enumerate(cuts) if c is not None and max(c, default=1) > 1]
    last = next(i for k, i in enumerate(given) if not fits(given[: k + 1]))
    before = given[: given.index(last)]
    other = next((i for i in before if fits([j for j in (*before, last) if j != i])), before[0])
    a, b = leaves[other], leaves[last]
    return Problem(
        f"{a.label} and {b.label} are cut in ways that {devices} devices cannot hold together",
        where=f"{a.source}; {b.source}",
        why="dims that the function ties together share mesh axes, and the dims of one array need different axes",
        fix=f"leave one of them open ({b.where or b.path} = AUTO), cut it less, or give all as Layouts that share axes",
    )
