"""What `ParameterServer.create` refuses: optimizers that are not elementwise, and options that make no sense."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from shardfn.cluster.parameter_server.ledger import Rules
from shardfn.cluster.parameter_server.partition import ArraySpec
from shardfn.errors import Problem, StrategyError, fail, raise_problems
from shardfn.frontend.value_checks import boolean, clipped, integer, option_problems


def check_elementwise(optimizer: Any, arrays: Sequence[ArraySpec] = ()) -> None:
    """Refuse an optimizer whose update of an element depends on other elements.

    Args:
      optimizer: an optax optimizer.
      arrays: the arrays of the parameters; their state must have their rows too.

    Raises:
      StrategyError: the updates of an array differ from those of its two halves, or the state of an array has another shape;
        or the optimizer fails with a part of the arrays.

    >>> import optax
    >>> check_elementwise(optax.adam(0.1))
    """
    try:
        with contextlib.suppress(KeyError):  # an optimizer for arrays of certain names
            if not np.allclose(
                _updates(optimizer, [slice(0, 4)]),
                _updates(optimizer, [slice(0, 2), slice(2, 4)]),
                rtol=1e-5, equal_nan=True,
            ):  # fmt: skip
                _not_elementwise("each server holds some rows only, so norms of an array or of all gradients would be those "
                                 "of a part")  # fmt: skip
        shapes = {spec.name: jax.ShapeDtypeStruct((spec.rows, *spec.row_shape), spec.dtype) for spec in arrays}
        state = jax.eval_shape(optimizer.init, shapes)
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, StrategyError):
            raise
        fail(StrategyError, "the optimizer cannot be used on servers", where="create(optimizer=...)",
             why=f"a server calls its `init` and `update(gradients, state, params)` with a dict of some of the arrays: {error}",
             fix="give an optax optimizer; where it labels or masks arrays, give it a function of the dict")  # fmt: skip
    for path, leaf in tree_util.tree_flatten_with_path(state)[0]:
        owner = next((shapes[key.key] for key in path if getattr(key, "key", None) in shapes), leaf)
        if leaf.shape not in ((), owner.shape):
            _not_elementwise(f"its state{tree_util.keystr(path)} is {list(leaf.shape)} for an array {list(owner.shape)}, "
                             "and each server holds some rows only")  # fmt: skip


def _updates(optimizer: Any, parts: Sequence[slice]) -> np.ndarray:
    """The updates of rows by gradients that are ordinary, huge, and not all finite, each part by itself."""
    random = np.random.default_rng(0)
    params, first, second, third = random.normal(size=(4, 4, 4)).astype("float32")
    first[3] *= 100
    third[3, 1] = np.nan
    found = []
    for part in parts:
        here = {"w": jnp.asarray(params[part])}
        state = optimizer.init(here)
        for gradient in (first, second * 1e12, third):
            change, state = optimizer.update({"w": jnp.asarray(gradient[part])}, state, here)
            found.append(np.asarray(change["w"]))
    return np.concatenate([np.concatenate(found[i::3]) for i in range(3)])


def _not_elementwise(why: str) -> NoReturn:
    fail(StrategyError, "the optimizer does not treat each element alone", where="create(optimizer=...)", why=why,
         fix="use SGD, Adam, Adagrad or the like, and clip by value; or train by all-reduce")  # fmt: skip


def count(name: str, value: Any, low: int = 0) -> int:
    """An int from `low` up, of NumPy or not, as an int that JSON can hold.

    Raises:
      StrategyError: it is no such int.

    >>> count("step", np.int64(3))
    3
    """
    raise_problems(option_problems(integer(low), name, value))
    return int(value)


def check_worker(worker: Any) -> None:
    """Refuse what names no worker: two workers of one name would take each other's pushes for their own.

    Raises:
      StrategyError: it is neither a number nor a text.
    """
    if not (isinstance(worker, str) and worker) and not _is_int(worker):
        fail(StrategyError, f"`worker` cannot be {clipped(worker)}", where=f"worker = {clipped(worker)}",
             why="pushes are told apart by the worker's name", fix="give each worker a number or a name of its own")  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_options(folder: Any, engine: Any, chunk_bytes: Any, timeout_s: Any, log_bytes: Any, **switches: Any) -> None:
    """Refuse options of `ParameterServer.create` that have no meaning; `switches` are those that are True or False.

    Raises:
      StrategyError: all that is wrong.
    """
    is_path = folder is None or isinstance(folder, str | os.PathLike)
    is_engine = engine is None or (hasattr(engine, "call") and not isinstance(engine, type))
    is_time = (isinstance(timeout_s, float) or _is_int(timeout_s)) and timeout_s >= 0
    raise_problems([
        *(p for name, value in switches.items() for p in option_problems(boolean, name, value)),
        *option_problems(integer(1), "chunk_bytes", chunk_bytes),
        *option_problems(integer(0), "log_bytes", 0 if log_bytes is None else log_bytes),
        *(Problem(f"`{name}` cannot be {clipped(value)}", where=f"{name} = {clipped(value)}", why=why, fix=fix)
          for name, value, fits, why, fix in (
              ("folder", folder, is_path, "it is no path", "give a str or a pathlib.Path, or None for a temporary folder"),
              ("engine", engine, is_engine, "it runs no servers", "give InProcess() or OnRay(name), or leave it out"),
              ("timeout_s", timeout_s, is_time, "it is no number of seconds", "give seconds, 0 or more"),
          ) if not fits),
    ])  # fmt: skip


def check_rules(workers: int, rules: Rules, staleness: Any = None) -> None:
    """Refuse a number of workers that does not fit the rules, and rules that contradict each other.

    Raises:
      StrategyError: it says which.
    """
    where = f"workers={workers}, backup_workers={rules.backup}, staleness={staleness}"
    if rules.backup >= workers:
        fail(StrategyError, "an update would wait for no worker", where=where,
             why="all workers are backup workers", fix="give workers > backup_workers")  # fmt: skip
    if rules.synchronous and staleness is not None:
        fail(StrategyError, "synchronous training has no staleness", where=where,
             why="all workers compute from the same parameters",
             fix="leave staleness out, or give synchronous=False")  # fmt: skip
    if not rules.synchronous and rules.backup:
        fail(StrategyError, "asynchronous training has no backup workers", where=where,
             why="no worker waits for another", fix="leave backup_workers out, or give synchronous=True")  # fmt: skip
