"""Many processes as one: start the group that `jax.distributed` connects, launch the processes of a machine, train and recover.

| module | holds |
|---|---|
| `group`, `environment` | `init`, `rank`, `size`; the variables that name a group |
| `launch`, `jobs`, `ports` | the processes of this machine; their list and environments; where process 0 listens |
| `recovery`, `preemption` | `run`: a training loop that goes on from its last checkpoint; the end that SIGTERM announces |
| `heartbeat` | `beat`, `rest`: a process that hangs |
| `parameter_server/` | `ParameterServer`: parameters on servers, for workers that come and go; `TableServers`: rows of tables |
| `kubernetes/` | manifests of a job, and their check against a plan |
"""

from shardfn.cluster.group import backend, init, rank, size
from shardfn.cluster.heartbeat import beat, rest
from shardfn.cluster.jobs import Process, local_job, read_rank_table
from shardfn.cluster.launch import Outcome, launch
from shardfn.cluster.parameter_server import ParameterServer, TableServers
from shardfn.cluster.recovery import RunResult, run

__all__ = [
    "Outcome", "ParameterServer", "Process", "RunResult", "TableServers", "backend", "beat", "init", "launch", "local_job",
    "rank", "read_rank_table", "rest", "run", "size",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
