"""`embedding.step`: `train.step` for a model some of whose parameters are tables that need not fit a device."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from shardfn import train
from shardfn.embedding.store import bucket
from shardfn.embedding.table import Fetched, Table, read_ahead
from shardfn.errors import NotAvailableError, StrategyError, StrategyTypeError, a, fail
from shardfn.planning.plan import Plan
from shardfn.report.report import Report
from shardfn.train.steps.state import TrainState, matches

Place = int | tuple[int, int | tuple[int, ...]]
"""Where a table's ids are in the batch: an argument, or some columns of one."""


class Fed(NamedTuple):
    """A batch whose ids are positions, with what was read ahead of each table."""

    batch: tuple[Any, ...]
    prepared: dict[str, Any]


class _OptState(NamedTuple):
    """The optimizer's state of the dense parameters, and the gradients of the tables' rows, for the tables themselves."""

    dense: Any
    gradients: dict[str, Any]


def step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    tables: Mapping[str, Table],
    ids: Mapping[str, Place],
    **options: Any,
) -> TableStep:
    """A training step of a model with tables, called as `state, loss = step(state, *batch)`.

    The loss takes a table as a parameter like any other: `params["items"][ids]`. It gets the rows that the batch needs, and
    the batch has their positions in place of the ids. The optimizer updates the dense parameters, each table its own rows.

    Args:
      loss_fn: as of `train.step`; its parameters are a dict.
      optimizer: the optax transformation of the dense parameters. Norms over all parameters do not count the tables.
      tables: each table by its key in the parameters.
      ids: where each table's ids are in the batch: the number of an argument, or `(argument, column)` or
        `(argument, (column, column))` of its last dimension.
      options: those of `train.step`, such as `mode`, `micro_batches`, `compute_dtype`. A table that `frozen` names stays as
        it is; `parameter_plan` shards the rows that a batch needs.

    Returns:
      A `TableStep`.

    Raises:
      ShardError: wrong options, as of `train.step`; tables without ids.
      NotAvailableError: several processes.

    >>> from shardfn import embedding
    >>> table = embedding.Table(1000, 4, optimizer=embedding.sgd(0.1))
    >>> loss = lambda params, items, y: jnp.mean((params["items"][items].sum(-1) * params["w"] - y) ** 2)
    >>> train = step(loss, optax.sgd(0.1), tables={"items": table}, ids={"items": 0}, mode="stand_alone")
    >>> items, y = np.array([3, 3, 999, 5]), np.ones(4, "float32")
    >>> state = train.init({"w": jnp.ones(())}, items, y)
    >>> state, loss = train(state, items, y)
    >>> sorted(state.params), table.count
    (['w'], 1)
    """
    if tables.keys() != ids.keys():
        fail(StrategyError, "`tables` and `ids` name different tables",
             where=f"tables: {', '.join(tables)}; ids: {', '.join(ids)}",
             why="each table needs the place of its ids in the batch", fix="give both the same keys")  # fmt: skip
    if jax.process_count() > 1:
        fail(NotAvailableError, "a training step with tables runs in one process", where=f"{jax.process_count()} processes",
             why="each process would have a table of its own", fix="shard the tables over devices: train.step")  # fmt: skip
    inner = train.step(loss_fn, _for_dense(optimizer, frozenset(tables)), **options)
    return TableStep(inner, dict(tables), {name: _place(name, at) for name, at in ids.items()})


class TableStep:
    """A training step with tables; `embedding.step` makes it.

    Attributes:
      tables: the tables by name.
    """

    def __init__(self, inner: train.TrainStep, tables: dict[str, Table], ids: dict[str, tuple[int, Any]]):
        self.tables = tables
        self._inner, self._ids = inner, ids
        self._spent: dict[str, Any] = {}  # gradients that the tables have taken; the next step reuses their memory
        self._shardings: dict[Any, dict[str, NamedSharding]] = {}

    def init(self, params: Any, /, *batch: Any) -> TrainState:
        """Make the first state, of the dense parameters.

        Args:
          params: a dict without the tables, or a function without arguments that makes it.
          *batch: a batch, with ids.

        Returns:
          The state. The tables keep their own.

        Raises:
          ShardError: as `train.TrainStep.init`; a dict that holds a table's name.
        """
        made = jax.eval_shape(params) if callable(params) else params
        if not isinstance(made, dict) or made.keys() & self.tables.keys():
            fail(StrategyTypeError, "the parameters are a dict without the tables", where=f"init({a(made)})",
                 why=f"the step adds {', '.join(self.tables)}", fix="leave the tables out of it")  # fmt: skip
        fed = self._fed(batch, False).batch
        rows = self._row_shapes(batch)

        def first() -> dict[str, Any]:
            zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in rows.items()}
            dense: Any = params() if callable(params) else params
            return {**dense, **zeros}

        state = self._inner.init(first, *fed)
        return self._without_rows(state)

    def feed(self, batches: Iterable[tuple[Any, ...]], ahead: int = 1) -> Iterator[Fed]:
        """Batches whose rows are read on the host while the step before runs.

        Args:
          batches: tuples of the batch's arguments.
          ahead: how many are read ahead.

        Yields:
          What a call takes in place of a batch: `step(state, fed)`.

        Raises:
          ShardError: ids that are not in their table.
        """
        return read_ahead(lambda batch: self._fed(batch, True), batches, ahead)

    def __call__(self, state: TrainState, /, *batch: Any) -> tuple[TrainState, Any]:
        """Take one step, and update the tables.

        Args:
          state: the state; its memory is donated.
          *batch: a batch, or one of `feed`.

        Returns:
          The next state, and the loss, as `train.step` returns it.

        Raises:
          ShardError: ids that are not in their table; as `train.TrainStep`.
        """
        fed = batch[0] if len(batch) == 1 and isinstance(batch[0], Fed) else self._fed(batch, False)
        rows = self._row_shapes(fed.batch)
        shardings = self._of_rows(state, fed.batch, rows)
        fetched = {}
        for name, table in self.tables.items():
            found = table._fetched(fed.prepared[name], rows[name].shape[0])
            fetched[name] = dataclasses.replace(found, values=jax.device_put(found.values, shardings[name]))
        values = {name: found.values for name, found in fetched.items()}
        spent = {name: self._spent.get(name) for name in self.tables}
        if (
            any(x is not None and (x.is_deleted() or x.shape != rows[n].shape) for n, x in spent.items())
            or not self._spent
        ):
            spent = {n: jax.device_put(jnp.zeros(x.shape, x.dtype), shardings[n]) for n, x in rows.items()}
        full = self._with_rows(state, values, spent)
        after, out = self._inner(full, *fed.batch)
        gradients = after.opt_state.gradients
        for name, found in fetched.items():
            if gradients[name] is not None:
                self.tables[name].update(_shapes(found), gradients[name])
        self._spent = gradients
        return self._without_rows(after), out

    def plan(self, state: TrainState, /, *batch: Any) -> Plan:
        """The plan of a step.

        Args:
          state: the state; shapes will do.
          *batch: a batch, with ids.

        Returns:
          The plan, as of `train.TrainStep`. `state/params/<table>` are the rows of a batch.
        """
        fed = self._fed(batch, False).batch
        rows = self._row_shapes(fed)
        return self._inner.plan(self._with_rows(state, rows, rows), *fed)

    def explain(self, state: TrainState, /, *batch: Any, compiled: bool = False) -> Report:
        """The report of a step.

        Args:
          state: the state; shapes will do.
          *batch: a batch, with ids.
          compiled: as of `train.TrainStep`.

        Returns:
          The report.
        """
        fed = self._fed(batch, False).batch
        rows = self._row_shapes(fed)
        return self._inner.explain(self._with_rows(state, rows, rows), *fed, compiled=compiled)

    # ---- inside

    def _fed(self, batch: tuple[Any, ...], is_ahead: bool) -> Fed:
        changed, prepared = list(batch), {}
        for name, (argument, columns) in self._ids.items():
            if argument >= len(batch):
                fail(StrategyError, f"the batch has no argument {argument} with the ids of `{name}`",
                     where=f"ids[{name!r}], a batch of {len(batch)} arguments", fix="count from 0, without params")  # fmt: skip
            found = np.asarray(batch[argument])
            prepared[name] = self.tables[name]._prepared(found if columns is None else found[..., columns], is_ahead)
            if columns is None:
                changed[argument] = prepared[name].positions
            else:
                if changed[argument] is batch[argument]:
                    changed[argument] = found.copy()
                changed[argument][..., columns] = prepared[name].positions
        return Fed(tuple(changed), prepared)

    def _row_shapes(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        """The rows that a batch may need at most."""
        shapes = {}
        for name, (argument, columns) in self._ids.items():
            shape, table = np.shape(batch[argument]), self.tables[name]
            count = int(np.prod(shape if columns is None else (*shape[:-1], len(columns))))
            shapes[name] = jax.ShapeDtypeStruct((bucket(min(count, table.shape[0])), table.shape[1]), table.dtype)
        return shapes

    def _of_rows(self, state: TrainState, batch: tuple[Any, ...], rows: dict[str, Any]) -> dict[str, NamedSharding]:
        key = tuple((np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(batch))
        if key not in self._shardings:
            plan = self._inner.plan(self._with_rows(state, rows, rows), *batch)
            found = {name: plan.decision(f"state/params/{name}").partition_spec for name in self.tables}
            self._shardings[key] = {name: NamedSharding(plan.mesh, spec) for name, spec in found.items()}
        return self._shardings[key]

    def _with_rows(self, state: TrainState, rows: dict[str, Any], gradients: dict[str, Any]) -> TrainState:
        frozen = matches(list(gradients), self._inner.options.frozen)
        kept = {name: None if is_frozen else x for (name, x), is_frozen in zip(gradients.items(), frozen, strict=True)}
        return TrainState({**state.params, **rows}, _OptState(state.opt_state, kept), state.step)

    def _without_rows(self, state: TrainState) -> TrainState:
        dense = {name: value for name, value in state.params.items() if name not in self.tables}
        return TrainState(dense, state.opt_state.dense, state.step)


def _shapes(fetched: Fetched) -> Fetched:
    """What an update needs: the step has the values' memory by now."""
    values = jax.ShapeDtypeStruct(fetched.values.shape, fetched.values.dtype)
    return dataclasses.replace(fetched, values=values)  # type: ignore[arg-type]


def _for_dense(optimizer: Any, names: frozenset[str]) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the dense parameters, whose state takes the gradients of the tables' rows out of the step."""
    inner = optax.with_extra_args_support(optimizer)

    def split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return ({k: v for k, v in tree.items() if k not in names}, {k: v for k, v in tree.items() if k in names})

    def init(params: Any) -> _OptState:
        dense, rows = split(params)
        return _OptState(inner.init(dense), jax.tree.map(jnp.zeros_like, rows))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, _OptState]:
        dense, gradients = split(updates)
        if "grad" in more:
            more = {**more, "grad": split(more["grad"])[0]}
        changes: Any
        changes, kept = inner.update(dense, state.dense, None if params is None else split(params)[0], **more)
        zeros: Any = jax.tree.map(jnp.zeros_like, gradients)
        return {**changes, **zeros}, _OptState(kept, gradients)

    return optax.GradientTransformationExtraArgs(init, update)


def _place(name: str, at: Any) -> tuple[int, tuple[int, ...] | None]:
    """The argument, and the columns of its last dimension; None for all of it."""
    pair: Any = at if isinstance(at, tuple) and len(at) == 2 else (at, None)
    try:
        columns = pair[1] if pair[1] is None or isinstance(pair[1], tuple | list) else (pair[1],)
        return operator.index(pair[0]), None if columns is None else tuple(map(operator.index, columns))
    except TypeError:
        fail(StrategyTypeError, f"the place of the ids of `{name}` is no number of an argument",
             where=f"ids[{name!r}] = {at!r:.60}", why="it is an argument, or an argument and columns",
             fix=f"ids={{{name!r}: 0}}, or (0, 1) for column 1 of argument 0")  # fmt: skip
