"""The words of other libraries for options, styles, modes and objectives, and what says the same here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from shardfn.errors import StrategyError, closest, did_you_mean, fail, nearest


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way of sharding a training step that people know by name."""

    words: tuple[str, ...]
    """Its names, without separators."""
    style: str = ""
    """The style of the search that means it, where there is one."""
    level: int = 0
    """The level of MindSpore's optimizer parallel that means it, where there is one."""
    of_level: str = ""
    """More entries of that config."""

    def in_data_parallel(self) -> str:
        """The options of `train.step` that mean it in data-parallel mode; empty where there are none."""
        if self.style == "data_parallel":
            return 'mode="data_parallel"'
        config = f'{{"optimizer_level": "level{self.level}", "parallel_optimizer_threshold": 0{self.of_level}}}'
        return f'mode="data_parallel", parallel_optimizer_config={config}' if self.level else ""

    def as_mode(self) -> str:
        """The options of `train.step` that mean it, the shortest first."""
        searched = f'mode="auto_parallel", style="{self.style}"' if self.style else ""
        ways = [self.in_data_parallel()] if self.style == "data_parallel" else [searched, self.in_data_parallel()]
        return "; or ".join(filter(None, ways))


SCHEMES = (
    Scheme(("ddp", "dp", "dataparallel", "distributeddataparallel"), "data_parallel"),
    Scheme(("zero", "zero1"), "zero1", 1),
    Scheme(("zero2",), "", 2),
    Scheme(("fsdp", "fsdp2", "zero3", "fullyshard", "fullysharded", "fullyshardeddataparallel"), "fsdp", 3),
    Scheme(("hsdp", "hybridshard", "hybridsharding", "hybridfsdp"), "", 3, ', "optimizer_weight_shard_size": 8'),
    Scheme(("tp", "tensorparallel", "megatron", "modelparallel"), "tensor_parallel"),
    Scheme(("fsdptensorparallel", "fsdptp", "2d"), "fsdp_tensor_parallel"),
)  # fmt: skip

MODES = (
    (("auto",), 'mode="auto_parallel"'),
    (("semiauto",), 'mode="semi_auto_parallel"'),
    (("standalone", "single", "none"), 'mode="stand_alone"'),
)
"""Other words for modes of `train.step`."""

OBJECTIVES = (
    (("speed", "throughput", "latency", "fast", "fastest", "runtime", "steptime", "compute", "flops"), "time"),
    (("bytes", "network", "bandwidth", "traffic", "comm", "comms", "collectives"), "communication"),
    (("mem", "peak", "peakmemory", "hbm", "ram"), "memory"),
)
"""Other words for levels."""

OPTIONS = {
    "in_shardings": "in_strategy", "in_specs": "in_strategy", "in_axis_resources": "in_strategy", "strategy": "in_strategy",
    "strategies": "in_strategy", "shards": "in_strategy", "grid": "in_strategy",
    "placements": "in_strategy", "in_placements": "in_strategy",
    "out_shardings": "out_strategy", "out_specs": "out_strategy", "out_axis_resources": "out_strategy",
    "out_placements": "out_strategy", "parallelize_plan": "parameter_plan", "tp_plan": "parameter_plan",
    "mesh": "device", "device_mesh": "device", "backend": "device", "platform": "device", "hardware": "device",
    "target": "device",
    "objective": "level", "optimize": "level", "static": "static_argnames", "recipe": "layout", "rules": "parameter_plan",
    "candidates": "compile_candidates", "timeout": "time_limit", "effort": "budget", "gap": "tolerance", "rtol": "tolerance",
    "verify": "check", "validate": "check", "debug": "check",
    "max_iterations": "assumed_trips", "trip_count": "assumed_trips",
}  # fmt: skip
"""What an option of `shard` is called in JAX, in other libraries or in speech."""

OF_STEPS = {
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum", "grad_accumulation", "accumulation_steps",
         "accumulate_n", "microbatches", "num_micro_batches"), "micro_batches",
    ),
    **dict.fromkeys(("mixed_precision", "precision", "param_dtype", "dtype", "amp", "amp_level", "mp_policy"), "compute_dtype"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "checkpointing", "checkpoint", "remat"), "recompute"),
    **dict.fromkeys(("cpu_offload", "offload", "offload_policy"), "opt_state_memory_kind"),
    "reshard_after_forward": "parallel_optimizer_comm_recompute", "bucket_cap_mb": "comm_fusion",
    "sharding_strategy": "mode", "parallel_mode": "mode", "optim": "optimizer", "loss": "loss_fn", "aux": "has_aux",
}  # fmt: skip
"""What an option of `train.step` is called elsewhere."""

NAMES = {
    **dict.fromkeys(("fully_shard", "FSDP", "FullyShardedDataParallel"),
                    'shardfn.train.step(loss, optimizer, mode="auto_parallel", style="fsdp")'),
    **dict.fromkeys(("DDP", "DistributedDataParallel", "DataParallel"),
                    'shardfn.train.step(loss, optimizer, mode="data_parallel")'),
    "parallelize_module": 'shardfn.shard(f, parameter_plan={"*/up": (1, 4), "*/down": (4, 1)})',
    **dict.fromkeys(("distribute_tensor", "device_put"), "jax.device_put(x, sharding), or shardfn.reshard"),
    **dict.fromkeys(("redistribute", "with_sharding_constraint"), "shardfn.reshard(x, sharding)"),
    **dict.fromkeys(("init_device_mesh", "make_mesh", "DeviceMesh", "Mesh"),
                    "nothing, the mesh follows from the strategies; or jax.make_mesh, and device=mesh"),
    "DTensor": "jax.Array",
    **dict.fromkeys(("NamedSharding", "PartitionSpec", "P"), "those of jax.sharding"),
    **dict.fromkeys(("jit", "pjit", "pmap", "xmap", "shard_map", "auto_parallel", "parallelize"), "shardfn.shard"),
    **dict.fromkeys(("optimize", "search"), "shardfn.plan"),
    **dict.fromkeys(("load", "load_state_dict", "load_checkpoint"), "shardfn.checkpoint.restore"),
    **dict.fromkeys(("save_state_dict", "async_save", "save_checkpoint", "dump"), "shardfn.checkpoint.save"),
    **dict.fromkeys(("init_process_group", "initialize"), "shardfn.cluster.init"),
    **dict.fromkeys(("Trainer", "TrainState", "fit", "train_step"), "shardfn.train.step"),
}  # fmt: skip
"""Names of other libraries, and what does the same."""

OF_PARAMETERS = {
    "requires_grad": (True, 'train.step(loss, optimizer, frozen=["{path}"]), or optax.masked with optax.set_to_zero'),
    "layerwise_parallel": (False, 'train.step(loss, optimizer, layerwise_parallel=["{path}"])'),
    "parallel_optimizer": (
        True,
        "parallel_optimizer_threshold of parallel_optimizer_config, which leaves small arrays whole",
    ),
    "comm_fusion": (1, 'train.step(loss, optimizer, fusion={{"{path}": {value}}})'),
}
"""Attributes of MindSpore's parameters: the value that says nothing, and what does the same."""

OF_JIT = ("keep_unused", "inline")
"""Options of `jax.jit` that `shard` has no counterpart of."""


def plain(word: object) -> str:
    """A word in lower case, without separators.

    >>> plain("ZeRO-2"), plain("fully_shard")
    ('zero2', 'fullyshard')
    """
    return re.sub(r"[\W_]", "", word.lower()) if isinstance(word, str) else ""


def scheme_of(word: object) -> Scheme | None:
    """The scheme of that name."""
    return next((scheme for scheme in SCHEMES if plain(word) in scheme.words), None)


def mode_fix(word: object) -> str:
    """What to write for a mode that there is not; empty for a word that no library has.

    >>> mode_fix("semi-auto"), mode_fix("fast")
    ('mode="semi_auto_parallel"', '')
    """
    scheme = scheme_of(word)
    return scheme.as_mode() if scheme else _in(MODES, word)


def style_fix(word: str, styles: Iterable[str]) -> str:
    """What to write for a style that there is not.

    >>> style_fix("ddp", ["data_parallel", "fsdp"]), style_fix("fdsp", ["data_parallel", "fsdp"])
    ("did you mean 'data_parallel'?", "did you mean 'fsdp'?")
    """
    scheme = scheme_of(word)
    if scheme and scheme.style:
        return did_you_mean([scheme.style])
    if scheme:
        return f"it is no style but a setting of training: train.step(loss, optimizer, {scheme.in_data_parallel()})"
    return nearest(word, styles)


def level_fix(word: object, levels: Iterable[str]) -> str:
    """What to write for an objective that there is not; empty for a word that is none.

    >>> level_fix("throughput", ["time", "memory"]), level_fix("tiem", ["time", "memory"])
    ("did you mean 'time'?", "did you mean 'time'?")
    """
    close = [_in(OBJECTIVES, word)] if _in(OBJECTIVES, word) else closest(str(word), levels)
    return did_you_mean(close[:1])


def optimizer_level_of(value: Any) -> str:
    """The level of MindSpore's optimizer parallel that a value means; empty for one that means none.

    >>> [optimizer_level_of(value) for value in ("fsdp", "ZeRO-1", 2, "high")]
    ['level3', 'level1', 'level2', '']
    """
    level = value if value in (1, 2, 3) else (scheme.level if (scheme := scheme_of(value)) else 0)
    return f"level{level}" if level else ""


def option_fix(word: str, names: Iterable[str]) -> str:
    """The fix for an option that is not there; `names` are what could be meant.

    >>> option_fix("in_shardings", ["in_strategy"]), option_fix("devices", ["device", "level"])
    ("did you mean 'in_strategy'?", "did you mean 'device'?")
    >>> option_fix("gradient_accumulation_steps", ["device", "level"])
    'train.step has it, by the name micro_batches'
    """
    names = list(names)
    if word in OF_JIT:
        return f"leave it out; jax.jit(plan.apply(f), {word}=...) takes it"
    for known in (OPTIONS, OF_STEPS):
        if (meant := known.get(word.lower())) in names:
            return did_you_mean([meant])
    if meant := OF_STEPS.get(word.lower()):
        return f"train.step has it, by the name {meant}"
    return nearest(word, names)


def missing(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error for a name that a module lacks: what does the same, or the names that look alike.

    >>> missing("shardfn", "fully_shard", ["shard"])
    AttributeError('shardfn has no fully_shard; use shardfn.train.step(loss, optimizer, mode="auto_parallel", style="fsdp")')
    """
    if name in NAMES and NAMES[name] != f"{module}.{name}":
        return AttributeError(f"{module} has no {name}; use {NAMES[name]}")
    close = closest(name, names)
    return AttributeError(
        f"module {module!r} has no attribute {name!r}" + (f"; {did_you_mean(close)}" if close else "")
    )


def refuse_attribute(name: str, value: Any, path: str, owner: str = "") -> None:
    """Raise for an attribute of MindSpore's parameters, which arrays do not have.

    Args:
      name: the attribute.
      value: what it was set to.
      path: the array's path, or a glob of several.
      owner: what has the attribute, if it is not the array.

    Raises:
      StrategyError: the value asks for something.

    >>> refuse_attribute("requires_grad", True, "w")
    """
    default, instead = OF_PARAMETERS[name]
    if value is not default:
        fail(StrategyError, f"`{name}` has no effect on arrays", where=f"{owner or path}.{name} = {value!r}",
             why="an array of JAX is a value: the next one, after a step, has no attributes",
             fix=f"use {instead.format(path=path, value=value)}")  # fmt: skip


def _in(table: Iterable[tuple[tuple[str, ...], str]], word: object) -> str:
    return next((meant for words, meant in table if plain(word) in words), "")
