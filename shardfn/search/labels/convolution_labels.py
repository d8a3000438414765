"""The layouts in which XLA computes a convolution correctly (`partition.xla_bugs`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Convolution
from shardfn.partition.xla_bugs import is_miscompiled
from shardfn.search.labels.mesh_model import spec_of_label
from shardfn.solver.labelling import Array


def computed_correctly(
    convolution: Convolution, shapes: Sequence[Sequence[int]], layouts: Sequence[Array], sizes: Sequence[int]
) -> Array:
    """Whether XLA computes a convolution correctly in each of the layouts of image, kernel and result.

    Args:
      convolution: the role of each dimension.
      shapes: of image, kernel and result.
      layouts: for each of them [labels, axes] of the dimension that each axis shards, -1 for none.
      sizes: devices along each axis.
    """
    names = tuple(map(str, range(len(sizes))))
    axes = dict(zip(names, sizes, strict=True))
    window = [shapes[1][d] for d in convolution.kernel]
    rows = zip(*(each.tolist() for each in layouts), strict=True)
    specs = ([spec_of_label(one, len(s), names) for one, s in zip(row, shapes, strict=True)] for row in rows)
    return np.array([not is_miscompiled(convolution, three, window, axes) for three in specs])
