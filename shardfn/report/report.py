"""A plan as a report: made once, shown as text, in a terminal, as HTML or as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from shardfn.compiled.comparison import compare
from shardfn.compiled.executable import Compiled
from shardfn.errors import StrategyError, closest, did_you_mean, fail
from shardfn.frontend.notes import Counted
from shardfn.planning.plan import Plan
from shardfn.planning.questions import with_dominated_entries, with_runners_up, with_tied_replicas
from shardfn.render.files import save_text
from shardfn.render.html import to_html
from shardfn.render.parts import Part
from shardfn.render.text import Shown, terminal_width, to_text
from shardfn.report.data import attributions, compiled_data, plan_data
from shardfn.report.page import page_html
from shardfn.report.sections import FULL_ROWS, Subject, parts


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What a plan does and why. `print` it, show it in a notebook, or take its data with `to_dict` or `to_json`.
    `save("report.html")` writes a page for a colleague.

    Text is short unless it is asked for with `full`; HTML and data always hold everything.

    >>> import jax, shardfn
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    >>> report = shardfn.explain(lambda x, w: x @ w, x, w, in_strategy=((4, 1), (1, 2)), device="tpu-v5e:2x4")
    >>> report.to_dict()["results"][0]["strategy"]
    [4, 2]
    """

    json: str
    is_full: bool
    """Whether text shows every section."""
    _subject: Subject = dataclasses.field(compare=False)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """What text shows."""
        of = self._subject
        return parts(dataclasses.replace(of, is_full=True, most=FULL_ROWS) if self.is_full else of)

    def __str__(self) -> str:
        """Fitted to the terminal; nothing is wrapped where standard output is a file or a pipe."""
        return self.to_text(terminal_width())

    __repr__ = __str__

    def __rich__(self) -> Any:
        return Shown(self.parts)

    def _repr_html_(self) -> str:
        return to_html(self.full().parts, f"Plan of {self._subject.plan.function}")

    def full(self) -> Report:
        """The same report with every section: dimension groups, op strategies, constraints, candidates and runners-up."""
        return dataclasses.replace(self, is_full=True)

    def to_text(self, width: int | None = None) -> str:
        """The report as plain text.

        Args:
          width: characters per line: prose is wrapped, and long paths are elided in the middle. None wraps nothing.

        Returns:
          Lines without colours.
        """
        return to_text(self.parts, width)

    def to_html(self) -> str:
        """The full report as one HTML page with pictures, for readers who have never seen shardfn; it needs no other file.

        Returns:
          The page, from `<!doctype html>` on.
        """
        return page_html(self._subject)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a file.

        Args:
          path: the file; `.html` gives the page of `to_html`, `.json` the data, `.txt` the text that `print` shows.

        Raises:
          StrategyError: the name has another ending, or the file cannot be written.
        """
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.to_text}
        save_text(path, {ending: lambda make=make: f"{make()}\n" for ending, make in forms.items()}, "a report")

    def to_dict(self) -> dict[str, Any]:
        """The full report as dicts, lists, strings and numbers; `schema` is the version of the keys.

        Returns:
          A new dict for each call.
        """
        return json.loads(self.json)

    def to_json(self) -> str:
        """What `to_dict` returns, as JSON text.

        Returns:
          One line.
        """
        return self.json


def make_report(
    plan: Plan,
    compiled: Compiled | None = None,
    transfers: Sequence[str] = (),
    counted: Sequence[Counted] | None = None,
) -> Report:
    """The report of a plan.

    Args:
      plan: the plan.
      compiled: the compiled program; the report then compares it with the prediction.
      transfers: one line for each argument that arrives with another sharding.
      counted: what a run counted; None without a run.
    """
    plan = with_tied_replicas(with_dominated_entries(with_runners_up(plan)))
    compared = None if compiled is None else compare(plan, compiled)
    due = attributions(plan)
    data = plan_data(plan, transfers, due)
    if compiled is not None and compared is not None:
        data["compiled"] = compiled_data(compiled, compared)
    if counted is not None:
        data["run"] = {"counts": [each._asdict() for each in counted]}
    return Report(json.dumps(data, ensure_ascii=False), False, Subject(plan, transfers, compared, due, counted))


def in_detail(report: Report, detail: str) -> Report:
    """The report in the detail that a user asks for.

    Raises:
      StrategyError: `detail` is neither "short" nor "full".
    """
    if detail not in ("short", "full"):
        fail(StrategyError, f"`detail` is {detail!r}", where=f"detail = {detail!r}", why="a report is short or full",
             fix=did_you_mean(closest(str(detail), ["short", "full"])) or 'use detail="full", or leave it out')  # fmt: skip
    return report.full() if detail == "full" else report
