"""Shardings in which XLA computes a convolution or its gradients wrongly, or does not compile it (JAX 0.10.2 and
0.12.0.1 on CPU).

- A window above 1 or a stride along a sharded spatial dimension, if the image leaves a mesh axis unused, the kernel is
  sharded too, or several spatial dimensions are sharded. One sharded spatial dimension over all axes is right, without
  strides or with a window of 1.
- A kernel sharded along its window. Its gradient is right if image and gradient are sharded alike over all axes.
- A grouped convolution whose shards do not divide the groups does not compile. With a window of 1 and sharded groups its
  values are wrong, or it does not compile. With a sharded batch and an unused mesh axis, the kernel's gradient is summed once
  for each device along that axis.
- A batch in groups, unless image and kernel are sharded alike along the contracted dimension and the result's batch is
  unsharded.
- A sharding constraint on a grouped convolution may abort the process.

Since JAX 0.12 some reshardings end the process, on every platform (`ends_process`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from shardfn.ir.model import Convolution, Op, Spec, axes_of, axis_name, axis_size


def is_miscompiled(found: Convolution, specs: Sequence[Spec], window: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether XLA might compute a convolution or its gradients wrongly.

    Args:
      found: the convolution.
      specs: the shardings of image, kernel and result.
      window: the kernel's size along each spatial dimension.
      axes: the mesh.

    >>> plain = Convolution((2, 3), (2, 3), (2, 3), is_dense=True)
    >>> sharded = ((), (), ("a",), ())
    >>> [is_miscompiled(plain, (sharded, ((),) * 4, sharded), (3, 3), axes) for axes in ({"a": 4}, {"a": 4, "b": 2})]
    [False, True]
    """
    image, kernel, result = specs
    every = {axis for axis, size in axes.items() if size > 1}
    is_pointwise = max(window, default=1) == 1
    if _is_grouped_miscompiled(found, specs, is_pointwise, axes, every):
        return True
    if is_pointwise and found.is_dense:
        return False
    if any(kernel[d] for d in found.kernel):
        alike = all(image[a] == kernel[b] for a, b in zip(found.image, found.kernel, strict=True))
        is_gradient = alike and not any(result[d] for d in found.result)
        return not is_gradient or _axes(kernel) != every
    sharded = [image[a] or result[b] for a, b in zip(found.image, found.result, strict=True)]
    is_one = sum(map(bool, sharded)) == 1 and (found.is_dense or is_pointwise)
    return any(sharded) and (not is_one or _axes(image) != every or bool(_axes(kernel)))


def ends_process(before: Spec, after: Spec, axes: Mapping[str, int]) -> bool:
    """Whether XLA ends the process over a resharding, since JAX 0.12.

    It does where an axis moves to another dimension while a further axis follows it in its old place or its new one, and no
    size of the two divides the other. Found by trying all pairs of shardings of two dimensions over 2 x 3, 3 x 2, 2 x 4 and
    4 x 2 devices.

    >>> ends_process(((), ("a",)), (("a", "b"), ()), {"a": 2, "b": 3})
    True
    >>> ends_process(((), ("a",)), (("b", "a"), ()), {"a": 2, "b": 3})
    False
    """
    places = {axis: dim for dim, own in enumerate(after) for axis in own}
    for dim, own in enumerate(before):
        for i, axis in enumerate(own):
            new = places.get(axis, dim)
            if new == dim:
                continue
            left = [y for y in own[i + 1 :] if y in after[dim]]
            met = [y for y in after[new][after[new].index(axis) + 1 :] if y not in own]
            sizes = [sorted((axis_size(axis, axes), axis_size(y, axes))) for y in (*left, *met)]
            if any(most % least for least, most in sizes):
                return True
    return False


def may_end_process(sizes: Iterable[int]) -> bool:
    """Whether there is a resharding over mesh axes of these sizes for which `ends_process` holds.

    >>> may_end_process([2, 2, 2]), may_end_process([2, 3])
    (False, True)
    """
    return any(max(pair) % min(pair) for pair in itertools.combinations({*sizes}, 2))


def aborts_if_constrained(op: Op) -> bool:
    """Whether XLA may abort on a sharding constraint on an op: a grouped convolution."""
    return op.convolution is not None and bool(op.convolution.grouped)


def _is_grouped_miscompiled(
    found: Convolution, specs: Sequence[Spec], is_pointwise: bool, axes: Mapping[str, int], every: set[str]
) -> bool:
    """Whether groups are sharded that windows of 1 read, shards do not divide the groups, or the batch is sharded while a mesh
    axis is unused."""
    for which, dim, groups in found.grouped:
        if is_pointwise and specs[which][dim]:
            return True
        if groups % math.prod(axis_size(a, axes) for a in specs[which][dim]):
            return True
    if not found.grouped:
        return False
    grouped = {(which, dim) for which, dim, _ in found.grouped}
    # Beside groups and windows: the image's batch and the kernel's summed features; in batches the summed dim of both.
    image, kernel, result = (
        [axes for dim, axes in enumerate(spec) if dim not in spatial and (which, dim) not in grouped]
        for which, (spec, spatial) in enumerate(zip(specs, (found.image, found.kernel, found.result), strict=True))
    )
    if any(image) and set().union(*map(_axes, specs[:2])) != every:
        return True  # an axis that shards the result alone is idle for the work
    return found.in_batches and (image != kernel or any(result))


def _axes(spec: Spec) -> set[str]:
    return {axis_name(axis) for axis in axes_of(spec)}
