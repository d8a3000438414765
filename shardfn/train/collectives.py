"""Collectives of gradients and parameters: which of them are fused, and how.

A bucket is one collective. Its members have the same kind, mesh axes and dtype, in the order of the model's leaves.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardfn.errors import ContextError, Problem, fail
from shardfn.frontend.paths import ruled
from shardfn.frontend.strategy import short
from shardfn.frontend.training_settings import FUSION, TrainingSettings
from shardfn.frontend.value_checks import integer, option_problems

AUTO_MB = 64
"""The size of a bucket in mode "auto", MindSpore's."""

KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}
"""MindSpore's names of kinds, and this library's."""


@dataclasses.dataclass(frozen=True)
class FusionRule:
    """How the collectives of one kind are fused."""

    mode: str = "size"
    """"size": up to `config` MB; "index": `config` holds the last index of each bucket; "off": each on its own."""
    config: Any = AUTO_MB


@dataclasses.dataclass(frozen=True)
class FusionOptions:
    """Which collectives to fuse."""

    rules: Mapping[str, FusionRule]
    """By kind: "all-reduce", "all-gather" and "reduce-scatter"."""
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Path globs to bucket numbers, 0 for a collective of its own. A path has priority, then the last glob that matches."""

    def id_of(self, path: str) -> int | None:
        """The bucket number of a path, None if the user gave none."""
        found = ruled(list(self.ids), [path], lambda one, two: True).rules
        return list(self.ids.values())[found[0]] if found else None


UNFUSED = FusionOptions(dict.fromkeys(KINDS.values(), FusionRule("off", None)))


@dataclasses.dataclass(frozen=True)
class BucketMember:
    """One operand of a collective."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """That of the collective: "float32" for a gradient that is summed in float32."""
    kind: str
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes per device."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One collective."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    members: tuple[int, ...]
    """Positions among the operands."""
    nbytes: int


def fusion_of(settings: TrainingSettings, ids: Mapping[str, int] | None = None) -> FusionOptions | None:
    """The fusion that settings and bucket numbers ask for; None leaves it to XLA.

    Args:
      settings: `comm_fusion` and `all_reduce_fusion_config` of it are read, if they were set.
      ids: path globs to bucket numbers from 1 up; 0 is a collective of its own.

    Raises:
      ContextError: both settings fuse all-reduces.

    >>> settings = TrainingSettings().changed("doc", comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    >>> fusion_of(settings).rules["all-reduce"]
    FusionRule(mode='size', config=32)
    """
    config, indices = settings.comm_fusion, settings.all_reduce_fusion_config
    if config is None and indices is None and not ids:
        return None
    config = config or FUSION
    rules = {kind: _rule(config[name]) for name, kind in KINDS.items()}
    if indices is not None:
        if config["allreduce"]["mode"] != "auto":
            fail(ContextError, "two settings fuse all-reduces",
                 where=f"comm_fusion['allreduce'] = {config['allreduce']}, all_reduce_fusion_config = {list(indices)}",
                 why="each is a rule of its own", fix="leave one of them out")  # fmt: skip
        rules["all-reduce"] = FusionRule("index", indices)
    if not config["openstate"]:
        return FusionOptions(UNFUSED.rules, ids or {})
    return FusionOptions(rules, ids or {})


def _rule(config: Mapping[str, Any]) -> FusionRule:
    if config["mode"] == "auto":
        return FusionRule()
    value = config["config"]
    return FusionRule(config["mode"], tuple(value) if isinstance(value, list) else value)


def id_problems(ids: Any) -> Iterator[Problem]:
    """What is wrong with `fusion`."""
    if not isinstance(ids, Mapping):
        yield Problem("`fusion` must be a dict of paths to numbers", f"fusion = {short(ids)}",
                      "it assigns parameters' collectives to buckets", 'write {"layers/*/w": 1}',
                      is_type=True)  # fmt: skip
        return
    for glob, number in ids.items():
        yield from option_problems(integer(0), f"fusion[{glob!r}]", number)


def buckets(tensors: Sequence[BucketMember], fusion: FusionOptions) -> tuple[Bucket, ...]:
    """Assign each operand to a bucket; buckets are in the order of their first members.

    By size: a bucket is filled up to its size in bytes, and an operand that does not fit opens the next bucket. (MindSpore
    counts four bytes for every element, and does not count the operand that opens a bucket.) By index: each index is the
    last operand of its bucket, counted among those of the kind, as in MindSpore's code.

    >>> rules = dict.fromkeys(KINDS.values(), FusionRule("index", (1,)))
    >>> tensors = [BucketMember(f"w{i}", (2, 3), "float32", "all-reduce", ("data",)) for i in range(5)]
    >>> [(b.members, b.nbytes) for b in buckets(tensors, FusionOptions(rules))]
    [((0, 1), 48), ((2, 3, 4), 72)]
    """
    groups: dict[tuple[tuple[str, tuple[str, ...], str], tuple[str, int]], list[int]] = {}
    counted: dict[str, int] = {}
    filled: dict[Any, tuple[int, int]] = {}
    for i, tensor in enumerate(tensors):
        rule, alike = fusion.rules[tensor.kind], (tensor.kind, tensor.axes, tensor.dtype)
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
    """XLA's options for one compile.

    Args:
      fusion: which collectives to fuse.
      platform: "cpu", "gpu" or "tpu".
      explicit: kinds whose buckets are collectives of the program, which XLA's combiners must not join. XLA's partitioner
        inserts the others, and its combiners get the size.

    >>> rules = dict.fromkeys(KINDS.values(), FusionRule("size", 1))
    >>> compiler_options(FusionOptions(rules), "tpu", [])
    {'xla_jf_crs_combiner_threshold_in_bytes': 1048576}
    """
    if fusion is None:
        return {}
    names = _THRESHOLDS.get(platform, {})
    alone = [kind for kind, rule in fusion.rules.items() if kind in explicit or rule.mode == "off"]
    sizes = {names[kind]: rule.config * 2**20 for kind, rule in fusion.rules.items()
             if kind not in alone and rule.mode == "size" and kind in names}  # fmt: skip
    passes = [f"{device}{kind}-combiner" for device in ("", "cpu-", "gpu-") for kind in alone]
    return ({"xla_disable_hlo_passes": ",".join(passes)} if passes else {}) | sizes


def ignored_fusion(fusion: FusionOptions | None, platform: str, explicit: Collection[str]) -> list[str]:
    """The parts of `fusion` without an XLA option, for collectives that its partitioner inserts (not `explicit`)."""
    if fusion is None or all(rule.mode == "off" for rule in fusion.rules.values()):
        return []
    names = _THRESHOLDS.get(platform, {})
    found = [
        f"{kind} by {r.mode}"
        for kind, r in fusion.rules.items()
        if kind not in explicit and (r.mode == "index" or (kind not in names and r != FusionRule()))
    ]
    return found + (["numbers by path"] if fusion.ids and not explicit else [])


_THRESHOLDS: Mapping[str, Mapping[str, str]] = {
    "gpu": {kind: f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes" for kind in KINDS.values()},
    "tpu": {"all-reduce": "xla_jf_crs_combiner_threshold_in_bytes"},
}


# ---- fused collectives: several arrays of one dtype in one flat array, inside `jax.shard_map`

Job = tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]
"""The operands of a collective, and the collective."""


def all_reduced(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes."""
    if len(arrays) == 1:
        return [lax.psum(arrays[0], axes)]
    flat = lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)
    return [part.reshape(x.shape) for part, x in zip(_split(flat, arrays, 1), arrays, strict=True)]


def all_reduced_shards(
    arrays: Sequence[jax.Array], axes: tuple[str, ...], specs: Sequence[PartitionSpec], others: frozenset[str]
) -> list[jax.Array]:
    """The sum of each array over the axes, where XLA shards the arrays over other mesh axes.

    A flat array of full arrays would gather them; here each device concatenates the shards that it holds.

    Args:
      arrays: of one dtype.
      axes: those of the enclosing `shard_map`, to sum over.
      specs: the sharding of each array over the other axes.
      others: the other axes.
    """
    summed = jax.shard_map(
        lambda *shards: tuple(all_reduced(shards, axes)),
        in_specs=tuple(specs), out_specs=tuple(specs), axis_names=set(others), check_vma=False,
    )  # fmt: skip
    return list(summed(*arrays))


def reduce_scattered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sum of each array over the axes; each device keeps a shard along the array's dimension."""
    if len(arrays) == 1:
        return [lax.psum_scatter(arrays[0], axes, scatter_dimension=dims[0], tiled=True)]
    count = lax.axis_size(axes)
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = jnp.concatenate([x.reshape(count, -1) for x in turned], axis=1)
    flat = lax.psum_scatter(flat, axes, scatter_dimension=0, tiled=True).reshape(-1)
    return [
        jnp.moveaxis(part.reshape(x.shape[0] // count, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(_split(flat, turned, count), turned, dims, strict=True)
    ]


def all_gathered(arrays: Sequence[jax.Array], dims: Sequence[int], axes: tuple[str, ...]) -> list[jax.Array]:
    """Each array, gathered from its shards along its dimension."""
    if len(arrays) == 1:
        return [lax.all_gather(arrays[0], axes, axis=dims[0], tiled=True)]
    turned = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    flat = lax.all_gather(jnp.concatenate([x.reshape(-1) for x in turned]), axes)
    ends = list(itertools.accumulate(x.size for x in turned))
    return [
        jnp.moveaxis(part.reshape(-1, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(jnp.split(flat, ends[:-1], axis=1), turned, dims, strict=True)
    ]


def fused_psum(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """`jax.lax.psum` of several arrays in one all-reduce for each dtype, inside `jax.shard_map`.

    It is MindSpore's `AllReduce` with one number as `fusion`, for the arrays of one call. XLA may merge it with others.

    Args:
      tree: a pytree of arrays.
      axis_name: the mesh axes to sum over.

    Returns:
      The sums, in the structure of `tree`.

    >>> jax.vmap(lambda t: fused_psum(t, "x"), axis_name="x")({"a": jnp.ones(3), "b": jnp.ones((3, 2))})["a"].tolist()
    [3.0, 3.0, 3.0]
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return _by_dtype(tree, lambda arrays: all_reduced(arrays, axes))


def fused_all_gather(tree: Any, axis_name: str | tuple[str, ...], *, axis: int = 0) -> Any:
    """`jax.lax.all_gather(..., tiled=True)` of several arrays in one all-gather for each dtype, inside `jax.shard_map`.

    Args:
      tree: a pytree of arrays.
      axis_name: the mesh axes to gather over.
      axis: the dimension of every array along which its shards lie.

    Returns:
      The gathered arrays, in the structure of `tree`.

    >>> jax.vmap(lambda t: fused_all_gather(t, "x"), axis_name="x")({"a": jnp.ones((3, 1)), "b": jnp.ones((3, 2))})["b"].shape
    (3, 6)
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return _by_dtype(tree, lambda arrays: all_gathered(arrays, [axis] * len(arrays), axes))


def _by_dtype(tree: Any, collective: Callable[[Sequence[jax.Array]], list[jax.Array]]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    found: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        found |= dict(zip(places, collective([arrays[i] for i in places]), strict=True))
    return treedef.unflatten(found[i] for i in range(len(arrays)))


def in_turn(jobs: Sequence[Job], backwards: bool) -> list[list[jax.Array]]:
    """Run collectives in sequence, so that XLA's combiners cannot join them; `backwards` begins with the last."""
    done: list[list[jax.Array]] = []
    for arrays, collective in reversed(jobs) if backwards else jobs:
        if done:
            *arrays, _ = lax.optimization_barrier((*arrays, done[-1][0]))
        done.append(collective(arrays))
    return done[::-1] if backwards else done


def _split(flat: jax.Array, arrays: Sequence[jax.Array], parts: int) -> list[jax.Array]:
    ends = list(itertools.accumulate(math.prod(x.shape) // parts for x in arrays))
    return jnp.split(flat, ends[:-1])
