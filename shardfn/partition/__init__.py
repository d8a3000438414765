"""Which collectives XLA's SPMD partitioner inserts for given shardings, without compiling.

Entry point: `partitioner.insert_collectives` takes the program as Shardy sharded it and returns it with its
collectives. Where the rule for something is:

- one op: `op_rules`, one function per rule, named by the op's row in `ir.op_traits`; matmuls: `dot_general` in the
  terms of `grouped_dot`, and those that send while they multiply `collective_matmul`; convolutions: `convolution`; the
  types that a rule takes and returns: `sharded_op`
- from one sharding of an array to another: `resharding`, and within a group of devices `tile_assignment`
- windows and slices along a sharded dimension: `halo_exchange`
- what a backend does differently: `platforms`, one row each
- what other shardings of the same function taught: `partition_cache`
- passes after partitioning: `simplify`; all-reduces that are combined: `combine_reductions`, and in loops
  `loop_reductions`; those of libtpu: `libtpu`, `tpu_padding`; the rebuilt program: `rebuild`
- layouts for which XLA computes wrong results: `xla_bugs`
"""
