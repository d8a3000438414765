"""`Cell.set_param_ps`, and the servers that hold what it marked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardfn.cluster.parameter_server import ParameterServer
from shardfn.cluster.parameter_server.engine import Engine
from shardfn.errors import ClusterError, NotAvailableError, StrategyError, fail
from shardfn.frontend.callee import State
from shardfn.frontend.strategy import is_cell
from shardfn.mindspore.context import get_ps_context

_ON_SERVERS = "_shardfn_on_servers"
"""Attribute of a Cell whose arrays are on servers: whether those of the Cells in it are, too."""


def mark(cell: Any, recurse: bool, init_in_server: bool) -> None:
    """As `Cell.set_param_ps`."""
    where = f"{type(cell).__name__}.set_param_ps()"
    if not get_ps_context("enable_ps") or get_ps_context("ms_role") is None:
        fail(ClusterError, "the parameter server is not on", where=where,
             why=f"enable_ps is {get_ps_context('enable_ps')} and the role {get_ps_context('ms_role')}",
             fix="call set_ps_context(enable_ps=True) before, and set MS_ROLE to MS_SCHED, MS_WORKER or MS_PSERVER")  # fmt: skip
    if init_in_server:
        fail(NotAvailableError, "`init_in_server` is not available yet", where=where,
             why="the first rows are made by the process that creates the servers", fix="leave it out")  # fmt: skip
    object.__setattr__(cell, _ON_SERVERS, bool(recurse))


def ps_parameters(cell: Any) -> State:
    """The arrays of a Cell that are on parameter servers. The others are the training step's.

    Args:
      cell: the Cell.

    Returns:
      The arrays that `set_param_ps` marked, of it and of the Cells in it, by path.

    >>> from shardfn.mindspore import Cell
    >>> ps_parameters(Cell())
    {}
    """
    return {path: array for path, array in cell.parameters_dict().items() if _is_marked(cell, path)}


def parameter_server(cell: Any, optimizer: Any, *, engine: Engine | None = None, **options: Any) -> ParameterServer:
    """Put the marked arrays of a Cell on parameter servers, as many as the context says.

    Args:
      cell: the Cell.
      optimizer: an optax optimizer.
      engine: where the servers run; by default on Ray where the context names a scheduler, else in this process.
      options: of `shardfn.cluster.ParameterServer.create`. The folder is `MS_RECOVERY_PATH` of the environment by default.

    Returns:
      The parameter server, whose arrays are named by their paths.

    Raises:
      StrategyError: no array is marked, or an option is wrong.
      ShardError: as `ParameterServer.create`.

    >>> import numpy as np, optax
    >>> from shardfn.mindspore import Cell, auto_parallel, set_ps_context
    >>> class Scale(Cell):
    ...     def __init__(self): self.by = np.ones(2, "float32")
    >>> with auto_parallel():
    ...     set_ps_context(enable_ps=True, ms_role="MS_WORKER", server_num=2)
    ...     scale = Scale()
    ...     scale.set_param_ps()
    ...     server = parameter_server(scale, optax.sgd(1.0))
    >>> _ = server.push({"by": np.ones(2)}, 0, 0)
    >>> scale.with_parameters(server.pull(["by"]).values).by.tolist()
    [0.0, 0.0]
    """
    arrays = ps_parameters(cell)
    if not arrays:
        fail(StrategyError, f"no array of {type(cell).__name__} is on parameter servers", where="parameter_server(cell)",
             why="set_param_ps was called neither on it nor on a Cell in it", fix="call cell.set_param_ps()")  # fmt: skip
    said = {"servers": get_ps_context("server_num"), "workers": get_ps_context("worker_num")}
    counts: dict[str, Any] = {name: number or 1 for name, number in said.items()}
    if engine is None and get_ps_context("scheduler_ip"):
        from shardfn.cluster.parameter_server.ray_engine import OnRay  # needs Ray
        from shardfn.mindspore.roles import SERVER

        engine = OnRay(resources={SERVER: 1})
    folder = os.environ.get("MS_RECOVERY_PATH")
    return ParameterServer.create(arrays, optimizer, engine=engine, **{"folder": folder, **counts, **options})


def _is_marked(cell: Any, path: str) -> bool:
    is_marked = False
    for node in _along(cell, path):
        if is_cell(node):
            mark = vars(node).get(_ON_SERVERS)
            if mark:
                return True
            is_marked = mark is not None  # of a Cell whose Cells are left out
    return is_marked


def _along(node: Any, path: str) -> Iterator[Any]:
    """What stands on the way to an array."""
    yield node
    for part in path.split("/"):
        if is_cell(node):
            node = vars(node).get(part)
        elif isinstance(node, Mapping):
            node = next((value for key, value in node.items() if str(key) == part), None)
        elif isinstance(node, list | tuple) and part.isdigit():
            node = node[int(part)]
        else:
            return
        yield node
