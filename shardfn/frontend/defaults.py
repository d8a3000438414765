"""What a call uses where neither its options nor its entries say: the settings of a process, from whoever keeps them.

`shardfn.mindspore.context` registers MindSpore's parallel context here when it is imported. Until then nothing is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from shardfn.errors import ContextError, fail
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.search.problem import Algorithm


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The settings that calls read; None stands for a setting that nobody set. Hashable, as part of a cache's key."""

    device_count: int | None = None
    platform: str | None = None
    rank: int = 0
    parallel_mode: str | None = None
    search_mode: str | None = None
    dataset_strategy: str | tuple[Any, ...] | None = None
    honours_out_strategy: bool = True
    """False: a given `out_strategy` is replaced with data parallelism, or with replicated results under "full_batch"."""
    layout_file: str = ""
    """A layout file for the arrays that no entry names."""
    plan_file: str = ""
    """Where each plan is saved."""
    saves_parameters_only: bool = True
    """Whether only trainable parameters go to a `plan_file` in MindSpore's format."""
    graphs: int = 0
    """How much of what is compiled is written to `graphs_path`: 0 to 3."""
    graphs_path: str = "."
    alltoall: bool | None = None
    """Whether arrays may be resharded, and tokens sent to experts, by all-to-all. None leaves it to XLA."""
    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)

    @property
    def names_files(self) -> bool:
        """Whether planning reads or writes files that these settings name."""
        return bool(self.layout_file or self.plan_file or self.graphs)

    @property
    def devices_asked(self) -> int | None:
        """The number of devices to use; None for all."""
        return 1 if self.parallel_mode == "stand_alone" else self.device_count

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.training.pipeline_stages or 1

    def check_rank(self, devices: int) -> None:
        """Raise where `rank` is not below the number of devices in use.

        Raises:
          ContextError: naming the ranks there are.
        """
        if self.rank >= devices:
            fail(ContextError, f"`global_rank` = {self.rank} is not one of {devices} devices",
                 where=f"set_auto_parallel_context(global_rank={self.rank})", why="ranks count from 0",
                 fix=f"give a rank from 0 to {devices - 1}, or a larger device_num")  # fmt: skip


_NOTHING = Defaults()
_provider: Callable[[], Defaults] = lambda: _NOTHING  # noqa: E731
_HELD: ContextVar[Defaults | None] = ContextVar("shardfn_defaults", default=None)


def register(provider: Callable[[], Defaults]) -> None:
    """Make `provider` the source of `current`. It must return one object as long as nothing changes: calls compare it."""
    global _provider
    _provider = provider


def current() -> Defaults:
    """The settings in force here.

    >>> current().search_mode is None
    True
    """
    return _HELD.get() or _provider()


@contextlib.contextmanager
def override(defaults: Defaults) -> Iterator[None]:
    """A block in which `defaults` are the current ones, not those of the provider."""
    token = _HELD.set(defaults)
    try:
        yield
    finally:
        _HELD.reset(token)
