"""Objects that print as their parts: fitted to a terminal, in colours by `rich`, as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfn.render.html import to_html
from shardfn.render.parts import Part, Table
from shardfn.render.text import Shown, terminal_width, to_text


class Printed:
    """What shows as `parts()`; `_html_title()` names the whole for screen readers."""

    __slots__ = ()

    def parts(self) -> Sequence[Part]:
        """What is shown, in order."""
        raise NotImplementedError

    def _html_title(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return to_text(self.parts(), terminal_width())

    def __rich__(self) -> Any:
        return Shown(self.parts())

    def _repr_html_(self) -> str:
        return to_html(self.parts(), self._html_title())


class PrintedTable(Printed):
    """What shows as its `table()`."""

    __slots__ = ()

    def table(self) -> Table:
        """The table."""
        raise NotImplementedError

    def parts(self) -> Sequence[Part]:
        """The table alone."""
        return [self.table()]
