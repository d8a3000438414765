"""Look up ids in a table whose rows are split unevenly over devices, without communication.

Device i holds part i of the rows and column block i of the ids, so it has every row that it needs. Gradients, and an
optimizer's update of the table, stay on the device for the same reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.devices.hardware import resolve
from shardfn.embedding.checks import as_ids
from shardfn.embedding.split import UnevenRows
from shardfn.errors import Problem, StrategyError, StrategyTypeError, fail, raise_problems
from shardfn.frontend.meshes import abstract_mesh, mesh_on, on_devices_of, partition_spec, spec_of
from shardfn.frontend.notes import noted
from shardfn.frontend.outer_call import is_on_parts
from shardfn.ir.model import Spec
from shardfn.planning.plan import FIX
from shardfn.runtime.processes import is_traced
from shardfn.units import bytes_text

COMPARE = "compare both splits, with gradients and times: shardfn.embedding.compare"


def lookup(
    table: Any, ids: Any, *, strategy: Any, rows: Any, offsets: Any = (), device: Any = None, check: bool = False
) -> jax.Array:
    """The rows of a table at `ids`; the table's rows are split unevenly, and so are the fields of the ids.

    The last dimension of `ids` has the fields. It falls into as many equal blocks as the rows have parts, and block i looks
    up rows of part i. The forward pass has no collective if the arrays are sharded as `strategy` says. An id that is not
    in its part gives a row of zeros, and no gradient.

    Args:
      table: the padded table [parts, longest, width] of `UnevenRows.pack`; or the table [total, width], which is packed here.
      ids: integers [..., fields].
      strategy: the numbers of shards of the table's rows and columns: `(4, 2)`. Rows are sharded into as many parts as
        `rows` has. A pair gives those of the ids too, `((4, 1), (2, 4))`: the batch of the ids is sharded over the
        devices that are left, and the table is replicated over these. Or the `NamedSharding` of the padded table.
      rows: the number of rows of each part, or an `UnevenRows`.
      offsets: the id of the first row of each part, as of `UnevenRows`.
      device: the devices, as of `shard`; with a `NamedSharding` its own.
      check: True refuses ids outside their part. Under `jax.jit` the check is one of `jax.experimental.checkify`, which
        must then transform the function.

    Returns:
      The rows [..., fields, width]; fields are sharded as the table's rows, `width` as its columns. A loss that is called on a
      part of the batch (`shardfn.train`) gets them unsharded.

    Raises:
      StrategyError: a strategy, rows or shapes that do not fit each other; devices that are not here, outside a plan;
        with `check`, ids outside their part.
      StrategyTypeError: ids that are no integers, a table that holds no numbers.

    >>> split = UnevenRows((10, 20, 30, 4))
    >>> table = split.pack(jnp.arange(64.0 * 2).reshape(64, 2))
    >>> lookup(table, jnp.array([[3, 12, 59, 63]]), strategy=(4, 2), rows=split)[0, :, 0].tolist()
    [6.0, 24.0, 118.0, 126.0]
    """
    split = rows if isinstance(rows, UnevenRows) else UnevenRows(rows, offsets)
    ids = ids if hasattr(ids, "dtype") else as_ids(ids)
    table = table if hasattr(table, "dtype") else np.asarray(table)
    if not jnp.issubdtype(table.dtype, np.number):
        fail(StrategyTypeError, f"the table holds {table.dtype}, no numbers", where=f"table: {table.dtype}{list(table.shape)}",
             fix="pass the table, or what `UnevenRows.pack` made of it")  # fmt: skip
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        fail(StrategyTypeError, f"ids are integers, but these are {ids.dtype}", where=f"ids: {ids.dtype}{list(ids.shape)}",
             fix="cast them: ids.astype(jnp.int32)")  # fmt: skip
    if not ids.ndim:
        fail(StrategyError, "the ids are one number", where=f"ids = {ids!r:.40}", why="their last dimension has the fields",
             fix="give an array [..., fields]")  # fmt: skip
    placed = None
    if is_on_parts("embedding.lookup"):
        of_table, of_ids = (split.parts, 1), (*(1,) * (ids.ndim - 1), split.parts)
        raise_problems(_problems(split, table.shape, ids.shape, of_table, of_ids, split.parts))
    else:
        placed = placement(strategy, split, tuple(table.shape), tuple(ids.shape), device)
    if ids.dtype.itemsize < 4:  # offsets need not fit such ids
        ids = ids.astype(np.int32)
    if (most := max(abs(n) for n in (*split.offsets, *map(sum, zip(split.offsets, split.rows, strict=True))))) > (
        largest := np.iinfo(jax.dtypes.canonicalize_dtype(ids.dtype)).max
    ):
        fail(StrategyError, f"ids up to {most:,} do not fit {jax.dtypes.canonicalize_dtype(ids.dtype)}",
             where=f"offsets = {split.offsets!r:.80}", why=f"its largest id is {largest:,}",
             fix="use offsets of 0, or jax_enable_x64 and ids of int64")  # fmt: skip
    if (
        placed
        and isinstance(placed.mesh, AbstractMesh)
        and not (isinstance(table, Tracer) or isinstance(ids, Tracer) or is_traced())
    ):
        fail(StrategyError, "a lookup cannot run on devices that are not here", where=f"device = {device!r:.80}",
             why="a target is only planned for", fix="shardfn.plan(lambda table, ids: lookup(...), table, ids, "
             f"device={device!r:.80}); to run, use {placed.mesh.size} devices of this machine")  # fmt: skip
    if check:
        _check_ids(split, ids)
    if isinstance(ids, np.ndarray) and not jax.config.read("jax_enable_x64"):  # JAX would wrap wider ids into the table
        lowest, highest = np.iinfo(np.int32).min, np.iinfo(np.int32).max  # the highest is in no part
        ids = np.where((ids < lowest) | (ids > highest), highest, ids).astype(np.int32)
    if table.ndim == 2:
        table = split.pack(table)
    if placed is None:
        part = np.repeat(np.arange(split.parts), ids.shape[-1] // split.parts)
        return _rows_at(split, jnp.asarray(table), jnp.asarray(ids), part, (part,))
    return _program(split, placed)(*map(on_devices_of, (table, ids), placed.shardings))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh of a lookup, and the mesh axes of the padded table and of the ids."""

    mesh: Mesh | AbstractMesh
    table: Spec
    ids: Spec

    @property
    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        """Of the padded table and of the ids."""
        return NamedSharding(self.mesh, partition_spec(self.table)), NamedSharding(self.mesh, partition_spec(self.ids))


def placement(
    strategy: Any, split: UnevenRows, table: tuple[int, ...], ids: tuple[int, ...], device: Any = None
) -> Placement:
    """Where a lookup's arrays are.

    Args:
      strategy: as of `lookup`.
      split: the split of the rows.
      table: the table's shape, padded or not.
      ids: the shape of the ids.
      device: as of `lookup`.

    Returns:
      The placement. Its `shardings` are those that the padded table and the ids should have.

    Raises:
      StrategyError: as of `lookup`.

    >>> placed = placement((4, 2), UnevenRows((10, 20, 30, 4)), (64, 16), (8, 4))
    >>> [s.spec for s in placed.shardings]
    [P('rows', None, 'columns'), P(None, 'rows')]
    """
    if isinstance(strategy, NamedSharding):
        mesh, of_table = strategy.mesh, spec_of(strategy.spec, 3)
        by_rows, by_columns = (math.prod(mesh.shape[n] for n in of_table[d]) for d in (0, 2))
        batch: tuple[int, ...] = (1,) * (len(ids) - 1)
        raise_problems(_problems(split, table, ids, (by_rows, by_columns), (*batch, by_rows), mesh.size))
        return Placement(mesh, of_table, (*((),) * len(batch), of_table[0]))
    of_table, of_ids = _numbers(strategy, len(ids))
    found = resolve(device)
    count = found.count
    raise_problems(_problems(split, table, ids, of_table, of_ids, count))
    axes = [("rows", of_table[0]), ("columns", of_table[1])]
    axes += [(f"batch{i}", n) for i, n in enumerate(of_ids[:-1])]
    axes = [(name, n) for name, n in axes if n > 1]
    rest = count // math.prod(n for _, n in axes)
    axes += [("repeat", rest)] if rest > 1 or not axes else []
    names = dict(axes)
    on = lambda name: (name,) if name in names else ()  # noqa: E731
    mesh = abstract_mesh(axes) if found.devices is None else mesh_on(found.devices, axes)
    by_batch = (on(f"batch{i}") for i in range(len(of_ids) - 1))
    return Placement(mesh, (on("rows"), (), on("columns")), (*by_batch, on("rows")))


@functools.lru_cache(maxsize=256)
def _program(split: UnevenRows, placed: Placement) -> Any:
    """The jitted lookup, cached: equal calls outside another `jit` compile once."""
    axes, columns = placed.table[0], placed.table[2]

    def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        return _rows_at(split, table[0], ids, lax.axis_index(axes) if axes else 0)

    in_specs = partition_spec(placed.table), partition_spec(placed.ids)
    out_specs = partition_spec((*placed.ids, columns))
    on_devices = jax.shard_map(on_device, mesh=placed.mesh, in_specs=in_specs, out_specs=out_specs)

    def program(table: jax.Array, ids: jax.Array) -> jax.Array:
        if split.parts > 1:
            table = noted(table, _note(split, placed, table, ids))
        return on_devices(table, ids)

    return jax.jit(program)


def _rows_at(split: UnevenRows, table: jax.Array, ids: jax.Array, part: Any, place: tuple[Any, ...] = ()) -> jax.Array:
    """The rows at ids of the part `part`; `place` is where the table has the part."""
    rows, offset = (jnp.asarray(n, ids.dtype)[part] for n in (split.rows, split.offsets))
    at = ids - offset
    is_row = (at >= 0) & (at < rows)
    found = table.at[(*place, jnp.where(is_row, at, 0))].get(mode="promise_in_bounds")
    return jnp.where(is_row[..., None], found, jnp.zeros((), table.dtype))


def _note(split: UnevenRows, placed: Placement, table: Any, ids: Any) -> str:
    """What a report says of a lookup."""
    row = table.shape[2] // math.prod(placed.mesh.shape[a] for a in placed.table[2]) * table.dtype.itemsize
    less = (split.longest - -(-split.total // split.parts)) * row
    saved = bytes_text(even_split_sends(split, placed, tuple(ids.shape), row))
    memory = split.memory_text(table.shape[2], table.dtype.itemsize)
    return (
        f"the table {list(table.shape)} of a lookup takes {memory}; the lookup sends nothing. With the even split a device would "
        f"hold {bytes_text(less)} less, and send about {saved} for each lookup;{FIX}{COMPARE}"
    )


def even_split_sends(split: UnevenRows, placed: Placement, ids: tuple[int, ...], row: int) -> int:
    """Bytes that a device sends for a lookup in the evenly split table: XLA gathers a small table. Of a large one it gathers the
    ids, and all-reduces the rows.

    Args:
      split: the uneven split; the even one has as many parts.
      placed: its placement.
      ids: the shape of the ids, [..., fields].
      row: bytes of a row's columns on one device.
    """
    shards = [math.prod(placed.mesh.shape[a] for a in axes) for axes in placed.ids[:-1]]
    found = math.prod(n // p for n, p in zip(ids, shards, strict=False)) * ids[-1]
    of_table = bytes_sent("all-gather", split.parts, -(-split.total // split.parts) * row)
    of_ids = bytes_sent("all-gather", split.parts, found // split.parts * np.dtype("int32").itemsize)
    return min(of_table, of_ids + bytes_sent("all-reduce", split.parts, found * row))


def _numbers(strategy: Any, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of shards of the table's rows and columns, and of the ids."""
    given = strategy if isinstance(strategy, Sequence) and not isinstance(strategy, str) else ()
    pair = given if given and isinstance(given[0], Sequence) else (given, None)
    table = _counts(pair[0]) if len(pair) == 2 else ()
    if len(table) == 3 and table[1] == 1:  # of the padded table
        table = (table[0], table[2])
    ids = _counts(pair[1]) if len(pair) == 2 and pair[1] is not None else ((1,) * (ndim - 1) + (table or (1,))[:1])
    if len(table) != 2 or len(ids) != ndim or min(*table, *ids) < 1:
        fail(StrategyTypeError, "the strategy of a lookup is two ints from 1, or such a pair with one for the ids",
             where=f"strategy = {strategy!r:.80}, ids with {ndim} dimensions",
             why="they are the numbers of shards of the table's rows and columns, and of each dimension of the ids",
             fix=f"strategy=(4, 1), or ((4, 1), {(1,) * (ndim - 1) + (4,)})")  # fmt: skip
    return table, ids


def _counts(given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        return ()


def _problems(
    split: UnevenRows, table: Sequence[int], ids: Sequence[int], of_table: Sequence[int], of_ids: Sequence[int], count: int
) -> list[Problem]:  # fmt: skip
    found, rows = [], f"rows = {split.rows!r:.80}"
    fits = tuple(table[:2]) == (split.parts, split.longest) if len(table) == 3 else table[:1] == (split.total,)
    if len(table) not in (2, 3) or not fits:
        found.append(Problem(f"the table has the shape {list(table)}, and the parts have {split.total} rows", rows,
                             "the sum of the parts is the number of the table's rows",
                             f"give a table [{split.total}, width] or [{split.parts}, {split.longest}, width]"))  # fmt: skip
    if of_table[0] != split.parts:
        found.append(Problem(f"the table's rows are sharded {of_table[0]} ways and have {split.parts} parts", rows,
                             "a device holds one part", f"strategy=({split.parts}, {of_table[1]})"))  # fmt: skip
    if of_ids[-1] != split.parts:
        found.append(Problem(f"the last dimension of the ids is sharded {of_ids[-1]} ways, and the rows have {split.parts} "
                             "parts", f"strategy of the ids = {tuple(of_ids)}", "block i of the ids looks up part i",
                             f"shard it {split.parts} ways"))  # fmt: skip
    for what, shape, shards in (
        ("the table", (table[-1],), of_table[1:]),
        ("the ids", ids, (*of_ids[:-1], split.parts)),
    ):
        found += [
            Problem(f"{what} with {size} {'columns' if what == 'the table' else f'entries in dimension {dim}'} cannot be "
                    f"sharded {n} ways", f"shape {list(shape)}", f"{size} is not divisible by {n}",
                    "pad it, or shard it otherwise")
            for dim, (size, n) in enumerate(zip(shape, shards, strict=True)) if size % n
        ]  # fmt: skip
    needed = math.prod(of_table) * math.prod(of_ids[:-1])
    if count % needed:
        found.append(Problem(f"the lookup needs {needed} devices, and {count} are given", f"strategy {tuple(of_table)} of the "
                             f"table, {tuple(of_ids)} of the ids", "their number must divide that of the devices",
                             f"name {needed} devices: device=jax.devices()[:{needed}]"))  # fmt: skip
    return found


def outside(split: UnevenRows, ids: Any) -> Any:
    """Which ids are not in their part: booleans of the shape of `ids`.

    >>> outside(UnevenRows((10, 20)), np.array([[9, 9], [10, 10]])).tolist()
    [[False, True], [True, False]]
    """
    block = ids.shape[-1] // split.parts
    first, count = (np.repeat(np.asarray(n, ids.dtype), block) for n in (split.offsets, split.rows))
    return (ids < first) | (ids - first >= count)


def _check_ids(split: UnevenRows, ids: Any) -> None:
    wrong = outside(split, ids)
    if isinstance(ids, Tracer):
        checkify.check(~wrong.any(), "{n} ids are outside their part of the table", n=wrong.sum())
        return
    places = np.argwhere(np.asarray(wrong))
    if len(places):
        at = tuple(map(int, places[0]))
        part = at[-1] * split.parts // ids.shape[-1]
        first = split.offsets[part]
        fail(StrategyError, f"{len(places)} ids are outside their part of the table", where=f"ids[{', '.join(map(str, at))}] "
             f"= {int(np.asarray(ids)[at])}, in block {part}",
             why=f"part {part} has the ids {first} to {first + split.rows[part] - 1}",
             fix="correct the ids, or leave `check` out for rows of zeros")  # fmt: skip
