"""The rows of an `embedding.Table` on parameter servers."""

from __future__ import annotations

import copy
import pathlib
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from shardfn.cluster.parameter_server.checks import check_options, check_worker, count
from shardfn.cluster.parameter_server.client import ParameterServer, open_job, push_rows
from shardfn.cluster.parameter_server.engine import Engine, InProcess, Options
from shardfn.cluster.parameter_server.folders import job_folder
from shardfn.cluster.parameter_server.ledger import Rules
from shardfn.cluster.parameter_server.ledger_rows import Job
from shardfn.cluster.parameter_server.partition import CHUNK_BYTES, ArraySpec, Rows
from shardfn.cluster.parameter_server.server_state import COUNT, RowStep
from shardfn.embedding.processes import first_other
from shardfn.embedding.store import ROWS, Fields, Normal, Opened, ReadsOfAll, Staged, Step, TableSpec
from shardfn.errors import ClusterError, StrategyError, fail


class TableServers:
    """Keeps the rows of a table on parameter servers: `embedding.Table(rows, width, store=TableServers(...))`.

    A batch pulls its rows and pushes their gradients; the servers apply the table's optimizer to these rows, and keep their
    moments. What is promised of a push to a `ParameterServer` holds for each update of the table. Training is synchronous: an
    update sums the gradients of all workers. With `cache_rows`, rows change in the cache on the device. They are pushed as values
    when they leave it, and at `Table.flush`. What a killed worker had not pushed is lost.

    Args:
      folder: where the databases are, as of `ParameterServer.create`. The table resumes with the rows of the folder. None
        for a temporary folder, which ends with the process.
      servers: the number of servers.
      workers: the number of workers; a folder with a table has the number it was made with. Each worker makes the table, with
        ids and gradients of its own, and calls its methods as often as the others.
      worker: the name or number of this worker.
      engine: where servers run, one engine for each table; `InProcess()` by default, for tests and debugging.
      chunk_bytes: the most bytes of rows in a message.
      timeout_s: seconds until a call gives up: on servers that do not answer, and on other workers.
      log_bytes: as of `ParameterServer.create`.

    Attributes:
      server: the parameter server, once a table has it: to `resize(servers=...)`, `report`, `save` the state, and `close`.

    Raises:
      StrategyError: options that make no sense.

    >>> from shardfn import embedding
    >>> servers = TableServers(servers=2)
    >>> table = embedding.Table(1000, 4, store=servers, optimizer=embedding.sgd(0.5), init=0.0)
    >>> batch = table.fetch([7, 999])
    >>> table.update(batch, jax.numpy.ones_like(batch.values))
    >>> table.lookup([7]).tolist(), servers.server.report().accepted
    ([[-0.5, -0.5, -0.5, -0.5]], 1)
    """

    def __init__(
        self,
        *,
        folder: str | pathlib.Path | None = None,
        servers: int = 1,
        workers: int = 1,
        worker: str | int = 0,
        engine: Engine | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 300,
        log_bytes: int | None = None,
    ):
        check_options(folder, engine, chunk_bytes, timeout_s, log_bytes)
        check_worker(worker)
        self.folder, self.engine, self.worker = folder, engine, str(worker)
        self.servers, self.workers = count("servers", servers, 1), count("workers", workers, 1)
        self._options, self._log_bytes = Options(chunk_bytes, False, timeout_s), log_bytes
        self._server: ParameterServer | None = None

    def __repr__(self) -> str:
        return f"TableServers(servers={self.servers}, workers={self.workers})"

    @property
    def server(self) -> ParameterServer:
        """The parameter server."""
        if self._server is None:
            fail(StrategyError, "no table has these servers", where="TableServers.server", why="a table starts them",
                 fix="embedding.Table(rows, width, store=...)")  # fmt: skip
        return self._server

    def open(self, table: TableSpec) -> Opened:
        """Start the servers of a table, or resume with those of the folder. `embedding.Table` calls it.

        Args:
          table: what the table is.

        Raises:
          StrategyError: these servers have a table; several processes without a folder, with servers in this process, or
            with different folders; a cache with several workers; a folder with another number of workers.
          CheckpointError: the folder holds another table.
          CheckpointFileError, ClusterError: as of `ParameterServer.create`.
        """
        self._check(table)
        moments = table.optimizer.moments
        specs = (
            ArraySpec(ROWS, table.shape, np.dtype(table.dtype).name),
            *(ArraySpec(name, table.shape, "float32", colocated_with=ROWS) for name, _ in moments),
            ArraySpec(COUNT, (), "int64"),
        )
        arrays = {
            ROWS: _First(table),
            **{name: _Filled(value, table.shape) for name, value in moments},
            COUNT: np.zeros(1, "int64"),
        }
        job = Job(specs, Rules(), table.kind)
        setup = job_folder(self.folder, table.optimizer, job, arrays, self.servers, self.workers, self._log_bytes)
        names = {spec.name: spec.name for spec in specs}
        server = self._server = open_job(setup, job, names, self.engine, self._options, False)
        held = server.report().workers
        if held != self.workers:
            self._give_up(server)
            fail(StrategyError, f"the table has {held} workers, not {self.workers}", where=f"store = {self!r}",
                 why="a folder keeps the number it has: an update sums the gradients of all of them",
                 fix=f"TableServers(workers={held}, ...); server.resize(workers={self.workers}) changes it for tables that are "
                 "made after it")  # fmt: skip
        version = server.next_step(self.worker)
        updates = int(server.pull([COUNT], version=version).values[COUNT])
        # No process returns before all have read these: the first one pushes, and the others count its pushes from now on.
        if other := first_other(np.array([version, updates, zlib.crc32(str(server.setup.folder).encode())])):
            self._give_up(server)
            process, theirs, first = other
            fail(StrategyError, f"process {process} has other servers for the table than process 0", where=f"store = {self!r}",
                 why=f"it finds {theirs[0]} updates there, and process 0 {first[0]}",
                 fix="give all processes of the job one folder, and an engine of one name")  # fmt: skip
        store = _ServerStore(server, table, self.worker, version, self.workers > 1)
        return Opened(store, updates, store.version == 0, self.workers > 1, store.set_count)

    def _give_up(self, server: ParameterServer) -> None:
        """Stop the servers, unless others may use the engine."""
        if self.engine is None:
            server.close()

    def _check(self, table: TableSpec) -> None:
        if self.workers > 1 and table.cache_rows:
            fail(StrategyError, "a cache does not go with other workers",
                 where=f"Table(cache_rows={table.cache_rows}, store={self!r})",
                 why="they would not see what changes in the cache until it is written back",
                 fix="cache_rows=0, or one worker")  # fmt: skip
        if self._server is not None:
            fail(StrategyError, "these servers have a table", where=f"store = {self!r}", why="each table has servers of its own",
                 fix="make another TableServers, with another folder")  # fmt: skip
        if jax.process_count() > 1 and (self.folder is None or isinstance(self.engine, InProcess | None)):
            fail(StrategyError, "the servers of a table of several processes are outside them", where=f"store = {self!r}",
                 why=f"{jax.process_count()} processes train, and all of them read the rows",
                 fix="TableServers(folder=..., engine=OnRay(...)), the same in each process")  # fmt: skip


class _ServerStore(ReadsOfAll):
    """A `BackingStore` of rows on servers. Of the processes of `jax.distributed`, which are one worker, the first one pushes.

    Args:
      server: the parameter server.
      table: what the table is.
      worker: the name of the worker.
      version: the pushes of the worker so far.
      is_shared: whether there are other workers, whose updates make useless what was read ahead.
    """

    def __init__(self, server: ParameterServer, table: TableSpec, worker: str, version: int, is_shared: bool):
        super().__init__(table.shape[0], (ROWS, *(name for name, _ in table.optimizer.moments)))
        self.server, self.worker, self.version, self.is_shared = server, worker, version, is_shared
        self._ahead = copy.copy(server)  # for the thread that reads ahead
        self._shape, self._dtype = table.shape, table.dtype
        self._sends = jax.process_index() == 0
        self._failed: tuple[list[Rows], RowStep] | None = None  # a push that may have arrived, or not

    def apply(self, step: Step, ids: np.ndarray, gradients: Any) -> None:
        """Push the gradient of rows."""
        self._push(ids, {ROWS: np.asarray(gradients)[: len(ids)]}, (step.number, step.rate))

    def load(self, ids: np.ndarray, fields: Fields) -> None:
        """Push values of rows and moments."""
        self._push(ids, fields, None)

    def set_count(self, count: int) -> None:
        """Push the number of updates."""
        self._deliver([Rows(COUNT, 0, None, np.array([count]))], None)

    def _push(self, ids: np.ndarray, fields: Fields, step: RowStep) -> None:
        self._deliver([Rows(name, 0, ids, np.asarray(rows)) for name, rows in fields.items()] if len(ids) else [], step)
        self._written.mark(ids)

    def _deliver(self, rows: list[Rows], step: RowStep) -> None:
        """Push. If the last push failed, and this is another one, send that one first: both would have the same number, by
        which the servers know a push."""
        if self._failed is not None and not _are_equal(self._failed, (rows, step)):
            self._send(*self._failed)
        self._send(rows, step)

    def _send(self, rows: list[Rows], step: RowStep) -> None:
        if self._sends:
            self._failed = rows, step
            receipt = push_rows(self.server, rows, self.worker, self.version, self.version, step)
            if not receipt.is_kept:
                fail(ClusterError, f"an update of a table was dropped: {receipt.status}", where=f"worker {self.worker!r}",
                     why=f"it was number {self.version}, and the servers have {receipt.version} updates",
                     fix="all workers make the same number of calls; make the tables of all of them again")  # fmt: skip
            self._failed = None
        self.version += 1

    def _staged(self, ids: np.ndarray, names: Iterable[str]) -> Staged | None:
        return None if self.is_shared else super()._staged(ids, names)

    def _fields(self, ids: np.ndarray, names: Iterable[str], is_ahead: bool = False) -> Fields:
        if not len(ids):
            return {name: np.empty((0, self._shape[1]), self._dtype if name == ROWS else np.float32) for name in names}
        server = self._ahead if is_ahead else self.server
        return server.pull(list(names), ids=dict.fromkeys(names, ids), version=self.version).values


def _are_equal(one: tuple[list[Rows], RowStep], other: tuple[list[Rows], RowStep]) -> bool:
    (first, step), (second, other_step) = one, other
    if step != other_step or [rows[:2] for rows in first] != [rows[:2] for rows in second]:
        return False
    return all(
        np.array_equal(() if a.ids is None else a.ids, () if b.ids is None else b.ids)
        and np.array_equal(a.values, b.values)
        for a, b in zip(first, second, strict=True)
    )


class _First:
    """The first rows of a table, slice by slice."""

    def __init__(self, table: TableSpec):
        self._first, self._dtype = table.first, table.dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        first = self._first
        rows = first(np.arange(part.start, part.stop)) if isinstance(first, Normal) else first[part]
        return np.asarray(rows, self._dtype)


class _Filled:
    """Rows of one value, slice by slice."""

    def __init__(self, value: float, shape: tuple[int, int]):
        self._value, self._width = value, shape[1]

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.full((part.stop - part.start, self._width), self._value, np.float32)
