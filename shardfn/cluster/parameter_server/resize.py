"""A change of the number of servers. Nothing that is live is written to.

1. The client takes a lease of the coordinator. Other changes and new pushes wait meanwhile.
2. It writes the first state of the new servers, one after the other, into a folder that the lease names.
3. One transaction of the coordinator makes the new servers live, if the client still has its lease.
4. Whoever learns of the new servers starts them and ends the old ones (`live_servers`).

So a client that stalls, or dies at any step, harms nothing: its folder is not live, and nobody else writes there. A thread
renews the lease, however long the change takes. A lease that runs out costs another try.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator

from shardfn.cluster.parameter_server.coordinator import LEASE_S, Lease
from shardfn.cluster.parameter_server.engine import Call, Engine, Setup, Unreachable, ask, targets_of
from shardfn.cluster.parameter_server.folders import writing
from shardfn.cluster.parameter_server.ledger import Place
from shardfn.cluster.parameter_server.live_servers import advance_all
from shardfn.cluster.parameter_server.partition import Partition
from shardfn.cluster.parameter_server.server import joined
from shardfn.cluster.parameter_server.server_rows import write_new_server
from shardfn.errors import ShardError


def change_servers(engine: Engine, setup: Setup, old: Place, partition: Partition, client: str) -> None:
    """Write the servers of another partition, and make them live.

    Raises:
      Unreachable: another client changes the servers, others wait that came before, the lease ran out, or an answer did not
        come: to be tried again.
      CheckpointFileError: the disk is full, and the servers are the old ones; or the coordinator's change could not be synced.
    """
    lease: Lease | None = ask(engine, "lease", client, old.epoch)
    if lease is None:
        raise Unreachable("another client changes the servers, or calls that came before wait for their turn")
    new = Place(old.epoch + 1, partition.servers, lease.token)
    folder = setup.path(targets_of(new)[0]).parent
    try:
        with _renewed(engine, lease), writing(folder):
            _write(engine, setup, old, new, partition, lease)
        if not ask(engine, "switch", lease.token, new.servers):
            raise Unreachable("a push came while the servers changed")
    except BaseException:
        with contextlib.suppress(Unreachable, ShardError):
            if ask(engine, "release", lease.token):
                shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _renewed(engine: Engine, lease: Lease) -> Iterator[None]:
    """Renew a lease meanwhile."""
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(LEASE_S / 4):
            with contextlib.suppress(Unreachable, ShardError):  # the next time, or the lease runs out
                ask(engine, "renew", lease.token)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _write(engine: Engine, setup: Setup, old: Place, new: Place, partition: Partition, lease: Lease) -> None:
    """Write the new servers one after the other, so that this client holds one of them at a time."""
    tokens = frozenset(push.token for push in lease.status.waiting)
    advance_all(engine, setup, old)
    for target, ranges in zip(targets_of(new), partition.ranges, strict=True):
        portions = engine.call([Call(source, "portion", (ranges, tokens)) for source in targets_of(old)])
        if any(each.version != lease.status.version for each in portions) or not ask(engine, "renew", lease.token):
            raise Unreachable("a push came while the servers changed")
        write_new_server(setup.path(target), joined(portions))
