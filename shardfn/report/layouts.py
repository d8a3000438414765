"""Several layouts of one call beside each other: time, bytes, memory, and what each sends most."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from shardfn.errors import ShardError, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.paths import few, listed
from shardfn.ir.model import mesh_sizes_text
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan import Figures, Plan, devices_text
from shardfn.render.cells import table
from shardfn.render.files import save_text
from shardfn.render.parts import Table
from shardfn.render.printed import PrintedTable
from shardfn.render.text import to_text
from shardfn.units import bytes_text


@dataclasses.dataclass(frozen=True)
class ComparedLayout:
    """One row of a comparison.

    Attributes:
      name: the name that the user gave the layout.
      plan: its plan; None where there is none.
      figures: modelled seconds, bytes sent, peak bytes and FLOPs of one call on one device; None without a plan.
      fits: whether the peak is within the memory limit, or else the memory of the device; False without a plan.
      problem: why there is no plan; empty where there is one.
    """

    name: str
    plan: Plan | None
    figures: Figures | None
    fits: bool
    problem: str = ""

    @property
    def sends_most(self) -> str:
        """The kind and the line of the collectives that send most bytes, or what a training step wrote them for, and their share;
        empty where nothing is sent."""
        sent: collections.Counter[tuple[str, str]] = collections.Counter()
        purposes: dict[tuple[str, str], collections.Counter[str]] = {}
        for c in self.plan.collectives if self.plan else ():
            sent[c.kind, c.where] += int(c.total_bytes)
            purposes.setdefault((c.kind, c.where), collections.Counter())[c.purpose] += int(c.total_bytes)
        if not sent.total():
            return ""
        (kind, where), size = sent.most_common(1)[0]
        most = [purpose for purpose, _ in purposes[kind, where].most_common() if purpose]
        at = f" at {file_line(where)}" if where else f" ({few(most, 1)})" if most else ""
        return f"{kind}{at}: {bytes_text(size)}, {size / sent.total():.0%}"


@dataclasses.dataclass(frozen=True, repr=False)
class LayoutComparison(PrintedTable):
    """Layouts of one call beside each other. Print it for a table, show it in a notebook, or `save` it as a page.

    Attributes:
      rows: the layouts: those that fit first, then by modelled time.
    """

    rows: tuple[ComparedLayout, ...]

    @property
    def best(self) -> str:
        """The name of the layout with the least modelled time among those that fit, or else among all."""
        return self.rows[0].name

    def table(self) -> Table:
        """One row for each layout."""
        rows = []
        for row in self.rows:
            if row.plan is None or row.figures is None:
                rows.append((row.name, "error", "", "", "", "", "", ""))
                continue
            kind, mesh = row.plan.kind, mesh_sizes_text(row.plan.axes)
            fits = "yes" if row.fits else "no"
            seconds, *others = row.figures.texts()
            least = "at least " if row.plan.cost.is_lower_bound else ""
            rows.append((row.name, kind, mesh, least + seconds, *others, fits, row.sends_most))
        targets = {devices_text(row.plan.hardware): None for row in self.rows if row.plan}
        where = [devices_text(row.plan.hardware) if row.plan and len(targets) > 1 else "" for row in self.rows]
        rows = [(name, on, *cells) for (name, *cells), on in zip(rows, where, strict=True)]
        columns = ("layout", "devices", "plan", "mesh", "time", "sent", "memory", "fits", "sends most")
        notes = [f"per device and call, modelled for {', '.join(targets)}"]
        notes += [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        unknown = {op: None for row in self.rows if row.plan for op in row.plan.cost.unmodelled_ops}
        notes += [f"at least: {listed([*unknown])} not modelled"] if unknown else []
        notes += [f"{row.name}: entries {row.plan.entries}" for row in self.rows if row.plan and row.plan.entries]
        return table("Layouts", columns, rows, "; ".join(notes), most=len(rows), optional=("mesh",))

    def __getitem__(self, name: str) -> Plan:
        """The plan of one layout."""
        found = {row.name: row.plan for row in self.rows}
        if found.get(name) is None:
            have = ", ".join(f"`{one}`" for one, plan in found.items() if plan is not None)
            fail(
                StrategyError,
                f"the comparison has no plan `{name}`",
                where=f"comparison[{name!r}]",
                fix=f"it has {have}",
            )
        return found[name]  # type: ignore[return-value]

    __repr__ = PrintedTable.__str__

    def _html_title(self) -> str:
        return "Layouts"

    def to_html(self) -> str:
        """The table as an HTML page that needs no other file.

        Returns:
          The page, from `<!doctype html>` on.
        """
        head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        return f"{head}<title>Layouts</title></head><body>{self._repr_html_()}</body></html>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a file.

        Args:
          path: the file; `.html` gives a page, `.txt` the text that `print` shows.

        Raises:
          StrategyError: the name has another ending, or the file cannot be written.
        """
        forms = {".html": self.to_html, ".txt": lambda: to_text([self.table()])}
        save_text(path, {ending: lambda make=make: f"{make()}\n" for ending, make in forms.items()}, "a comparison")


def compare(layouts: Mapping[str, Any], *args: Any, **kwargs: Any) -> LayoutComparison:
    """Compare layouts of one call: modelled time, bytes sent, memory, whether each fits, and what each sends most.

    Nothing runs, and no device is needed.

    Args:
      layouts: by name, sharded functions (`shard(f, style="fsdp")`), training steps (`train.step`) or plans.
      args: the positional arguments of the call, arrays or shapes; none where all layouts are plans.
      kwargs: its keyword arguments.

    Returns:
      The `LayoutComparison`. A layout that cannot be planned, such as one that keeps no memory limit, has a row that says why.

    Raises:
      StrategyTypeError: `layouts` is no dict of such values, or empty.
      ShardError: no layout can be planned; the problems of the first.

    >>> import jax, shardfn
    >>> x, w = jax.ShapeDtypeStruct((1024, 512), "float32"), jax.ShapeDtypeStruct((512, 256), "float32")
    >>> dense = lambda x, w: x @ w
    >>> rows = shardfn.shard(dense, ((8, 1), (1, 1)), device="tpu-v5e:2x4")
    >>> inner = shardfn.shard(dense, ((1, 8), (8, 1)), device="tpu-v5e:2x4")
    >>> found = shardfn.compare({"rows": rows, "inner": inner}, x, w)
    >>> found.best, [row.figures.bytes_sent for row in found.rows]
    ('rows', [0, 1835008])
    """
    if not isinstance(layouts, Mapping) or not layouts or not all(isinstance(name, str) for name in layouts):
        given = a(layouts) if layouts or not isinstance(layouts, Mapping) else "an empty one"
        fail(StrategyTypeError, f"`compare` takes a dict from names to layouts, not {given}",
             where=f"compare({layouts!r:.60})", why="each row of the table has a name",
             fix='write shardfn.compare({"fsdp": shard(f, style="fsdp"), "given": shard(f, ((4, 1), None))}, *args)')  # fmt: skip
    rows, first = list[ComparedLayout](), None
    for name, layout in layouts.items():
        if not isinstance(layout, Plan) and not callable(getattr(layout, "plan", None)):
            fail(StrategyTypeError, f"the layout `{name}` is {a(layout)}", where=f"{name} = {layout!r:.60}",
                 why="a layout is a sharded function, a training step or a plan",
                 fix='shard the function: shardfn.shard(f, style="fsdp")')  # fmt: skip
        try:
            plan = layout if isinstance(layout, Plan) else layout.plan(*args, **kwargs)
        except ShardError as error:
            first = first or error
            problem = error.problems[0]
            text = f"{problem.what}; fix: {problem.fix}" if problem.fix else problem.what
            rows.append(ComparedLayout(name, None, None, False, text))
            continue
        limit = plan.hardware.chip.memory_bytes if plan.memory_limit is None else plan.memory_limit
        rows.append(ComparedLayout(name, plan, Figures.of(plan.cost), plan.cost.memory.peak <= limit))
    if first is not None and not any(row.plan for row in rows):
        raise first
    return LayoutComparison(tuple(sorted(rows, key=_order)))


def _order(row: ComparedLayout) -> tuple[bool, bool, float]:
    return row.figures is None, not row.fits, row.figures.time_s if row.figures else 0.0
