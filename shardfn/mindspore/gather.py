"""MindSpore's lookups with `manual_split`: tables whose rows are split unevenly over devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardfn import embedding
from shardfn.api import shard
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, nearest, raise_problems, warn

ATTRIBUTES = ("manual_split", "manual_split_with_offset", "primitive_target")


class Gather:
    """MindSpore's `ops.Gather`: rows of a table by ids, with a strategy and the attribute `manual_split`.

    `manual_split=(10, 20, 30, 4)` gives the rows of each device. `manual_split_with_offset=((10, 0), (20, 10), ...)` gives
    the id of each part's first row too. Both need a strategy such as `((4, 1), (1, 4))`: rows of the table and the last
    dimension of the ids are sharded into as many parts. `((4, 2), (1, 4))` shards the columns too.

    Args:
      batch_dims: leading dimensions that the table and the ids share; 0 with `manual_split`.

    Raises:
      StrategyError: when it is called: all that is wrong with the attributes, the strategy and the arrays.

    >>> gather = Gather().add_prim_attr("manual_split", (1, 3)).shard(((2, 1), (1, 2)))
    >>> gather(jnp.arange(8.0).reshape(4, 2), jnp.array([[0, 3]]), 0, device=jax.devices()[:2]).tolist()
    [[[0.0, 1.0], [6.0, 7.0]]]
    """

    def __init__(self, batch_dims: int = 0):
        self.batch_dims = batch_dims
        self.attributes: dict[str, Any] = {}
        self.in_strategy: Any = None
        self.out_strategy: Any = None

    def add_prim_attr(self, name: str, value: Any) -> Gather:
        """Set an attribute.

        Args:
          name: "manual_split", "manual_split_with_offset" or "primitive_target"; the last has no effect.
          value: its value.

        Returns:
          The operator itself.

        Raises:
          StrategyError: another name.
        """
        if name not in ATTRIBUTES:
            fail(StrategyError, f"`{type(self).__name__}` has no attribute {name!r}", where=f"add_prim_attr({name!r}, …)",
                 fix=nearest(name, ATTRIBUTES))  # fmt: skip
        if name == "primitive_target":
            warn(f"primitive_target={value!r} has no effect: the lookup runs on the devices that hold the table; leave it "
                 "out, or keep a table that is too large for them in embedding.Table")  # fmt: skip
        self.attributes[name] = value
        return self

    def shard(self, in_strategy: Any = None, out_strategy: Any = None) -> Gather:
        """Give the strategies of the table and of the ids.

        Args:
          in_strategy: two entries, such as `((8, 1), (1, 8))`.
          out_strategy: one entry for the result; not with `manual_split`.

        Returns:
          The operator itself.
        """
        self.in_strategy, self.out_strategy = in_strategy, out_strategy
        return self

    def __call__(self, input_params: Any, input_indices: Any, axis: int = 0, *, device: Any = None) -> jax.Array:
        """The rows at the ids.

        Args:
          input_params: the table; with `manual_split` also the padded table of `held`.
          input_indices: integers.
          axis: the dimension of the table that ids count; 0 with `manual_split`.
          device: the devices, as of `shardfn.shard`.
        """
        if self._split_name is None:
            return self._even(input_params, input_indices, axis, device)
        split = self.checked(jnp.shape(input_params), jnp.shape(input_indices), axis, device)
        return embedding.lookup(input_params, input_indices, strategy=self.in_strategy, rows=split, device=device)

    def held(self, input_params: Any, input_indices: Any, *, device: Any = None) -> Any:
        """The padded table, with the rows of each device on it; only with `manual_split`.

        Args:
          input_params: the table.
          input_indices: the ids, or their shape.
          device: the devices.

        Raises:
          StrategyError: as the call.
        """
        split = self.checked(jnp.shape(input_params), jnp.shape(input_indices), 0, device)
        packed = split.pack(input_params)
        placed = embedding.placement(self.in_strategy, split, packed.shape, jnp.shape(input_indices), device)
        return jax.device_put(packed, placed.shardings[0])

    def checked(
        self, table: tuple[int, ...], ids: tuple[int, ...], axis: int = 0, device: Any = None
    ) -> embedding.UnevenRows:
        """The split, after MindSpore's checks.

        Args:
          table: the table's shape, padded or not.
          ids: the shape of the ids.
          axis: as of the call.
          device: as of the call.

        Raises:
          StrategyError, StrategyTypeError: everything that MindSpore refuses, all at once.
        """
        name = self._split_name
        if name is None:
            fail(
                StrategyError, f"`{type(self).__name__}` has no `manual_split`", fix='add_prim_attr("manual_split", …)'
            )
        split = _split_of(name, self.attributes[name])
        strategies = self.in_strategy
        if not (isinstance(strategies, tuple | list) and len(strategies) == 2):
            fail(StrategyTypeError, "`manual_split` needs a strategy of the table and of the ids",
                 where=f"shard({strategies!r:.80})", fix=f"shard((({split.parts}, 1), (1, {split.parts})))")  # fmt: skip
        call = _Call(name, split, tuple(strategies[0]), tuple(strategies[1]), table, ids, resolve(device).count)
        of_class = [] if self.out_strategy is None and not self.batch_dims and axis == 0 else [
            Problem(f"`{name}` goes with axis 0, without batch_dims and out_strategy",
                    f"axis = {axis}, batch_dims = {self.batch_dims}, out_strategy = {self.out_strategy!r:.40}",
                    "each device gathers from its own rows", "leave them out")
        ]  # fmt: skip
        raise_problems([*of_class, *_problems(call)])
        return split

    @property
    def _split_name(self) -> str | None:
        return next((name for name in ATTRIBUTES[:2] if name in self.attributes), None)

    def _even(self, table: Any, ids: Any, axis: int, device: Any) -> jax.Array:
        def take(table: Any, ids: Any) -> Any:
            one = lambda t, i: jnp.take(t, i, axis % jnp.ndim(table) - self.batch_dims)  # noqa: E731
            for _ in range(self.batch_dims):
                one = jax.vmap(one)
            return one(table, ids)

        return self._sharded(take, table, ids, device)

    def _sharded(self, take: Callable[..., Any], table: Any, ids: Any, device: Any) -> jax.Array:
        if self.in_strategy is None:
            return take(table, ids)
        return shard(take, self.in_strategy, self.out_strategy, device)(table, ids)


class SparseGatherV2(Gather):
    """MindSpore's `ops.SparseGatherV2`, as `Gather`."""


class EmbeddingLookup(Gather):
    """MindSpore's `ops.EmbeddingLookup`: `(table, ids, offset)`. Ids that are not in the table give zeros.

    >>> EmbeddingLookup()(jnp.ones((4, 2)), jnp.array([1, 9]), 0).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """

    def __call__(self, input_params: Any, input_indices: Any, offset: int = 0, *, device: Any = None) -> jax.Array:
        """The rows at `ids - offset`.

        Args:
          input_params: as of `Gather`.
          input_indices: integers.
          offset: the id of the table's first row; 0 with `manual_split`.
          device: as of `Gather`.
        """
        ids = input_indices - offset if offset else input_indices
        return super().__call__(input_params, ids, 0, device=device)

    def _even(self, table: Any, ids: Any, axis: int, device: Any) -> jax.Array:
        def take(table: Any, ids: Any) -> Any:
            return table.at[jnp.where(ids < 0, table.shape[0], ids)].get(mode="fill", fill_value=0)

        return self._sharded(take, table, ids, device)


def slice_strategies(slice_mode: str, devices: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The strategies of the table and of ids [batch, fields] that `slice_mode` of `nn.EmbeddingLookup` stands for.

    Args:
      slice_mode: "batch_slice", "field_slice", "table_row_slice" or "table_column_slice".
      devices: the number of devices.

    Returns:
      The two strategies. Those of "field_slice" go with `manual_split`.

    Raises:
      StrategyError: another mode.

    >>> slice_strategies("table_row_slice", 8)
    ((8, 1), (1, 1))
    """
    modes = {"batch_slice": ((1, 1), (devices, 1)), "field_slice": ((devices, 1), (1, devices)),
             "table_row_slice": ((devices, 1), (1, 1)), "table_column_slice": ((1, devices), (1, 1))}  # fmt: skip
    if slice_mode not in modes:
        fail(StrategyError, f"there is no slice mode {slice_mode!r}", where=f"slice_mode = {slice_mode!r}",
             fix=nearest(slice_mode, modes))  # fmt: skip
    return modes[slice_mode]


class _Call(NamedTuple):
    """A call with `manual_split`: shapes, strategies and the number of devices."""

    name: str
    split: embedding.UnevenRows
    of_table: tuple[int, ...]
    of_ids: tuple[int, ...]
    table: tuple[int, ...]
    ids: tuple[int, ...]
    devices: int


def _split_of(name: str, value: Any) -> embedding.UnevenRows:
    is_plain = name == "manual_split"
    kinds = "ints from 1" if is_plain else "pairs (rows, offset)"
    if not isinstance(value, tuple | list) or not value:
        fail(StrategyTypeError, f"`{name}` is a tuple of {kinds}, but it is {a(value)}", where=f"{name} = {value!r:.80}",
             fix=f'add_prim_attr("{name}", {"(10, 20)" if is_plain else "((10, 0), (20, 10))"})')  # fmt: skip
    if is_plain:
        return embedding.UnevenRows(tuple(value))
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value):
        fail(StrategyTypeError, f"`{name}` is a tuple of {kinds}", where=f"{name} = {value!r:.80}",
             fix=f'add_prim_attr("{name}", ((10, 0), (20, 10)))')  # fmt: skip
    return embedding.UnevenRows(tuple(pair[0] for pair in value), tuple(pair[1] for pair in value))


def _problems(call: _Call) -> Iterator[Problem]:
    """What MindSpore refuses besides what `embedding.lookup` refuses."""
    split, parts = call.split, call.split.parts
    where = f"{call.name} = {split.rows!r:.80}"
    rows = call.table[0] if len(call.table) == 2 else split.total
    if split.total != rows:
        yield Problem(f"the rows of `{call.name}` add up to {split.total}, and the table has {rows}", where,
                      "every row is on one device", "correct the rows")  # fmt: skip
    if any(n != 1 for n in call.of_ids[:-1]):
        fix = f"shard(({call.of_table}, {(*(1,) * (len(call.ids) - 1), parts)}))"
        yield Problem("only the last dimension of the ids can be sharded", f"strategy of the ids = {call.of_ids}",
                      "a device looks up a block of fields in its rows", fix)  # fmt: skip
    if {call.of_table[0], call.of_ids[-1]} != {parts}:
        yield Problem(f"`{call.name}` has {parts} parts; rows are sharded {call.of_table[0]} ways and fields "
                      f"{call.of_ids[-1]} ways", where, "each device has a part and its block of fields",
                      "give as many parts as devices along the rows")  # fmt: skip
    if math.prod(call.of_table) != call.devices:
        yield Problem(f"the table is sharded {math.prod(call.of_table)} ways on {call.devices} devices",
                      f"strategy of the table = {call.of_table}", "with uneven rows no device may hold a copy",
                      "use all devices, or name fewer")  # fmt: skip
    fields = call.ids[-1] // max(1, call.of_ids[-1])
    small = [n for n in split.rows if n < fields]
    if small:
        yield Problem(f"a part of {small[0]} rows is smaller than its block of {fields} fields", where,
                      "MindSpore wants a row for each field of a block",
                      "give each part more rows, or shard fields further")  # fmt: skip
