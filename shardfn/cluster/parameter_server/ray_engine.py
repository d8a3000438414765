"""The engine on Ray: the coordinator and each server is an actor, which Ray starts again when its process ends.

Ray restarts a process without its state; the state comes from the database. Ray's own retries of calls are off: clients
try again themselves. Only messages of this package travel, which are tuples of NumPy arrays, numbers and names; the optimizer is
pickled once, when an actor is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from shardfn.cluster.parameter_server.engine import COORDINATOR, Call, Setup, Target, Unreachable
from shardfn.errors import ExtraError, fail, with_extra

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.exceptions import (  # pyright: ignore[reportMissingImports]
        GetTimeoutError,
        RayError,
        RayTaskError,
    )
except ImportError as error:
    fail(ExtraError, "the engine on Ray needs Ray", where="shardfn.cluster.parameter_server.ray_engine", why=str(error),
         fix=with_extra("ray"))  # fmt: skip

NAMESPACE = "shardfn"
WAITERS, CALLERS = 256, 16
"""Calls that the coordinator answers at the same time, most of which wait for an update; and those of a server."""

ANSWER_S = 60
"""Seconds after which a call counts as lost. A node that is cut off is declared dead by Ray after some 15."""

PARENT_S = 1
"""Seconds between looks at whether the raylet runs."""


class OnRay:
    """The engine on Ray. `ray.init` comes first; it may be given to other actors and tasks.

    The actors are detached: they outlive the process that made them, until `ParameterServer.close`. A driver that was
    killed calls `ParameterServer.create` with the same folder, and resumes.

    Args:
      name: the job's name, one for each folder.
      servers: options of the servers' actors, as `ray.remote` takes them, such as `num_cpus`, `num_gpus` or `resources`. By
        default an actor reserves no CPU.
    """

    def __init__(self, name: str = "parameter-server", **servers: Any):
        self.name, self.options = name, {"num_cpus": 0, **servers}
        self._handles: dict[Target, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}

    def start(self, setup: Setup, targets: Sequence[Target]) -> None:
        """Start actors that do not run yet."""
        for target in targets:
            own = {"num_cpus": 0} if target == COORDINATOR else self.options
            options = {
                "name": self._actor_name(target), "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached",
                "max_restarts": -1, "max_task_retries": 0, "max_concurrency": WAITERS if target == COORDINATOR else CALLERS,
            }  # fmt: skip
            try:
                self._handles[target] = _host().options(**{**own, **options}).remote(setup, target)
            except RayError as error:
                raise Unreachable(_first_line(error)) from error

    def stop(self, targets: Sequence[Target]) -> None:
        """Close databases and end the actors."""
        for target in targets:
            with contextlib.suppress(Unreachable, RayError):
                handle = self._handle(target)
                with contextlib.suppress(Exception):
                    ray.get(handle.end.remote(), timeout=5)
                ray.kill(handle)
            self._handles.pop(target, None)

    def call(self, calls: Sequence[Call]) -> list[Any]:
        """Call methods, all at the same time."""
        try:
            return ray.get([self._send(one) for one in calls], timeout=ANSWER_S)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except (RayError, GetTimeoutError) as error:
            for one in calls:
                self._handles.pop(one.to, None)
            raise Unreachable(
                f"{', '.join(sorted({self._actor_name(one.to) for one in calls}))}: {_first_line(error)}"
            ) from error

    def notify(self, calls: Sequence[Call]) -> None:
        """Call methods, and do not wait."""
        for one in calls:
            with contextlib.suppress(Unreachable, RayError):
                self._send(one)

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def process_ids(self, targets: Sequence[Target]) -> list[int]:
        """The processes of actors, for drills."""
        return ray.get([self._handle(target).process_id.remote() for target in targets])

    def _send(self, one: Call) -> Any:
        return self._handle(one.to).call.remote(one.method, one.args)

    def _handle(self, target: Target) -> Any:
        if target not in self._handles:
            try:
                self._handles[target] = ray.get_actor(self._actor_name(target), NAMESPACE)
            except (ValueError, RayError) as error:
                raise Unreachable(f"{self._actor_name(target)} does not run") from error
        return self._handles[target]

    def _actor_name(self, target: Target) -> str:
        return f"{self.name}/{target.name}"


class Host:
    """An actor with a coordinator or a server. What is wrong with the folder is told to each caller.

    It ends with its node: Ray leaves actors running whose raylet ended, and one that Ray replaced would keep its folder locked.
    """

    def __init__(self, setup: Setup, target: Target):
        self.setup, self.target, self.hosted, self.lock = setup, target, None, threading.Lock()
        self.has_ended = False
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method."""
        with self.lock:
            if self.has_ended:
                raise Unreachable(f"{self.target.name} was stopped")
            if self.hosted is None:
                self.hosted = self.setup.make(self.target)
        return getattr(self.hosted, method)(*args)

    def end(self) -> None:
        """Close the database."""
        with self.lock:
            self.has_ended = True
            if self.hosted is not None:
                self.hosted.close()

    def process_id(self) -> int:
        """The process."""
        return os.getpid()


def _end_with(raylet: int) -> None:
    """End this process when its raylet, which is its parent, has ended. What was acknowledged is on disk."""
    while os.getppid() == raylet:
        time.sleep(PARENT_S)
    os._exit(1)


@functools.cache
def _host() -> Any:
    return ray.remote(Host)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
