"""The halo exchange of an op whose window dimensions are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Graph, Op
from shardfn.ir.windows import halo_extent
from shardfn.search.resharding_costs import MeshModel, shard_count
from shardfn.solver.labelling import Array


def halo_cost(
    op: Op, graph: Graph, wanted: Sequence[Array], made: Sequence[Array], local: Sequence[Array], mesh: MeshModel
) -> tuple[Array, Array]:
    """Bytes sent and seconds of the halo exchange (rule in `partition.halo_exchange`), for each label.

    Args:
      op: one with window dimensions.
      graph: its graph.
      wanted: for each operand, [labels, axes], the dimension that each axis shards; -1 for none.
      made: the same for each result.
      local: for each operand, [labels], the bytes of its shard.
      mesh: axes and links.
    """
    sent, seconds = np.zeros(len(wanted[0])), np.zeros(len(wanted[0]))
    rates = [link.exchange_bytes_s for link in mesh.links]
    latencies = [link.latency_s for link in mesh.links]
    for tap in op.window_dims:
        of_kernel = tap.over >= 0
        other = graph.values[op.inputs[tap.over] if of_kernel else op.outputs[0]].shape
        along = wanted[tap.operand] == tap.dim
        alike = (along == ((wanted[tap.over] if of_kernel else made[0]) == tap.out_dim)).all(axis=1)
        count = shard_count(np.where(along, 0, -1), mesh.sizes)
        size = graph.values[op.inputs[tap.operand]].shape[tap.dim]
        for n in np.unique(count[alike & along.any(axis=1)]).tolist():
            rows = -(-size // int(n))
            before, after = halo_extent(size, other[tap.out_dim], int(n), tap)
            if not before + after or before + after >= (n - 1) * rows:
                continue
            here = alike & (count == n)
            part = np.where(here, (before + after) / rows * local[tap.operand], 0.0)
            sent += part
            seconds += part / np.where(along, rates, np.inf).min(axis=1, where=here[:, None], initial=max(rates))
            seconds += np.where(here, np.where(along, latencies, 0.0).max(axis=1) * ((before > 0) + (after > 0)), 0.0)
    return sent, seconds
