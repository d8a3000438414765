"""Which collectives travel together: from paths, shapes, dtypes and what was asked for to buckets. Arithmetic only.

A bucket is one collective. Tensors share one only if kind, axes and dtype are the same. Their order is that of the
model's leaves.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from shardfn.errors import ContextError, Problem, fail, raise_problems
from shardfn.frontend.paths import ruled, unmet
from shardfn.frontend.strategy import short
from shardfn.frontend.training_settings import FUSION, TrainingSettings

AUTO_MB = 64
"""The size of a bucket in mode "auto", MindSpore's."""

KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}
"""The context's names of kinds, and this library's."""


@dataclasses.dataclass(frozen=True)
class FusionRule:
    """How the collectives of one kind are put together."""

    mode: str = "size"
    """"size": up to `config` MB; "index": `config` holds the last index of each bucket; "off": each on its own."""
    config: Any = AUTO_MB


@dataclasses.dataclass(frozen=True)
class FusionOptions:
    """What was asked for."""

    rules: tuple[tuple[str, FusionRule], ...]
    """One for each kind."""
    ids: tuple[tuple[str, int], ...] = ()
    """Path globs to the number of their bucket, 0 for a collective of its own; a path goes first, else the last that fits."""

    def rule(self, kind: str) -> FusionRule:
        """The rule of "all-reduce", "all-gather" or "reduce-scatter"."""
        return dict(self.rules)[kind]

    def id_of(self, path: str) -> int | None:
        """The number of a path's bucket, None where it was not said."""
        found = ruled([glob for glob, _ in self.ids], [path], lambda one, two: True).rules
        return self.ids[found[0]][1] if found else None


@dataclasses.dataclass(frozen=True)
class BucketMember:
    """One array that a collective takes."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """As it travels: of a gradient summed in float32, "float32"."""
    kind: str
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that one device puts in."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One collective."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    members: tuple[int, ...]
    """Positions among the tensors."""
    nbytes: int


def fusion_of(settings: TrainingSettings, ids: Mapping[str, int] | None = None) -> FusionOptions | None:
    """What the settings and the numbers by path ask for; None where nothing was said and XLA puts together what it likes.

    Args:
      settings: `comm_fusion` and `all_reduce_fusion_config` of it are read, if they were set.
      ids: path globs to bucket numbers from 1 up; 0 is a collective of its own.

    Raises:
      ContextError: both settings say how all-reduces are put together.
      StrategyError: a number below 0.

    >>> settings = TrainingSettings().changed("doc", comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    >>> fusion_of(settings).rule("all-reduce")
    Rule(mode='size', config=32)
    """
    config, indices = settings.comm_fusion, settings.all_reduce_fusion_config
    if config is None and indices is None and not ids:
        return None
    config = config or FUSION
    rules = {
        kind: FusionRule() if config[name]["mode"] == "auto" else _rule(config[name]) for name, kind in KINDS.items()
    }
    if indices is not None:
        if config["allreduce"]["mode"] != "auto":
            fail(ContextError, "two settings say how all-reduces are put together",
                 where=f"comm_fusion['allreduce'] = {config['allreduce']}, all_reduce_fusion_config = {list(indices)}",
                 why="each is a rule of its own", fix="leave one of them out")  # fmt: skip
        rules["all-reduce"] = FusionRule("index", indices)
    if not config["openstate"]:
        rules = dict.fromkeys(rules, FusionRule("off", None))
    return FusionOptions(tuple(rules.items()), tuple((ids or {}).items()))


def _rule(config: Mapping[str, Any]) -> FusionRule:
    value = config["config"]
    return FusionRule(config["mode"], tuple(value) if isinstance(value, list) else value)


def id_problems(ids: Any) -> Iterator[Problem]:
    """What is wrong with numbers by path."""
    if not isinstance(ids, Mapping):
        yield Problem("`fusion` must be a dict of paths to numbers", f"fusion = {short(ids)}",
                      "it says which parameters' collectives share a bucket", 'write {"layers/*/w": 1}',
                      is_type=True)  # fmt: skip
        return
    for glob, number in ids.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            yield Problem(f"`fusion` of {glob!r} cannot be {short(number)}", f"fusion = {short(dict(ids))}",
                          "it is the number of a bucket", "give an int from 1 up, or 0 for a collective of its own",
                          is_type=not isinstance(number, int) or isinstance(number, bool))  # fmt: skip


def check_ids(fusion: FusionOptions, paths: Sequence[str]) -> None:
    """Raise if a glob fits no path.

    Raises:
      StrategyError: naming each.
    """
    raise_problems(list(unmet("fusion", [glob for glob, _ in fusion.ids], paths, "trained parameter")))


def buckets(tensors: Sequence[BucketMember], fusion: FusionOptions) -> tuple[Bucket, ...]:
    """Each tensor in one bucket, in the order of their first members.

    By size: a bucket is filled up to its size in bytes of the dtype at hand; a tensor that does not fit opens the next
    and is charged to it. (MindSpore counts every element as four bytes, and does not charge the one that opens it.)
    By index: counted among the tensors of the kind, each index being the last of its bucket, as MindSpore does and not
    as its documentation says; what follows the last index is one more bucket.

    >>> rules = tuple((kind, FusionRule("index", (1,))) for kind in KINDS.values())
    >>> tensors = [BucketMember(f"w{i}", (2, 3), "float32", "all-reduce", ("data",)) for i in range(5)]
    >>> [(b.members, b.nbytes) for b in buckets(tensors, FusionOptions(rules))]
    [((0, 1), 48), ((2, 3, 4), 72)]
    """
    groups: dict[tuple[tuple[str, tuple[str, ...], str], tuple[str, int]], list[int]] = {}
    counted: dict[str, int] = {}
    filled: dict[Any, tuple[int, int]] = {}
    for i, tensor in enumerate(tensors):
        rule, alike = fusion.rule(tensor.kind), (tensor.kind, tensor.axes, tensor.dtype)
        place = counted.get(tensor.kind, 0)
        counted[tensor.kind] = place + 1
        number = fusion.id_of(tensor.path)
        if number == 0 or (number is None and rule.mode == "off"):
            part: tuple[str, int] = ("own", i)
        elif number is not None:
            part = ("id", number)
        elif rule.mode == "index":
            part = ("index", bisect.bisect_left(rule.config, place))
        else:
            which, used = filled.get(alike, (0, 0))
            if used and used + tensor.nbytes > rule.config * 2**20:
                which, used = which + 1, 0
            filled[alike] = which, used + tensor.nbytes
            part = ("size", which)
        groups.setdefault((alike, part), []).append(i)
    return tuple(
        Bucket(*alike, tuple(members), sum(tensors[i].nbytes for i in members))
        for (alike, _), members in groups.items()
    )


def compiler_options(fusion: FusionOptions | None, platform: str, explicit: Collection[str]) -> dict[str, Any]:
    """What XLA is told, for one compile.

    Args:
      fusion: what was asked for.
      platform: "cpu", "gpu" or "tpu".
      explicit: kinds whose buckets are collectives of the program, which XLA's combiners are to leave alone; those of
        the others are made by XLA's partitioner, and the combiners are given the size.

    >>> rules = tuple((kind, FusionRule("size", 1)) for kind in KINDS.values())
    >>> compiler_options(FusionOptions(rules), "tpu", [])
    {'xla_jf_crs_combiner_threshold_in_bytes': 1048576}
    """
    if fusion is None:
        return {}
    names = _THRESHOLDS.get(platform, {})
    alone = [kind for kind, rule in fusion.rules if kind in explicit or rule.mode == "off"]
    sizes = {names[kind]: rule.config * 2**20 for kind, rule in fusion.rules
             if kind not in alone and rule.mode == "size" and kind in names}  # fmt: skip
    passes = [f"{device}{kind}-combiner" for device in ("", "cpu-", "gpu-") for kind in alone]
    return ({"xla_disable_hlo_passes": ",".join(passes)} if passes else {}) | sizes


def unheard(fusion: FusionOptions | None, platform: str, explicit: Collection[str]) -> list[str]:
    """What of it XLA has no option for, where its partitioner makes the collectives (those that are not explicit)."""
    if fusion is None or all(rule.mode == "off" for _, rule in fusion.rules):
        return []
    names = _THRESHOLDS.get(platform, {})
    found = [
        f"{kind} by {r.mode}"
        for kind, r in fusion.rules
        if kind not in explicit and (r.mode == "index" or (kind not in names and r != FusionRule()))
    ]
    return found + (["numbers by path"] if fusion.ids and not explicit else [])


_THRESHOLDS: Mapping[str, Mapping[str, str]] = {
    "gpu": {kind: f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes" for kind in KINDS.values()},
    "tpu": {"all-reduce": "xla_jf_crs_combiner_threshold_in_bytes"},
}
