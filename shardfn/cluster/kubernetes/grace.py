"""How long a pod may take to end after SIGTERM: long enough to save the state."""

from __future__ import annotations

import math

from shardfn.cluster.kubernetes.job import Job
from shardfn.cluster.kubernetes.quantity import amount
from shardfn.layoutfile.plan_file import estimated_arguments

END_S = 30
"""Kubernetes' own grace period. The step that runs and the end of the program take place in it."""
SAVES = 2
"""A save in the background may have begun when the signal comes. The last one waits for it."""
WRITE_BYTES_S = 100 << 20
"""What a slow shared file system writes: Amazon EFS in bursting mode, of any size below 1 TiB
(https://repost.aws/knowledge-center/efs-choosing-correct-throughput-mode). All processes share it."""


def state_bytes(job: Job) -> float | None:
    """The size of what a checkpoint holds: `state`, or else all arguments of the plan, of which the state is a part.

    >>> state_bytes(Job("a", "a:1", ("a",), state="80Gi")) == 80 * 2**30, state_bytes(Job("a", "a:1", ("a",)))
    (True, None)
    """
    return amount(job.state) if job.state else estimated_arguments(job.plan)


def grace_s(job: Job) -> int:
    """The seconds that a pod has: `grace_s`, or else Kubernetes' 30 and the time of two saves at 100 MiB/s.

    Args:
      job: the job. Where nothing says how large its state is, Kubernetes' own 30 s are left.

    >>> grace_s(Job("a", "a:1", ("a",), state="80Gi")), grace_s(Job("a", "a:1", ("a",), state="80Gi", grace_s=600))
    (1669, 600)
    """
    if job.grace_s is not None:
        return job.grace_s
    return END_S + math.ceil(SAVES * (state_bytes(job) or 0) / WRITE_BYTES_S)
