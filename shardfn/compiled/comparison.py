"""The prediction of a plan compared with the compiled program: collectives, FLOPs, memory, and why they differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardfn.compiled.executable import Compiled
from shardfn.cost.collectives import COLLECTIVE_KINDS
from shardfn.cost.compute import matrix_flops
from shardfn.ir.partitioned import Collective
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan import Plan
from shardfn.units import bytes_text


@dataclasses.dataclass(frozen=True)
class Tally:
    """The collectives of one kind in one program: their count, their runs in one call, and the bytes one device sends."""

    count: int
    runs: int
    bytes_sent: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """One number, predicted and compiled; None where it is not known."""

    predicted: float | None
    compiled: float | None

    @property
    def ratio(self) -> float | None:
        """Compiled over predicted, where both are known and there is something to compare."""
        return self.compiled / self.predicted if self.predicted and self.compiled is not None else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `kinds` holds (kind, predicted, compiled); memory is in bytes on one device."""

    kinds: tuple[tuple[str, Tally, Tally], ...]
    memory: tuple[tuple[str, Pair], ...]
    matrix_flops: Pair
    why: tuple[str, ...]


def compare(plan: Plan, compiled: Compiled) -> Comparison:
    """Compare the prediction of a plan with its compiled program; collectives in loops count once for each iteration."""
    kinds = tuple(
        (kind, tally(kind, plan.collectives), tally(kind, compiled.collectives))
        for kind in COLLECTIVE_KINDS
        if any(c.kind == kind for c in (*plan.collectives, *compiled.collectives))
    )
    memory = plan.cost.memory
    together, held = compiled.together(plan.hardware.platform), compiled.bytes_of(plan.closed_over)
    rows = (
        ("arguments", Pair(memory.arguments, compiled.argument_bytes)),
        ("results", Pair(memory.results, compiled.output_bytes)),
        ("temporaries", Pair(memory.temporaries, compiled.temp_bytes)),
        *([("closed_over", Pair(memory.constants, held))] if memory.constants else []),
        ("together", Pair(memory.peak, None if together is None else together + held)),
        # XLA's own count of a CPU's peak leaves temporaries out
        *([] if plan.hardware.platform == "cpu" else [("xla_peak", Pair(None, compiled.peak_bytes))]),
    )
    explained: set[str] = set()
    why = [text for rule in WHY for text in rule(plan, compiled, kinds, explained)]
    return Comparison(kinds, rows, Pair(matrix_flops(plan.partitioned), compiled.flops), tuple(dict.fromkeys(why)))


def tally(kind: str, collectives: Sequence[Collective]) -> Tally:
    """Count the collectives of one kind."""
    mine = [c for c in collectives if c.kind == kind]
    return Tally(len(mine), sum(c.trips for c in mine), sum(c.total_bytes for c in mine))


# ---- why they differ: each rule sees both sides and explains a difference. `explained` holds the kinds whose bytes an
# earlier rule has accounted for.

Kinds = Sequence[tuple[str, Tally, Tally]]
Rule = Callable[[Plan, Compiled, Kinds, set[str]], Iterator[str]]


def _wider(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    for kind, predicted, actual in kinds:
        narrow = {c.dtype for c in plan.collectives if c.kind == kind} & {"bf16", "f16"}
        kept = {part for c in compiled.collectives if c.kind == kind for part in c.dtype.split("+")}
        if narrow and actual.count and not narrow & kept:
            if actual.bytes_sent > predicted.bytes_sent:
                explained.add(kind)
            yield (f"{kind}: XLA's {plan.hardware.platform} backend sends {'/'.join(sorted(narrow))} "
                   f"as {'/'.join(sorted(kept))}")  # fmt: skip


def _loops(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    in_loops = (c for c in plan.collectives if c.trips > 1 and c.where and not c.in_matmul)
    for kind, where in dict.fromkeys((c.kind, c.where) for c in in_loops):
        predicted, actual = (
            [c for c in side if (c.kind, c.where) == (kind, where)] for side in (plan.collectives, compiled.collectives)
        )
        most, now = (max((c.trips for c in side), default=0) for side in (predicted, actual))
        if now and now != most:
            explained.add(kind)
            what = "hoists it out of a loop" if now < most else "keeps it in the loop"
            yield f"{kind} at {_line(where)}: XLA {what}; predicted to run {_times(most)}, it runs {_times(now)}"


def _merged(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    for kind, predicted, actual in kinds:
        if predicted.count and _close(predicted.bytes_sent, actual.bytes_sent):
            if actual.count < predicted.count:
                yield f"{kind}: XLA merged {predicted.count} into {actual.count}, with the same bytes"
            elif actual.count > predicted.count and not any(c.in_matmul and c.kind == kind for c in plan.collectives):
                yield f"{kind}: XLA split {predicted.count} into {actual.count}, with the same bytes"


# (predicted, compiled): what XLA does there
_WAYS = {
    ("reduce-scatter", "all-reduce"): "every device receives the full sum and keeps its shard",
    ("all-to-all", "all-gather"): "the array is replicated and sliced again (full rematerialisation)",
    ("all-to-all", "collective-permute"): "shards are exchanged in pairs",
    ("all-to-all", "all-reduce"): "it multiplies the shards in place and reduces the partial results",
    ("all-gather", "all-reduce"): "it multiplies the shards in place and reduces the partial results",
    ("all-gather", "collective-permute"): "it sends only the rows that are needed",
}


_IN_MATMULS = "all-reduce", "all-gather", "reduce-scatter"
_ON_TPU = {
    **dict.fromkeys(
        ((kind, "collective-permute") for kind in _IN_MATMULS),
        "it sends only the rows that are needed, or sends while it multiplies (collective matmul)",
    ),
    **dict.fromkeys((("collective-permute", kind) for kind in _IN_MATMULS), "it makes no collective matmul there"),
}


def _other_ways(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    changed = [(kind, p.bytes_sent, c.bytes_sent) for kind, p, c in kinds
               if kind not in explained and not _close(p.bytes_sent, c.bytes_sent)]  # fmt: skip
    less = [kind for kind, predicted, actual in changed if actual < predicted]
    more = [kind for kind, predicted, actual in changed if actual > predicted]
    if less and more:
        known = {**_WAYS, **(_ON_TPU if plan.hardware.platform == "tpu" else {})}
        ways = "; or ".join(dict.fromkeys(known[a, b] for a in less for b in more if (a, b) in known))
        yield (f"XLA chooses another resharding: {' and '.join(more)}{_lines(more, compiled)} "
               f"in place of {' and '.join(less)}{f': {ways}' if ways else ''}")  # fmt: skip
    elif more:
        yield f"compiled but not predicted: {' and '.join(more)}{_lines(more, compiled)}"
    elif less:
        does = "sends less" if any(c.kind in less for c in compiled.collectives) else "needs none"
        yield f"predicted, but XLA {does}: {' and '.join(less)}{_lines(less, plan)}"


def _gaps(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    yield from (f"in the plan: {_line(f)}" for f in plan.diagnostics if f.startswith(("no sharding rule", "loops of")))
    yield from (f"in the compiled program: {_line(finding)}" for finding in compiled.diagnostics)


def _sizes(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    memory = plan.cost.memory
    if (size := compiled.argument_bytes) is not None and size < memory.arguments:
        yield "arguments: XLA drops unused ones"
    if (size := compiled.output_bytes) is not None and size - memory.results == 8 * len(plan.outputs):
        yield "results: XLA adds a table of pointers, 8 B for each result"
    if compiled.alias_bytes:
        yield f"donated arguments: {bytes_text(compiled.alias_bytes)} of the results reuse their buffers"
    if (size := compiled.temp_bytes) is None or _close(size, memory.temporaries):
        pass
    elif size < memory.temporaries:
        yield "temporaries: XLA fuses more ops than predicted, and fused intermediates take no memory"
    else:
        yield "temporaries: XLA needs more for collective buffers, padding and copies"
    peak, sizes = compiled.peak_bytes, compiled.together("")
    if plan.hardware.platform == "tpu" and peak is not None and sizes is not None:
        if peak > 1.01 * sizes:
            yield "peak: XLA's own count includes the vector memory"
        elif sizes > 1.01 * peak:
            yield "temporaries: XLA counts buffers that share memory more than once, so the compiled peak is XLA's own"


def _work(plan: Plan, compiled: Compiled, kinds: Kinds, explained: set[str]) -> Iterator[str]:
    predicted = matrix_flops(plan.partitioned)
    if not _close(compiled.flops, predicted):
        yield "matmul work: XLA computes " + (
            "less; usually it merges equal matmuls and lowers small ones to elementwise ops"
            if compiled.flops < predicted
            else "more; usually devices repeat work, or it lowers another op to matmuls"
        )


WHY: tuple[Rule, ...] = (_wider, _loops, _merged, _other_ways, _gaps, _sizes, _work)


def _line(where: str) -> str:
    return file_line(where) or "an unknown line"


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=0.01)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _lines(kinds: Sequence[str], side: Any) -> str:
    """Where the most bytes of these kinds are sent."""
    found = sorted((c for c in side.collectives if c.kind in kinds and c.where), key=lambda c: -c.total_bytes)
    lines = list(dict.fromkeys(_line(c.where) for c in found))
    return f" at {', '.join(lines[:2])}{_more(len(lines) - 2)}" if lines else ""


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
