"""The keys of the parallel context, one row each; the tables at the bottom are this file's contents page.

`docs/reference/context.md` says what each key means.
Every key of MindSpore exists here, and its value is checked as MindSpore checks it. A row that is not `active` is for the
training step, or for something that is not built yet: then only a value without an effect can be set.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from shardfn import search
from shardfn.errors import Problem
from shardfn.frontend.training_settings import CHECKS, FUSION, OPTIMIZER
from shardfn.frontend.value_checks import Check, boolean, clipped, in_turn, integer, one_of, record, text, wrong
from shardfn.layoutfile.files import files_in, name_problem
from shardfn.mindspore.layout import Layout

PYNATIVE_MODE = 1
GRAPH_MODE = 0


class ParallelMode:
    """MindSpore's names of the parallel modes: plain strings.

    >>> ParallelMode.SEMI_AUTO_PARALLEL
    'semi_auto_parallel'
    """

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting. `honours` lists the stored values that can be set today; None is every value that passes `check`."""

    name: str
    default: Any
    check: Check
    active: bool = False  # a field of ParallelContext, read by the library
    honours: tuple[Any, ...] | None = None
    lacks: str = ""  # the missing capability behind the other values
    instead: str = ""  # what to do in its place
    store: Callable[[Any], Any] = lambda value: value  # what the user wrote -> what is kept
    read: Callable[[Any], Any] = lambda kept: kept  # what is kept -> what `get` gives
    alias_of: str = ""  # the row that keeps this one's value
    write: Callable[[Any, Any], Any] = lambda value, standing: value  # for an alias: the value to keep in that row

    def unavailable(self, value: Any) -> Iterator[Problem]:
        """The problem of a checked `value` whose capability is not built yet."""
        if self.honours is None or self.store(value) in self.honours:
            return
        settable = [repr(value) for value in self.honours if isinstance(value, (str, int, float))]
        leave = " or ".join([f"leave {self.name} out", *([f"set it to {' or '.join(settable)}"] if settable else [])])
        what = f"`{self.name}` = {clipped(value)} is not available yet"
        yield Problem(what, why=f"{self.lacks} is not built yet", fix=self.instead or leave)


# ---- checks, combined in the rows ----


def _interleaved(name: str, value: dict[str, Any]) -> Iterator[Problem]:
    if not value["pipeline_interleave"] and value["pipeline_scheduler"] != "1f1b":
        yield wrong(
            f"{name}['pipeline_scheduler']",
            value["pipeline_scheduler"],
            "without pipeline_interleave only 1f1b is allowed",
            "set pipeline_interleave to True",
        )


def _removed(fix: str) -> Check:
    def check(name: str, value: int) -> Iterator[Problem]:
        if value != 1:
            yield wrong(name, value, "MindSpore has taken this setting away", fix)

    return check


def _dataset(name: str, value: Any) -> Iterator[Problem]:
    form = "'full_batch', 'data_parallel', or a tuple with one tuple of ints, one Layout or None (data parallel) for each input"
    if isinstance(value, str):
        yield from one_of("full_batch", "data_parallel")(name, value)
        return
    if not isinstance(value, tuple):
        yield wrong(name, value, f"its type is {type(value).__name__}, not tuple", f"give {form}", is_type=True)
        return
    if value and all(isinstance(entry, int) for entry in value):
        yield wrong(name, value, "it needs one entry for each input", f"give ({value!r},)", is_type=True)
        return
    for i, entry in enumerate(value):
        here = f"{name}[{i}]"
        if isinstance(entry, Layout):
            if "interleaved_parallel" in entry.alias_name:
                yield wrong(here, entry, "data cannot be sharded over interleaved_parallel", "use another axis there")
        elif entry is not None and not isinstance(entry, tuple):
            why = f"its type is {type(entry).__name__}, not tuple"
            yield wrong(here, entry, why, "give a tuple of ints, a Layout or None", is_type=True)
        else:
            for d, shards in enumerate(entry or ()):
                yield from integer(1)(f"{here}[{d}]", shards)


def _fraction(name: str, value: Any) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        why = f"its type is {type(value).__name__}, not float"
        yield wrong(name, value, why, "give a float such as 0.1", is_type=True)
    elif not 0 < value <= 1:
        yield wrong(name, value, "it must be above 0 and at most 1", "give a float such as 0.1")


_TARGETS = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "ascend": "Ascend"}


def _target(name: str, value: Any) -> Iterator[Problem]:
    if value is not None and not (isinstance(value, str) and value.lower() in _TARGETS):
        yield from one_of(*_TARGETS.values())(name, value)


def _mode(name: str, value: Any) -> Iterator[Problem]:
    for problem in integer(0, 1)(name, value):
        yield dataclasses.replace(problem, fix="give PYNATIVE_MODE (1) or GRAPH_MODE (0)")


def _graphs(name: str, value: Any) -> Iterator[Problem]:
    if not isinstance(value, bool):
        yield from integer(0, 3)(name, value)


# ---- the rows ----


def _now(name: str, default: Any, check: Check, **more: Any) -> Key:
    return Key(name, default, check, active=True, **more)


def _later(name: str, default: Any, check: Check, lacks: str, also: tuple[Any, ...] = (), instead: str = "") -> Key:
    return Key(name, default, check, honours=(default, *also), lacks=lacks, instead=instead)


def _trains(name: str, default: Any, **more: Any) -> Key:
    """A setting that the training step reads; a dict is kept as its JSON, so that a context stays hashable."""
    check = more.pop("check", None) or CHECKS[name]
    if isinstance(default, dict):
        defaults = default
        default = json.dumps(defaults)
        more = {"store": lambda value: json.dumps({**defaults, **value}), "read": json.loads, **more}
    return Key(name, default, check, **more)


def _inside(owner: str, name: str, default: Any) -> Key:
    """An entry of the setting `owner` that can be read, but not set, by its own name."""

    def check(name: str, value: Any) -> Iterator[Problem]:
        fix = f"set {owner}={{{name!r}: {clipped(value)}, ...}}"
        yield Problem(f"`{name}` can be read but not set", why=f"it is an entry of {owner}", fix=fix)

    return Key(name, default, check, alias_of=owner, read=lambda kept: json.loads(kept)[name])


def _table(*rows: Key) -> Mapping[str, Key]:
    return MappingProxyType({row.name: row for row in rows})


_PIPELINE = {"pipeline_interleave": False, "pipeline_scheduler": "1f1b"}


def _file(name: str, value: Any) -> Iterator[Problem]:
    yield from text(name, value)
    if isinstance(value, str) and (value.endswith(("/", os.sep)) or os.path.isdir(value)):
        fix = files_in(pathlib.Path(value)) or f"give a file in it: {os.path.join(value, 'strategy.toml')!r}"
        yield wrong(name, value, "it is a folder, not a file", fix)
    elif isinstance(value, str) and (problem := name_problem(pathlib.Path(value), name)):
        yield problem


class StrategyFiles(NamedTuple):
    """`strategy_ckpt_config`: a layout file to read, one to write, and whether only parameters go there."""

    load_file: str = ""
    save_file: str = ""
    only_trainable_params: bool = True


_pipeline_check = in_turn(
    record(
        complete=True,
        pipeline_interleave=boolean,
        pipeline_scheduler=one_of("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"),
    ),
    _interleaved,
)
_files_record = record(load_file=_file, save_file=_file, only_trainable_params=boolean)


def _files(name: str, value: Any) -> Iterator[Problem]:
    if not isinstance(value, StrategyFiles):
        yield from _files_record(name, value)


def _search(name: str, value: Any) -> Iterator[Problem]:
    yield from one_of(*search.MODES)(name, value)


def _batch(full: bool, standing: Any) -> Any:
    # A tuple that stands is not the full batch either: full_batch=False leaves it.
    return "full_batch" if full else standing if isinstance(standing, tuple) else "data_parallel"


def _group_devices() -> int:
    return jax.device_count() if jax.distributed.is_initialized() else 1


def _first_rank() -> int:
    """The place of this process's first device among those of all processes."""
    return jax.devices().index(jax.local_devices()[0]) if jax.distributed.is_initialized() else 0


def _layout_file(entry: str) -> dict[str, Any]:
    """The fields of a row that is an entry of `strategy_ckpt_config`."""
    return {"alias_of": "strategy_ckpt_config", "read": lambda kept: getattr(kept, entry),
            "write": lambda value, standing: standing._replace(**{entry: value})}  # fmt: skip


ROLES = ("MS_SCHED", "MS_WORKER", "MS_PSERVER")
"""The roles of a process in a job with parameter servers. `MS_SERVER` is another name of the last."""


def _role() -> str | None:
    found = os.environ.get("MS_ROLE")
    return "MS_PSERVER" if found == "MS_SERVER" else found


def _variable(name: str) -> dict[str, Any]:
    """The fields of a row that an environment variable says where it is not set; a number, if it is one."""

    def read(kept: Any) -> Any:
        found = os.environ.get(name) if kept is None else kept
        return int(found) if isinstance(found, str) and found.isascii() and found.isdigit() else found

    return {"read": read}


# fmt: off
AUTO_PARALLEL_KEYS = _table(
    # MindSpore documents 4096 as the end of device_num, but takes any number from 1 up, as here.
    # Unset, both follow the group of processes.
    _now("device_num", None, integer(1), read=lambda kept: _group_devices() if kept is None else kept),
    _now("global_rank", None, integer(0, 4095), read=lambda kept: _first_rank() if kept is None else kept),
    _now("parallel_mode", ParallelMode.STAND_ALONE, one_of(*ParallelMode.MODE_LIST)),
    _now("search_mode", "auto", _search),
    _now("auto_parallel_search_mode", "auto", _search, alias_of="search_mode"),
    _now("dataset_strategy", "data_parallel", _dataset),
    _now("full_batch", False, boolean, alias_of="dataset_strategy", write=_batch, read=lambda kept: kept == "full_batch"),
    _now("enable_alltoall", None, boolean),
    _now("out_strategy_mode", "overwrite", one_of("overwrite", "honour")),
    _now("strategy_ckpt_config", StrategyFiles(), _files, read=lambda kept: kept._asdict(),
         store=lambda value: value if isinstance(value, StrategyFiles) else StrategyFiles(**value)),
    _now("strategy_ckpt_load_file", "", _file, **_layout_file("load_file")),
    _now("strategy_ckpt_save_file", "", _file, **_layout_file("save_file")),

    _trains("gradients_mean", False),
    _trains("gradient_fp32_sync", True),
    _trains("loss_repeated_mean", True),
    _trains("parameter_broadcast", False),
    _trains("enable_parallel_optimizer", False),
    _trains("parallel_optimizer_config", dict(OPTIMIZER)),
    _trains("optimizer_weight_shard_size", -1),
    _trains("comm_fusion", dict(FUSION)),
    _trains("all_reduce_fusion_config", None, store=tuple, read=lambda kept: None if kept is None else list(kept)),
    _trains("pipeline_stages", 1),
    _trains("pipeline_config", _PIPELINE, check=_pipeline_check,
            honours=tuple(json.dumps({"pipeline_interleave": interleave, "pipeline_scheduler": scheduler})
                          for interleave, scheduler in ((False, "1f1b"), (True, "1f1b"), (True, "gpipe"))),
            lacks="a pipeline in another order than 1f1b and gpipe",
            instead="use the pipeline_scheduler 1f1b or gpipe"),
    _inside("pipeline_config", "pipeline_scheduler", "1f1b"),
    _inside("pipeline_config", "pipeline_interleave", False),
    _trains("auto_pipeline", False),

    _later("force_fp32_communication", False, boolean, "a choice of the collectives' dtype"),
    _later("communi_parallel_mode", "all_group_parallel",
           one_of("all_group_parallel", "same_server_group_parallel", "no_group_parallel"), "an order of the collectives"),
    _later("optimizer_weight_shard_aggregated_save", False, boolean, "the sharding of optimizer states"),
    _later("group_ckpt_save_file", "", text, "writing the groups of devices"),
    _later("pipeline_result_broadcast", False, boolean, "a pipeline that gives more than a loss"),
    _later("grad_accumulation_step", 1, in_turn(integer(1), _removed("pass micro_batches=... to train.step")),
           "gradient accumulation"),
    _later("sharding_propagation", False, boolean, "the old switch of this search",
           instead="set search_mode='sharding_propagation'"),
)

RUN_KEYS = _table(
    _now("mode", PYNATIVE_MODE, _mode),
    _now("device_target", None, _target, store=lambda value: _TARGETS[value.lower()] if value else value),
    _now("save_graphs", 0, _graphs, store=lambda value: 2 * value if isinstance(value, bool) else value),  # True is 2
    _now("save_graphs_path", ".", text),
    _later("device_id", 0, integer(0, 4095), "a device chosen by number",
           instead="give shard device=[...], a list of devices"),
)

ALGO_KEYS = _table(
    _now("fully_use_devices", False, boolean),
    # Elementwise ops are always sharded as their input: neither value has an effect.
    _now("elementwise_op_strategy_follow", False, boolean),
    _now("enable_algo_approxi", False, boolean),
    _now("algo_approxi_epsilon", 0.1, _fraction),
    _now("tensor_slice_align_enable", False, boolean),
    _now("tensor_slice_align_size", 16, integer(1, 1024)),
)

PS_KEYS = _table(
    _now("enable_ps", False, boolean),
    _now("ms_role", None, one_of(*ROLES), read=lambda kept: _role() if kept is None else kept),
    _now("worker_num", None, integer(1), **_variable("MS_WORKER_NUM")),
    _now("server_num", None, integer(1), **_variable("MS_SERVER_NUM")),
    _now("scheduler_ip", None, text, **_variable("MS_SCHED_HOST")),
    _now("scheduler_port", None, integer(1, 65535), **_variable("MS_SCHED_PORT")),
    _later("config_file_path", "", text, "MindSpore's recovery configuration",
           instead="set MS_RECOVERY_PATH to the folder of the servers' logs"),
    _later("enable_ssl", False, boolean, "TLS of its own", instead="set Ray's RAY_USE_TLS and its certificates"),
    _later("client_password", "", text, "a password of a certificate", instead="use Ray's token"),
    _later("server_password", "", text, "a password of a certificate", instead="use Ray's token"),
    _later("scheduler_manage_port", 11202, integer(1, 65535), "a web server of the scheduler"),
    _later("server_mode", "PARAMETER_SERVER", one_of("PARAMETER_SERVER", "FEDERATED_LEARNING", "HYBRID_TRAINING"),
           "federated learning"),
)
# fmt: on
