"""What an uneven split of a table saves against the even one, as the planner estimates it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.api import plan
from shardfn.embedding.lookup import lookup, placement
from shardfn.embedding.split import UnevenRows
from shardfn.errors import StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.units import bytes_text, time_text


@dataclasses.dataclass(frozen=True)
class SplitCost:
    """What one split of a table costs.

    Attributes:
      memory: bytes of the table on each device, padding included.
      padding: bytes of all devices' padding.
      sent: bytes that a device sends for one lookup.
      sent_in_training: the same for a lookup and the table's gradient.
      time_s: modelled seconds of a lookup and the table's gradient.
    """

    memory: int
    padding: int
    sent: int
    sent_in_training: int
    time_s: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The costs of an uneven split and of the even split of the same table; print it for a table.

    Attributes:
      uneven: the costs of the uneven split, for `lookup`.
      even: those of the even split, for `table[ids]` as XLA partitions it.
    """

    uneven: SplitCost
    even: SplitCost

    def __str__(self) -> str:
        rows = [f"{'split':<8}{'memory':>12}{'padding':>12}{'sent':>12}{'with gradient':>16}{'time':>12}"]
        for name, cost in (("uneven", self.uneven), ("even", self.even)):
            *sizes, time_s = dataclasses.astuple(cost)
            texts = [bytes_text(n) for n in sizes]
            rows.append(f"{name:<8}{texts[0]:>12}{texts[1]:>12}{texts[2]:>12}{texts[3]:>16}{time_text(time_s):>12}")
        return "\n".join(rows)


def compare(
    split: UnevenRows, width: int, ids: tuple[int, ...], *, strategy: Any, dtype: Any = "float32", device: Any = None
) -> Comparison:
    """Compare an uneven split of a table with the even one, without running either.

    Both lookups take ids that are sharded over fields, and give rows that are sharded alike. Bytes and times are those of the
    plan; memory and padding are those of the table alone.

    Args:
      split: the uneven split.
      width: elements of a row.
      ids: the shape of the ids, [..., fields].
      strategy: as of `lookup`.
      dtype: the table's dtype.
      device: as of `lookup`; a target such as "tpu-v5e:8" will do.

    Raises:
      StrategyError: as of `lookup`.
      StrategyTypeError: a split or a shape of another type.

    >>> found = compare(UnevenRows((10, 20, 30, 4)), 16, (8, 8), strategy=(4, 1), device="cpu:4")
    >>> print(found)
    split         memory     padding        sent   with gradient        time
    uneven      1.88 KiB     3.5 KiB         0 B             0 B...
    even           1 KiB         0 B       3 KiB...
    """
    if not isinstance(split, UnevenRows) or not isinstance(ids, tuple | list):
        fail(StrategyTypeError, f"`compare` takes {a(split)} and {a(ids)}", where=f"split = {split!r:.40}, ids = {ids!r:.40}",
             why="it takes an `UnevenRows` and a shape", fix="compare(UnevenRows((10, 20)), 16, (8, 4), ...)")  # fmt: skip
    raise_problems(option_problems(integer(1), "width", width))
    try:
        jnp.dtype(dtype)
    except TypeError:
        fail(StrategyTypeError, f"there is no dtype {dtype!r:.40}", where=f"dtype = {dtype!r:.40}", why="it is that of the table",
             fix='dtype="float32"')  # fmt: skip
    placed = placement(strategy, split, (split.total, width), ids, device)
    of_table, of_ids = placed.shardings
    rows, _, columns = of_table.spec
    even = UnevenRows((-(-split.total // split.parts),) * split.parts)
    fill = NamedSharding(placed.mesh, PartitionSpec(rows, columns))
    found = NamedSharding(placed.mesh, PartitionSpec(*of_ids.spec, columns))
    index, item = jax.ShapeDtypeStruct(ids, "int32"), jnp.dtype(dtype).itemsize
    target = placed.mesh if isinstance(placed.mesh, Mesh) else device

    def cost(look: Any, shape: tuple[int, ...], sharding: Any, of: UnevenRows) -> SplitCost:
        table = jax.ShapeDtypeStruct(shape, dtype)

        def trained(table: Any, ids: Any) -> Any:
            y, back = jax.vjp(lambda t: look(t, ids), table)
            return y, back(y)[0]

        sent, both = (
            plan(fn, table, index, in_strategy=(sharding, of_ids), out_strategy=out, device=target).cost
            for fn, out in ((look, (found,)), (trained, (found, sharding)))
        )
        padding = of.parts * of.longest - split.total
        memory = math.prod(sharding.shard_shape(shape)) * item
        return SplitCost(memory, padding * width * item, int(sent.bytes_sent), int(both.bytes_sent), both.time_s)

    return Comparison(
        cost(
            lambda t, i: lookup(t, i, strategy=strategy, rows=split, device=device),
            (split.parts, split.longest, width),
            of_table,
            split,
        ),
        cost(lambda t, i: t.at[i].get(mode="fill", fill_value=0), (even.total, width), fill, even),
    )
