"""The loop of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardfn.cluster.parameter_server.client import ParameterServer
from shardfn.cluster.parameter_server.coordinator import Receipt
from shardfn.cluster.parameter_server.ledger import STALE


def train(
    server: ParameterServer,
    worker: str | int,
    gradient: Callable[[Any, Any], Any],
    batch: Callable[[int], Any],
    steps: int,
) -> Iterator[Receipt]:
    """Run the loop of one worker: pull, compute, push. A worker resumes after a restart with the step that is missing.

    Args:
      server: the parameter server.
      worker: the worker's name or number.
      gradient: `(params, batch) -> gradients`.
      batch: the worker's batch of a step.
      steps: the number of steps.

    Yields:
      What became of each push.

    Raises:
      ClusterError, CheckpointFileError: as `pull` and `push`.

    >>> import numpy as np, optax
    >>> server = ParameterServer.create(np.zeros(2, "float32"), optax.sgd(1.0))
    >>> [receipt.status for receipt in train(server, 0, lambda params, batch: np.ones(2), lambda step: None, 2)]
    ['applied', 'applied']
    """
    is_synchronous, step = server.job.rules.synchronous, server.next_step(worker)
    while step < steps:
        params, version = server.pull(version=step if is_synchronous else None)
        if is_synchronous:
            step = version  # larger where other workers did not wait for this one
        receipt = server.push(gradient(params, batch(step)), worker, step, version=version)
        yield receipt
        step += receipt.status != STALE
