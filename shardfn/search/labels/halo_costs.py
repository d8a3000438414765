"""The halo exchange of an op whose window dimensions are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Graph, Op
from shardfn.partition.halo_exchange import halo_permutes, rows_read
from shardfn.search.labels.mesh_model import MeshModel, shard_count
from shardfn.solver.labelling import Array


def halo_cost(
    op: Op, graph: Graph, wanted: Sequence[Array], made: Sequence[Array], local: Sequence[Array], mesh: MeshModel
) -> tuple[Array, Array]:
    """Bytes sent and seconds of the halo exchange of `partition.halo_exchange`, or of the gather in its place, for each label.

    Args:
      op: one with window dimensions.
      graph: its graph.
      wanted: for each operand, [labels, axes], the dimension that each axis shards; -1 for none.
      made: the same for each result, before its sums are reduced.
      local: for each operand, [labels], the bytes of its shard.
      mesh: axes and links.
    """
    sent, seconds = np.zeros(len(wanted[0])), np.zeros(len(wanted[0]))
    rates = [link.exchange_bytes_s for link in mesh.links]
    latencies = [link.latency_s for link in mesh.links]
    shard_bytes = list(local)
    for window in op.window_dims:
        of_kernel = window.over >= 0
        other = graph.values[op.inputs[window.over] if of_kernel else op.outputs[0]].shape
        along = wanted[window.operand] == window.dim
        alike = (along == ((wanted[window.over] if of_kernel else made[0]) == window.out_dim)).all(axis=1)
        count = shard_count(np.where(along, 0, -1), mesh.sizes)
        size = graph.values[op.inputs[window.operand]].shape[window.dim]
        for n in map(int, np.unique(count[alike & along.any(axis=1)])):
            here, own = alike & (count == n), -(-size // n)
            permutes = halo_permutes(size, other[window.out_dim], n, window)
            if permutes and mesh.rules.sends_halo_rows_once:
                permutes = tuple(dict.fromkeys(permutes))
            moved = (n - 1) * own if permutes is None else sum(fetch.end - fetch.start for fetch in permutes)
            part = np.where(here, moved / own * shard_bytes[window.operand], 0.0)
            sent += part
            seconds += part / np.where(along, rates, np.inf).min(axis=1, where=here[:, None], initial=max(rates))
            launches = 1 if permutes is None else len(permutes)
            seconds += np.where(here, np.where(along, latencies, 0.0).max(axis=1) * launches, 0.0)
            if permutes:  # the next dimension's rows are as long as what arrived makes them
                grown = rows_read(window, other[window.out_dim], n) / own
                shard_bytes[window.operand] = np.where(
                    here, shard_bytes[window.operand] * grown, shard_bytes[window.operand]
                )
    return sent, seconds
