"""The traced program as data, and Shardy's passes over it. The only user of `jax.extend.mlir`."""
