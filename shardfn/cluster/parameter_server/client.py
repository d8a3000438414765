"""What workers call: `pull` parameters, `push` gradients. Everything that may fail is tried again until `timeout_s`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from shardfn.cluster.parameter_server.checks import check_elementwise, check_options, check_rules, check_worker, count
from shardfn.cluster.parameter_server.coordinator import (
    BUSY,
    MOVED,
    LedgerStatus,
    Pulled,
    Receipt,
    Report,
)
from shardfn.cluster.parameter_server.engine import (
    COORDINATOR,
    Call,
    Engine,
    InProcess,
    Options,
    Setup,
    Target,
    Unreachable,
    ask,
    targets_of,
)
from shardfn.cluster.parameter_server.folders import job_folder
from shardfn.cluster.parameter_server.ledger import Place, Push, Rules, Update
from shardfn.cluster.parameter_server.ledger_rows import Job, check_job
from shardfn.cluster.parameter_server.live_servers import advance_all, enter, retire, updates_after
from shardfn.cluster.parameter_server.partition import (
    CHUNK_BYTES,
    Partition,
    Rows,
    as_rows,
    gather,
    requests,
    specs_of,
    split,
)
from shardfn.cluster.parameter_server.resize import change_servers
from shardfn.cluster.parameter_server.server import Behind
from shardfn.cluster.parameter_server.server_state import Part, RowStep
from shardfn.durable import DatabaseClosed, FolderInUse
from shardfn.errors import CheckpointFileError, ClusterError, StrategyError, fail, nearest
from shardfn.frontend.paths import array_paths

COMPACT_EVERY = 1000
"""Updates after which the coordinator forgets those that no server needs any more."""

PAUSES_S = (0.005, 0.5)
"""The first and the longest pause before a call is tried again; each pause is twice the one before."""

_T = TypeVar("_T")


class ParameterServer:
    """Parameters and their optimizer on servers, for workers that pull parameters and push gradients.

    `create` makes one. With the Ray engine it can be sent to other processes. One object is for one thread.

    >>> import optax
    >>> server = ParameterServer.create({"w": np.ones(4, "float32")}, optax.sgd(0.5), servers=2, workers=2)
    >>> for worker in ("a", "b"):
    ...     receipt = server.push({"w": np.ones(4)}, worker, step=0)
    >>> receipt.status, server.pull(version=1).values["w"].tolist()
    ('applied', [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(self, engine: Engine, setup: Setup, job: Job, names: Any, options: Options):
        self.engine, self.setup, self.job, self.names, self.options = engine, setup, job, names, options
        self._known: dict[Target, int] = {}  # servers are at least there, as far as this client knows
        self._pulled = 0
        self._place: Place | None = None  # the live servers, as far as this client knows
        self._is_running = False  # as far as this client knows
        self._is_closed = False

    @classmethod
    def create(
        cls,
        params: Any,
        optimizer: Any,
        *,
        folder: str | pathlib.Path | None = None,
        servers: int = 1,
        workers: int = 1,
        synchronous: bool = True,
        backup_workers: int = 0,
        staleness: int | None = None,
        engine: Engine | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        compress: bool = False,
        timeout_s: float = 300,
        log_bytes: int | None = None,
    ) -> ParameterServer:
        """Start servers, or resume with those of a folder: their parameters, optimizer state, and numbers of servers and workers.

        Args:
          params: the first parameters, a pytree of arrays, in JAX's dtypes. Arrays of ints have no gradient: they stay as
            they are.
          optimizer: an optax optimizer that treats each element alone, such as SGD, Adam or Adagrad. Servers hold ranges
            of rows, so a norm of all gradients is not known to them.
          folder: where the databases are. None for a temporary folder, which ends with the process.
          servers: the number of servers.
          workers: the number of workers whose gradients an update sums, in synchronous training.
          synchronous: sum the gradients of all workers for each step. Otherwise each push is an update.
          backup_workers: in synchronous training, how many workers an update does not wait for.
          staleness: in asynchronous training, the most updates between the parameters that a gradient was computed
            from and its own update. Pushes from older parameters are refused. By default four times the number of workers.
          engine: where servers run; `InProcess()` by default.
          chunk_bytes: the most bytes of rows in a message.
          compress: whether float32 gradients and parameters travel as bfloat16. Servers keep float32.
          timeout_s: seconds until a call gives up: on servers that do not answer, and on other workers.
          log_bytes: bytes of pushes after which a server saves its state and forgets them; by default four times its state.

        Returns:
          The parameter server.

        Raises:
          StrategyError: numbers that make no sense, values that JAX's 32 bits do not hold, or an optimizer that does not treat
            each element alone.
          CheckpointError: the folder holds another job.
          CheckpointFileError: the folder is damaged, or cannot be written.
          ClusterError: another process has the folder open.
        """
        check_options(folder, engine, chunk_bytes, timeout_s, log_bytes, synchronous=synchronous, compress=compress)
        servers, workers = count("servers", servers, 1), count("workers", workers, 1)
        bound = 4 * workers if staleness is None else count("staleness", staleness)
        rules = Rules(synchronous, count("backup_workers", backup_workers), 0 if synchronous else bound)
        check_rules(workers, rules, staleness)
        job = Job(specs_of(params), rules)
        check_elementwise(optimizer, job.arrays)
        leaves = zip(job.arrays, jax.tree.leaves(params), strict=True)
        arrays = {
            spec.name: np.asarray(leaf, spec.dtype).reshape((spec.rows, *spec.row_shape)) for spec, leaf in leaves
        }
        names = jax.tree.unflatten(jax.tree.structure(params), array_paths("", params))
        setup = job_folder(folder, optimizer, job, arrays, servers, workers, log_bytes)
        return open_job(setup, job, names, engine, Options(chunk_bytes, compress, timeout_s), folder is None)

    def pull(
        self,
        names: str | Sequence[str] | None = None,
        *,
        ids: Mapping[str, Any] | None = None,
        version: int | None = None,
    ) -> Pulled:
        """Read parameters. In synchronous training all arrays have one version. In asynchronous training some may be newer.

        Args:
          names: the paths of arrays, or one path; None for all.
          ids: rows to read of some arrays, int[n] each, instead of all rows.
          version: the number of an update to wait for: in synchronous training the worker's step.

        Returns:
          The parameters: a pytree like that of `create`; a dict by path if `names` are given. And their version.

        Raises:
          StrategyError: there is no such array, or ids are no rows of it.
          ClusterError: the update or the answers did not come within `timeout_s`.
          CheckpointFileError: files of the servers are damaged.
        """
        known = {spec.name: spec for spec in self.job.arrays}
        names = [names] if isinstance(names, str) else names
        version = None if version is None else count("version", version)
        for name in [*(names or ()), *(ids or ())]:
            if name not in known:
                fail(StrategyError, f"there is no array `{name}`", where="pull", why="the servers do not hold it",
                     fix=nearest(name, known))  # fmt: skip
        wanted = tuple(known if names is None else names)
        unique = {name: np.unique(np.asarray(own), return_inverse=True) for name, own in (ids or {}).items()}
        for name, (rows, _) in unique.items():
            if (len(rows) and rows.dtype.kind not in "iu") or not known[name].shape:
                fail(StrategyError, f"ids of `{name}` do not fit", where="pull",
                     why=f"they are {rows.dtype}, and the array is {list(known[name].shape)}",
                     fix="give ints, of an array that has rows")  # fmt: skip
            if len(rows) and not 0 <= rows[0] <= rows[-1] < known[name].rows:
                fail(StrategyError, f"ids of `{name}` are outside the array", where="pull",
                     why=f"they are from {rows[0]} to {rows[-1]}",
                     fix=f"give 0 to {known[name].rows - 1}")  # fmt: skip
        rows = {name: ids for name, (ids, _) in unique.items()}
        found, at = self._retried("pull", lambda: self._read(wanted, rows, version))
        found |= {name: found[name][back] for name, (_, back) in unique.items() if name in found}
        self._pulled = at
        return Pulled(jax.tree.map(found.__getitem__, self.names) if names is None else found, at)

    def push(self, gradients: Any, worker: str | int, step: int, *, version: int | None = None) -> Receipt:
        """Send gradients. A push counts once, however often it is sent; when this returns, it is on disk.

        Args:
          gradients: a pytree like that of `create`, or some arrays by path in a dict; the others have zero gradient. A
            `RowGradient` holds the gradient of some rows.
          worker: the worker's name or number, the same in all of its pushes. Any is taken, since workers come and go: a second
            name would count as one more of the `workers` that an update waits for.
          step: the worker's step, from 0, one more than that of its last push that counts: `next_step`.
          version: the version of the parameters that the gradients were computed from; by default that of the last pull.

        Returns:
          What became of it. Compute a "stale" push again, with the same step, from new parameters.

        Raises:
          StrategyError: gradients that do not fit or are not finite, or a step that is no count.
          ClusterError: a push of the worker is missing before it, or the answers did not come within `timeout_s`. The push
            may count or not; send it again.
          CheckpointFileError: the disk is full, and the push does not count; or it could not be synced, and may count or not:
            send it again when the servers were restarted; or files are damaged.
        """
        check_worker(worker)
        step, version = count("step", step), self._pulled if version is None else count("version", version)
        rows = as_rows(self.job.arrays, gradients, "push")
        return push_rows(self, rows, str(worker), step, step if self.job.rules.synchronous else version)

    def next_step(self, worker: str | int) -> int:
        """The step that a worker pushes next: where it resumes after a restart.

        Args:
          worker: the worker's name or number.

        Returns:
          The step. In synchronous training it is the version of the parameters.

        Raises:
          StrategyError: the worker has no name.
          ClusterError: the answer did not come within `timeout_s`.
        """
        check_worker(worker)
        return self._retried("next_step", lambda: self._ask("next_step", str(worker)))

    def save(self) -> int:
        """Save the state of the servers, so that the next start has no pushes to apply.

        Returns:
          The version.

        Raises:
          ClusterError: the answers did not come within `timeout_s`.
          CheckpointFileError: the disk is full; what was saved before is kept.
        """
        return self._retried("save", self._save)

    def resize(self, *, servers: int | None = None, workers: int | None = None) -> None:
        """Change the number of servers or of workers during training. Any client may call it, also several at the same time.

        While the servers change, pushes wait; they go before the next change. The client holds one new server at a time.

        Args:
          servers: the number of servers; None for as many as there are.
          workers: the number of workers, from the next update on; None for as many as there are.

        Raises:
          StrategyError: a number that makes no sense.
          ClusterError: the answers did not come within `timeout_s`, or another client changes the servers. They are the old or
            the new ones.
          CheckpointFileError: the disk is full, and the servers are the old ones; or it could not be synced, and a restart
            decides which they are.
        """
        servers = None if servers is None else count("servers", servers, 1)
        if workers is not None:
            workers = count("workers", workers, 1)
            check_rules(workers, self.job.rules)
            update = self._retried("resize", lambda: self._ask("set_workers", workers))
            if update is not None:
                self._spread(update)
        if servers is not None:
            client = secrets.token_hex(8)
            self._retried("resize", lambda: self._move(servers, client), client)

    def report(self) -> Report:
        """What happened so far: updates, pushes that count, pushes that were late or stale, and the staleness of each.

        Raises:
          ClusterError: the answer did not come within `timeout_s`.
        """
        return self._retried("report", lambda: self._ask("report"))

    def close(self) -> None:
        """Stop the servers. `create` with the same folder resumes."""
        if self._is_closed:
            return
        try:
            place = self._retried("close", lambda: self._ask("status")).place
            retire(self.engine, self.setup, place)
        except (ClusterError, CheckpointFileError):  # the coordinator's disk is full, or it does not answer
            place = self._place
        self.engine.stop([*(targets_of(place) if place else ()), COORDINATOR])
        self._is_closed = True

    # ---- one attempt of each

    def _ask(self, method: str, *args: Any) -> Any:
        return ask(self.engine, method, *args)

    def _retried(self, what: str, attempt: Callable[[], _T], name: str = "") -> _T:
        """The result of the first attempt that is answered. After the first one the call stands in line, under a name."""
        if self._is_closed:
            fail(ClusterError, "the parameter server is closed", where=what, why="`close` stopped its servers",
                 fix="call `create` with the same folder")  # fmt: skip
        deadline, pause, name = time.monotonic() + self.options.timeout_s, PAUSES_S[0], name or secrets.token_hex(8)
        with contextlib.ExitStack() as at_end:
            while True:
                try:
                    return attempt()
                except (Unreachable, FolderInUse, DatabaseClosed, CheckpointFileError) as error:
                    if isinstance(error, CheckpointFileError) and not self._is_retired():
                        raise
                    if isinstance(error, FolderInUse) and isinstance(self.engine, InProcess):
                        raise  # on other engines it may be the process of a node that counts as dead
                    self._is_running = False
                    if time.monotonic() > deadline and isinstance(error, FolderInUse | CheckpointFileError):
                        raise
                    if time.monotonic() > deadline:
                        fail(ClusterError, "the parameter servers do not answer", where=what,
                             fix="look at the servers' logs; call again",
                             why=f"after {self.options.timeout_s:g} s: {error}")  # fmt: skip
                if pause == PAUSES_S[0]:
                    at_end.callback(self.engine.notify, [Call(COORDINATOR, "leave_line", (name,))])
                self.engine.notify([Call(COORDINATOR, "join_line", (name,))])
                self.engine.pause(pause)
                pause = min(2 * pause, PAUSES_S[1])

    def _is_retired(self) -> bool:
        """Whether the servers that this client knows are not live any more, so that their errors say nothing."""
        try:
            return self._place is not None and self._ask("status").place != self._place
        except (Unreachable, FolderInUse, DatabaseClosed):
            return True  # not known: the call is tried again

    def _live(self, status: LedgerStatus | None = None) -> Place:
        """The live servers, which run: those of a status; by default those that this client knows."""
        if status is None and self._place is not None and self._is_running:
            return self._place
        place = (status or self._ask("status")).place
        if place != self._place or not self._is_running:
            self._place, self._is_running = (
                place,
                False,
            )  # before: the errors of live servers are not those of retired ones
            enter(self.engine, self.setup, place)
            self._is_running = True
        return place

    def _read(
        self, names: Sequence[str], ids: Mapping[str, np.ndarray], version: int | None
    ) -> tuple[dict[str, Any], int]:
        arrays, chunk = self.job.arrays, self.options.chunk_bytes
        before = self._place
        asked = requests(Partition(arrays, before.servers), names, ids, chunk) if before else []
        known = [self._known.get(targets_of(before)[server], -1) for server, _ in asked] if before else []
        status = self._status(version, min(known, default=-1))
        place, updates = self._live(status), status.updates
        partition, targets = Partition(arrays, place.servers), targets_of(place)
        if place != before:
            asked, updates = requests(partition, names, ids, chunk), ()
        found: list[Any] = [None] * len(asked)
        missing = list(range(len(asked)))
        while missing:
            calls = [Call(targets[asked[i][0]], "pull", (asked[i][1], updates, self.options.compress)) for i in missing]
            for i, answer in zip(missing, self.engine.call(calls), strict=True):
                found[i] = answer
            newest = max(answer.version for answer in found) if self.job.rules.synchronous else 0
            least = max(status.version, newest)
            missing = [i for i, answer in enumerate(found) if isinstance(answer, Behind) or answer.version < least]
            if missing:
                updates = updates_after(self.engine, self.setup, min(found[i].version for i in missing))
        at = min((answer.version for answer in found), default=status.version)
        for (server, _), answer in zip(asked, found, strict=True):
            self._known[targets[server]] = at if self.job.rules.synchronous else answer.version
        return gather(partition, names, ids, (rows for answer in found for rows in answer.rows)), at

    def _status(self, version: int | None, known: int) -> LedgerStatus:
        """The status, when an update is there, with the updates after a known one; -1 for none."""
        deadline = time.monotonic() + self.options.timeout_s
        while True:
            left = deadline - time.monotonic()
            status: LedgerStatus = self._ask("status", None if known < 0 else known, version, min(max(left, 0), 5))
            if version is None or status.version >= version:
                return status
            if left <= 0:
                workers = ", ".join(push.worker for push in status.waiting)
                here = f"pushes of {workers} are there" if workers else "no push is there"
                fail(ClusterError, f"update {version} did not come", where=f"pull(version={version})",
                     why=f"after {self.options.timeout_s:g} s the version is {status.version}; for the next update {here}, "
                         f"of {status.workers} workers",
                     fix="restart the workers that are gone, or change their number: resize(workers=...)")  # fmt: skip

    def _send(self, push: Push, rows: Sequence[Rows], row_step: RowStep = None) -> tuple[Receipt, Update | None]:
        place = self._live()
        messages = split(
            Partition(self.job.arrays, place.servers), rows, self.options.chunk_bytes, self.options.compress
        )
        calls = [
            Call(target, "prepare", (Part(push, index, len(own), message, row_step),))
            for target, own in zip(targets_of(place), messages, strict=True) for index, message in enumerate(own)
        ]  # fmt: skip
        answers = zip(calls, self.engine.call(calls), strict=True)
        if len({call.to for call, is_complete in answers if is_complete}) < place.servers:
            raise Unreachable("a server was started again between two messages")
        receipt, update = self._ask("commit", push, place.epoch)
        if receipt.status in (MOVED, BUSY):
            raise Unreachable("the servers change")
        return receipt, update

    def _spread(self, update: Update) -> None:
        """Tell the servers of an update, so that they work on it before somebody pulls. If it gets lost, a pull tells them."""
        with contextlib.suppress(
            Unreachable, FolderInUse, DatabaseClosed, CheckpointFileError
        ):  # the push counts already
            place = self._live()
            targets = targets_of(place)
            self.engine.notify([Call(target, "advance", ((update,),)) for target in targets])
            if update.number % COMPACT_EVERY == 0:
                oldest = min(self.engine.call([Call(target, "oldest") for target in targets]))
                self._ask("compact", oldest, place.epoch)

    def _save(self) -> int:
        place = self._live(self._ask("status"))
        version = advance_all(self.engine, self.setup, place)
        oldest = min(self.engine.call([Call(target, "snapshot") for target in targets_of(place)]))
        self._ask("compact", oldest, place.epoch)
        return version

    def _move(self, servers: int, client: str) -> None:
        place = self._live(self._ask("status"))
        if place.servers != servers:
            change_servers(self.engine, self.setup, place, Partition(self.job.arrays, servers), client)
            self._live(self._ask("status"))


def open_job(
    setup: Setup, job: Job, names: Any, engine: Engine | None, options: Options, joins: bool
) -> ParameterServer:
    """Start the servers of a job whose folder is written.

    Args:
      setup: as `folders.job_folder` made it.
      job: what does not change.
      names: the pytree of the arrays' names.
      engine: where servers run; `InProcess()` by default.
      options: how the client talks.
      joins: whether servers that run already are right with another folder, which their first client chose.

    Raises:
      CheckpointError, CheckpointFileError, ClusterError: as of `ParameterServer.create`.
    """
    with contextlib.ExitStack() as on_error:
        if engine is None:
            engine = own = InProcess()
            on_error.callback(lambda: own.stop(list(own.running)))  # another attempt may open the folder
        engine.start(setup, [COORDINATOR])
        made, where = (
            ParameterServer(engine, setup, job, names, options),
            f"create(folder={str(setup.folder.parent)!r})",
        )
        folder = made._retried("create", lambda: made._ask("folder")).parent
        if folder != setup.folder and not joins:
            fail(ClusterError, "the engine runs another job", where=where, why=f"it has the servers of {folder}",
                 fix="give each job an engine of its own, with a name of its own: OnRay(name)")  # fmt: skip
        check_job(made._retried("create", lambda: made._ask("job_of")), job, where)
        made.setup = dataclasses.replace(setup, folder=folder)
        made._retried("create", made._live)
        on_error.pop_all()
    return made


def push_rows(
    server: ParameterServer, rows: Sequence[Rows], worker: str, step: int, version: int, row_step: RowStep = None
) -> Receipt:
    """Send rows, as `ParameterServer.push`.

    Args:
      server: the parameter server.
      rows: gradients of rows; of a table also values.
      worker: the worker's name.
      step: its step.
      version: the version of the parameters that they were computed from.
      row_step: as of `Part`.

    Raises:
      ClusterError, CheckpointFileError: as of `ParameterServer.push`.
    """
    push = Push(worker, step, secrets.token_hex(8), version)
    receipt, update = server._retried("push", lambda: server._send(push, rows, row_step))
    if update is not None:
        server._spread(update)
    return receipt
