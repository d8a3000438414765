"""MindSpore's parallel context: one frozen, validated dataclass with the user's settings.

Outside an `auto_parallel` block, a setting changes one value that every thread of the process sees: data loader threads, and
often notebook cells, have contexts of their own, where a bare `ContextVar` would lose it. Inside a block it ends with the
block. A block belongs to its thread and to the asyncio tasks started in it. A thread started inside sees the process's
value, unless it runs in `contextvars.copy_context()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from shardfn.errors import ContextError, ContextTypeError, NotAvailableError, Problem, fail, nearest
from shardfn.frontend.defaults import Defaults, register
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.frontend.value_checks import clipped
from shardfn.mindspore.context_keys import (
    ALGO_KEYS,
    AUTO_PARALLEL_KEYS,
    GRAPH_MODE,
    PYNATIVE_MODE,
    RUN_KEYS,
    Key,
    ParallelMode,
    StrategyFiles,
)
from shardfn.search.problem import Algorithm

__all__ = [
    "GRAPH_MODE", "PYNATIVE_MODE", "ParallelContext", "ParallelMode", "auto_parallel", "current",
    "get_algo_parameters", "get_auto_parallel_context", "get_context",
    "reset_algo_parameters", "reset_auto_parallel_context", "reset_context",
    "set_algo_parameters", "set_auto_parallel_context", "set_context",
]  # fmt: skip

_TRAINING = frozenset(f.name for f in dataclasses.fields(TrainingSettings)) - {"all_reduce_fusion_config"}
_KEYS: dict[str, Key] = {**AUTO_PARALLEL_KEYS, **RUN_KEYS, **ALGO_KEYS}


def _default(name: str) -> Any:
    return _KEYS[name].default


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """The settings that the library reads; hashable, so that it can be part of a cache key.

    Its fields are the active keys of `context_keys`.

    Attributes:
      explicit: the keys that the user set.
      inert: the other keys with a value that is not the default: those of the training step, and those without an effect.

    >>> ParallelContext(device_num=8).device_num
    8
    """

    device_num: int | None = _default("device_num")
    global_rank: int = _default("global_rank")
    parallel_mode: str = _default("parallel_mode")
    search_mode: str = _default("search_mode")
    dataset_strategy: str | tuple[Any, ...] = _default("dataset_strategy")
    out_strategy_mode: str = _default("out_strategy_mode")
    strategy_ckpt_config: StrategyFiles = _default("strategy_ckpt_config")  # noqa: RUF009 (a NamedTuple does not change)
    mode: int = _default("mode")
    device_target: str | None = _default("device_target")
    save_graphs: int = _default("save_graphs")
    save_graphs_path: str = _default("save_graphs_path")
    fully_use_devices: bool = _default("fully_use_devices")
    elementwise_op_strategy_follow: bool = _default("elementwise_op_strategy_follow")
    enable_algo_approxi: bool = _default("enable_algo_approxi")
    algo_approxi_epsilon: float = _default("algo_approxi_epsilon")
    tensor_slice_align_enable: bool = _default("tensor_slice_align_enable")
    tensor_slice_align_size: int = _default("tensor_slice_align_size")
    inert: tuple[tuple[str, Any], ...] = ()
    explicit: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        invalid: list[Problem] = []
        waiting: list[Problem] = []
        for key in _KEYS.values():
            value = getattr(self, key.name) if key.active and not key.alias_of else key.default
            if value is key.default:
                continue
            found = list(key.check(key.name, value))
            invalid += found
            if not found:
                waiting += key.unavailable(value)
                object.__setattr__(self, key.name, key.store(value))
        _raise(invalid, waiting)

    @functools.cached_property
    def defaults(self) -> Defaults:
        """The settings that calls, searches and training steps read."""
        mode = self._said("parallel_mode")
        return Defaults(
            device_count=self.device_num,
            platform=self.device_target,
            rank=self.global_rank,
            parallel_mode=mode,
            search_mode=self._said("search_mode"),
            dataset_strategy=self._said("dataset_strategy"),
            honours_out_strategy=mode is None or "auto" not in mode or self.out_strategy_mode == "honour",
            layout_file=self.strategy_ckpt_config.load_file,
            plan_file=self.strategy_ckpt_config.save_file,
            saves_parameters_only=self.strategy_ckpt_config.only_trainable_params,
            graphs=self.save_graphs,
            graphs_path=self.save_graphs_path,
            algorithm=Algorithm(**{name: getattr(self, name) for name in ALGO_KEYS}),
            training=TrainingSettings(
                **{name: self.read(name) for name in _TRAINING if self.is_set(name)},
                all_reduce_fusion_config=self._kept("all_reduce_fusion_config"),
            ),
        )

    def is_set(self, name: str) -> bool:
        """Whether the user set a key, to any value.

        Args:
          name: the key, or an alias of it.

        Returns:
          True if it was set.

        Raises:
          ContextError: there is no such key.

        >>> with auto_parallel(parallel_mode="stand_alone"):
        ...     current().is_set("parallel_mode"), current().is_set("device_num")
        (True, False)
        """
        key = _known(_KEYS, "is_set", name)
        return (key.alias_of or name) in self.explicit

    def read(self, name: str) -> Any:
        """The value of a key, as the `get` functions return it.

        Args:
          name: any key of the three tables.

        Returns:
          The value, or the default.

        Raises:
          ContextError: there is no such key.
        """
        key = _known(_KEYS, "read", name)
        return key.read(self._kept(key.alias_of or name))

    def _said(self, name: str) -> Any:
        return self.read(name) if self.is_set(name) else None

    def _kept(self, name: str) -> Any:
        key = _KEYS[name]
        return getattr(self, name) if key.active else dict(self.inert).get(name, key.default)


def set_auto_parallel_context(**settings: Any) -> None:
    """Set keys of MindSpore's auto-parallel context.

    Args:
      settings: keys with their values, such as `device_num=8`.

    Raises:
      ContextError: an unknown key or a value out of range: all problems together, and nothing is set.
      ContextTypeError: values of wrong types only.
      NotAvailableError: a value that asks for something that is not built yet.

    >>> set_auto_parallel_context(device_num=8, parallel_mode="semi_auto_parallel")
    >>> get_auto_parallel_context("device_num")
    8
    >>> reset_auto_parallel_context()
    """
    _update(lambda context: _changed(context, AUTO_PARALLEL_KEYS, "set_auto_parallel_context", settings))


def get_auto_parallel_context(key: str) -> Any:
    """The value of a key of the auto-parallel context.

    Args:
      key: the key.

    Returns:
      The value, or the default.

    Raises:
      ContextError: there is no such key.

    >>> get_auto_parallel_context("parallel_mode")
    'stand_alone'
    """
    return _read(AUTO_PARALLEL_KEYS, "get_auto_parallel_context", key)


def reset_auto_parallel_context() -> None:
    """Reset every key of the auto-parallel context to its default, as if it had never been set.

    >>> set_auto_parallel_context(search_mode="sharding_propagation")
    >>> reset_auto_parallel_context()
    >>> get_auto_parallel_context("search_mode")
    'auto'
    """
    _update(lambda context: _reset(context, AUTO_PARALLEL_KEYS))


@contextlib.contextmanager
def auto_parallel(**settings: Any) -> Iterator[ParallelContext]:
    """Set keys of the auto-parallel context for a `with` block. At its end every setting has its old value.

    Args:
      settings: as in `set_auto_parallel_context`.

    Yields:
      The context inside the block.

    Raises:
      ContextError: as in `set_auto_parallel_context`.

    >>> with auto_parallel(device_num=4) as context:
    ...     context.device_num
    4
    >>> get_auto_parallel_context("device_num")
    1
    """
    changed = _changed(current(), AUTO_PARALLEL_KEYS, "auto_parallel", settings)
    token = _BLOCK.set(changed)
    try:
        yield changed
    finally:
        _BLOCK.reset(token)


def set_context(**settings: Any) -> None:
    """Set keys of MindSpore's run context.

    Args:
      settings: `mode`, `device_target`, `save_graphs`, `save_graphs_path` or `device_id`, with values.

    Raises:
      ContextError: as in `set_auto_parallel_context`.

    >>> with auto_parallel():
    ...     set_context(mode=GRAPH_MODE, device_target="cpu")
    ...     get_context("device_target")
    'CPU'
    """
    _update(lambda context: _changed(context, RUN_KEYS, "set_context", settings))


def get_context(key: str) -> Any:
    """The value of a key of `set_context`.

    Args:
      key: the key.

    Returns:
      The value, or the default.

    Raises:
      ContextError: there is no such key.

    >>> get_context("mode") == PYNATIVE_MODE
    True
    """
    return _read(RUN_KEYS, "get_context", key)


def reset_context() -> None:
    """Reset every key of `set_context` to its default. `reset_auto_parallel_context` leaves them, as in MindSpore.

    >>> reset_context()
    """
    _update(lambda context: _reset(context, RUN_KEYS))


def set_algo_parameters(**settings: Any) -> None:
    """Set parameters of the search, by MindSpore's names.

    A rule does not apply to an op that it would leave without a sharding, nor to your own entries.

    Args:
      settings: parameters with values.

        - `fully_use_devices`: shard every op over all devices where possible.
        - `tensor_slice_align_enable`, `tensor_slice_align_size`: shard the last dimension of a matmul's operands and result
          only if the shard is a multiple of the size.
        - `enable_algo_approxi`, `algo_approxi_epsilon`: accept a solution within this fraction of the least cost.
        - `elementwise_op_strategy_follow`: shard elementwise ops as their input, which shardfn always does.

    Raises:
      ContextError: as in `set_auto_parallel_context`.

    >>> with auto_parallel():
    ...     set_algo_parameters(fully_use_devices=True)
    ...     get_algo_parameters("fully_use_devices")
    True
    """
    _update(lambda context: _changed(context, ALGO_KEYS, "set_algo_parameters", settings))


def get_algo_parameters(key: str) -> Any:
    """The value of a parameter of the search.

    Args:
      key: the parameter.

    Returns:
      The value, or the default.

    Raises:
      ContextError: there is no such parameter.

    >>> get_algo_parameters("tensor_slice_align_size")
    16
    """
    return _read(ALGO_KEYS, "get_algo_parameters", key)


def reset_algo_parameters() -> None:
    """Reset every parameter of the search to its default.

    >>> reset_algo_parameters()
    """
    _update(lambda context: _reset(context, ALGO_KEYS))


def current() -> ParallelContext:
    """The current context: that of the innermost `auto_parallel` block, or else of the process.

    >>> current().out_strategy_mode
    'overwrite'
    """
    return _BLOCK.get() or _shared


# ---- checking and storing settings ----


def _read(table: Mapping[str, Key], caller: str, name: Any) -> Any:
    return current().read(_known(table, caller, name).name)


_HOMES = {"auto_parallel_context": AUTO_PARALLEL_KEYS, "context": RUN_KEYS, "algo_parameters": ALGO_KEYS}


def _unknown(table: Mapping[str, Key], caller: str, name: str, written: str) -> Problem:
    verb = "get" if caller.startswith("get") else "set"
    homes = [f"{verb}_{home}" for home, keys in _HOMES.items() if name in keys]
    shown = [other for other, key in table.items() if key.active]  # a list of all would be long
    fix = f"use {homes[0]}" if homes else nearest(name, table, shown or table)
    return Problem(f"`{name}` is no key of {caller}", where=f"{caller}({written})", fix=fix)


def _known(table: Mapping[str, Key], caller: str, name: Any) -> Key:
    if not isinstance(name, str):
        fail(
            ContextTypeError,
            "a key of the context is a string",
            where=f"{caller}({clipped(name)})",
            why=f"its type is {type(name).__name__}, not str",
            fix="give one key by its name",
        )
    if name not in table:
        raise ContextError(_unknown(table, caller, name, repr(name)))
    return table[name]


def _raise(invalid: list[Problem], waiting: list[Problem]) -> None:
    if invalid:
        kind = ContextTypeError if all(problem.is_type for problem in invalid) else ContextError
        raise kind([*invalid, *waiting])
    if waiting:
        raise NotAvailableError(waiting)


def _changed(
    context: ParallelContext, table: Mapping[str, Key], caller: str, settings: Mapping[str, Any]
) -> ParallelContext:
    """`context` with `settings`; raises all problems together."""
    invalid: list[Problem] = []
    waiting: list[Problem] = []
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        written = f"{name}={clipped(value)}"
        key = table.get(name)
        if key is None:
            invalid.append(_unknown(table, caller, name, written))
            continue
        found = [dataclasses.replace(problem, where=f"{caller}({written})") for problem in key.check(name, value)]
        invalid += found
        if not found:
            waiting += [dataclasses.replace(p, where=f"{caller}({written})") for p in key.unavailable(value)]
            kept[name] = key.store(value)
    for key in [table[name] for name in kept if table[name].alias_of]:
        home, said = key.alias_of, kept.pop(key.name)
        value = key.write(said, kept.get(home, context._kept(home)))
        if home in settings and kept[home] != value:
            invalid.append(
                Problem(
                    f"`{key.name}` and `{home}` contradict each other",
                    why="they are one setting",
                    where=f"{caller}({key.name}={said!r}, {home}={clipped(kept[home])})",
                    fix=f"give {home} only",
                )
            )
        kept[home] = value
    _raise(invalid, waiting)
    return _with(context, kept, context.explicit.union(kept))


def _with(context: ParallelContext, kept: Mapping[str, Any], explicit: frozenset[str]) -> ParallelContext:
    fields = {name: value for name, value in kept.items() if _KEYS[name].active}
    rest = {**dict(context.inert), **{name: value for name, value in kept.items() if name not in fields}}
    inert = tuple(sorted((name, value) for name, value in rest.items() if value != _default(name)))
    return dataclasses.replace(context, **fields, inert=inert, explicit=explicit)


def _reset(context: ParallelContext, table: Mapping[str, Key]) -> ParallelContext:
    defaults = {name: key.default for name, key in table.items() if not key.alias_of}
    return _with(context, defaults, context.explicit.difference(table))


_shared = ParallelContext()
_LOCK = threading.Lock()
_BLOCK: ContextVar[ParallelContext | None] = ContextVar("shardfn_auto_parallel_block", default=None)


def _update(change: Callable[[ParallelContext], ParallelContext]) -> None:
    global _shared
    block = _BLOCK.get()
    if block is not None:
        _BLOCK.set(change(block))
        return
    with _LOCK:
        _shared = change(_shared)


register(lambda: current().defaults)
