"""The optimised HLO text of a program as data: computations, instructions and the call graph.

In the forms that XLA's CPU, GPU and TPU backends print.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from shardfn.ir.source_lines import user_line


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    opcode: str
    type: str
    operands: tuple[tuple[str, str], ...]
    """Name, and the type where the text repeats it; of a constant its value."""
    attributes: str
    is_root: bool


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program by name, and its devices."""

    computations: dict[str, Computation]
    entry: str
    devices: int
    lines: dict[int, str]
    """`file:line` of each stack frame."""


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_OPERANDS = re.compile(r"[^()]*+(?:\([^()]*+(?:\([^()]*+\)[^()]*+)*+\)[^()]*+)*+")
_OPERAND = re.compile(r"([^%]*)%([\w.\-]+)")


def modules(text: str) -> Iterator[Module]:
    """The modules of a text."""
    for part in re.split(r"(?m)^(?=HloModule )", text):
        computations: dict[str, Computation] = {}
        entry, here = "", {}
        for line in part.splitlines():
            if header := _HEADER.match(line):
                here = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
            elif match := _LINE.match(line):
                inside = _OPERANDS.match(line, match.end())
                assert inside is not None
                operands = tuple((name, kind) for kind, name in _OPERAND.findall(inside[0])) or ((inside[0], ""),)
                here[match[2]] = Instruction(match[4], match[3], operands, line[inside.end() + 1 :], bool(match[1]))
        if entry:
            copies = re.findall(r"(?:num_partitions|replica_count)=(\d+)", part.partition("\n")[0])
            yield Module(computations, entry, math.prod(map(int, copies)), _frames(part))


def _frames(text: str) -> dict[int, str]:
    """For each stack frame the line of `source_lines.user_line`."""

    def section(name: str, pattern: str) -> dict[int, tuple[str, ...]]:
        body = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.M)
        rows = re.findall(rf"^(\d+) {pattern}", body[1], re.M) if body else []
        return {int(key): tuple(values) for key, *values in rows}

    names = section("FileNames", r'"(.*)"')
    places = section("FileLocations", r"\{file_name_id=(\d+).*? line=(\d+)")
    frames = section("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
    shift = int(frames[1][1] or 0) if 1 in frames else 0  # frame 1 has no parent; XLA writes that as 1, not 0

    def stack(frame: int) -> Iterator[tuple[str, str]]:
        while frame in frames:
            file, line = places.get(int(frames[frame][0]), ("0", "0"))
            yield names.get(int(file), ("",))[0], line
            parent = int(frames[frame][1] or shift) - shift
            frame = parent if parent < frame else 0

    return {frame: user_line(list(stack(frame))) for frame in frames}


_CALLED = re.compile(
    r", (calls|body|condition|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
REDUCERS = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter", "sort", "map", "custom-call"})
"""Instructions whose called computations work on scalars."""


def called(it: Instruction) -> dict[str, str]:
    """The computations an instruction calls: `body`, `condition`, `calls`, `branch_computations 1`, …"""
    lists = ((role, re.findall(r"[\w.\-]+", names)) for role, names in _CALLED.findall(it.attributes))
    return {f"{role} {k}" if k else role: name for role, names in lists for k, name in enumerate(names)}


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each group of a collective; all in one where none is written.

    >>> replica_groups(", replica_groups={{0,1},{2,3}}", 4), replica_groups(", replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    >>> replica_groups(", replica_groups=mesh['a'=4,'b'=2] {'a':(1)2,'b'}", 8)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    if listed := re.search(r", replica_groups=\{(\{.*?\})\}", attributes):
        return tuple(tuple(map(int, one.split(","))) for one in re.findall(r"\{([\d,]+)\}", listed[1]))
    if counted := re.search(r", replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        sizes = [int(n) for n in counted[3].split(",")]
        ranks = np.arange(math.prod(sizes)).reshape(sizes)
        ranks = ranks.transpose([int(n) for n in counted[4].split(",")]) if counted[4] else ranks
        return tuple(map(tuple, ranks.reshape(int(counted[1]), int(counted[2])).tolist()))
    if mesh := re.search(r", replica_groups=mesh\[([^]]*)\].*? \{([^}]*)\}", attributes):
        axes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        found = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[2])  # 'a':(2)4 is a part of 'a', of size 4
        parts = {axis: (int(before or 1), int(size or axes[axis])) for axis, before, size in found}
        split = [(*parts.get(axis, (1, 1)), size) for axis, size in axes.items()]
        ranks = np.arange(math.prod(axes.values()))
        ranks = ranks.reshape([n for before, count, size in split for n in (before, count, size // before // count)])
        ranks = np.moveaxis(ranks, range(1, 3 * len(split), 3), range(-len(split), 0))
        return tuple(map(tuple, ranks.reshape(-1, math.prod(count for _, count, _ in split)).tolist()))
    return (tuple(range(devices)),)


# Opcode: the kind whose cost it has, and how many of its operands are sent (None: all).
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "all-reduce": ("all-reduce", None),
    "all-gather": ("all-gather", None),
    "reduce-scatter": ("reduce-scatter", None),
    "all-to-all": ("all-to-all", None),
    "ragged-all-to-all": ("all-to-all", 2),  # the rows to send, and those to fill: at most the fewer of them are sent
    "collective-permute": ("collective-permute", None),
    "collective-broadcast": ("collective-permute", None),
    "send": ("collective-permute", 1),  # half of a permute that XLA took apart
}


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
            groups, name = replica_groups(it.attributes, module.devices), re.search(r'op_name="([^"]*)"', it.attributes)
            yield Branched(COLLECTIVES[opcode][0], branch, groups, name[1] if name else "")
        elif opcode not in REDUCERS:
            for i, name in enumerate(called(it).values()):
                yield from _branched(module, name, i if opcode == "conditional" and branch < 0 else branch)
