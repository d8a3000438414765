"""Which release of JAX is there, where XLA of an earlier one did otherwise."""

import jax

IS_BEFORE_JAX_0_12 = jax.__version_info__ < (0, 12)
"""Whether it is JAX 0.10 or 0.11: XLA's CPU backend then takes optimization barriers out and widens products of half
precision, and the partitioner does not cut Fourier transforms."""
