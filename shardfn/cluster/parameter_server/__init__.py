"""A parameter server: parameters and optimizer state on servers, for workers that pull parameters and push gradients.

How a push becomes durable and atomic:

1. The worker's client splits the gradients by the servers' rows and sends each server its part, in messages of limited size. A
   server writes its part to its database and answers when it is on disk. Every server gets a part, if an empty one.
2. The client asks the coordinator to accept the push. The coordinator writes a row to its database and answers when that is
   on disk. This transaction is the commit: before it the push does not count, after it the push counts at all servers.
3. Which pushes make which update follows from the sequence of these commits (`ledger`). Servers learn the updates from
   whoever pulls, and apply them in order to what they hold.

So a push that is sent again is one row (worker and step name it), a part without such a row is forgotten, and a server that
was killed reads its snapshot and its parts, and applies the updates since then again. The servers change in number by
databases of new servers in a folder of their own, and one transaction of the coordinator, which makes them the live ones
(`resize`). Calls that wait for such a change stand in line (`line`): they have their turn before the next change.

| module | holds |
|---|---|
| `client`, `checks` | `ParameterServer`: create, pull, push, save; what `create` refuses |
| `resize`, `live_servers` | a change of the number of servers; starting the live ones, and ending those before them |
| `training` | `train`, the loop of a worker |
| `tables` | `TableServers`: the rows of an `embedding.Table` |
| `partition` | the rows of each server; splitting and putting together |
| `ledger` | which pushes count and what they make: synchronous, with backup workers, asynchronous with bounded staleness |
| `coordinator`, `server` | the processes, each with its database (`shardfn.durable`) |
| `ledger_rows`, `server_rows` | their tables |
| `line` | who waits for a change of the servers, in order |
| `server_state` | what a server holds, and how an update changes it: arrays, or rows of a table |
| `folders` | the first databases of a job |
| `engine`, `ray_engine` | where they run: in this process, or as Ray actors |
"""

from shardfn.cluster.parameter_server.client import ParameterServer
from shardfn.cluster.parameter_server.coordinator import Pulled, Receipt, Report
from shardfn.cluster.parameter_server.engine import InProcess
from shardfn.cluster.parameter_server.partition import RowGradient
from shardfn.cluster.parameter_server.tables import TableServers
from shardfn.cluster.parameter_server.training import train

__all__ = ["InProcess", "ParameterServer", "Pulled", "Receipt", "Report", "RowGradient", "TableServers", "train"]
