"""Many processes as one: start the group that `jax.distributed` connects, and launch the processes of a machine."""

from shardfn.cluster.group import backend, init, rank, size
from shardfn.cluster.jobs import Process, local_job, read_rank_table
from shardfn.cluster.launch import Outcome, launch

__all__ = ["Outcome", "Process", "backend", "init", "launch", "local_job", "rank", "read_rank_table", "size"]


def __dir__() -> list[str]:
    return __all__
