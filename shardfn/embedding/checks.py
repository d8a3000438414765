"""What is wrong with the options of a table, its ids and its gradients."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardfn.embedding.rowwise import RowOptimizer
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, nearest
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.units import bytes_text

STORES = ("device", "host")
MOST_ON_DEVICES = np.iinfo(np.int32).max
"""Rows of an array on devices: their ids are int32 there."""


def table_problems(
    *, rows: Any, width: Any, store: Any, path: Any, cache_rows: Any, optimizer: Any, init: Any, seed: Any, dtype: Any,
    strategy: Any, device: Any
) -> Iterator[Problem]:  # fmt: skip
    """All problems with the arguments of a `Table`."""
    for name, value, least in (
        ("rows", rows, 1),
        ("width", width, 1),
        ("cache_rows", cache_rows, 0),
        ("seed", seed, 0),
    ):
        yield from option_problems(integer(least), name, value)
    is_made = not isinstance(store, str | os.PathLike) and callable(getattr(store, "open", None))
    if not is_made and store not in STORES:
        fix = "shardfn.cluster.TableServers(servers=2)" if store == "servers" else nearest(store, STORES)
        yield Problem(f"there is no store {store!r:.40}", f"store = {store!r:.40}",
                      'stores are "device", "host", and servers as an object', fix)  # fmt: skip
    for name, value in (("cache_rows", cache_rows), ("path", path)):
        if value and (store == "device" or (is_made and name == "path")):
            where = "devices is in their memory" if store == "device" else "servers is in their folder"
            yield Problem(f"`{name}` goes with store=\"host\"", f"{name} = {value!r:.40}", f"a table on {where}",
                          f'leave `{name}` out, or use store="host"')  # fmt: skip
    on_devices = {"rows": rows} if store == "device" else {"cache_rows": cache_rows}
    for name, value in on_devices.items():
        if isinstance(value, int) and value > MOST_ON_DEVICES:
            yield Problem(f"{value:,} rows are too many for devices", f"{name} = {value}",
                          "ids of rows are int32 there", f"{name}={MOST_ON_DEVICES} at most; host memory holds more")  # fmt: skip
    if strategy is not None and not (
        isinstance(strategy, tuple | list)
        and len(strategy) == 2
        and all(isinstance(n, int) and n > 0 for n in strategy)
    ):
        yield Problem("`strategy` must be two ints from 1", f"strategy = {strategy!r:.40}",
                      "they are the numbers of shards of rows and columns", "strategy=(8, 1)")  # fmt: skip
    if store == "device" and device is not None and strategy is None:
        yield Problem("`device` goes with `strategy`", f"device = {device!r:.40}", "without one, rows are on the default device",
                      "strategy=(1, 1), or leave `device` out")  # fmt: skip
    if path is not None and not isinstance(path, str | os.PathLike):
        yield Problem(f"`path` is {a(path)}", f"path = {path!r:.40}", "it is a folder for memory-mapped files", 'path="/scratch"',
                      is_type=True)  # fmt: skip
    if strategy is not None and store != "device" and not cache_rows:
        yield Problem("`strategy` is of rows on devices, and there are none", f"strategy = {strategy!r:.40}",
                      "a host store or servers without cache have no rows there", "leave it out, or give cache_rows")  # fmt: skip
    if not isinstance(optimizer, RowOptimizer):
        yield Problem(f"the optimizer of a table is one of rows, not {a(optimizer)}", f"optimizer = {optimizer!r:.40}",
                      "only the rows of a batch are updated", "optimizer=embedding.adagrad(0.01)")  # fmt: skip
    try:
        is_floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        yield Problem(f"the rows of a table cannot be {dtype!r:.40}", f"dtype = {dtype!r:.40}",
                      "an optimizer updates them by their gradient", 'use a floating dtype, such as "float32"')  # fmt: skip
    yield from _init_problems(rows, width, init)


def _init_problems(rows: Any, width: Any, init: Any) -> Iterator[Problem]:
    fix = "give the standard deviation of the first rows, or an array of all"
    try:
        first = np.asarray(init, np.float32)
    except (TypeError, ValueError) as error:
        yield Problem(f"`init` is {a(init)} that holds no numbers", f"init = {init!r:.40}", str(error), fix)
        return
    if isinstance(init, int | float):
        if not (np.isfinite(init) and init >= 0):
            yield Problem("`init` is no standard deviation", f"init = {init}", "it is a number from 0", fix)
    elif first.shape != (rows, width):
        yield Problem(f"`init` has the shape {list(first.shape)}", "init", f"the table has [{rows}, {width}]", fix)


def checked_ids(ids: Any, rows: int) -> np.ndarray:
    """The ids of a batch as int64.

    Raises:
      StrategyError, StrategyTypeError: as of `Table.fetch`.
    """
    if isinstance(ids, Tracer):
        fail(StrategyTypeError, "the ids are traced", where="fetch(ids)", why="rows are fetched on the host, before a step",
             fix="fetch outside jit, and give values and positions to the step")  # fmt: skip
    found = as_ids(ids)
    if found.dtype.kind not in "iu" and (found.size or found.dtype.kind != "f"):  # [] is an array of floats
        fail(StrategyTypeError, f"ids are integers, but these are {found.dtype}", where=f"ids: {found.dtype}{list(found.shape)}",
             fix="cast them: ids.astype(numpy.int64)")  # fmt: skip
    wrong = np.argwhere((found < 0) | (found >= rows))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        fail(StrategyError, f"{len(wrong)} ids are not in the table", where=f"ids[{', '.join(map(str, at))}] = {found[at]}",
             why=f"the table has the ids 0 to {rows - 1}", fix="correct the ids, or make a larger table")  # fmt: skip
    return found.astype(np.int64)


def as_ids(ids: Any) -> np.ndarray:
    """Ids as an array.

    Raises:
      StrategyTypeError: lists of different lengths.
    """
    try:
        return np.asarray(ids)
    except ValueError:
        fail(StrategyTypeError, "the ids are lists of different lengths", where=f"ids = {ids!r:.60}",
             why="they are one array", fix="pad them, or concatenate them")  # fmt: skip


def too_large(shape: tuple[int, int], element_bytes: int, store: Any, is_in_files: bool, error: Exception) -> NoReturn:
    """Say that a table does not fit the memory.

    Args:
      shape: rows and width.
      element_bytes: bytes of an element and its moments.
      store: as of `Table`.
      is_in_files: whether its rows are in files.
      error: what was raised when memory was asked for.

    Raises:
      StrategyError: always.
    """
    place = store if isinstance(store, str) else "servers"
    fix = "use fewer rows, or files: path=..." if store == "host" else 'store="host", or more devices'
    if is_in_files:
        fix = "use fewer rows: which of them changed, and when, is kept in memory, 6 bytes for each row"
    size = bytes_text(math.prod(shape) * element_bytes)
    fail(StrategyError, f"a table of {size} does not fit the memory of its {place}",
         where=f"Table({shape[0]}, {shape[1]}, store={store!r})", why=f"{error!s:.200}", fix=fix)  # fmt: skip


def check_gradients(shape: tuple[int, ...], gradients: Any) -> None:
    """Refuse what is no gradient of fetched rows of this shape.

    Raises:
      StrategyError, StrategyTypeError: as of `Table.update`.
    """
    if isinstance(gradients, Tracer):
        fail(StrategyTypeError, "the gradient is traced", where="update(fetched, gradients)",
             why="rows are updated after a step", fix="return it from the jitted function, and update outside")  # fmt: skip
    if np.shape(gradients) != tuple(shape):
        fail(StrategyError, f"the gradient has the shape {list(np.shape(gradients))}, and the rows {list(shape)}",
             where=f"update(…, gradients[{', '.join(map(str, np.shape(gradients)))}])",
             why="it is the gradient of `fetched.values`", fix="jax.grad(loss)(fetched.values, ...)")  # fmt: skip


def folder_of(given: Any, name: str) -> pathlib.Path:
    """The absolute path of a folder of saves.

    Raises:
      StrategyTypeError: no path.
    """
    if not isinstance(given, str | os.PathLike):
        fail(StrategyTypeError, f"the folder of saves is a path, not {a(given)}", where=f"{name}({given!r:.40})",
             fix=f'{name}("saves/items")')  # fmt: skip
    return pathlib.Path(given).absolute()
