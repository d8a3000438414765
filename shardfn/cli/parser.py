"""A parser of command lines that says what a misspelt flag or command was meant to be."""

from __future__ import annotations

import argparse
from typing import Any

from shardfn.errors import did_you_mean, nearest, similar
from shardfn.frontend.other_words import OPTIONS


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser`, but for its answer to names that it does not know. Its commands are parsers of this class.

    >>> parser = Parser(exit_on_error=False)
    >>> _ = parser.add_argument("--device")
    >>> parser.parse_args(["--device", "tpu-v5e:8"])
    Namespace(device='tpu-v5e:8')
    """

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """The values of the arguments; what is left over is an error of this command, not of the whole command line."""
        found, left = super().parse_known_args(*args, **kwargs)
        if left:
            flag = next((text.partition("=")[0] for text in left if text.startswith("-")), "")
            self.error(f"there is no flag {flag}; {self._flag_fix(flag)}" if flag else f"unexpected: {' '.join(left)}")
        return found, left

    def _flag_fix(self, flag: str) -> str:
        """The fix for a flag that is not there: flags are options of `shard`, with dashes."""
        flags = {_option(name): name for name in self._option_string_actions if name.startswith("--")}
        close = similar(OPTIONS.get(_option(flag), _option(flag)), flags)
        return did_you_mean(flags[name] for name in close) or f"{self.prog} --help lists the flags"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(None, f"there is no command {value}; {nearest(value, action.choices)}")


def _option(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
