"""Convolutions of images with sharded spatial dimensions, by halo exchange.

A window at the edge of a shard reaches into the neighbouring shards. `exchange` fetches the halo, the rows beyond the edge,
and `conv` convolves the extended local image. Value and gradients equal those of the unsharded convolution, for every
stride, dilation and padding whose halo lies within the neighbouring shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.errors import Problem, StrategyError, StrategyTypeError, closest, did_you_mean, fail, raise_problems
from shardfn.frontend.meshes import mesh_and_spec, on_devices_of, partition_spec
from shardfn.frontend.outer_call import is_on_parts
from shardfn.ir.model import Spec, axes_of

__all__ = ["Halo", "conv", "exchange", "halo_of"]

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Halo:
    """The halo of one sharded dimension.

    Attributes:
      before: rows that each shard fetches from its neighbours.
      after: rows that each shard fetches from its neighbours.
      starts: for each shard, the first row of its first window. It counts dilated rows from the first fetched row.
      length: dilated rows that each shard reads.
      shard_out: rows of the result that each shard computes.
      size_out: rows of the complete result.
      dilation: 1 + the zeros between rows.
    """

    before: int
    after: int
    starts: tuple[int, ...]
    length: int
    shard_out: int
    size_out: int
    dilation: int = 1


def halo_of(
    size: int,
    shards: int,
    window: int,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    window_dilation: int = 1,
    dilation: int = 1,
) -> Halo | str:
    """The halo of a dimension under a window, or the reason why an exchange with the neighbours cannot provide it.

    Args:
      size: rows of the dimension, a multiple of `shards`.
      shards: the number of equal shards.
      window: rows of the kernel.
      stride: rows between two windows.
      padding: zero rows before and after; a negative number removes rows.
      window_dilation: 1 + the zeros between the kernel's rows.
      dilation: 1 + the zeros between the image's rows.

    >>> halo_of(16, 4, 3, padding=(1, 1))
    Halo(before=1, after=1, starts=(0, 0, 0, 0), length=6, shard_out=4, size_out=16, dilation=1)
    >>> halo_of(16, 8, 9)
    'shard 0 needs 7 rows after its own, and its neighbour has 2'
    """
    rows, span = size // shards, (window - 1) * window_dilation + 1
    size_out = max(0, ((size - 1) * dilation + 1 + sum(padding) - span) // stride + 1)
    if size_out == 0:
        return f"no window of {span} rows fits into {(size - 1) * dilation + 1 + sum(padding)}"
    shard_out = -(-size_out // shards)
    length = (shard_out - 1) * stride + span
    firsts = [p * shard_out * stride - padding[0] for p in range(shards)]  # in dilated rows
    befores = [-((first - p * rows * dilation) // dilation) for p, first in enumerate(firsts)]
    afters = [-(-(first + length) // dilation) - (p + 1) * rows for p, first in enumerate(firsts)]
    for p, first in enumerate(firsts):
        kept = min((p + 1) * shard_out, size_out) - p * shard_out
        if kept <= 0:
            continue  # this shard's result is discarded
        last = first + (kept - 1) * stride + span
        lack = {
            "before": min(befores[p], p * rows),
            "after": min(-(-last // dilation), size) - (p + 1) * rows,
        }
        for side, count in lack.items():
            if count > rows:
                return f"shard {p} needs {count} rows {side} its own, and its neighbour has {rows}"
    before, after = max(0, *befores), max(0, *afters)
    starts = tuple(first - (p * rows - before) * dilation for p, first in enumerate(firsts))
    return Halo(before, after, starts, length, shard_out, size_out, dilation)


def exchange(x: jax.Array, before: int, after: int, axes: str | AxisNames, dim: int) -> jax.Array:
    """Halo exchange: a shard with the last rows of the shard before it and the first rows of the one after it.

    For use inside `jax.shard_map`. Rows beyond the first and the last shard are zero, and so are rows that a neighbour does
    not have.

    Args:
      x: the local shard.
      before: rows to fetch from the shard before.
      after: rows to fetch from the shard after.
      axes: the mesh axes that shard the dimension, major to minor.
      dim: the dimension.

    Returns:
      The shard, longer by `before + after` rows.

    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    >>> rows = PartitionSpec("rows")
    >>> fetch = jax.shard_map(lambda x: exchange(x, 1, 0, "rows", 0), mesh=mesh, in_specs=rows, out_specs=rows)
    >>> fetch(jax.numpy.arange(1, 9)).tolist()
    [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]
    """
    count, size = lax.axis_size(axes), x.shape[dim]
    parts = [x]
    if before:
        rows = lax.slice_in_dim(x, max(0, size - before), size, axis=dim)
        rows = lax.ppermute(rows, axes, [(p, p + 1) for p in range(count - 1)])
        parts.insert(0, _padded(rows, dim, max(0, before - size), 0))
    if after:
        rows = lax.slice_in_dim(x, 0, min(size, after), axis=dim)
        rows = lax.ppermute(rows, axes, [(p + 1, p) for p in range(count - 1)])
        parts.append(_padded(rows, dim, 0, max(0, after - size)))
    return lax.concatenate(parts, dim) if len(parts) > 1 else x


def conv(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    layout: Any,
    kernel_layout: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` of a sharded image; its spatial dimensions may be sharded.

    Batch and spatial dimensions of the result are sharded as the image's, its channels as the kernel's output channels. A
    spatial dimension of the result that its axes do not divide is computed in shards, and XLA reshards it. Over sharded
    input channels the result is summed; with as many groups it keeps them sharded. With groups and sharded output
    channels, each device takes the part of the image that its groups use. A kernel with another sharding is gathered.

    Args:
      lhs: the image, by default [N, C, H, W], with any number of spatial dimensions.
      rhs: the kernel, by default [O, I, H, W].
      window_strides: as in `jax.lax.conv_general_dilated`.
      padding: as in `jax.lax.conv_general_dilated`.
      lhs_dilation: as in `jax.lax.conv_general_dilated`.
      rhs_dilation: as in `jax.lax.conv_general_dilated`.
      dimension_numbers: as in `jax.lax.conv_general_dilated`.
      feature_group_count: the same.
      precision: the same.
      preferred_element_type: the same.
      batch_group_count: the same; above 1 only with an unsharded batch.
      layout: the sharding of the image, a Layout or a NamedSharding; it determines that of the result.
      kernel_layout: the sharding of the kernel, on the same mesh; replicated if None.

    Returns:
      The result, a sharded array. A loss that is called on a part of the batch (`shardfn.train`) gets the unsharded one.

    Raises:
      StrategyError: a dimension that its axes do not divide; a window that reaches beyond the neighbouring shard; groups
        that the shards do not divide; strides, dilations or padding that do not fit the spatial dimensions.
      StrategyTypeError: a layout of another type.

    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.make_mesh((2, 4), ("row", "column"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> image, kernel = jax.numpy.ones((1, 16, 32, 3)), jax.numpy.ones((3, 3, 3, 8))
    >>> y = conv(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ...          layout=NamedSharding(mesh, PartitionSpec(None, "row", "column", None)))
    >>> y.shape, y.sharding.spec
    ((1, 8, 16, 8), P(None, 'row', 'column', None))
    """
    lhs, rhs = (x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.numpy.asarray(x) for x in (lhs, rhs))
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    why = "a halo exchange needs named mesh axes"
    mesh, image = mesh_and_spec(layout, lhs.ndim, "layout", why)
    kernel: Spec = ((),) * rhs.ndim
    if kernel_layout is not None:
        other, kernel = mesh_and_spec(kernel_layout, rhs.ndim, "kernel_layout", why)
        if other.axis_names != mesh.axis_names or other.axis_sizes != mesh.axis_sizes:
            fail(StrategyTypeError, "the image and the kernel are on different meshes",
                 where=f"layout = {layout!r}, kernel_layout = {kernel_layout!r}",
                 fix="use one mesh, with the same axis names")  # fmt: skip
    if on_parts := is_on_parts("halo.conv"):
        image, kernel = ((),) * lhs.ndim, ((),) * rhs.ndim
    spatial = lhs.ndim - 2
    steps = {"window_strides": window_strides, "lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation}
    raise_problems(list(_problems_of_windows(spatial, steps, padding)))
    strides, inner, outer = (tuple(map(int, n)) if n is not None else (1,) * spatial for n in steps.values())
    window_shape = tuple(rhs.shape[d] for d in numbers.rhs_spec[2:])
    if isinstance(padding, str):
        if any(d > 1 for d in inner):
            fail(StrategyError, f"padding {padding!r} has no meaning with zeros between the image's rows",
                 where=f"padding = {padding!r}, lhs_dilation = {inner}",
                 why="the output size is ambiguous; `jax.lax.conv_general_dilated` refuses it too",
                 fix="give the zeros before and after each spatial dimension: padding=[(1, 1), (1, 1)]")  # fmt: skip
        spans = [(w - 1) * d + 1 for w, d in zip(window_shape, outer, strict=True)]
        sizes = [lhs.shape[d] for d in numbers.lhs_spec[2:]]
        padding = lax.padtype_to_pads(sizes, spans, strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    strategy = [_size(mesh, dim) for dim in image]
    counts = feature_group_count, batch_group_count
    raise_problems(list(_problems(mesh, lhs.shape, rhs.shape, image, kernel, numbers, *counts)))
    halos: list[Halo | None] = []
    for i, dim in enumerate(numbers.lhs_spec[2:]):
        found = None
        if strategy[dim] > 1:
            found = halo_of(lhs.shape[dim], strategy[dim], window_shape[i], strides[i], pads[i], outer[i], inner[i])
        if isinstance(found, str):
            fail(StrategyError, f"a window reaches beyond the neighbouring shards of dim {dim} of the image",
                 where=f"image {list(lhs.shape)} sharded {tuple(strategy)}, kernel {list(rhs.shape)}, stride {strides[i]}, "
                 f"padding {pads[i]}, dilations {inner[i]} and {outer[i]}",
                 why=found, fix=f"shard dim {dim} less than {strategy[dim]} ways, or another dimension")  # fmt: skip
        halos.append(found)

    grouped, channels = feature_group_count > 1, image[numbers.lhs_spec[1]]
    groups = feature_group_count // strategy[numbers.lhs_spec[1]] if grouped else 1
    summed = () if grouped else channels
    out = channels if grouped and channels else kernel[numbers.rhs_spec[0]]
    # `_problems` has checked that the parts of the groups on different devices are equal.
    shares = 1 if grouped and channels else min(max(groups, batch_group_count), _size(mesh, out))
    convolution = _Convolution(image, out, numbers, strides, pads, inner, outer, groups, batch_group_count,
                               precision, preferred_element_type, tuple(halos), summed, shares)  # fmt: skip
    if on_parts:
        return convolution.on_device(lhs, rhs)
    places = partition_spec(image), partition_spec(convolution.kernel)
    targets = (NamedSharding(mesh, spec) for spec in places)
    return _program(mesh, convolution)(*map(on_devices_of, (lhs, rhs), targets))


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """A convolution with its shardings.

    `groups` counts the groups of the local image, `out` are the mesh axes of the output channels, `summed` those of the input
    channels that the result is summed over. `shares` is the number of parts that the groups fall into along `out`; each device
    takes the channels, or the batch, of its part.
    """

    image: Spec
    out: AxisNames
    numbers: lax.ConvDimensionNumbers
    strides: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    groups: int
    batch_groups: int
    precision: Any
    dtype: Any
    halos: tuple[Halo | None, ...]
    summed: AxisNames
    shares: int

    @property
    def kernel(self) -> Spec:
        """The sharding of the kernel."""
        dims: list[AxisNames] = [()] * len(self.image)
        dims[self.numbers.rhs_spec[0]], dims[self.numbers.rhs_spec[1]] = self.out, self.summed
        return tuple(dims)

    @property
    def result(self) -> Spec:
        """The sharding of the result."""
        dims: list[AxisNames] = [()] * len(self.image)
        for out_dim, dim in zip(self.numbers.out_spec, self.numbers.lhs_spec, strict=True):
            dims[out_dim] = self.image[dim]
        dims[self.numbers.out_spec[1]] = self.out
        return tuple(dims)

    def on_device(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """The convolution of the local shard."""
        if self.shares > 1:
            dim = self.numbers.lhs_spec[1 if self.groups > 1 else 0]
            size, count = x.shape[dim] // self.shares, lax.axis_size(self.out)
            first = lax.axis_index(self.out) * self.shares // count * size
            x = lax.dynamic_slice_in_dim(x, first, size, axis=dim)
        groups, batch_groups = (n // self.shares if n > 1 else 1 for n in (self.groups, self.batch_groups))
        pads, inner = list(self.pads), list(self.inner)
        for i, (halo, dim) in enumerate(zip(self.halos, self.numbers.lhs_spec[2:], strict=True)):
            if halo is not None:
                x = _window(x, halo, self.image[dim], dim)
            elif min(pads[i]) < 0:  # XLA computes negative padding wrongly on the CPU (seen on JAX 0.10.2)
                x = _padded(x, dim, *pads[i], inner[i] - 1)
            else:
                continue
            pads[i], inner[i] = (0, 0), 1
        y = lax.conv_general_dilated(x, k, self.strides, pads, inner, self.outer, self.numbers, groups, batch_groups,
                                     self.precision, self.dtype)  # fmt: skip
        return lax.psum(y, self.summed) if self.summed else y


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh | AbstractMesh, convolution: _Convolution) -> Any:
    """The jitted convolution, cached: equal calls outside another `jit` compile once."""
    in_specs = partition_spec(convolution.image), partition_spec(convolution.kernel)
    run = jax.shard_map(convolution.on_device, mesh=mesh, in_specs=in_specs,
                        out_specs=partition_spec(convolution.result))  # fmt: skip

    @jax.jit
    def program(x: jax.Array, k: jax.Array) -> jax.Array:
        y = run(x, k)
        for dim, halo in zip(convolution.numbers.out_spec[2:], convolution.halos, strict=True):
            if halo is not None and halo.size_out != y.shape[dim]:
                y = lax.slice_in_dim(y, 0, halo.size_out, axis=dim)
        return y

    return program


def _size(mesh: Mesh | AbstractMesh, axes: AxisNames) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _window(x: jax.Array, halo: Halo, axes: AxisNames, dim: int) -> jax.Array:
    """The rows that the windows of this device use, with zeros between them and beyond the image."""
    x = exchange(x, halo.before, halo.after, axes, dim)
    x = _padded(x, dim, 0, halo.dilation - 1, halo.dilation - 1)
    if len(set(halo.starts)) == 1:
        return lax.slice_in_dim(x, halo.starts[0], halo.starts[0] + halo.length, axis=dim)
    start = jax.numpy.asarray(halo.starts)[lax.axis_index(axes)]
    return lax.dynamic_slice_in_dim(x, start, halo.length, axis=dim)


def _padded(x: jax.Array, dim: int, low: int, high: int, between: int = 0) -> jax.Array:
    if not (low or high or between):
        return x
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, between)
    return lax.pad(x, jax.numpy.zeros((), x.dtype), config)


def _problems(
    mesh: Mesh | AbstractMesh, lhs: Sequence[int], rhs: Sequence[int], image: Spec, kernel: Spec, numbers: Any,
    groups: int, batch_groups: int,
) -> Iterator[Problem]:  # fmt: skip
    """What is wrong with the shardings of an image and a kernel of these shapes."""
    strategy = [_size(mesh, dim) for dim in image]
    where = f"image {list(lhs)} sharded {tuple(strategy)}"
    for dim, (size, shards) in enumerate(zip(lhs, strategy, strict=True)):
        if size % shards:
            yield Problem(f"dim {dim} of the image cannot be sharded {shards} ways", where,
                          f"{size} is not divisible by {shards}",
                          f"leave it unsharded, or pad it to {-(-size // shards) * shards}")  # fmt: skip
    batch, channels = (strategy[d] for d in numbers.lhs_spec[:2])
    if groups > 1 and groups % channels:
        yield Problem(f"the channels of the image cannot be sharded {channels} ways with {groups} groups", where,
                      f"{groups} is not divisible by {channels}, and a group must be on one device",
                      "leave the channels unsharded")  # fmt: skip
    if batch_groups > 1 and batch > 1:
        yield Problem(f"the batch of the image cannot be sharded {batch} ways with batch_group_count = {batch_groups}", where,
                      "a group of the batch must be on one device", "leave the batch unsharded")  # fmt: skip
    used = set(axes_of(image))
    both = sorted(used & set(kernel[numbers.rhs_spec[0]]))
    if both:
        yield Problem(f"the kernel's output channels and the image are both sharded over {', '.join(both)}", where,
                      "two dimensions of the result would use one axis", "shard the kernel over another axis")  # fmt: skip
    out_dim = numbers.rhs_spec[0]
    size, shards = rhs[out_dim], _size(mesh, kernel[out_dim])
    where = f"kernel {list(rhs)} sharded {shards} ways along dim {out_dim}"
    if groups > 1 and image[numbers.lhs_spec[1]]:
        return  # the image's channels place the groups, and the kernel follows
    if size % shards:
        yield Problem(f"the kernel's output channels cannot be sharded {shards} ways", where,
                      f"{size} is not divisible by {shards}",
                      "leave them unsharded, or use fewer shards")  # fmt: skip
        return
    for name, count, dim in (("feature", groups, numbers.lhs_spec[1]), ("batch", batch_groups, numbers.lhs_spec[0])):
        if count < 2 or shards < 2:
            continue
        for of, n in ((f"dim {dim} of the image", lhs[dim]), ("the kernel's output channels", size)):
            if n % count:
                yield Problem(f"{of} cannot be split into {name}_group_count = {count} groups",
                              f"image {list(lhs)}, kernel {list(rhs)}", f"{n} is not divisible by {count}",
                              f"give a {name}_group_count that divides it")  # fmt: skip
                return
        if count % shards and shards % count:
            fitting = sorted({math.gcd(shards, count), count} - {1})
            yield Problem(f"the kernel's output channels cannot be sharded {shards} ways with {name}_group_count = {count}",
                          where,
                          f"neither of {shards} and {count} divides the other, so a device would hold parts of several groups",
                          f"shard them {' or '.join(map(str, fitting))} ways, or not at all")  # fmt: skip


def _problems_of_windows(dims: int, steps: dict[str, Any], padding: Any) -> Iterator[Problem]:
    example = f"({', '.join(['1'] * dims)}{',' * (dims == 1)})"
    for name, given in steps.items():
        if given is None and name != "window_strides":
            continue
        numbers = _ints(given, dims)
        if numbers is None or min(numbers, default=1) < 1:
            yield Problem(f"`{name}` must be {dims} ints from 1", f"{name} = {given!r:.80}",
                          f"the image has {dims} spatial dimensions, and each needs one", f"{name}={example}")  # fmt: skip
    if isinstance(padding, str):
        if padding.upper() not in (words := ("SAME", "SAME_LOWER", "VALID")):
            yield Problem("padding is an unknown word", f"padding = {padding!r:.80}", "",
                          did_you_mean(closest(padding, words))
                          or 'use "SAME", "SAME_LOWER" or "VALID", or pairs of numbers')  # fmt: skip
        return
    pairs = tuple(padding) if isinstance(padding, Iterable) else ()
    if len(pairs) != dims or any(_ints(pair, 2) is None for pair in pairs):
        yield Problem(f"`padding` must be {dims} pairs of ints", f"padding = {padding!r:.80}",
                      "each spatial dimension has its own", f"padding=[{', '.join(['(1, 1)'] * dims)}]")  # fmt: skip


def _ints(given: Any, count: int) -> tuple[int, ...] | None:
    """The numbers as `count` ints, or None."""
    try:
        found = tuple(map(operator.index, given))
    except TypeError:
        return None
    return found if len(found) == count else None
