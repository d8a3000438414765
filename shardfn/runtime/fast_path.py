"""The way of a call that is of the same kind as the last one: straight to `jax.jit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from shardfn.frontend import defaults
from shardfn.frontend.watch import NOTHING_READ, Watch
from shardfn.planning.call import OtherCall
from shardfn.runtime.executable import Entry


def _no_fast_path(*args: Any) -> Any:
    raise OtherCall


@dataclasses.dataclass
class FastPath:
    """What the last call ran, and where it may run again without a look at its kind: nowhere at first."""

    run: Callable[..., Any] = _no_fast_path
    defaults: Any = None
    """The settings in force."""
    context: Any = None
    """The mesh around the call."""
    watch: Watch = NOTHING_READ
    checks_arrays: bool = False
    """Whether arguments may be on other devices."""

    def open(self, entry: Entry) -> None:
        """Let calls like the one of now run this entry."""
        self.run, self.watch, self.checks_arrays = entry.jitted, entry.watch, entry.plan.hardware.count > 1
        self.defaults, self.context = defaults.current(), jax.sharding.get_abstract_mesh()

    def close(self) -> None:
        """Let the next call look for its entry."""
        self.run, self.defaults = _no_fast_path, None
