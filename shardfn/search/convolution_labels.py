"""In which layouts XLA computes a convolution rightly (`graph.mistakes`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfn.ir.model import Convolution
from shardfn.partition.xla_bugs import is_miscompiled
from shardfn.search.resharding_costs import Array, spec_of_label


def computed_correctly(
    convolution: Convolution, shapes: Sequence[Sequence[int]], laid: Sequence[Array], sizes: Sequence[int]
) -> Array:
    """In which of the layouts [labels, axes] of image, kernel and result, of these shapes, XLA computes a convolution rightly.

    Args:
      convolution: which dims are which.
      shapes: of image, kernel and result.
      laid: for each of them [labels, axes] of the dim that each axis cuts, -1 for none.
      sizes: devices along each axis.
    """
    names = tuple(map(str, range(len(sizes))))
    axes = dict(zip(names, sizes, strict=True))
    window = [shapes[1][d] for d in convolution.kernel]
    rows = zip(*(layouts.tolist() for layouts in laid), strict=True)
    specs = ([spec_of_label(one, len(s), names) for one, s in zip(row, shapes, strict=True)] for row in rows)
    return np.array([not is_miscompiled(convolution, three, window, axes) for three in specs])
