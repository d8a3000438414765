"""What the profiler saw of a program: its costliest kernels, with the user's lines."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax

from shardfn.cost.rehearsal import Kernel


class Event(NamedTuple):
    """One run of a kernel: the instruction that it belongs to, its own name, and its seconds."""

    op: str
    kernel: str
    seconds: float


def events(directory: str, module: str) -> Iterator[Event]:
    """The kernels of a module in the traces of a directory.

    Args:
      directory: where `jax.profiler.trace` wrote.
      module: the name of the HLO module.

    Of a device its streams count, where the profiler has them; of a host, whose kernels run in threads, all lines do.
    """
    for path in sorted(pathlib.Path(directory).rglob("*.xplane.pb")):
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        of_devices = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in of_devices or planes:
            lines = list(plane.lines)
            streams = [line for line in lines if line.name.startswith("Stream")]
            for line in streams or lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" in stats and stats.get("hlo_module") == module:
                        yield Event(str(stats["hlo_op"]), event.name, event.duration_ns * 1e-9)


def kernels_of(
    found: Iterable[Event], lines: Mapping[str, str], calls: int, most: int
) -> tuple[tuple[Kernel, ...], float]:
    """The costliest instructions in one call, and the seconds of all kernels of one call.

    Args:
      found: the runs of several calls.
      lines: the user's line of each instruction.
      calls: how many calls they are of.
      most: how many instructions to keep.

    >>> runs = [Event("fusion.1", "fusion_1", 2.0), Event("sort", "radix", 1.0), Event("sort", "radix", 4.0)]
    >>> kernels_of(runs, {"sort": "f.py:3"}, calls=1, most=1)
    ((Kernel(op='sort', kernel='radix', where='f.py:3', runs=2.0, seconds=5.0),), 7.0)
    """
    by_op: dict[str, list[Event]] = collections.defaultdict(list)
    for event in found:
        by_op[event.op].append(event)
    every = [_kernel(op, runs, lines.get(op, ""), calls) for op, runs in by_op.items()]
    return tuple(sorted(every, key=lambda k: -k.seconds)[:most]), sum(k.seconds for k in every)


def _kernel(op: str, runs: list[Event], where: str, calls: int) -> Kernel:
    by_name: dict[str, float] = collections.defaultdict(float)
    for run in runs:
        by_name[run.kernel] += run.seconds
    return Kernel(op, max(by_name, key=by_name.__getitem__), where, len(runs) / calls, sum(by_name.values()) / calls)
