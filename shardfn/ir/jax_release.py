"""The JAX release, where an earlier XLA behaves differently."""

import jax

IS_BEFORE_JAX_0_12 = jax.__version_info__ < (0, 12)
"""JAX 0.10 or 0.11. XLA's CPU backend then drops optimization barriers and widens half-precision matmuls, and the
partitioner replicates Fourier transforms.
"""
