"""Workarounds for XLA bugs: shardings for which XLA computes wrong values or a program that cannot run.

| module | holds |
|---|---|
| `wrong_ops` | which ops of a partitioned program XLA gets wrong |
| `uneven_movement` | movement and windows along dimensions with uneven or empty shards, and resharded rotations |
| `even_scatters` | scatters with updates of even shards |
| `self_updates` | updates that read the array they go into |
| `nested_movement` | rotations of what is rotated, in one kernel with a normalization |
| `rewrites` | the function rewritten around its wrong ops |
| `windows` | windows over one array that exchange their padding, and the function without them |
| `notes` | the diagnostic of the workarounds |

`partition.xla_bugs` has the rule for convolutions. The other bugs (JAX 0.10.2 and 0.12.0.1):

- The gradient of max pooling is wrong where a dimension is sharded and windows overlap by half or more.
- On CPU a Fourier transform near a collective may read a transposed array and fail when it runs. It has one dimension
  more here, of one element, and its own dimensions are gathered before and after it.
- Before JAX 0.12 two windowed ops (`reduce_window`, `jnp.pad`, convolutions) with the same window over one array along a
  sharded dimension may get each other's padding. An optimization barrier on the operand avoids it.
- An array that is replicated along a dimension, and padded between its elements or by negative numbers into shards, gets
  wrong values or does not compile. A pad between elements and by a negative number before them ends the process.
  Windows with such padding (`reduce_window`) meet the same.
- A scatter that combines counts the padding of unevenly sharded updates (`even_scatters`).
- A scatter of one window becomes an update of a slice. If its operand is such a slice itself, after partitioning, XLA merges
  the two and forgets that each stays within its array: shards that have no part in the update are changed. An optimization
  barrier on the operand avoids it.
- Of a dynamic slice that is sharded along a dimension that it shortens, XLA forgets that its place is clamped. An explicit clamp
  avoids it.
- On CPU an update at a dynamic place that is computed from its own array may read what it has written, on one device too. A
  select of the shifted update avoids it.
- A matmul whose batch dimension and several axes of a contracted dimension are sharded gets wrong values where its result is
  sharded along the batch over as many shards as the contracted dimension, but over other axes.
- A sharding constraint on the derivative of a minimum or maximum over windows, which is one of the two results of a windowed
  op, ends the process. An optimization barrier on the result avoids it.
- A rotation of an array that is resharded for it along the same dimension may not compile: XLA reshards its slices instead.
- On GPU before JAX 0.12 a rotation of what is rotated or concatenated has wrong values or does not compile in one kernel with
  a softmax or a mean of rows. An optimization barrier between the two avoids it.
- Windows with padding in front have wrong values or end the process where some shard has no row of their result.
- On CPU a reduction over a sharded dimension does not compile unless it is a sum, product, minimum or maximum, or `and` or
  `or` of bools. GPUs are treated alike; on TPU it compiles.
"""

from shardfn.planning.workarounds.notes import workaround_note
from shardfn.planning.workarounds.rewrites import replicate_wrong_ops, rotations_apart
from shardfn.planning.workarounds.uneven_movement import before_resharding, movements_of_equation, moves_shards
from shardfn.planning.workarounds.windows import has_windows, separate_windows, windows_clash
from shardfn.planning.workarounds.wrong_ops import WrongOp, in_program, refuse_reshardings, wrong_ops

__all__ = [
    "WrongOp", "before_resharding", "has_windows", "in_program", "movements_of_equation", "moves_shards", "refuse_reshardings",
    "replicate_wrong_ops", "rotations_apart", "separate_windows", "windows_clash", "workaround_note", "wrong_ops",
]  # fmt: skip
