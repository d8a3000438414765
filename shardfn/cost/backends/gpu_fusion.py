"""Fusion in XLA's GPU backend."""

from shardfn.cost.backends.scatter_fusion import ScatterFuser


class GpuFuser(ScatterFuser):
    """Fuses one graph as on a GPU."""

    duplicates_into_scatters = False
