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

from shardfn.errors import (
    ContextError,
    ContextTypeError,
    NotAvailableError,
    Problem,
    did_you_mean,
    fail,
    raise_problems,
    similar,
    warn,
)
from shardfn.frontend.defaults import Defaults, register
from shardfn.frontend.training_settings import TrainingSettings
from shardfn.frontend.value_checks import clipped
from shardfn.mindspore.context_keys import ALGO_KEYS, AUTO_PARALLEL_KEYS, PS_KEYS, RUN_KEYS, Key
from shardfn.search.problem import Algorithm

_TRAINING = frozenset(f.name for f in dataclasses.fields(TrainingSettings)) - {"all_reduce_fusion_config"}
_KEYS: dict[str, Key] = {**AUTO_PARALLEL_KEYS, **RUN_KEYS, **ALGO_KEYS, **PS_KEYS}


@dataclasses.dataclass(frozen=True, init=False)
class ParallelContext:
    """The settings of the three tables; hashable, so that it can be part of a cache key.

    Each key is an attribute, with its default where it was not set.

    Args:
      settings: the keys that are set, with values.

    Attributes:
      settings: the keys that were set, with the values that are kept, sorted.

    Raises:
      ContextError: an unknown key or a value out of range: all problems together.
      ContextTypeError: values of wrong types only.
      NotAvailableError: a value that asks for something that is not built yet.

    >>> ParallelContext(device_num=8).device_num
    8
    """

    settings: tuple[tuple[str, Any], ...]

    def __init__(self, **settings: Any) -> None:
        object.__setattr__(self, "settings", _checked({}, _KEYS, "ParallelContext", settings))

    def __getattr__(self, name: str) -> Any:
        if name not in _KEYS or _KEYS[name].alias_of:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return dict(self.settings).get(name, _KEYS[name].default)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that the user set."""
        return frozenset(name for name, _ in self.settings)

    @functools.cached_property
    def defaults(self) -> Defaults:
        """The settings that calls, searches and training steps read."""
        mode = self._said("parallel_mode")
        return Defaults(
            device_count=self.device_num,
            platform=self.device_target,
            rank=self.global_rank or 0,
            parallel_mode=mode,
            search_mode=self._said("search_mode"),
            dataset_strategy=self._said("dataset_strategy"),
            honours_out_strategy=mode is None or "auto" not in mode or self.out_strategy_mode == "honour",
            layout_file=self.strategy_ckpt_config.load_file,
            plan_file=self.strategy_ckpt_config.save_file,
            saves_parameters_only=self.strategy_ckpt_config.only_trainable_params,
            graphs=self.save_graphs,
            graphs_path=self.save_graphs_path,
            alltoall=self.enable_alltoall,
            algorithm=Algorithm(**{name: getattr(self, name) for name in ALGO_KEYS}),
            training=TrainingSettings(
                **{name: self.read(name) for name in _TRAINING if self.is_set(name)},
                all_reduce_fusion_config=self.all_reduce_fusion_config,
            ),
        )

    def is_set(self, name: str) -> bool:
        """Whether the user set a key, or an alias of it, to any value.

        Raises:
          ContextError: there is no such key.

        >>> with auto_parallel(parallel_mode="stand_alone"):
        ...     current().is_set("parallel_mode"), current().is_set("device_num")
        (True, False)
        """
        key = _known(_KEYS, "is_set", name)
        return (key.alias_of or name) in self.explicit

    def read(self, name: str) -> Any:
        """The value of any key of the tables, or its default, as the `get` functions return it.

        Raises:
          ContextError: there is no such key.
        """
        key = _known(_KEYS, "read", name)
        return key.read(getattr(self, key.alias_of or name))

    def _said(self, name: str) -> Any:
        return self.read(name) if self.is_set(name) else None


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
    _set(AUTO_PARALLEL_KEYS, "set_auto_parallel_context", settings)


def get_auto_parallel_context(key: str) -> Any:
    """The value of a key of the auto-parallel context, or its default.

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
    _reset(AUTO_PARALLEL_KEYS)


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
    changed = _with(_checked(dict(current().settings), AUTO_PARALLEL_KEYS, "auto_parallel", settings))
    _warn_of_devices(changed)
    _warn_of_settings(changed, settings)
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
    ...     set_context(mode=0, device_target="cpu")
    ...     get_context("device_target")
    'CPU'
    """
    _set(RUN_KEYS, "set_context", settings)


def get_context(key: str) -> Any:
    """The value of a key of `set_context`, such as "mode", or its default.

    Raises:
      ContextError: `set_context` has no such key.

    >>> get_context("save_graphs_path")
    '.'
    """
    return _read(RUN_KEYS, "get_context", key)


def reset_context() -> None:
    """Reset every key of `set_context` to its default. `reset_auto_parallel_context` leaves them, as in MindSpore.

    >>> reset_context()
    """
    _reset(RUN_KEYS)


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
    _set(ALGO_KEYS, "set_algo_parameters", settings)


def get_algo_parameters(key: str) -> Any:
    """The value of a parameter of the search, or its default.

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
    _reset(ALGO_KEYS)


def set_ps_context(**settings: Any) -> None:
    """Set keys of MindSpore's parameter server context. What is not set, the environment says.

    Args:
      settings: keys with values.

        - `enable_ps`: whether `Cell.set_param_ps` may put parameters on servers.
        - `ms_role`: "MS_SCHED", "MS_WORKER" or "MS_PSERVER"; by default `MS_ROLE` of the environment.
        - `worker_num`, `server_num`: by default `MS_WORKER_NUM` and `MS_SERVER_NUM`.
        - `scheduler_ip`, `scheduler_port`: by default `MS_SCHED_HOST` and `MS_SCHED_PORT`.

    Raises:
      ContextError: as in `set_auto_parallel_context`.
      NotAvailableError: a key that Ray has its own setting for, such as `enable_ssl`.

    >>> with auto_parallel():
    ...     set_ps_context(enable_ps=True, server_num=2)
    ...     get_ps_context("server_num")
    2
    """
    _set(PS_KEYS, "set_ps_context", settings)


def get_ps_context(key: str) -> Any:
    """The value of a key of the parameter server context, else what the environment says, else its default.

    Raises:
      ContextError: there is no such key.

    >>> get_ps_context("enable_ps")
    False
    """
    return _read(PS_KEYS, "get_ps_context", key)


def reset_ps_context() -> None:
    """Reset every key of the parameter server context: parameter servers are off.

    >>> reset_ps_context()
    """
    _reset(PS_KEYS)


def current() -> ParallelContext:
    """The current context: that of the innermost `auto_parallel` block, or else of the process.

    >>> current().out_strategy_mode
    'overwrite'
    """
    return _BLOCK.get() or _shared


# ---- checking and storing settings ----


def _read(table: Mapping[str, Key], caller: str, name: Any) -> Any:
    return current().read(_known(table, caller, name).name)


_HOMES = {
    "auto_parallel_context": AUTO_PARALLEL_KEYS, "context": RUN_KEYS, "algo_parameters": ALGO_KEYS, "ps_context": PS_KEYS,
}  # fmt: skip


def _unknown(table: Mapping[str, Key], caller: str, name: str, written: str) -> Problem:
    verb = "get" if caller.startswith("get") else "set"
    homes = [f"{verb}_{home}" for home, keys in _HOMES.items() if name in keys]
    shown = [other for other, key in table.items() if not key.alias_of and len(key.honours or (0, 0)) > 1]
    parts = set(name.split("_"))
    close = similar(name, table) or [other for other in shown if parts & set(other.split("_"))][:3]
    fix = f"use {homes[0]}" if homes else did_you_mean(close) or f"use one of {', '.join(shown)}"
    return Problem(f"`{name}` is no key of {caller}", where=f"{caller}({written})", fix=fix)


def _known(table: Mapping[str, Key], caller: str, name: Any) -> Key:
    if not isinstance(name, str):
        fail(ContextTypeError, "a key of the context is a string", where=f"{caller}({clipped(name)})",
             why=f"its type is {type(name).__name__}, not str", fix="give one key by its name")  # fmt: skip
    if name not in table:
        raise ContextError(_unknown(table, caller, name, repr(name)))
    return table[name]


def _checked(
    before: Mapping[str, Any], table: Mapping[str, Key], caller: str, settings: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """The values that are kept when `settings` are added to those `before`; raises all problems together."""
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
        value = key.write(said, kept.get(home, before.get(home, table[home].default)))
        if home in settings and kept[home] != value:
            invalid.append(Problem(f"`{key.name}` and `{home}` contradict each other", why="they are one setting",
                                   where=f"{caller}({key.name}={said!r}, {home}={clipped(kept[home])})",
                                   fix=f"give {home} only"))  # fmt: skip
        kept[home] = value
    if invalid:
        kind = ContextTypeError if all(problem.is_type for problem in invalid) else ContextError
        raise kind([*invalid, *waiting])
    raise_problems(waiting, NotAvailableError)
    return tuple(sorted({**before, **kept}.items()))


def _with(settings: tuple[tuple[str, Any], ...]) -> ParallelContext:
    context = ParallelContext()
    object.__setattr__(context, "settings", settings)
    return context


def _set(table: Mapping[str, Key], caller: str, settings: Mapping[str, Any]) -> None:
    _update(lambda context: _with(_checked(dict(context.settings), table, caller, settings)))
    _warn_of_devices(current())
    _warn_of_settings(current(), settings)


def _warn_of_devices(context: ParallelContext) -> None:
    if (context.device_num or 1) > 1 and context.is_set("parallel_mode") and context.parallel_mode == "stand_alone":
        warn(f"parallel_mode='stand_alone' uses one device, whatever device_num={context.device_num} says; "
             "set another parallel_mode, or leave it out")  # fmt: skip


_WITHOUT: tuple[tuple[str, Callable[[ParallelContext], bool], str, str], ...] = (
    ("tensor_slice_align_size", lambda c: not c.tensor_slice_align_enable, "shards are not aligned",
     "set tensor_slice_align_enable=True"),
    ("algo_approxi_epsilon", lambda c: not c.enable_algo_approxi, "no approximate solution is accepted",
     "set enable_algo_approxi=True"),
    ("elementwise_op_strategy_follow", lambda c: not c.elementwise_op_strategy_follow,
     "elementwise ops are always sharded as their input", "leave it out"),
    ("save_graphs_path", lambda c: not c.save_graphs, "no graphs are saved", "set save_graphs=True"),
    ("strategy_ckpt_config", lambda c: not (c.strategy_ckpt_config.only_trainable_params or c.strategy_ckpt_config.save_file),
     "only_trainable_params is about the file that is written, and none is", "give its save_file"),
    ("out_strategy_mode", lambda c: c.out_strategy_mode == "overwrite" and c.is_set("parallel_mode")
     and "auto" not in c.parallel_mode, "only the modes semi_auto_parallel and auto_parallel overwrite an out_strategy",
     "leave it out"),
)  # fmt: skip
"""Settings without an effect: the key, whether it has none in a context, why, and what to do."""


def _warn_of_settings(context: ParallelContext, settings: Mapping[str, Any]) -> None:
    for name, has_none, why, fix in _WITHOUT:
        if name in settings and has_none(context):
            warn(f"{name}={clipped(settings[name])} has no effect: {why}; {fix}")


def _reset(table: Mapping[str, Key]) -> None:
    _update(lambda context: _with(tuple(pair for pair in context.settings if pair[0] not in table)))


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
