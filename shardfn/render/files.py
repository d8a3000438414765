"""Texts saved as files, in the form that the name's ending asks for."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping

from shardfn.errors import StrategyError, fail


def save_text(path: str | os.PathLike[str], forms: Mapping[str, Callable[[], str]], what: str) -> None:
    """Write a text as a file.

    Args:
      path: the file.
      forms: for each ending the function that makes the text.
      what: what is saved, for error messages: "a picture".

    Raises:
      StrategyError: the name has another ending, or the file cannot be written.
    """
    target, where = pathlib.Path(path), f"save({str(path)!r})"
    form = forms.get(target.suffix.lower())
    if form is None:
        *others, last = forms
        endings = f"{', '.join(others)} or {last}" if others else last
        fix = f"save it as {target.with_suffix(next(iter(forms))).name!r}" if target.name else "give the name of a file"
        fail(StrategyError, f"{what} cannot be saved as `{target.name}`", where=where,
             why=f"the name of {what} ends in {endings}", fix=fix)  # fmt: skip
    text = form()
    try:
        target.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        fail(StrategyError, f"{what} cannot be written to {str(path)!r}", where=where, why=str(error),
             fix="give a path in a directory that exists and can be written to")  # fmt: skip
