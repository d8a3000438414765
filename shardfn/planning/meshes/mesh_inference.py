"""Mesh inference: from integer strategies and dimension groups to mesh axes and a sharding for each array.

Strategies of one dimension group share mesh axes: if one array is sharded 4 ways and another 2 ways, the second uses the
major part of the first's axes. Each group gets its own axes, row-major, in order of first appearance. Devices that are left
over form a last axis. Rows that a slice, a pad or an update moves are one group here: a plan of shifts keeps most of them on
their devices. Two groups share axes only if the devices are too few for both; the groups that meet on the least data share
first. Dimensions of one array never share an axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import string
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardfn.errors import Problem
from shardfn.frontend.strategy import Leaf
from shardfn.ir.dimension_groups import shared_elements
from shardfn.ir.divisors import primes
from shardfn.ir.model import Spec

TRIES = 6
"""Attempts with fewer and fewer pairs of groups on axes of their own, where the devices are too few for all."""

Atom = tuple[int, int]
"""(chain, position): one prime factor of the shards of a dimension group."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Dimension `dim` of leaf `leaf`, which belongs to `chain`, in `shards` shards."""

    leaf: int
    dim: int
    chain: int
    shards: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh and the sharding of every leaf on it; None for an open leaf."""

    axes: tuple[tuple[str, int], ...]
    specs: tuple[Spec | None, ...]
    order: tuple[int, ...] | None = None
    """The device at each position of the mesh, if not 0, 1, 2, …"""


def place(
    leaves: Sequence[Leaf],
    strategies: Sequence[tuple[int, ...] | None],
    groups: Sequence[tuple[int, ...]],
    devices: int,
    problems: list[Problem],
    values: Sequence[tuple[int, ...]] = (),
    sizes: Sequence[int] = (),
    calls: Sequence[Sequence[int]] = (),
) -> Placement:
    """Infer the mesh for all strategies of a call.

    Args:
      leaves: the arrays, for their names in errors.
      strategies: that of each leaf, or None if it is open.
      groups: the dimension group of each dimension of each leaf.
      devices: the device count; the product of each strategy divides it.
      problems: receives a pair of arrays that no mesh can hold together.
      values: the dimension groups of every value inside the function. Groups that meet there share axes last.
      sizes: elements of each of these values. Groups that meet on the fewest elements share axes first.
      calls: leaves, by position, that are operands of one function inside. Their groups share no axis where the devices suffice.

    Returns:
      The placement. If there is none, `problems` has grown and every leaf is open.
    """
    if devices == 1:
        return Placement((), tuple(None if c is None else ((),) * len(c) for c in strategies))
    needs, chains = _needs(strategies, groups)
    used = [_atoms(need, chains[need.chain]) for need in needs]
    total = math.prod(p for chain in chains for p in chain)
    if devices % total == 0:
        atoms = ((chain, position) for chain, factors in enumerate(chains) for position in range(len(factors)))
        slots_of = {atom: slot for slot, atom in enumerate(atoms)}
    else:
        tries = list(_kept_apart(_shared_by_chains(needs, groups, values, sizes or (1,) * len(values))))
        operands = _operands(needs, used, chains, devices, calls)
        both = itertools.product([operands, ()] if operands else [()], tries)
        found = (_share(needs, used, chains, devices, apart, mine) for mine, apart in both)
        slots_of = next((slots for slots in found if slots is not None), None)
    if slots_of is None:
        problems.append(_clash(leaves, strategies, groups, devices))
        return Placement((), (None,) * len(leaves))
    sizes, slots_of = _ordered(slots_of, chains, devices)
    rows = [tuple(slots_of[atom] for atom in atoms) for atoms in used]
    merged = _merge(rows, sizes)
    axes = tuple((name, math.prod(sizes[s] for s in group)) for name, group in zip(_names(), merged))  # noqa: B905
    start = {group[0]: name for (name, _), group in zip(axes, merged, strict=True)}
    specs: list[list[tuple[str, ...]] | None] = [None if c is None else [()] * len(c) for c in strategies]
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
    strategies: Sequence[tuple[int, ...] | None], groups: Sequence[tuple[int, ...]]
) -> tuple[list[Need], list[list[int]]]:
    """The sharded dimensions, and for each chain the prime factors of its shards, major first.

    A group that has two dimensions of one array (`x @ x.T`) forms two chains: dimensions of one array never share an axis.
    """
    number: dict[tuple[int, int], int] = {}
    needs: list[Need] = []
    for i, (strategy, leaf_groups) in enumerate(zip(strategies, groups, strict=True)):
        met: dict[int, int] = {}
        for dim, (shards, group) in enumerate(zip(strategy or (), leaf_groups)):  # noqa: B905
            if shards > 1:
                met[group] = met.get(group, -1) + 1
                needs.append(Need(i, dim, number.setdefault((group, met[group]), len(number)), shards))
    chains: list[list[int]] = [[] for _ in number]
    for need in sorted(needs, key=lambda n: n.shards):
        left = need.shards
        for prime in chains[need.chain]:
            left = left // prime if left % prime == 0 else left
        chains[need.chain] += primes(left)
    return needs, chains


def finest(axes: Sequence[tuple[str, int]]) -> tuple[tuple[tuple[str, int], ...], dict[str, tuple[str, ...]]]:
    """The mesh with every axis split into its prime factors, and the new axes of each old one, major to minor.

    The names are positional, so that two meshes with the same finest form are equal.

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


def split_axes(spec: Spec, parts: Mapping[str, tuple[str, ...]]) -> Spec:
    """A spec over the finer axes that make up each of its own."""
    return tuple(tuple(part for axis in dim for part in parts[axis]) for dim in spec)


def expresses(axes: Sequence[tuple[str, int]], other: Sequence[int]) -> bool:
    """Whether each axis of a mesh of sizes `other` is a product of axes of the mesh `axes`.

    >>> expresses((("a", 2), ("b", 4)), (8,)), expresses((("a", 8),), (2, 4))
    (True, False)
    """

    def strides(sizes: Sequence[int]) -> set[int]:
        return set(itertools.accumulate(reversed(sizes), operator.mul))

    return strides(other) <= strides([size for _, size in axes] or [1])


def _atoms(need: Need, chain: list[int]) -> tuple[Atom, ...]:
    left, taken = need.shards, []
    for position, prime in enumerate(chain):
        if left % prime == 0:
            left //= prime
            taken.append((need.chain, position))
    return tuple(taken)


def _shared_by_chains(
    needs: Sequence[Need], groups: Sequence[tuple[int, ...]], values: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> dict[tuple[int, int], int]:
    """`shared_elements` of the groups of two chains, by pair of chains."""
    chains_of: dict[int, set[int]] = {}
    for need in needs:
        chains_of.setdefault(groups[need.leaf][need.dim], set()).add(need.chain)
    shared = shared_elements(values, sizes, chains_of)
    return {(c, d): count for (a, b), count in shared.items() for c in chains_of[a] for d in chains_of[b]}


def _operands(
    needs: Sequence[Need], used: Sequence[tuple[Atom, ...]], chains: list[list[int]], devices: int,
    calls: Sequence[Sequence[int]],
) -> list[set[Atom]]:  # fmt: skip
    """For each call inside, the atoms of its operands; calls whose operands need more devices than there are are left out."""
    sets = [{a for need, row in zip(needs, used, strict=True) if need.leaf in call for a in row} for call in calls]
    return [atoms for atoms in sets if devices % math.prod(chains[c][at] for c, at in atoms) == 0]


def _kept_apart(met: Mapping[tuple[int, int], int]) -> Iterator[Collection[tuple[int, int]]]:
    """The pairs of chains to keep on different axes, from all pairs to none, without those that meet on the least data first.

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
    operands: Sequence[Collection[Atom]] = (),
) -> dict[Atom, int] | None:
    """Assign one prime factor of the device count to every atom, by depth-first graph colouring.

    Atoms of one group, of two groups that `met`, of one array, and of one call's `operands` need different factors.
    Unused factors are tried first, and the atom with the fewest possible factors is next. None if there is no assignment.
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
    for together in (*by_leaf.values(), *operands):
        for a, b in itertools.permutations(together, 2):
            apart[a].add(b)
    options = {a: [s for s, p in enumerate(factors) if p == chains[a[0]][a[1]]] for a in atoms}
    twins = {a: [b for b in by_chain[a[0]] if b < a and (options[b], arrays[b]) == (options[a], arrays[a])]
             for a in atoms}  # fmt: skip
    chosen: dict[Atom, int] = {}
    still: dict[Atom, list[int]] = dict(options)

    def choose(atom: Atom, slot: int | None) -> None:
        """Assign a factor to an atom, or undo it, and update the factors that are still possible."""
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
        """The next atom and the factors to try; None if the whole part is assigned."""
        choices = {a: still[a] for a in part if a not in chosen}
        if not choices:
            return None
        fresh = set(range(len(factors))) - set(chosen.values())
        tight = min(choices, key=lambda a: (len(choices[a]) if len(choices[a]) < 2 else 2, a))
        first_fresh = min(fresh & set(choices[tight]), default=-1)
        tried = set(choices[tight]) - fresh | {first_fresh} - {-1}
        return tight, iter(sorted(tried, key=lambda s: (s not in fresh, s)))

    def colour(part: Sequence[Atom]) -> bool:
        """Assign all atoms of a part. It keeps its own stack: a model can have thousands of atoms."""
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
    """The connected components of the atoms."""
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
    """Number the slots by first appearance over the groups; unused primes follow, largest first."""
    order: dict[int, int] = {}
    sizes: list[int] = []
    for atom in sorted(slots_of):
        if slots_of[atom] not in order:
            order[slots_of[atom]] = len(order)
            sizes.append(chains[atom[0]][atom[1]])
    sizes += sorted(primes(devices // math.prod(sizes)), reverse=True)
    return sizes, {atom: order[slot] for atom, slot in slots_of.items()}


def _merge(rows: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[list[int]]:
    """Merge neighbouring slots that always shard together, in order, into one axis."""
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
    strategies: Sequence[tuple[int, ...] | None],
    groups: Sequence[tuple[int, ...]],
    devices: int,
) -> Problem:
    """The problem of the first array that no longer fits, and the first earlier one without which it would fit."""

    def fits(chosen: Sequence[int]) -> bool:
        kept = [one if i in chosen else None for i, one in enumerate(strategies)]
        needs, chains = _needs(kept, groups)
        used = [_atoms(n, chains[n.chain]) for n in needs]
        total = math.prod(p for chain in chains for p in chain)
        return devices % total == 0 or _share(needs, used, chains, devices) is not None

    given = [i for i, c in enumerate(strategies) if c is not None and max(c, default=1) > 1]
    last = next(i for k, i in enumerate(given) if not fits(given[: k + 1]))
    before = given[: given.index(last)]
    other = next((i for i in before if fits([j for j in (*before, last) if j != i])), before[0])
    a, b = leaves[other], leaves[last]
    return Problem(f"the strategies of {a.label} and {b.label} do not fit on one mesh of {devices} devices",
                   f"{a.source}; {b.source}",
                   "tied dimensions share mesh axes, and the dimensions of one array need different axes",
                   f"leave one of them open ({b.where or b.path} = AUTO), shard it less, or write NamedShardings on one mesh "
                   "for all")  # fmt: skip
