"""Where a coordinator and servers run, and how they are called: the interface of all engines, and the one in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from shardfn.cluster.parameter_server.coordinator import Coordinator
from shardfn.cluster.parameter_server.ledger import Place
from shardfn.cluster.parameter_server.partition import CHUNK_BYTES
from shardfn.cluster.parameter_server.server import Server
from shardfn.errors import ShardError


class Unreachable(Exception):
    """A call whose answer did not come. Whether it had an effect is not known."""


class Target(NamedTuple):
    """A server of a place; the coordinator, where `server` is None.

    >>> Target(0, 1).name, Target(2, 0, "c0ffee").name, COORDINATOR.name
    ('epoch-0/server-1', 'epoch-2-c0ffee/server-0', 'coordinator')
    """

    epoch: int = 0
    server: int | None = None
    token: str = ""

    @property
    def name(self) -> str:
        """Its name, which is that of its folder."""
        if self.server is None:
            return "coordinator"
        return f"epoch-{self.epoch}{'-' if self.token else ''}{self.token}/server-{self.server}"


COORDINATOR = Target()


def targets_of(place: Place) -> list[Target]:
    """The servers of a place."""
    return [Target(place.epoch, server, place.token) for server in range(place.servers)]


class Call(NamedTuple):
    """A call of a method."""

    to: Target
    method: str
    args: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What starts a server again.

    Attributes:
      folder: the folder of the job, on a file system that every host sees where a server may be started.
      optimizer: the optax optimizer.
      is_synchronous: whether training is synchronous.
      log_bytes: as of `Server`.
    """

    folder: pathlib.Path
    optimizer: Any
    is_synchronous: bool
    log_bytes: int | None = None

    def path(self, to: Target) -> pathlib.Path:
        """The folder of a database."""
        return self.folder / to.name

    def make(self, to: Target) -> Coordinator | Server:
        """Start the coordinator or a server from its database."""
        if to.server is None:
            return Coordinator(self.path(to))
        return Server(self.path(to), self.optimizer, self.is_synchronous, self.log_bytes)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a client talks: as the arguments of `ParameterServer.create`."""

    chunk_bytes: int = CHUNK_BYTES
    compress: bool = False
    timeout_s: float = 300


class Engine(Protocol):
    """What a client asks of an engine."""

    def start(self, setup: Setup, targets: Sequence[Target]) -> None:
        """Start the coordinator or servers, where they do not run yet."""
        ...

    def stop(self, targets: Sequence[Target]) -> None:
        """Stop servers. Their databases are closed."""
        ...

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Call methods, at the same time where that is possible.

        Raises:
          Unreachable: an answer did not come. The other calls may have had their effect.
        """
        ...

    def notify(self, calls: Sequence[Call]) -> None:
        """Call methods whose answers do not matter."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait before a call is tried again."""
        ...


def ask(engine: Engine, method: str, *args: Any) -> Any:
    """Call a method of the coordinator."""
    return engine.call([Call(COORDINATOR, method, args)])[0]


class InProcess:
    """The engine in this process. Several threads may use it.

    >>> InProcess().call([])
    []
    """

    def __init__(self) -> None:
        self.running: dict[Target, Coordinator | Server] = {}
        self._setup: Setup | None = None
        self._starting = threading.RLock()

    def start(self, setup: Setup, targets: Sequence[Target]) -> None:
        """Start what does not run yet."""
        with self._starting:
            self._setup = setup
            for target in targets:
                if target not in self.running:
                    self.running[target] = setup.make(target)

    def stop(self, targets: Sequence[Target]) -> None:
        """Stop servers."""
        with self._starting:
            for target in targets:
                if target in self.running:
                    self.running.pop(target).close()

    def restart(self, target: Target) -> None:
        """Start the coordinator or a server from its database, as after its machine lost power: what was not on disk is gone."""
        with self._starting:
            assert self._setup is not None
            if target in self.running:
                self.running.pop(target).close()
            self.running[target] = self._setup.make(target)

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Call methods, one after the other."""
        return [self._call(one) for one in calls]

    def notify(self, calls: Sequence[Call]) -> None:
        """Call methods."""
        for one in calls:
            with contextlib.suppress(Unreachable, ShardError):  # what is wrong there, a pull says
                self._call(one)

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def _call(self, one: Call) -> Any:
        running = self.running.get(one.to)
        if running is None:
            raise Unreachable(f"{one.to.name} does not run")
        # A message is a copy: the caller may change its arrays.
        args = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, one.args)
        return getattr(running, one.method)(*args)
