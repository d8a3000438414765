"""What each XLA backend does differently with the collectives of a partitioned program: one row each.

The partitioner, which emits the collectives, and the search, which charges for them, read the same row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from shardfn.ir.model import is_gpu
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.collective_matmul import collective_matmul_permutes
from shardfn.partition.combine_reductions import combine_partial_sums
from shardfn.partition.libtpu import (
    all_reduce_gathers,
    makes_reduce_scatter,
    max_reduced_gather_bytes,
    repeat_distant_gathers,
)
from shardfn.partition.loop_reductions import all_reduces_after_loops
from shardfn.partition.rebuild import without_unread


def _gpu_passes(partitioned: PartitionedProgram, torus: Sequence[int]) -> PartitionedProgram:
    return all_reduces_after_loops(without_unread(combine_partial_sums(partitioned)))


def _tpu_passes(partitioned: PartitionedProgram, torus: Sequence[int]) -> PartitionedProgram:
    found = combine_partial_sums(
        all_reduces_after_loops(without_unread(partitioned))
    )  # in this order, unlike XLA on GPUs
    return all_reduce_gathers(without_unread(repeat_distant_gathers(found)), torus)


@dataclasses.dataclass(frozen=True)
class CollectiveRules:
    """How one XLA backend communicates."""

    passes: Callable[[PartitionedProgram, Sequence[int]], PartitionedProgram] = lambda partitioned, torus: partitioned
    """What it changes after partitioning, on all chips of a torus (empty elsewhere); unread resharding is removed."""
    makes_reduce_scatters: bool = True
    """Whether it reduce-scatters sums of which each device needs a shard; else it all-reduces and slices."""
    scatters_shard: Callable[[tuple[int, ...], int, int, bool, tuple[int, ...]], bool] | None = None
    """Where it does so for some shards only, along one dimension, for which (`libtpu.makes_reduce_scatter`)."""
    max_reduced_gather_bytes: Callable[[Sequence[int]], float] = lambda torus: 0
    """Bytes of the result up to which it all-reduces in the place of an all-gather over all chips of a torus."""
    combines_reductions: bool = True
    """Whether it adds partial sums before they are reduced (`combine_reductions`), and reduces what a loop adds up after the
    loop (`loop_reductions`)."""
    sent_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By dtype, another one in which collectives send; what arrives is converted back."""
    operands_sent_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By dtype, another one in which all-gathers and collective-permutes send what a matmul of default precision reads; it
    reads what arrives."""
    sends_halo_rows_once: bool = False
    """Whether rows that neighbours on both sides read are sent in one collective-permute."""
    sees_counting_indices: bool = True
    """Whether it sees that a column of an index counts along a dimension (`counting_indices`)."""
    hoists_invariants: bool = False
    """Whether it computes before a loop what the loop does not change (`loop_invariants`)."""
    hoists_gathers: bool = False
    """Whether what it moves before a loop may be larger than what it is computed from. If not, all-gathers stay in the loop: on
    TPUs because libtpu moves no such op, on GPUs because XLA moves no op at all."""

    matmul_permutes: Callable[[str, int, bool], int] = lambda kind, n, is_square: 0
    """How many collective-permutes a collective matmul sends instead of a kind of collective between `n` devices, which may
    be a square on the torus; 0 where it makes none (`collective_matmul`)."""

    def scatters(
        self, shard: tuple[int, ...], dims: Collection[int], bits: int, spans_torus: bool, torus: tuple[int, ...]
    ) -> bool:
        """Whether it reduce-scatters a sum; else it all-reduces and slices.

        Args:
          shard: the shape that one device needs.
          dims: the dimensions along which the sum is to be scattered.
          bits: of one element.
          spans_torus: whether the sum is over all devices of the torus.
          torus: its dimensions, empty elsewhere.

        >>> collective_rules("cpu").scatters((32, 256), {0}, 32, True, ())
        False
        >>> [collective_rules("tpu").scatters((32, 256), dims, 32, True, (2, 4)) for dims in ({0}, {0, 1})]
        [True, False]
        """
        if self.scatters_shard is None:
            return self.makes_reduce_scatters
        return len(dims) == 1 and self.scatters_shard(shard, next(iter(dims)), bits, spans_torus, torus)


_RULES = {
    "cpu": CollectiveRules(
        makes_reduce_scatters=False,
        combines_reductions=False,
        sees_counting_indices=False,
        sent_as={"bf16": "f32"},
        hoists_invariants=True,
        hoists_gathers=True,
    ),
    "gpu": CollectiveRules(_gpu_passes),
    "tpu": CollectiveRules(
        _tpu_passes,
        scatters_shard=makes_reduce_scatter,
        max_reduced_gather_bytes=max_reduced_gather_bytes,
        operands_sent_as={"f32": "bf16"},
        matmul_permutes=collective_matmul_permutes,
        sends_halo_rows_once=True,
        hoists_invariants=True,
    ),
}


def collective_rules(platform: str) -> CollectiveRules:
    """The rules of a platform's backend.

    >>> [collective_rules(platform).makes_reduce_scatters for platform in ("cpu", "cuda", "tpu")]
    [False, True, True]
    """
    return _RULES["gpu" if is_gpu(platform) else platform]
