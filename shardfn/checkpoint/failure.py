"""What the processes of a job tell each other when one of them cannot write its part of a checkpoint."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

SETTLE_S = 20.0
"""Most seconds to wait for writes that were ended."""

POLL_S = 0.2
"""Seconds between two looks for another process's failure."""


class Failure:
    """Tells the other processes of a job that this one could not write, so that none waits for it.

    Orbax's processes wait for each other when they have written, for ten minutes. Here whoever waits looks for a failure
    meanwhile, in the store of JAX's coordination service.
    """

    count = itertools.count()
    """Of saves. Every process of a job begins the same ones."""

    def __init__(self) -> None:
        self._save = f"shardfn/save/{next(self.count)}"
        self._key = f"{self._save}/failed"
        self._thread = threading.get_ident()
        self._error = ""
        self._errors: list[BaseException] = []
        self._running: set[object] = set()
        self._changed = threading.Condition()
        self._client = ocp.multihost.get_jax_distributed_client() if jax.process_count() > 1 else None

    def tell(self, error: BaseException) -> None:
        """Tell of an error."""
        self._errors.append(error)
        self._error = self._error or str(error)
        if self._client is not None:
            with contextlib.suppress(RuntimeError):  # somebody has told already
                self._client.key_value_set(self._key, f"process {jax.process_index()}: {error}"[:4000])

    @contextlib.contextmanager
    def logged_once(self) -> Iterator[None]:
        """Keep the threads of Orbax from logging the tracebacks of errors that were told: the save raises them."""

        def is_new(record: logging.LogRecord) -> bool:
            return not record.exc_info or record.exc_info[1] not in self._errors

        logger = logging.getLogger("absl")
        logger.addFilter(is_new)
        try:
            yield
        finally:
            logger.removeFilter(is_new)

    def told(self) -> str:
        """What a process has told; empty if nothing."""
        if self._client is None or self._error:
            return self._error
        try:
            return self._client.key_value_try_get(self._key)
        except RuntimeError:  # there is no such key
            return ""

    def barrier(self) -> Any:
        """Orbax's barrier, which ends with an error as soon as a process has told of one; None for a single process."""
        if self._client is None:
            return None
        reach = ocp.multihost.get_barrier_sync_fn()

        def wait(*, key: str, timeout_ms: int) -> None:
            key = f"{self._save}/{key}"  # a barrier that was left is still under way: those of the next save have other keys
            if threading.get_ident() == self._thread:  # a save begins in all processes, or in none
                return reach(key=key, timeout_ms=timeout_ms)
            reached: concurrent.futures.Future[None] = concurrent.futures.Future()

            def run() -> None:
                try:
                    reached.set_result(reach(key=key, timeout_ms=timeout_ms))
                except Exception as error:
                    reached.set_exception(error)

            threading.Thread(target=run, daemon=True).start()
            while not concurrent.futures.wait([reached], POLL_S).done:
                self._raise_told()
            reached.result()

        return wait

    def _raise_told(self) -> None:
        """Raise what a process has told, if anything."""
        if text := self.told():
            self._errors.append(OSError(text))
            raise self._errors[-1]

    async def watch(self, write: Coroutine[Any, Any, None]) -> None:
        """Run a write. Tell of its error; end it with an error as soon as another one has told of one."""
        task = asyncio.ensure_future(write)
        self._running.add(task)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                if self.told():
                    task.cancel()
                    await asyncio.wait({task})
                    self._raise_told()
            task.result()
        except Exception as error:
            self.tell(error)
            raise
        finally:
            with self._changed:
                self._running.discard(task)
                self._changed.notify_all()

    def settle(self) -> None:
        """After an error: wait until no write of this process is under way, so that its files can be deleted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, SETTLE_S)
