"""Convolutions of images whose spatial dims are cut: each device fetches the border it lacks from its neighbours.

A window at the edge of a piece looks over it. `exchange` brings the rows beyond the edge from the neighbouring pieces,
and `conv` convolves what is then there, so that XLA sees whole local images only: the value and both gradients are those
of the uncut image, for every stride, dilation and padding whose border lies within the neighbouring piece.
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
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.meshes import MeshLayout, partition_spec, spec_of
from shardfn.ir.model import Spec

__all__ = ["Halo", "conv", "exchange", "halo_of"]

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Halo:
    """What the pieces of one cut dim need beside their own rows, in rows, and where each starts to read.

    `starts[p]` counts, in rows dilated by `dilation`, from the first of the `before` rows of piece p; from there piece p
    reads `length` rows and makes `pieces_out` rows of the result, of which all pieces together keep `size_out`.
    """

    before: int
    after: int
    starts: tuple[int, ...]
    length: int
    pieces_out: int
    size_out: int
    dilation: int = 1


def halo_of(
    size: int,
    cut: int,
    window: int,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    window_dilation: int = 1,
    dilation: int = 1,
) -> Halo | str:
    """The border of a dim of `size` rows in `cut` equal pieces under a window, or why it cannot be fetched.

    Args:
      size: rows of the dim, a multiple of `cut`.
      cut: the number of pieces.
      window: the kernel's rows.
      stride: rows between two windows.
      padding: zeros before and after the dim; a negative one takes rows away.
      window_dilation: 1 + the zeros between the kernel's rows.
      dilation: 1 + the zeros between the image's rows.

    >>> halo_of(16, 4, 3, padding=(1, 1))
    Halo(before=1, after=1, starts=(0, 0, 0, 0), length=6, pieces_out=4, size_out=16, dilation=1)
    >>> halo_of(16, 8, 9)
    'piece 0 needs 7 rows after its own, and its neighbour holds 2'
    """
    piece, span = size // cut, (window - 1) * window_dilation + 1
    size_out = max(0, ((size - 1) * dilation + 1 + sum(padding) - span) // stride + 1)
    if size_out == 0:
        return f"no window of {span} rows fits into {(size - 1) * dilation + 1 + sum(padding)}"
    pieces_out = -(-size_out // cut)
    length = (pieces_out - 1) * stride + span
    firsts = [p * pieces_out * stride - padding[0] for p in range(cut)]  # of the dilated dim, where each reads first
    befores = [-((first - p * piece * dilation) // dilation) for p, first in enumerate(firsts)]
    afters = [-(-(first + length) // dilation) - (p + 1) * piece for p, first in enumerate(firsts)]
    for p, first in enumerate(firsts):
        kept = min((p + 1) * pieces_out, size_out) - p * pieces_out
        if kept <= 0:
            continue  # all that this piece makes is cut off again
        last = first + (kept - 1) * stride + span
        lack = {
            "before": min(befores[p], p * piece),
            "after": min(-(-last // dilation), size) - (p + 1) * piece,
        }
        for side, rows in lack.items():
            if rows > piece:
                return f"piece {p} needs {rows} rows {side} its own, and its neighbour holds {piece}"
    before, after = max(0, *befores), max(0, *afters)
    starts = tuple(first - (p * piece - before) * dilation for p, first in enumerate(firsts))
    return Halo(before, after, starts, length, pieces_out, size_out, dilation)


def exchange(x: jax.Array, before: int, after: int, axes: str | AxisNames, dim: int) -> jax.Array:
    """A piece with the last `before` rows of the piece before it and the first `after` rows of the one after it.

    For use inside `jax.shard_map`, where `axes` cut the dim; beyond the first and the last piece there are zeros, and so
    where more rows are asked for than a neighbour has.

    Args:
      x: the piece on this device.
      before: rows to fetch from the piece before.
      after: rows to fetch from the piece after.
      axes: the mesh axes that cut the dim, major to minor.
      dim: the dim.

    >>> mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    >>> rows = PartitionSpec("rows")
    >>> fetch = jax.shard_map(lambda x: exchange(x, 1, 0, "rows", 0), mesh=mesh, in_specs=rows, out_specs=rows)
    >>> fetch(jax.numpy.arange(1, 9)).tolist()
    [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8]
    """
    count, held = lax.axis_size(axes), x.shape[dim]
    parts = [x]
    if before:
        rows = lax.slice_in_dim(x, max(0, held - before), held, axis=dim)
        rows = lax.ppermute(rows, axes, [(p, p + 1) for p in range(count - 1)])
        parts.insert(0, _padded(rows, dim, max(0, before - held), 0))
    if after:
        rows = lax.slice_in_dim(x, 0, min(held, after), axis=dim)
        rows = lax.ppermute(rows, axes, [(p + 1, p) for p in range(count - 1)])
        parts.append(_padded(rows, dim, 0, max(0, after - held)))
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
    """`jax.lax.conv_general_dilated` of an image that lies as `layout` says, its spatial dims cut or not.

    The result's batch and spatial dims are cut as the image's; its channels over the axes that cut the kernel's output
    channels. A spatial dim of the result that its cut does not divide is computed in pieces and then laid out by XLA.
    Channels of the image that are cut are summed over, or, with as many groups, stay cut. Where the kernel's output
    channels are cut and there are groups, each device takes the part of the image that its groups look at. A kernel cut
    otherwise than along its output channels is gathered.

    Args:
      lhs: the image, by default [N, C, H, W], with any number of spatial dims.
      rhs: the kernel, by default [O, I, H, W].
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers: as in `jax.lax.conv_general_dilated`.
      feature_group_count, precision, preferred_element_type: the same.
      batch_group_count: the same; more than 1 only where the batch is whole.
      layout: how the image lies; of the kernel and the result the rest follows.
      kernel_layout: how the kernel lies, on the same mesh; whole if None.

    Raises:
      StrategyError: a dim is not divided by its cut, a window reaches beyond the neighbouring piece, groups that the
        cut does not divide, or strides, dilations or padding that do not fit the spatial dims. StrategyTypeError: a
        layout of another type.

    >>> mesh = jax.make_mesh((2, 4), ("row", "column"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> image, kernel = jax.numpy.ones((1, 16, 32, 3)), jax.numpy.ones((3, 3, 3, 8))
    >>> y = conv(image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ...          layout=NamedSharding(mesh, PartitionSpec(None, "row", "column", None)))
    >>> y.shape, y.sharding.spec
    ((1, 8, 16, 8), P(None, 'row', 'column', None))
    """
    lhs, rhs = (x if hasattr(x, "shape") and hasattr(x, "dtype") else jax.numpy.asarray(x) for x in (lhs, rhs))
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    mesh, image = _placed(layout, lhs.ndim, "layout")
    kernel: Spec = ((),) * rhs.ndim
    if kernel_layout is not None:
        other, kernel = _placed(kernel_layout, rhs.ndim, "kernel_layout")
        if other.axis_names != mesh.axis_names or other.axis_sizes != mesh.axis_sizes:
            fail(StrategyTypeError, "the image and the kernel lie on two grids",
                 where=f"layout = {layout!r}, kernel_layout = {kernel_layout!r}",
                 fix="write both on one device matrix, with the same axis names")  # fmt: skip
    spatial = range(lhs.ndim - 2)
    steps = {"window_strides": window_strides, "lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation}
    raise_problems(list(_problems_of_windows(len(spatial), steps, padding)))
    strides, inner, outer = (tuple(map(int, n)) if n is not None else (1,) * len(spatial) for n in steps.values())
    windows = tuple(rhs.shape[d] for d in numbers.rhs_spec[2:])
    if isinstance(padding, str):
        if any(d > 1 for d in inner):
            fail(StrategyError, f"padding {padding!r} has no meaning with zeros between the image's rows",
                 where=f"padding = {padding!r}, lhs_dilation = {inner}",
                 why="which output size is meant is not clear: `jax.lax.conv_general_dilated` refuses it too",
                 fix="give the zeros before and after each spatial dim: padding=[(1, 1), (1, 1)]")  # fmt: skip
        spans = [(w - 1) * d + 1 for w, d in zip(windows, outer, strict=True)]
        sizes = [lhs.shape[d] for d in numbers.lhs_spec[2:]]
        padding = lax.padtype_to_pads(sizes, spans, strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    cuts = [math.prod(mesh.shape[axis] for axis in dim) for dim in image]
    problems = list(_problems(lhs, image, cuts, kernel, numbers, feature_group_count, batch_group_count))
    problems += _problems_of_outputs(mesh, lhs, rhs, image, kernel, numbers, feature_group_count, batch_group_count)
    borders: list[Halo | None] = []
    for i in spatial:
        dim = numbers.lhs_spec[2 + i]
        found = None
        if cuts[dim] > 1 and not problems:
            found = halo_of(lhs.shape[dim], cuts[dim], windows[i], strides[i], pads[i], outer[i], inner[i])
        if isinstance(found, str):
            problems.append(
                Problem(
                    f"a window reaches over the pieces that dim {dim} of the image is cut into",
                    where=f"image {list(lhs.shape)} cut {tuple(cuts)}, kernel {list(rhs.shape)}, stride {strides[i]}, "
                    f"padding {pads[i]}, dilations {inner[i]} and {outer[i]}",
                    why=found,
                    fix=f"cut dim {dim} less than {cuts[dim]} ways, or another dim",
                )
            )
        borders.append(found if isinstance(found, Halo) else None)
    raise_problems(problems)

    grouped, channels = feature_group_count > 1, image[numbers.lhs_spec[1]]
    groups = feature_group_count // cuts[numbers.lhs_spec[1]] if grouped else 1
    summed = () if grouped else channels
    out = channels if grouped and channels else kernel[numbers.rhs_spec[0]]
    asked = _Asked(image, out, numbers, strides, pads, inner, outer, groups, batch_group_count,
                   precision, preferred_element_type, tuple(borders), summed,
                   1 if grouped and channels else _shares(mesh, out, max(groups, batch_group_count)))  # fmt: skip
    places = partition_spec(image), partition_spec(asked.kernel)
    return _program(mesh, asked)(*(_moved(v, mesh, spec) for v, spec in zip((lhs, rhs), places, strict=True)))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A convolution and the layouts around it.

    `groups` are those of the image as it lies, `out` the axes that cut the kernel's output channels, and so the result's,
    `summed` the axes of cut channels. `shares` counts the parts of the groups that devices along `out` make results of: each
    takes what its groups look at, of the image's channels or of its batch.
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
    borders: tuple[Halo | None, ...]
    summed: AxisNames
    shares: int

    @property
    def kernel(self) -> Spec:
        """How the kernel comes in."""
        dims: list[AxisNames] = [()] * len(self.image)
        dims[self.numbers.rhs_spec[0]], dims[self.numbers.rhs_spec[1]] = self.out, self.summed
        return tuple(dims)

    @property
    def result(self) -> Spec:
        """How the result comes out."""
        dims: list[AxisNames] = [()] * len(self.image)
        for mine, theirs in zip(self.numbers.out_spec, self.numbers.lhs_spec, strict=True):
            dims[mine] = self.image[theirs]
        dims[self.numbers.out_spec[1]] = self.out
        return tuple(dims)

    def on_device(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """The convolution of one device's piece."""
        if self.shares > 1:
            dim = self.numbers.lhs_spec[1 if self.groups > 1 else 0]
            size, cut = x.shape[dim] // self.shares, lax.axis_size(self.out)
            first = lax.axis_index(self.out) * self.shares // cut * size
            x = lax.dynamic_slice_in_dim(x, first, size, axis=dim)
        groups, batch_groups = (n // self.shares if n > 1 else 1 for n in (self.groups, self.batch_groups))
        ready = [found is not None or min(pad) < 0 for found, pad in zip(self.borders, self.pads, strict=True)]
        for i, needed in enumerate(self.borders):
            dim = self.numbers.lhs_spec[2 + i]
            if needed is not None:
                x = _window(x, needed, self.image[dim], dim)
            elif ready[i]:  # XLA computes negative padding wrongly on the CPU (seen on JAX 0.10.2)
                x = _padded(x, dim, *self.pads[i], self.inner[i] - 1)
        y = lax.conv_general_dilated(
            x, k, self.strides,
            [(0, 0) if done else pad for done, pad in zip(ready, self.pads, strict=True)],
            [1 if done else d for done, d in zip(ready, self.inner, strict=True)],
            self.outer, self.numbers, groups, batch_groups, self.precision, self.dtype,
        )  # fmt: skip
        return lax.psum(y, self.summed) if self.summed else y


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh | AbstractMesh, asked: _Asked) -> Any:
    """The jitted convolution, the same for equal calls: outside another `jit` it is compiled once."""
    run = jax.shard_map(asked.on_device, mesh=mesh, in_specs=(partition_spec(asked.image), partition_spec(asked.kernel)),
                        out_specs=partition_spec(asked.result))  # fmt: skip

    @jax.jit
    def whole(x: jax.Array, k: jax.Array) -> jax.Array:
        y = run(x, k)
        for dim, needed in zip(asked.numbers.out_spec[2:], asked.borders, strict=True):
            if needed is not None and needed.size_out != y.shape[dim]:
                y = lax.slice_in_dim(y, 0, needed.size_out, axis=dim)
        return y

    return whole


def _shares(mesh: Mesh | AbstractMesh, out: AxisNames, groups: int) -> int:
    """Into how many parts the groups fall whose results lie on different devices; `_problems` has seen that they are whole."""
    return min(groups, math.prod(mesh.shape[axis] for axis in out))


def _window(x: jax.Array, needed: Halo, axes: AxisNames, dim: int) -> jax.Array:
    """The rows that this device's windows look at, zeros between them and beyond the image included."""
    x = exchange(x, needed.before, needed.after, axes, dim)
    if needed.dilation > 1:
        x = _padded(x, dim, 0, needed.dilation - 1, needed.dilation - 1)
    if len(set(needed.starts)) == 1:
        return lax.slice_in_dim(x, needed.starts[0], needed.starts[0] + needed.length, axis=dim)
    start = jax.numpy.asarray(needed.starts)[lax.axis_index(axes)]
    return lax.dynamic_slice_in_dim(x, start, needed.length, axis=dim)


def _padded(x: jax.Array, dim: int, low: int, high: int, between: int = 0) -> jax.Array:
    if not (low or high or between):
        return x
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (low, high, between)
    return lax.pad(x, jax.numpy.zeros((), x.dtype), config)


def _placed(layout: Any, ndim: int, name: str) -> tuple[Mesh | AbstractMesh, Spec]:
    if not isinstance(layout, MeshLayout | NamedSharding):
        fail(StrategyTypeError, f"`{name}` must be a Layout or a NamedSharding, but it is {a(layout)}",
             where=f"{name} = {layout!r:.80}", why="borders are fetched over named axes of the grid",
             fix='build one: Layout((2, 4), ("row", "column"))("None", "row", …), or pass image.sharding')  # fmt: skip
    is_jax = isinstance(layout, NamedSharding)
    spec = spec_of(layout.spec, ndim) if is_jax else layout.spec
    if len(spec) != ndim:
        fail(StrategyTypeError, f"`{name}` has {len(spec)} dims, and the array has {ndim}",
             where=f"{name} = {layout!r}", fix='give each dim an entry; that of a whole one is "None"')  # fmt: skip
    return layout.mesh if is_jax else _mesh(layout), spec


@functools.lru_cache(maxsize=64)
def _mesh(layout: Any) -> Mesh:
    return layout.mesh()


def _problems(
    lhs: Any, image: Spec, cuts: Sequence[int], kernel: Spec, numbers: Any, groups: int, batch_groups: int
) -> Iterator[Problem]:
    where = f"image {list(lhs.shape)} cut {tuple(cuts)}"
    for dim, (size, cut) in enumerate(zip(lhs.shape, cuts, strict=True)):
        if size % cut:
            yield Problem(f"dim {dim} of the image cannot be cut {cut} ways", where, f"{size} is not divisible by {cut}",
                          f"leave it whole, or pad it to {-(-size // cut) * cut}")  # fmt: skip
    batch, channels = (cuts[d] for d in numbers.lhs_spec[:2])
    if groups > 1 and groups % channels:
        yield Problem(f"the channels of the image cannot be cut {channels} ways with {groups} groups", where,
                      f"{groups} is not divisible by {channels}, and a group lies on one device",
                      "leave the channels whole")  # fmt: skip
    if batch_groups > 1 and batch > 1:
        yield Problem(f"the batch of the image cannot be cut {batch} ways with batch_group_count = {batch_groups}", where,
                      "a group of the batch lies on one device", "leave the batch whole")  # fmt: skip
    used = {axis for dim in image for axis in dim}
    both = sorted(used & set(kernel[numbers.rhs_spec[0]]))
    if both:
        yield Problem(f"the kernel's output channels and the image are both cut over {', '.join(both)}", where,
                      "the result would be cut twice over one axis", "cut the kernel over an axis of its own")  # fmt: skip


def _problems_of_windows(dims: int, steps: dict[str, Any], padding: Any) -> Iterator[Problem]:
    example = f"({', '.join(['1'] * dims)}{',' * (dims == 1)})"
    for name, given in steps.items():
        if given is None and name != "window_strides":
            continue
        numbers = _ints(given, dims)
        if numbers is None or min(numbers, default=1) < 1:
            yield Problem(f"`{name}` must be {dims} whole numbers from 1 on", f"{name} = {given!r:.80}",
                          f"the image has {dims} spatial dims, and each has its own", f"{name}={example}")  # fmt: skip
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            yield Problem("padding is no word that is known", f"padding = {padding!r:.80}", "",
                          'use "SAME", "SAME_LOWER" or "VALID", or pairs of numbers')  # fmt: skip
        return
    pairs = tuple(padding) if isinstance(padding, Iterable) else ()
    if len(pairs) != dims or any(_ints(pair, 2) is None for pair in pairs):
        yield Problem(f"`padding` must be {dims} pairs of whole numbers", f"padding = {padding!r:.80}",
                      "each spatial dim has zeros before and after it", f"padding=[{', '.join(['(1, 1)'] * dims)}]")  # fmt: skip


def _ints(given: Any, count: int) -> tuple[int, ...] | None:
    """As many whole numbers, or None."""
    try:
        found = tuple(map(operator.index, given))
    except TypeError:
        return None
    return found if len(found) == count else None


def _problems_of_outputs(
    mesh: Mesh | AbstractMesh,
    lhs: Any,
    rhs: Any,
    image: Spec,
    kernel: Spec,
    numbers: Any,
    groups: int,
    batch_groups: int,
) -> Iterator[Problem]:
    out_dim = numbers.rhs_spec[0]
    size, cut = rhs.shape[out_dim], math.prod(mesh.shape[axis] for axis in kernel[out_dim])
    where = f"kernel {list(rhs.shape)} cut {cut} ways along dim {out_dim}"
    if groups > 1 and image[numbers.lhs_spec[1]]:
        return  # the image's channels say where the groups lie, and the kernel follows
    if size % cut:
        yield Problem(f"the kernel's output channels cannot be cut {cut} ways", where, f"{size} is not divisible by {cut}",
                      "leave them whole, or cut them less")  # fmt: skip
        return
    for name, count, dim in (("feature", groups, numbers.lhs_spec[1]), ("batch", batch_groups, numbers.lhs_spec[0])):
        if count < 2 or cut < 2:
            continue
        for of, held in ((f"dim {dim} of the image", lhs.shape[dim]), ("the kernel's output channels", size)):
            if held % count:
                yield Problem(f"{of} cannot be split into {name}_group_count = {count} groups",
                              f"image {list(lhs.shape)}, kernel {list(rhs.shape)}", f"{held} is not divisible by {count}",
                              f"give a {name}_group_count that divides it")  # fmt: skip
                return
        if count % cut and cut % count:
            yield Problem(f"the kernel's output channels cannot be cut {cut} ways with {name}_group_count = {count}", where,
                          f"neither of {cut} and {count} divides the other, so that a device would hold part of several groups",
                          f"cut them {' or '.join(map(str, _fitting(cut, count)))} ways, or leave them whole")  # fmt: skip


def _fitting(cut: int, count: int) -> list[int]:
    return sorted({math.gcd(cut, count), count} - {1})


def _moved(value: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Any:
    """A concrete array that lies on other devices is moved to the mesh; others are jit's business."""
    if isinstance(value, Tracer) or isinstance(mesh, AbstractMesh):
        return value
    target = NamedSharding(mesh, spec)
    if isinstance(value, jax.Array) and value.committed and value.sharding.device_set == target.device_set:
        return value
    return jax.device_put(value, target)
