"""The sections of a report, each a function from a plan to parts; `SECTIONS` at the end of the file is their order."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardfn.compiled.comparison import Comparison, Tally
from shardfn.cost.devices.chips import CHIPS
from shardfn.frontend.notes import Counted
from shardfn.frontend.paths import alike, few, layer, mirrored, name_of_row, starred
from shardfn.ir.model import Spec
from shardfn.ir.op_traits import LISTED
from shardfn.ir.partitioned import USER_WRITTEN, Collective
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan import Candidates, Decision, DimensionGroup, Plan, headline, in_rows, op_strategies
from shardfn.render.cells import axes_text, shape_text, spec_text, table, times
from shardfn.render.parts import Cell, Part, Table, Text
from shardfn.report.data import UNMODELLED, Attribution, seconds, strides
from shardfn.report.drawing import drawing
from shardfn.report.processes import processes_table
from shardfn.units import bytes_text, flops_text, number_text, time_text

MOST_REASONS = 6
"""A reason that more arrays share is stated once, below the table."""
SHORT_ROWS, FULL_ROWS = 12, 32
"""Rows of a table in a short and in a full report."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a section reads: a plan, transfers of arguments, the compiled program, and whether the report is full."""

    plan: Plan
    transfers: Sequence[str]
    compared: Comparison | None
    due: Sequence[Attribution]
    """What causes each collective."""
    counted: Sequence[Counted] | None = None
    """What a run counted; None without a run."""
    is_full: bool = False
    most: int = SHORT_ROWS
    """The most rows of a table."""


def _headline(of: Subject) -> Iterable[Part]:
    is_preset = of.plan.hardware.chip.source == CHIPS["cpu"].source
    yield Text("", (*headline(of.plan), *([ORDER_ALONE] if is_preset else [])))


ORDER_ALONE = (
    "times on virtual CPU devices order plans, no more; `python -m shardfn calibrate --save` measures this machine"
)
"""The line about the times of CPU devices that nobody calibrated."""


def _diagnostics(of: Subject) -> Iterable[Part]:
    unmodelled = of.plan.cost.unmodelled_ops
    lines = [
        *of.plan.diagnostics,
        *([f"{UNMODELLED}: {', '.join(map(file_line, unmodelled))}"] if unmodelled else []),
        *of.transfers,
    ]
    if lines:
        yield Text("Diagnostics", tuple(lines))


def _mesh(of: Subject) -> Iterable[Part]:
    rows = []
    used = of.plan.partitioned.used_axes
    for name, size, stride in strides(of.plan):
        first = ", ".join(str(i * stride) for i in range(min(size, 4))) + (", …" if size > 4 else "")
        groups = [g.name for g in of.plan.dimension_groups if name in g.axes]
        inside = "arrays inside the function" if name in used else "nothing: its devices repeat the same work"
        rows.append((name, str(size), first, few(groups, 3) or inside))
    note = f"devices in the order of the mesh: {few(list(map(str, of.plan.order)), 16)}" if of.plan.order else ""
    yield table("Mesh", ("axis", "size", "first devices", "shards dimension group"), rows, note)


def _processes(of: Subject) -> Iterable[Part]:
    return processes_table(of.plan, SHORT_ROWS if of.is_full else 3, of.most)


def _arrays(of: Subject) -> Iterable[Part]:
    for title, decisions in (("Arguments", of.plan.inputs), ("Results", of.plan.outputs)):
        groups = in_rows(decisions, with_reasons=True)
        if len(groups) > of.most:  # sharded arrays first, then large ones
            groups.sort(key=lambda same: (not any(same[0].spec), -same[0].local_bytes))
        counts = collections.Counter(_reason(same[0]) for same in groups)
        stated = {reason for reason, count in counts.items() if count >= min(MOST_REASONS, len(groups)) > 1}
        rows = [
            (_name([d.path for d in same]), times(len(same)), f"{d.dtype}{shape_text(d.shape)}", str(d.strategy),
             spec_text(d.spec), shape_text(d.local_shape) if any(d.spec) else "replicated", bytes_text(d.local_bytes),
             _chosen_by(same, of.is_full and _reason(d) not in stated))
            for same in groups for d in same[:1]
        ]  # fmt: skip
        note = "; ".join(
            f"{source}: {reason}"
            for source, reason in sorted(stated)
            if of.is_full and reason and source not in ("you", "mode")
        )
        columns = ("array", "count", "shape", "strategy", "spec", "shard", "per device", "chosen by")
        yield table(title, columns, rows, note, of.most, ("spec",))


def _name(paths: Sequence[str]) -> Cell:
    """One name for the arrays of a row, which lists their paths."""
    return Cell(name_of_row(paths), paths if len(paths) > 1 else ())


def _line(where: str) -> Cell:
    return Cell(file_line(where), place=where)


def _chosen_by(same: Sequence[Decision], has_reason: bool) -> str:
    """The entry of the user's call, or the parallel mode; else who chose, with the reason where there is room for it."""
    source = same[0].source
    reason = starred([d.reason for d in same if layer(d.reason) == layer(same[0].reason)])
    if source in ("you", "mode") and reason:
        return reason
    return f"{source}: {reason}" if reason and (has_reason or source == "file") else source


def _reason(d: Decision) -> tuple[str, str]:
    """Who chose a sharding and why, without the names of other arrays."""
    return d.source, re.sub(r"`[^`]*`", "`…`", d.reason)


def _collectives(of: Subject) -> Iterable[Part]:
    counts = collections.Counter[Collective]()
    due: dict[Collective, list[str]] = {}
    purposes: dict[Collective, list[str]] = {}
    for own, (shardings, constraints) in zip(of.plan.collectives, of.due, strict=True):
        c = dataclasses.replace(own, purpose=layer(own.purpose))
        counts[c] += 1
        due[c] = list(dict.fromkeys([*due.get(c, []), *constraints, *shardings]))
        purposes.setdefault(c, []).append(own.purpose)
    groups = sorted(counts.items(), key=lambda g: (-seconds(of.plan, g[0]) * g[1], -g[0].total_bytes * g[1]))
    rows = [
        (c.kind, times(count), f"{axes_text(c.axes)} ({c.group_size})", f"{c.dtype}{shape_text(c.shape)}",
         times(c.trips), bytes_text(c.total_bytes * count), time_text(seconds(of.plan, c) * count), _line(c.where),
         Cell(": ".join(filter(None, (_cause(c, starred(purposes[c])), few(due[c], 2)))), due[c] if len(due[c]) > 2 else ()))
        for c, count in groups
    ]  # fmt: skip
    columns = ("collective", "count", "mesh axes", "operand", "runs", "sent", "time", "line", "caused by")
    note = "slowest first; bytes by ring algorithms; times are modelled"
    yield table("Collectives, per device and call", columns, rows, note, of.most)
    if not rows:
        yield Text("Collectives", ("none predicted",))


def _cause(c: Collective, purpose: str) -> str:
    return "collective matmul" if c.in_matmul else purpose or _CAUSES.get(c.cause, c.cause)


_CAUSES = {"return": "sharding of a result or of a loop carry", USER_WRITTEN: "written in a shard_map"}


def _closed_over(of: Subject) -> Iterable[Part]:
    rows = [
        (array.name, f"{array.dtype}{list(array.shape)}".replace(" ", ""), bytes_text(array.bytes))
        for array in of.plan.closed_over
    ]
    note = "replicated: every device holds all of each"
    yield table("Arrays that the function closes over", ("array", "shape", "per device"), rows, note, of.most)


def _memory(of: Subject) -> Iterable[Part]:
    memory, device = of.plan.cost.memory, of.plan.hardware.chip.memory_bytes
    sizes = (("arguments", memory.arguments), ("results", memory.results), ("donated", -memory.donated),
             ("closed-over arrays", memory.constants), ("temporaries (estimate)", memory.temporaries),
             ("peak (estimate)", memory.peak))  # fmt: skip
    rows = [
        (what, bytes_text(n), "<0.1%" if 0 < abs(n) < device / 1000 else f"{n / device:.1%}")
        for what, n in sizes
        if n or what not in ("donated", "closed-over arrays")
    ]
    yield table("Memory per device", ("part", "size", f"of {bytes_text(device)} ({of.plan.hardware.chip.name})"), rows)


# ---- sections of a full report only


def _runners_up(of: Subject) -> Iterable[Part]:
    chosen = [d for d in of.plan.inputs if d.runner_up]
    without = sum(d.source == "searched" and any(n > 1 for n in d.shape) for d in of.plan.inputs) - len(chosen)
    copies = mirrored([(d.path, d.shape) for d in of.plan.inputs])
    groups = alike(chosen, lambda d: (layer(copies.get(d.path, d.path)), d.strategy, d.runner_up), least=2)
    rows = [
        (_name([d.path for d in same]), times(len(same)), str(same[0].strategy), same[0].runner_up) for same in groups
    ]
    note = "everything else as planned; evaluate a strategy of your own with plan.what_if"
    note += f"; {without} smaller arrays: plan.why(path)" if without > 0 else ""
    yield table("Runners-up", ("array", "count", "planned", "next best strategy and its additional cost"), rows, note)
    if not rows and of.plan.runner_up:
        yield Text("Runner-up", (of.plan.runner_up,))


def _dimension_groups(of: Subject) -> Iterable[Part]:
    def key(g: DimensionGroup) -> Any:
        return layer(g.name), g.size, g.axes, tuple(map(layer, g.members))

    rows = []
    for same in alike(sorted(of.plan.dimension_groups, key=lambda g: not g.axes), key, least=2):
        members = [starred(each) for each in zip(*(g.members[1:] for g in same), strict=True)]
        rows.append(
            (
                _name([g.name for g in same]),
                times(len(same)),
                str(same[0].size),
                axes_text(same[0].axes),
                few(members, 3),
            )
        )
    yield table("Dimension groups", ("dimension", "count", "size", "mesh axes", "tied dimensions"), rows)


def _candidates(of: Subject) -> Iterable[Part]:
    shown = Candidates(of.plan.candidates).table()
    yield table(shown.title, shown.columns, shown.rows, most=of.most)


def _ops(of: Subject) -> Iterable[Part]:
    every = op_strategies(of.plan)
    shown = collections.Counter(o for o in every if o.op in LISTED or o.op.startswith("custom_call"))
    rows = [
        (o.op, times(count), ", ".join(map(str, o.inputs)), ", ".join(map(str, o.outputs)), times(o.trips),
         _line(o.where))
        for o, count in shown.items()
    ]  # fmt: skip
    hidden = len(every) - sum(shown.values())
    note = f'{hidden} more op{"s"[: hidden != 1]} (elementwise, or moving data): .to_dict()["ops"]' if hidden else ""
    yield table("Op strategies", ("op", "count", "in_strategy", "out_strategy", "runs", "line"), rows, note, of.most)


def _constraints(of: Subject) -> Iterable[Part]:
    shown = collections.Counter((c.kind, c.where, c.operands, c.results) for c in of.plan.constraints)
    rows = [
        (kind, times(count), ", ".join(map(_open, operands)), ", ".join(map(_open, results)), _line(where))
        for (kind, where, operands, results), count in shown.items()
    ]
    note = "sharding propagation alone would choose other shardings for these ops"
    yield table("Sharding constraints", ("op", "count", "operands", "results", "line"), rows, note, of.most)


def _open(spec: Spec | None) -> str:
    return "open" if spec is None else spec_text(spec)


# ---- the compiled program


def _compiled(of: Subject) -> Iterable[Part]:
    if of.compared is None:
        return
    kinds = of.compared.kinds
    if len(kinds) > 1:
        totals = (Tally(*map(sum, zip(*map(dataclasses.astuple, side), strict=True)))
                  for side in ([p for _, p, _ in kinds], [c for _, _, c in kinds]))  # fmt: skip
        kinds = (*kinds, ("all", *totals))
    rows = [
        (kind, _ran(p), _ran(c), bytes_text(p.bytes_sent), bytes_text(c.bytes_sent),
         f"{c.bytes_sent / p.bytes_sent:.2f}" if p.bytes_sent else "-")
        for kind, p, c in kinds
    ]  # fmt: skip
    columns = ("collective", "predicted", "compiled", "predicted sent", "compiled sent", "ratio")
    yield table("Compiled: collectives, per device and call", columns, rows)
    pairs = [(_MEMORY.get(what, what), pair, bytes_text) for what, pair in of.compared.memory]
    rows = [
        (what, *("-" if v is None else text(v) for v in (pair.predicted, pair.compiled)),
         "-" if pair.ratio is None else f"{pair.ratio:.2f}")
        for what, pair, text in (*pairs, ("matmul work", of.compared.matrix_flops, flops_text))
    ]  # fmt: skip
    yield table("Compiled: memory and work per device", ("part", "predicted", "compiled", "ratio"), rows)
    yield Text("Why they differ", of.compared.why or ("They agree.",))


def _ran(tally: Tally) -> str:
    return number_text(tally.count) + (f", {number_text(tally.runs)} runs" if tally.runs != tally.count else "")


def _rehearsed(of: Subject) -> Iterable[Part]:
    return of.plan.rehearsal.parts() if of.plan.rehearsal is not None else ()


def _counted(of: Subject) -> Iterable[Part]:
    rows = [
        (c.what, c.where, number_text(sum(c.counts)), number_text(c.left_out),
         *(number_text(round(n)) for n in (min(c.counts), sum(c.counts) / len(c.counts), max(c.counts))),
         str(c.counts.count(0)), _numbers(c.counts, len(c.counts) if of.is_full else SHORT_ROWS))
        if c.counts else (c.what, c.where, "hidden", *("",) * 6)
        for c in of.counted or ()
    ]  # fmt: skip
    columns = ("counted", "line", "in all", "dropped", "least", "mean", "most", "none", "each")
    note = "of one run; hidden: inside a custom derivative rule or a shard_map"
    yield table("Counted in a run", columns, rows, note, of.most)
    if of.counted is not None and not rows:
        yield Text("Counted in a run", ("nothing: the function has no `experts.route`",))


def _numbers(counts: Sequence[int], most: int) -> str:
    return " ".join(map(str, counts[:most])) + (" …" if len(counts) > most else "")


_MEMORY = {"closed_over": "closed-over arrays", "together": "peak", "xla_peak": "peak by XLA's own count"}


def _drawing(of: Subject) -> Iterable[Part]:
    if of.plan.hardware.count > 1:
        yield drawing(of.plan)


SECTIONS: tuple[tuple[Callable[[Subject], Iterable[Part]], bool], ...] = (
    (_headline, True), (_diagnostics, True), (_mesh, True), (_processes, True), (_drawing, True), (_arrays, True),
    (_closed_over, True),
    (_collectives, True),
    (_memory, True), (_rehearsed, True), (_compiled, True), (_counted, True),
    (_dimension_groups, False), (_ops, False), (_constraints, False),
    (_candidates, False), (_runners_up, False),
)  # fmt: skip
"""Each section, and whether a short report has it."""


def parts(of: Subject) -> tuple[Part, ...]:
    """The parts of a report. The sections that a short report leaves out are closed at first in HTML."""
    made: list[Part] = []
    for section, is_short in SECTIONS:
        for part in section(of) if is_short or of.is_full else ():
            if not isinstance(part, Table):
                made.append(part)
            elif part.rows:
                made.append(dataclasses.replace(part, is_open=is_short))
    return tuple(made if of.is_full else [*made, MORE])


MORE = Text("", ('Everything else: explain(..., detail="full") or report.full(); as data: report.to_dict().',))
