"""Window dimensions: which elements ops with windows and offsets read, from the attributes of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from shardfn.ir.model import WindowDim

Numbers = Mapping[str, Sequence[int]]
"""Integer attributes of an op by name; what an op has not is missing."""

Shapes = Sequence[Sequence[int]]


def window_dims(name: str, numbers: Numbers, shapes: Shapes) -> tuple[WindowDim, ...]:
    """The window dimensions of one op; empty for ops without windows.

    Args:
      name: of the op, such as `slice`.
      numbers: its attributes; a convolution's dimensions are `image`, `kernel` and `result`.
      shapes: of its operands, then of its results.

    >>> window_dims("slice", {"start_indices": [2], "limit_indices": [8], "strides": [1]}, [(8,), (6,)])
    (WindowDim(operand=0, dim=0, out_dim=0, stride=1, low=2, extent=1, spacing=1, over=-1, unread=0),)
    """
    read = _TAPS.get(name)
    return read(numbers, shapes) if read else ()


def _slice(numbers: Numbers, _: Shapes) -> tuple[WindowDim, ...]:
    each = zip(numbers["start_indices"], numbers["limit_indices"], numbers["strides"], strict=True)
    return tuple(
        WindowDim(0, d, d, stride, start, unread=max(limit - start - 1, 0) % stride)
        for d, (start, limit, stride) in enumerate(each)
    )


def _pad(numbers: Numbers, _: Shapes) -> tuple[WindowDim, ...]:
    both = zip(numbers["edge_padding_low"], numbers["interior_padding"], strict=True)
    return tuple(WindowDim(0, d, d, low=-low, spacing=holes + 1) for d, (low, holes) in enumerate(both))


def _reverse(numbers: Numbers, _: Shapes) -> tuple[WindowDim, ...]:
    return tuple(WindowDim(0, d, d) for d in numbers["dimensions"])


def _reduce_window(numbers: Numbers, shapes: Shapes) -> tuple[WindowDim, ...]:
    """Over each of the operands, which are a third of all shapes: each has an initial value and a result."""
    found = _windows(numbers, numbers["window_dimensions"], "window_dilations", "base_dilations")
    return tuple(WindowDim(i, d, d, *window) for i in range(len(shapes) // 3) for d, window in enumerate(found))


def _select_and_scatter(numbers: Numbers, _: Shapes) -> tuple[WindowDim, ...]:
    """An element is selected, and written, within the windows that contain it."""
    size = numbers["window_dimensions"]
    strides = numbers.get("window_strides") or [1] * len(size)
    overlaps = [n - s for n, s in zip(size, strides, strict=True)]
    return tuple(WindowDim(0, d, d, 1, -n, 2 * n + 1) for d, n in enumerate(overlaps) if n > 0)


def _convolution(numbers: Numbers, shapes: Shapes) -> tuple[WindowDim, ...]:
    """The image beside the result, and beside the kernel: a kernel's gradient is a convolution with a large kernel."""
    _, kernel, result = shapes
    found = []
    apart = numbers.get("rhs_dilation") or [1] * len(numbers["kernel"])
    windows = _windows(numbers, [kernel[d] for d in numbers["kernel"]], "rhs_dilation", "lhs_dilation")
    dims = zip(numbers["image"], numbers["kernel"], numbers["result"], apart, windows, strict=True)
    for image, k, out, step, (stride, low, extent, spacing) in dims:
        found.append(WindowDim(0, image, out, stride, low, extent, spacing))
        found.append(WindowDim(0, image, k, step, low, (result[out] - 1) * stride + 1, spacing, 1))
    return tuple(found)


def _windows(numbers: Numbers, size: Sequence[int], dilation: str, spacing: str) -> list[tuple[int, int, int, int]]:
    """(stride, low, extent, spacing) of every dim of a window."""
    ones = [1] * len(size)
    strides, apart, holes = (numbers.get(name) or ones for name in ("window_strides", dilation, spacing))
    low = (numbers.get("padding") or [0, 0] * len(size))[::2]
    return [(strides[d], -low[d], (n - 1) * apart[d] + 1, holes[d]) for d, n in enumerate(size)]


@functools.lru_cache(1 << 12)
def halo_extent(size: int, out_size: int, shards: int, window: WindowDim) -> tuple[int, int]:
    """Rows that a shard of the result reads before and after the operand's shard on the same device, at most.

    >>> halo_extent(64, 64, 8, WindowDim(0, 0, 0, low=-1, extent=3))
    (1, 1)
    """
    own, out = -(-size // shards), -(-out_size // shards)
    before = after = 0
    for shard in range(shards):
        first = max(0, -(-(shard * out * window.stride + window.low) // window.spacing))
        end = min(
            size, (((shard + 1) * out - 1) * window.stride + window.low + window.extent - 1) // window.spacing + 1
        )
        if first < end:
            before, after = max(before, shard * own - first), max(after, end - (shard + 1) * own)
    return before, after


_TAPS: dict[str, Callable[[Numbers, Shapes], tuple[WindowDim, ...]]] = {
    "slice": _slice,
    "pad": _pad,
    "reverse": _reverse,
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "convolution": _convolution,
}

ATTRIBUTES = (
    "start_indices", "limit_indices", "strides", "edge_padding_low", "interior_padding", "dimensions", "window_dimensions",
    "window_strides", "window_dilations", "base_dilations", "lhs_dilation", "rhs_dilation",
)  # fmt: skip
"""The attributes that are lists of integers; `padding` is a matrix, and is handed over row by row."""

WINDOWED = frozenset(_TAPS)
