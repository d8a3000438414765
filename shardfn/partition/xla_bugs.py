"""Convolutions that XLA computes wrongly, in value or in gradient, or makes no program of, as they are laid out.

Seen on JAX 0.10.2 and 0.12.0.1 (CPU): one with a window larger than 1, or strides, and a spatial dim cut gives wrong
results, in value or in gradient, if the image leaves some grid axis unused, if the kernel is cut as well, or, with several
spatial dims cut, strides or dilation, in other cases that follow no plain rule. It is right with whole spatial dims, and with
one spatial dim cut of an image that is cut over all axes, without strides or with a window of 1.
So is one whose kernel is cut along its window wrong; a kernel's gradient, where image and gradient are cut alike along the
window, is right if these are cut over all axes, else some idle axis is added up as well.
One in groups, cut along their dims so that the pieces do not divide the groups, does not compile, or ends the process; with
its batch cut while some grid axis is idle, the kernel's gradient is added up once for each of the devices along that axis.
With the batch in groups it is wrong, or ends the process, where the summed dim of image and kernel are not cut alike, or
the result's batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardfn.ir.model import Convolution, Spec, axis_size


def is_miscompiled(found: Convolution, laid: Sequence[Spec], window: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether XLA might compute a convolution, or the gradients of one, wrongly.

    Args:
      found: the convolution.
      laid: the layouts of image, kernel and result.
      window: the kernel's size along each spatial dim.
      axes: the grid.

    >>> plain = Convolution((2, 3), (2, 3), (2, 3), is_dense=True)
    >>> sharded = ((), (), ("a",), ())
    >>> [is_miscompiled(plain, (sharded, ((),) * 4, sharded), (3, 3), axes) for axes in ({"a": 4}, {"a": 4, "b": 2})]
    [False, True]
    """
    image, kernel, result = laid
    every = {axis for axis, size in axes.items() if size > 1}
    if _is_mistaken_in_groups(found, laid, axes, every):
        return True
    is_pointwise = max(window, default=1) == 1
    if is_pointwise and found.is_dense:
        return False
    if any(kernel[d] for d in found.kernel):
        alike = all(image[a] == kernel[b] for a, b in zip(found.image, found.kernel, strict=True))
        is_gradient = alike and not any(result[d] for d in found.result)
        return not is_gradient or _axes(kernel) != every
    sharded = [image[a] or result[b] for a, b in zip(found.image, found.result, strict=True)]
    is_one = sum(map(bool, sharded)) == 1 and (found.is_dense or is_pointwise)
    return any(sharded) and (not is_one or _axes(image) != every or bool(_axes(kernel)))


def _is_mistaken_in_groups(found: Convolution, laid: Sequence[Spec], axes: Mapping[str, int], every: set[str]) -> bool:
    """Whether the pieces along a dim of groups do not divide these, or the batch is cut while some axis of the grid is idle."""
    for which, dim, groups in found.grouped:
        if groups % math.prod(axis_size(a, axes) for a in laid[which][dim]):
            return True
    if not found.grouped:
        return False
    grouped = {(which, dim) for which, dim, _ in found.grouped}
    # Beside groups and windows: the image's batch and the kernel's summed features; in batches the summed dim of both.
    image, kernel, result = (
        [axes for dim, axes in enumerate(spec) if dim not in spatial and (which, dim) not in grouped]
        for which, (spec, spatial) in enumerate(zip(laid, (found.image, found.kernel, found.result), strict=True))
    )
    if any(image) and set().union(*map(_axes, laid[:2])) != every:
        return True  # an axis that cuts the result alone is idle for the work
    return found.in_batches and (image != kernel or any(result))


def _axes(spec: Spec) -> set[str]:
    return {axis.partition(":")[0] for dim in spec for axis in dim}
