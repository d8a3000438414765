"""What XLA's compiler writes to standard error and a report should say: resharding by full rematerialisation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardfn.compiled.hlo import modules
from shardfn.ir.source_lines import file_line

_WARNING = re.compile(
    r"Involuntary full rematerialization\. .*? from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) efficiently for HLO "
    r"operation %\S+ = (?P<array>\w+\[[\d,]*\])(?P<rest>.*)"
)


def rematerialisations(log: str, hlo: str = "") -> list[str]:
    """A diagnostic for each array that XLA replicates and slices again to reshard it.

    Args:
      log: what the compiler wrote.
      hlo: the compiled program, which has the source lines.

    >>> rematerialisations('W0 [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding '
    ...     '{devices=[8,1]<=[8]} to {maximal device=0} efficiently for HLO operation %p = f32[1,16]{1,0} parameter(0), '
    ...     'sharding={devices=[8,1]<=[8]}, metadata={op_name="x"}. As the last resort, ...')
    ['XLA replicates f32[1,16] of `x` to reshard it from (8, 1) to one device (full rematerialisation)']
    """
    lines = {frame: line for module in modules(hlo) for frame, line in module.lines.items()} if hlo else {}
    return list(dict.fromkeys(_notes(log, lines)))


def _notes(log: str, lines: dict[int, str]) -> Iterator[str]:
    for found in _WARNING.finditer(log):
        name = re.search(r'op_name="([^"]*)"', found["rest"])
        frame = re.search(r"stack_frame_id=(\d+)", found["rest"])
        line = file_line(lines.get(int(frame[1]), "")) if frame else ""
        op = name[1].rpartition("/")[2] if name else ""
        of, at = f" of `{op}`" if op and op != "call_exported" else "", f" at {line}" if line else ""
        before, after = _shards(found["before"]), _shards(found["after"])
        yield f"XLA replicates {found['array']}{of}{at} to reshard it from {before} to {after} (full rematerialisation)"


def _shards(sharding: str) -> str:
    """An HLO sharding as the number of shards of each dimension; without dimensions of replicas, which come last."""
    if named := re.match(r"\{mesh\[(.*?)\], \[(.*?)\]", sharding):  # JAX 0.12
        axes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
        dims = (re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", dim) for dim in re.findall(r"\{(.*?)\}", named[2]))
        return _tuple([math.prod(int(part or axes[axis]) for axis, part in dim) for dim in dims])
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if tiles is None:
        return "one device" if "maximal" in sharding else "replicated"
    sizes = [int(n) for n in tiles[1].split(",")]
    if "last_tile_dim" in sharding:
        sizes = sizes[:-1]
    return _tuple(sizes)


def _tuple(sizes: list[int]) -> str:
    return str(tuple(sizes)) if math.prod(sizes) > 1 else "replicated"
