"""The collectives in branches of conditionals of a compiled program, and which devices wait for each other there."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from shardfn.compiled.hlo import COLLECTIVES, REDUCERS, Module, called, modules


@dataclasses.dataclass(frozen=True)
class Branched:
    """A collective in a branch of a conditional, and which devices wait for each other there."""

    kind: str
    branch: int
    """Of the outermost conditional."""
    groups: tuple[tuple[int, ...], ...]
    name: str
    """The scopes and the primitive that it came from, as JAX names them."""


def in_branches(hlo_text: str) -> tuple[Branched, ...]:
    """The collectives in branches of conditionals, which only the devices that take the branch reach.

    A collective-permute has no groups, and no backend guarantees that it waits for its pairs alone: its group is every device.

    >>> [found] = in_branches('''HloModule m, num_partitions=4
    ... %here (x: f32[2]) -> f32[2] {
    ...   %x = f32[2]{0} parameter(0)
    ...   ROOT %r = f32[2]{0} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add
    ... }
    ... %there (x: f32[2]) -> f32[2] {
    ...   ROOT %x = f32[2]{0} parameter(0)
    ... }
    ... ENTRY %main (p: s32[], x: f32[2]) -> f32[2] {
    ...   %p = s32[] parameter(0)
    ...   %x = f32[2]{0} parameter(1)
    ...   ROOT %c = f32[2]{0} conditional(%p, %x, %x), branch_computations={%here, %there}
    ... }''')
    >>> found.kind, found.branch, found.groups
    ('all-reduce', 0, ((0, 1), (2, 3)))
    """
    return tuple(x for module in modules(hlo_text) for x in _branched(module, module.entry, -1))


def _branched(module: Module, caller: str, branch: int) -> Iterator[Branched]:
    for it in module.computations.get(caller, {}).values():
        opcode = it.opcode.removesuffix("-start")
        if opcode in COLLECTIVES and branch >= 0:
            name = re.search(r'op_name="([^"]*)"', it.attributes)
            yield Branched(
                COLLECTIVES[opcode][0], branch, _groups(it.attributes, module.devices), name[1] if name else ""
            )
        elif opcode not in REDUCERS:
            for i, name in enumerate(called(it).values()):
                yield from _branched(module, name, i if opcode == "conditional" and branch < 0 else branch)


def _groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each group, in the forms of `_group_size`; all in one where it is none of them."""
    if listed := re.search(r", replica_groups=\{(\{.*?\})\}", attributes):
        return tuple(tuple(map(int, one.split(","))) for one in re.findall(r"\{([\d,]+)\}", listed[1]))
    if counted := re.search(r", replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        ranks = np.arange(devices).reshape([int(n) for n in counted[3].split(",")])
        ranks = ranks.transpose([int(n) for n in counted[4].split(",")]) if counted[4] else ranks
        return tuple(map(tuple, ranks.reshape(int(counted[1]), int(counted[2])).tolist()))
    if mesh := re.search(r", replica_groups=mesh\[([^]]*)\] \{([^}:]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        axes = re.findall(r"'([^']*)'", mesh[2])
        if math.prod(sizes.values()) == devices and all(axis in sizes for axis in axes):
            ranks = np.arange(devices).reshape(list(sizes.values()))
            last = [list(sizes).index(axis) for axis in axes]
            ranks = np.moveaxis(ranks, last, range(-len(last), 0))
            return tuple(map(tuple, ranks.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()))
    return (tuple(range(devices)),)
