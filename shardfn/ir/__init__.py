"""The traced program as data, and Shardy's passes over it. The only user of `jax.extend.mlir`.

Entry points: `shardy.read_graph` (a lowered module → `Graph`) and `shardy.PreparedModule.propagate` (given shardings →
`PartitionedProgram`). The data is in `model` (the program) and `partitioned` (with shardings and collectives); one row
per kind of op with its cost, fusion and partitioning rule in `op_traits`; reading a module in `reader` and
`op_attributes`; sharding rules that Shardy lacks in `extra_rules`; tied dimensions in `dimension_groups`; the form of a
module that XLA propagates through in `propagation_form`; rewriting a jaxpr in `rewrite`; what collectives of this library
are for in `purposes`; differences between JAX releases in `jax_release`.
"""
