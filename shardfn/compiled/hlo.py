"""The optimised HLO text of a program as data: computations, instructions and the call graph.

In the forms that XLA's CPU, GPU and TPU backends print.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

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


# Opcode: the kind whose cost it has, and how many of its operands are sent (None: all).
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "all-reduce": ("all-reduce", None),
    "all-gather": ("all-gather", None),
    "reduce-scatter": ("reduce-scatter", None),
    "all-to-all": ("all-to-all", None),
    "ragged-all-to-all": ("all-to-all", 1),  # an upper bound: how much of it is sent is known when it runs
    "collective-permute": ("collective-permute", None),
    "collective-broadcast": ("collective-permute", None),
    "send": ("collective-permute", 1),  # half of a permute that XLA took apart
}
