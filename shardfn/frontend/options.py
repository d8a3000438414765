"""What the user asked of `shard`, and what the parallel context adds to it: devices, layout file, bounds of the search."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jax import tree_util

from shardfn.cost.devices.hardware import Hardware, resolve
from shardfn.errors import ContextError, DeviceError, Problem, fail, raise_problems
from shardfn.frontend.byte_sizes import bytes_of, plain
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.search_options import Wishes
from shardfn.frontend.strategy import Leaf
from shardfn.frontend.validation import check_all
from shardfn.layoutfile.files import LayoutFile, read_layout
from shardfn.planning.named_shardings import mesh_of


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for, as given to `shard`."""

    in_strategy: Any = None
    out_strategy: Any = None
    device: Any = None
    level: int = 0
    parameter_plan: Any = None
    search_mode: str | None = None
    memory_limit: int | float | str | None = None
    compile_candidates: int = 0
    time_limit: float | None = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    layout: Any = None
    compiler_options: Any = None

    def __post_init__(self) -> None:
        for name in ("level", "memory_limit", "compile_candidates", "time_limit"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    def wishes(self, current: Defaults) -> Wishes:
        """What bounds the search."""
        limit = None if self.memory_limit is None else bytes_of(self.memory_limit, "memory_limit")
        assert not isinstance(limit, Problem)  # checked by `shard`
        mode = self.search_mode or current.search_mode
        inside = mode not in (None, "auto")  # which follows the cuts where nothing is left open
        seconds = math.inf if self.time_limit is None else self.time_limit
        return Wishes(limit, seconds, self.compile_candidates <= 1, current.algorithm, inside)

    def layout_file(self, current: Defaults) -> LayoutFile | None:
        """The layout file given, or the context's."""
        if self.layout is not None:
            return read_layout(self.layout)
        return read_layout(pathlib.Path(current.layout_file)) if current.layout_file else None

    def hardware(self, inputs: Sequence[Leaf], current: Defaults, problems: Sequence[Problem]) -> Hardware:
        """The devices to plan for: those given, or those of a mesh in a strategy, or the context's, or all.

        Raises:
          ContextError: the context asks for something that `shard` cannot do.
          DeviceError: there are no such devices; beside it, `problems` and what is wrong whatever the device is.
        """
        if current.parallel_mode in ("data_parallel", "hybrid_parallel"):
            fail(ContextError, f"`shard` has no meaning under parallel_mode={current.parallel_mode!r}",
                 where=f"parallel_mode = {current.parallel_mode!r}", why="that mode cuts no operator",
                 fix='set_auto_parallel_context(parallel_mode="semi_auto_parallel"), or leave parallel_mode unset')  # fmt: skip
        if current.stages > 1 and current.search_mode == "dynamic_programming":
            fail(ContextError, "a pipeline does not go with the search dynamic_programming",
                 where="pipeline_stages > 1, search_mode = 'dynamic_programming'", why="as in MindSpore",
                 fix="use another search_mode, or reset_auto_parallel_context()")  # fmt: skip
        device = self.device
        mesh = mesh_of([*(leaf.entry for leaf in inputs), *tree_util.tree_leaves(self.out_strategy)])
        if device is None and mesh is not None:
            device = mesh
        try:
            found = resolve(device, count=current.devices_asked, default=current.platform)
        except DeviceError as error:
            known = list(problems)
            check_all(inputs, 1, known)
            raise_problems([*error.problems, *known] if known else ())
            raise
        if found.count % current.stages:
            fail(ContextError, f"{found.count} devices cannot be cut into {current.stages} pipeline stages",
                 where=f"pipeline_stages = {current.stages}", why=f"{found.count} is not divisible by {current.stages}",
                 fix="set pipeline_stages to a divisor, or reset_auto_parallel_context()")  # fmt: skip
        current.check_rank(found.count)
        return found
