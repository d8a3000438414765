"""A training step some of whose parameters are tables, of which it sees the rows that a batch needs.

The step inside is an ordinary one. Its parameters have an array of rows in place of each table, and its batch has the
positions of the ids in these rows. The optimizer's state takes the gradients of the rows out of it, for the tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import tree_util
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardfn.errors import Problem, StrategyError, StrategyTypeError, fail, raise_problems, warn
from shardfn.frontend.paths import join, listed, tidy
from shardfn.frontend.value_checks import integer, option_problems
from shardfn.planning.plan import Plan, decision_of
from shardfn.report.report import Report
from shardfn.runtime.processes import as_global, on_host
from shardfn.runtime.read_ahead import read_ahead
from shardfn.train.collectives import Bucket
from shardfn.train.steps.options import StepOptions
from shardfn.train.steps.state import TrainState, is_maker, matches
from shardfn.train.steps.tables import RowTable, place_of, replaced, tables_in, without_ids
from shardfn.train.steps.train_step import TrainStep
from shardfn.train.steps.uses_of_ids import other_uses


class Fed(NamedTuple):
    """A batch whose ids are positions, with what was read ahead of each table."""

    batch: tuple[Any, ...]
    prepared: dict[str, Any]


class _OptState(NamedTuple):
    """The optimizer's state of the dense parameters, and the gradients of the tables' rows by path."""

    dense: Any
    gradients: dict[str, Any]


class _Unfinished(NamedTuple):
    """A step whose state is spent: from which state, its result, and the tables with ids and gradients left to update."""

    state: Any
    result: tuple[TrainState, Any]
    updates: list[tuple[RowTable, Any, Any]]


class TableStep(TrainStep):
    """A training step with tables, of `train.step(..., ids=...)`.

    Attributes:
      tables: the tables by their paths in the parameters; empty before `init`.
    """

    def __init__(self, options: StepOptions):
        self._places = {path: place_of(path, at) for path, at in options.ids.items()}
        super().__init__(dataclasses.replace(options, optimizer=_for_dense(options.optimizer, frozenset(self._places))))
        self.tables: dict[str, RowTable] = {}
        self._spent: dict[str, Any] = {}  # gradients that the tables have taken; the next step reuses their memory
        self._shardings: dict[Any, dict[str, NamedSharding]] = {}
        self._unfinished: _Unfinished | None = None

    def init(self, params: Any, /, *batch: Any, **named: Any) -> TrainState:
        """Make the first state.

        Args:
          params: as of `TrainStep.init`, with tables. The state has the same tables in its `params`; they keep their rows and
            change with each step.
          *batch: arrays or shapes as the step will get them.
          **named: arrays of the batch by the loss function's names.

        Raises:
          ShardError: as `TrainStep.init`; tables without ids, ids without a table, no batch.
        """
        batch = self._ordered(batch, named)
        self.tables = self._found(jax.eval_shape(params) if is_maker(params) else params)
        if not batch:
            fail(StrategyError, "`init` needs a batch", where="init(params)",
                 why="the number of ids gives that of the rows", fix="init(params, *batch)")  # fmt: skip
        shapes = self._row_shapes(batch)

        def dense(model: Any) -> Any:
            return replaced(model, {path: jnp.zeros(rows.shape, rows.dtype) for path, rows in shapes.items()})

        model = (lambda: dense(params())) if is_maker(params) else dense(params)
        state = super().init(model, *self._batch_shapes(batch))
        self._warn_of_other_uses(state.params, self._batch_shapes(batch))
        return self._outside(state)

    def feed(self, batches: Iterable[tuple[Any, ...]], ahead: int = 1) -> Iterator[Fed]:
        """Batches whose rows are read on the host while the step before runs. Call `init` before.

        Args:
          batches: tuples of the batch's arguments.
          ahead: how many are read ahead.

        Yields:
          What a call takes in place of a batch: `step(state, fed)`.

        Raises:
          ShardError: ids that are not in their table.
        """
        raise_problems(option_problems(integer(0), "ahead", ahead))
        self._refuse_unseen()
        yield from read_ahead(lambda batch: self._fed(batch, True), map(self._with_ids_here, batches), ahead)

    def __call__(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[TrainState, Any]:
        """Take one step, and update the tables.

        Args:
          state: as of `TrainStep`.
          *batch: a batch, or one of `feed`.
          **named: arrays of the batch by the loss function's names.

        Returns:
          As `TrainStep`.

        Raises:
          ShardError: as `TrainStep`; ids that are not in their table.
          ClusterError: the servers of a table do not answer. Call it again with the same state: what is left of this step is
            done then, and nothing twice.
        """
        if self._unfinished is not None and self._unfinished.state is state:
            return self._finished(self._unfinished)
        self._unfinished = None
        batch = self._ordered(batch, named)
        self._see(state)
        is_fed = len(batch) == 1 and isinstance(batch[0], Fed)
        fed: Fed = batch[0] if is_fed else self._fed(self._with_ids_here(batch), False)
        shapes = self._row_shapes(fed.batch)
        shardings = self._shardings_of_rows(state, fed.batch, shapes)
        rows = {
            path: _placed(table.rows_of(fed.prepared[path], shapes[path].shape[0]), shardings[path])
            for path, table in self.tables.items()
        }
        inside = self._inside(state, rows, {path: self._memory(path, shapes[path], shardings[path]) for path in rows})
        after, out = super().__call__(inside, *fed.batch)
        self._spent = after.opt_state.gradients
        updates = [
            (self.tables[path], fed.prepared[path].ids, gradients)
            for path, gradients in self._spent.items()
            if gradients is not None
        ]
        self._unfinished = _Unfinished(state, (self._outside(after), out), updates)
        return self._finished(self._unfinished)

    def plan(self, state: TrainState, /, *batch: Any, **named: Any) -> Plan:
        """The plan of a step, as of `TrainStep`. `state/params/<table>` are the rows of a batch."""
        return super().plan(*self._shapes(state, batch, named))

    def explain(self, state: TrainState, /, *batch: Any, compiled: bool = False, **named: Any) -> Report:
        """The report of a step, as of `TrainStep`."""
        return super().explain(*self._shapes(state, batch, named), compiled=compiled)

    def lower(self, state: TrainState, /, *batch: Any, **named: Any) -> Any:
        """Lower a step, as `TrainStep` does."""
        return super().lower(*self._shapes(state, batch, named))

    def buckets(self, state: TrainState, /, *batch: Any, **named: Any) -> tuple[tuple[Bucket, tuple[str, ...]], ...]:
        """The fused collectives, as of `TrainStep`."""
        return super().buckets(*self._shapes(state, batch, named))

    # ---- inside

    def _finished(self, step: _Unfinished) -> tuple[TrainState, Any]:
        """The result of a step, once its tables are updated."""
        while step.updates:
            table, ids, gradients = step.updates[0]
            table.apply(ids, gradients)
            del step.updates[0]
        self._unfinished = None
        return step.result

    def _found(self, params: Any) -> dict[str, RowTable]:
        """The tables among the parameters, each with a place of its ids."""
        found = tables_in(params)
        own = matches(list(found), self.options.layerwise_parallel)
        first = {id(table): path for path, table in reversed(found.items())}
        raise_problems([
            *(Problem(f"the table `{first[id(table)]}` is at `{path}` too", f"params, at {path}",
                      "its optimizer would update a row twice in a step", "keep it at one path, with all its ids in one argument")
              for path, table in found.items() if first[id(table)] != path),
            *(without_ids(path) for path in found if path not in self._places),
            *(Problem(f"there is no table at `{path}`", f"ids[{path!r}]", f"the parameters have tables at {listed(list(found))}",
                      "give the path of an `embedding.Table` in the parameters") for path in self._places if path not in found),
            *(Problem(f"`layerwise_parallel` names the table `{path}`", f"layerwise_parallel = {self.options.layerwise_parallel}",
                      "all devices share its rows", "leave it out") for path, mine in zip(found, own, strict=True) if mine),
        ])  # fmt: skip
        return {path: found[path] for path in self._places}

    def _warn_of_other_uses(self, params: Any, batch: tuple[Any, ...]) -> None:
        """Warn of ids that are used as more than the places of rows."""
        parts = self._parts
        if parts is None or any(parts.own):
            return
        for use in other_uses(lambda x, *b: self.options.loss_fn(parts.model(x), *b), params, batch, self._places):
            warn(f"the loss {use}. A step has the rows of its batch alone, and positions in them as ids: read "
                 "`params[table][ids]`, and pass masks and other values of ids as further arguments of the batch")  # fmt: skip

    def _see(self, state: Any) -> None:
        """Take the tables of a state from elsewhere, such as a checkpoint."""
        if not self.tables and isinstance(state, TrainState):
            self.tables = self._found(state.params)
        self._refuse_unseen()

    def _refuse_unseen(self) -> None:
        if not self.tables:
            fail(StrategyError, "this step has not seen its tables", where=f"ids = {dict(self._places)}",
                 why="`init` finds them among the parameters", fix="call init(params, *batch) once before")  # fmt: skip

    def _with_ids_here(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The batch with all ids on this host, also those that span processes."""
        arguments = {argument for argument, _ in self._places.values()}
        if any(isinstance(x, Tracer) for i, x in enumerate(batch) if i in arguments):
            fail(StrategyTypeError, "the ids of a step with tables are traced", where=f"ids = {dict(self._places)}",
                 why="rows are read on the host, before a step", fix="call the step outside jax.jit")  # fmt: skip
        return tuple(on_host(x) if i in arguments else x for i, x in enumerate(batch))

    def _fed(self, batch: tuple[Any, ...], is_ahead: bool) -> Fed:
        changed, prepared = list(batch), {}
        for path, (argument, columns) in self._places.items():
            self._ids_shape(path, batch)
            found = np.asarray(batch[argument])
            prepared[path] = self.tables[path].prepare(found if columns is None else found[..., columns], is_ahead)
            if columns is None:
                changed[argument] = prepared[path].positions
            else:
                if changed[argument] is batch[argument]:
                    changed[argument] = found.copy()
                changed[argument][..., columns] = prepared[path].positions
        return Fed(tuple(changed), prepared)

    def _ids_shape(self, path: str, batch: tuple[Any, ...]) -> tuple[int, ...]:
        """The shape of a table's ids."""
        argument, columns = self._places[path]
        where = f"ids[{path!r}] = {argument if columns is None else (argument, columns)}"
        if argument >= len(batch):
            fail(StrategyError, f"the batch has no argument {argument} with the ids of `{path}`",
                 where=f"{where}, a batch of {len(batch)} arguments", fix="count from 0, without params")  # fmt: skip
        shape = np.shape(batch[argument])
        if columns is None:
            return shape
        if len(shape) < 2 or max(columns) >= shape[-1]:
            fail(StrategyError, f"argument {argument} of the batch has no column {max(columns)} with the ids of `{path}`",
                 where=f"{where}, an array {list(shape)}", why="columns are those of its last dimension, after the batch",
                 fix=f"ids={{{path!r}: {argument}}} for all of it")  # fmt: skip
        return (*shape[:-1], len(columns))

    def _row_shapes(self, batch: tuple[Any, ...]) -> dict[str, Any]:
        """The rows that a batch may need at most."""
        counts = {path: math.prod(self._ids_shape(path, batch)) for path in self.tables}
        return {
            path: jax.ShapeDtypeStruct((table.capacity(counts[path]), table.shape[1]), table.dtype)
            for path, table in self.tables.items()
        }

    def _batch_shapes(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """The batch of the step inside, which has positions as ids."""
        all_ids = {argument for argument, columns in self._places.values() if columns is None}
        return tuple(jax.ShapeDtypeStruct(np.shape(x), np.int32) if i in all_ids else x for i, x in enumerate(batch))

    def _shapes(self, state: TrainState, batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        batch = self._ordered(batch, named)
        self._see(state)
        rows = self._row_shapes(batch)
        return self._inside(state, rows, rows), *self._batch_shapes(batch)

    def _shardings_of_rows(self, state: TrainState, batch: tuple[Any, ...], rows: Any) -> dict[str, NamedSharding]:
        key = tuple((np.shape(x), getattr(x, "dtype", None)) for x in tree_util.tree_leaves(batch))
        if key not in self._shardings:
            plan = super().plan(self._inside(state, rows, rows), *batch)
            specs = {path: decision_of(plan, f"state/params/{path}").partition_spec for path in self.tables}
            self._shardings[key] = {path: NamedSharding(plan.mesh, spec) for path, spec in specs.items()}
        return self._shardings[key]

    def _memory(self, path: str, rows: Any, sharding: NamedSharding) -> jax.Array:
        """An array that the gradient of the rows may replace."""
        spent = self._spent.get(path)
        if spent is None or spent.is_deleted() or spent.shape != rows.shape:
            return _placed(jnp.zeros(rows.shape, rows.dtype), sharding)
        return spent

    def _inside(self, state: Any, rows: dict[str, Any], gradients: dict[str, Any]) -> Any:
        """The state of the step inside."""
        frozen = matches(list(gradients), self.options.frozen)
        kept = {path: None if is_frozen else x for (path, x), is_frozen in zip(gradients.items(), frozen, strict=True)}
        return TrainState(replaced(state.params, rows), _OptState(state.opt_state, kept), state.step)

    def _outside(self, state: TrainState) -> TrainState:
        return TrainState(replaced(state.params, self.tables), state.opt_state.dense, state.step)


def _placed(rows: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Rows that every process has, as one array of all."""
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    return as_global(np.asarray(rows), sharding)


def _for_dense(optimizer: Any, paths: frozenset[str]) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the dense parameters, whose state takes the gradients of the tables' rows out of the step."""

    def dense(tree: Any) -> Any:
        return replaced(tree, dict.fromkeys(paths))

    def rows(tree: Any) -> dict[str, Any]:
        keyed = tree_util.tree_flatten_with_path(tree)[0]
        found = {tidy(join("", key)): leaf for key, leaf in keyed}
        return {path: found.get(path) for path in sorted(paths)}

    def init(params: Any) -> _OptState:
        return _OptState(optimizer.init(dense(params)), tree_util.tree_map(jnp.zeros_like, rows(params)))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, _OptState]:
        if "grad" in more:
            more = {**more, "grad": dense(more["grad"])}
        changes, kept = optimizer.update(dense(updates), state.dense, dense(params), **more)
        gradients = rows(updates)
        zeros = {path: jnp.zeros_like(x) for path, x in gradients.items() if x is not None}
        is_none = lambda x: x is None  # noqa: E731
        full = tree_util.tree_map_with_path(lambda key, x: zeros.get(tidy(join("", key)), x), changes, is_leaf=is_none)
        return full, _OptState(kept, gradients)

    return optax.GradientTransformationExtraArgs(init, update)
