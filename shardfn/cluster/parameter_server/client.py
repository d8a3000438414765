"""What workers call: `pull` parameters, `push` gradients. Everything that may fail is tried again until `timeout_s`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from shardfn.cluster.parameter_server.checks import check_elementwise, check_options, check_rules, check_worker, count
from shardfn.cluster.parameter_server.coordinator import (
    BUSY,
    MOVED,
    Job,
    News,
    Pulled,
    Receipt,
    Report,
    check_job,
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
)
from shardfn.cluster.parameter_server.folders import job_folder, writing
from shardfn.cluster.parameter_server.held import Part, RowStep
from shardfn.cluster.parameter_server.journal import FolderInUse, JournalClosed
from shardfn.cluster.parameter_server.ledger import Push, Rules, Update
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
from shardfn.cluster.parameter_server.server import Behind, regroup, write_server
from shardfn.errors import CheckpointFileError, ClusterError, ShardError, StrategyError, fail, nearest
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
        self._place: tuple[int, int] | None = None  # epoch and number of servers
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
        """Start servers, or go on with those of a folder: their parameters, optimizer state, and numbers of servers and workers.

        Args:
          params: the first parameters, a pytree of arrays.
          optimizer: an optax optimizer that treats each element alone, such as SGD, Adam or Adagrad. Servers hold ranges
          of rows, so
            a norm of all gradients is not known to them.
          folder: where logs and snapshots are. None for a temporary folder, which ends with the process.
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
          log_bytes: bytes of a server's log that make it start anew with a snapshot; by default four times its state.

        Returns:
          The parameter server.

        Raises:
          StrategyError: numbers that make no sense, or an optimizer that does not treat each element alone.
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
          worker: the worker's name or number.
          step: the worker's step, from 0, one more than that of its last push that counts: `next_step`.
          version: the version of the parameters that the gradients were computed from; by default that of the last pull.

        Returns:
          What became of it. Compute a "stale" push again, with the same step, from new parameters.

        Raises:
          StrategyError: gradients that do not fit or are not finite, or a step that is no count.
          ClusterError: a push of the worker is missing before it, or the answers did not come within `timeout_s`. The push
            may count or not; send it again.
          CheckpointFileError: the disk is full, and the push does not count; or files are damaged.
        """
        check_worker(worker)
        step, version = count("step", step), self._pulled if version is None else count("version", version)
        rows = as_rows(self.job.arrays, gradients, "push")
        return push_rows(self, rows, str(worker), step, step if self.job.rules.synchronous else version)

    def next_step(self, worker: str | int) -> int:
        """The step that a worker pushes next: where a worker goes on that was restarted.

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
        """Make snapshots, so that the next start has no log to read.

        Returns:
          The version.

        Raises:
          ClusterError: the answers did not come within `timeout_s`.
          CheckpointFileError: the disk is full; what was saved before is kept.
        """
        return self._retried("save", self._save)

    def resize(self, *, servers: int | None = None, workers: int | None = None) -> None:
        """Change the number of servers or of workers during training. Pushes wait meanwhile.

        Args:
          servers: the number of servers; None for as many as there are.
          workers: the number of workers, from the next update on; None for as many as there are.

        Raises:
          StrategyError: a number that makes no sense.
          ClusterError: the answers did not come within `timeout_s`. The servers are the old or the new ones.
          CheckpointFileError: the disk is full; the servers are the old ones.
        """
        servers = None if servers is None else count("servers", servers, 1)
        if workers is not None:
            workers = count("workers", workers, 1)
            check_rules(workers, self.job.rules)
            update = self._retried("resize", lambda: self._ask("set_workers", workers))
            if update is not None:
                self._spread(update)
        if servers is not None:
            self._retried("resize", lambda: self._move(servers))

    def report(self) -> Report:
        """What happened so far: updates, pushes that count, pushes that were late or stale, and the staleness of each.

        Returns:
          The report.

        Raises:
          ClusterError: the answer did not come within `timeout_s`.
        """
        return self._retried("report", lambda: self._ask("report"))

    def close(self) -> None:
        """Stop the servers. `create` with the same folder goes on."""
        if self._is_closed:
            return
        news: News = self._retried("close", lambda: self._ask("news"))
        self.engine.stop([*_targets(news.epoch, news.servers), COORDINATOR])
        self._is_closed = True

    # ---- one attempt of each

    def _ask(self, method: str, *args: Any) -> Any:
        return self.engine.call([Call(COORDINATOR, method, args)])[0]

    def _retried(self, what: str, attempt: Callable[[], _T]) -> _T:
        """The result of the first attempt that is answered."""
        if self._is_closed:
            fail(ClusterError, "the parameter server is closed", where=what, why="`close` stopped its servers",
                 fix="call `create` with the same folder")  # fmt: skip
        deadline, pause = time.monotonic() + self.options.timeout_s, PAUSES_S[0]
        while True:
            try:
                return attempt()
            except (Unreachable, FolderInUse, JournalClosed) as error:
                self._place = None
                if time.monotonic() > deadline and isinstance(error, FolderInUse):
                    raise
                if time.monotonic() > deadline:
                    fail(ClusterError, "the parameter servers do not answer", where=what,
                         fix="look at the servers' logs; call again",
                         why=f"after {self.options.timeout_s:g} s: {error}")  # fmt: skip
            self.engine.pause(pause)
            pause = min(2 * pause, PAUSES_S[1])

    def _start_servers(self) -> None:
        news: News = self._ask("news")
        try:
            self.engine.start(self.setup, _targets(news.epoch, news.servers))
        except CheckpointFileError as error:
            if self._ask("news").epoch == news.epoch:
                raise
            raise Unreachable("the servers changed meanwhile, and the folder of those is gone") from error
        self._place = (news.epoch, news.servers)

    def _located(self) -> tuple[int, int]:
        """The epoch and the number of servers."""
        if self._place is None:
            self._start_servers()
        assert self._place is not None
        return self._place

    def _read(
        self, names: Sequence[str], ids: Mapping[str, np.ndarray], version: int | None
    ) -> tuple[dict[str, Any], int]:
        arrays, chunk = self.job.arrays, self.options.chunk_bytes
        asked = requests(Partition(arrays, self._place[1]), names, ids, chunk) if self._place else []
        known = [self._known.get(Target(self._place[0], server), -1) for server, _ in asked] if self._place else []
        news, before = self._news(version, min(known, default=-1)), self._place
        self._place = (news.epoch, news.servers)
        partition, updates = Partition(arrays, news.servers), news.updates
        if self._place != before:
            asked, updates = requests(partition, names, ids, chunk), ()
        found: list[Any] = [None] * len(asked)
        missing = list(range(len(asked)))
        while missing:
            calls = [
                Call(Target(news.epoch, asked[i][0]), "pull", (asked[i][1], updates, self.options.compress))
                for i in missing
            ]
            for i, answer in zip(missing, self.engine.call(calls), strict=True):
                found[i] = answer
            newest = max(answer.version for answer in found) if self.job.rules.synchronous else 0
            least = max(news.version, newest)
            missing = [i for i, answer in enumerate(found) if isinstance(answer, Behind) or answer.version < least]
            if missing:
                updates = self._updates_after(min(found[i].version for i in missing))
        at = min((answer.version for answer in found), default=news.version)
        if self.job.rules.synchronous:
            self._known |= {Target(news.epoch, server): at for server, _ in asked}
        else:
            self._known |= {
                Target(news.epoch, server): answer.version for (server, _), answer in zip(asked, found, strict=True)
            }
        return gather(partition, names, ids, (rows for answer in found for rows in answer.rows)), at

    def _news(self, version: int | None, known: int) -> News:
        """The news, when an update is there, with the updates after a known one; -1 for none."""
        deadline = time.monotonic() + self.options.timeout_s
        while True:
            left = deadline - time.monotonic()
            news: News = self._ask("news", None if known < 0 else known, version, min(max(left, 0), 5))
            if version is None or news.version >= version:
                return news
            if left <= 0:
                here = f"pushes of {', '.join(news.waiting)} are there" if news.waiting else "no push is there"
                fail(ClusterError, f"update {version} did not come", where=f"pull(version={version})",
                     why=f"after {self.options.timeout_s:g} s the version is {news.version}; for the next update {here}, "
                         f"of {news.workers} workers",
                     fix="restart the workers that are gone, or change their number: resize(workers=...)")  # fmt: skip

    def _updates_after(self, version: int) -> tuple[Update, ...]:
        updates = self._ask("news", version).updates
        if updates and updates[0].number > version + 1:
            fail(CheckpointFileError, f"update {version + 1} is not in the ledger", where=str(self.setup.folder),
                 why=f"a server is at version {version}, and the ledger begins with {updates[0].number}",
                 fix="restore the folder from a copy")  # fmt: skip
        return updates

    def _send(self, push: Push, rows: Sequence[Rows], row_step: RowStep = None) -> tuple[Receipt, Update | None]:
        epoch, servers = self._located()
        messages = split(Partition(self.job.arrays, servers), rows, self.options.chunk_bytes, self.options.compress)
        calls = [
            Call(Target(epoch, server), "prepare", (Part(push, index, len(own), message, row_step),))
            for server, own in enumerate(messages) for index, message in enumerate(own)
        ]  # fmt: skip
        answers = zip(calls, self.engine.call(calls), strict=True)
        if len({call.to for call, is_complete in answers if is_complete}) < servers:
            raise Unreachable("a server was started again between two messages")
        receipt, update = self._ask("vote", push, epoch)
        if receipt.status in (MOVED, BUSY):
            raise Unreachable("the servers change")
        return receipt, update

    def _spread(self, update: Update) -> None:
        """Tell the servers of an update, so that they work on it before somebody pulls. If it gets lost, a pull tells them."""
        with contextlib.suppress(Unreachable, CheckpointFileError):  # the push counts already
            targets = _targets(*self._located())
            self.engine.tell([Call(target, "advance", ((update,),)) for target in targets])
            if update.number % COMPACT_EVERY == 0:
                self._ask("compact", min(self.engine.call([Call(target, "oldest") for target in targets])))

    def _save(self) -> int:
        version, targets = self._advance_all()
        self._ask("compact", min(self.engine.call([Call(target, "snapshot") for target in targets])))
        return version

    def _advance_all(self) -> tuple[int, list[Target]]:
        """Bring all servers to the last update."""
        news: News = self._ask("news")
        targets = _targets(news.epoch, news.servers)
        versions = self.engine.call([Call(target, "advance", ((),)) for target in targets])
        updates = self._updates_after(min(versions))
        self.engine.call([Call(target, "advance", (updates,)) for target in targets])
        return news.version, targets

    def _move(self, servers: int) -> None:
        news: News = self._ask("news")
        if news.servers == servers:
            return
        tokens = self._ask("freeze")
        try:
            accepted, (version, targets) = self._ask("news").accepted, self._advance_all()
            saved = self.engine.call([Call(target, "dump") for target in targets])
            if {one.version for one in saved} != {version}:
                raise Unreachable("a push came while the servers changed")
            folder = self.setup.path(Target(news.epoch + 1, 0)).parent
            shutil.rmtree(folder, ignore_errors=True)
            with writing(folder):
                for index, one in enumerate(regroup(Partition(self.job.arrays, servers), saved, tokens)):
                    write_server(self.setup.path(Target(news.epoch + 1, index)), one)
            if not self._ask("switch", servers, accepted, news.epoch):
                raise Unreachable("a push came while the servers changed")
        except ShardError:
            self._ask("thaw")
            raise
        self._start_servers()
        self.engine.stop(targets)
        shutil.rmtree(self.setup.path(targets[0]).parent, ignore_errors=True)


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
        folder = made._retried("create", lambda: made._ask("place")).parent
        if folder != setup.folder and not joins:
            fail(ClusterError, "the engine runs another job", where=where, why=f"it has the servers of {folder}",
                 fix="give each job an engine of its own, with a name of its own: OnRay(name)")  # fmt: skip
        check_job(made._retried("create", lambda: made._ask("job_of")), job, where)
        made.setup = dataclasses.replace(setup, folder=folder)
        made._retried("create", made._start_servers)
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


def _targets(epoch: int, servers: int) -> list[Target]:
    return [Target(epoch, server) for server in range(servers)]
