"""What kinds of kernels reach of a chip's rates, measured: sorts, FFTs, solvers, convolutions, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardfn.cost.backends.gpu_sorts import radix_passes
from shardfn.cost.backends.library_call import base_rate
from shardfn.cost.devices.chips import Chip


class KindStep(NamedTuple):
    """What is run for one kind: a function of an array, the array's shape and dtype on one device, and the kind's work in it."""

    function: Callable[[jax.Array], jax.Array]
    shape: tuple[int, ...]
    dtype: Any
    work: float


_CHANNELS_LAST = {2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def _convolve(x: jax.Array) -> jax.Array:
    spatial = x.ndim - 2
    kernel = jnp.full((*(3,) * spatial, x.shape[-1], x.shape[-1]), 0.01, x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1,) * spatial, "SAME", dimension_numbers=_CHANNELS_LAST[spatial])


def _kernel_gradient(x: jax.Array) -> jax.Array:
    kernel = jnp.full((3, 3, 3, x.shape[-1], x.shape[-1]), 0.01, x.dtype)

    def convolved(kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1, 1), "SAME", dimension_numbers=_CHANNELS_LAST[3])

    return jax.vjp(convolved, kernel)[1](x)[0]


def _definite(x: jax.Array) -> jax.Array:
    return 0.01 * (x + x.T) + x.shape[0] * jnp.eye(x.shape[0], dtype=x.dtype)


def _solved(x: jax.Array) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(x, x[:, :1], lower=True)  # the values are of no matter


def _counted(x: jax.Array) -> jax.Array:
    """Rows in an order in which no two that follow each other lie side by side."""
    return (jnp.arange(x.shape[0]) * 7919) % x.shape[0]


def _pooled(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def kind_steps(elements: int) -> dict[str, KindStep]:
    """What is run for each kind, with arrays of about `elements` elements on each device.

    >>> kind_steps(2**20)["fft"].shape
    (1024, 1024)
    """
    rows = max(2, elements // 2**16)
    row = elements // rows
    passes, reads = radix_passes(32, rows)
    side = 2 ** (math.isqrt(elements).bit_length() - 1)
    image = 1, *(2 ** round(math.log2(max(8, elements // 32)) / 3),) * 3, 32
    windows = 2.0 * math.prod(image) * 27 * 32
    photo = 1, *(2 ** round(math.log2(max(8, elements // 64)) / 2),) * 2, 64
    points = math.isqrt(4 * elements)
    few, many, pooled = max(2, elements // 4096), max(2, elements // 128), math.prod(photo)
    return {
        "sort": KindStep(lambda x: jnp.sort(x, -1), (rows, row), jnp.int32, 4.0 * rows * row * passes * (1 + reads)),
        "bitonic sort": KindStep(lambda x: jnp.sort(x, -1), (16384,), jnp.int32, 105.0),
        "comparison sort": KindStep(lambda x: jnp.sort(x, -1), (few, 4096), jnp.int32, 78.0 * few * 4096),
        "top_k of few": KindStep(lambda x: jax.lax.top_k(x, 8)[0], (rows, row), jnp.float32, 4.0 * rows * row),
        "gather": KindStep(lambda x: x[_counted(x)], (many, 128), jnp.float32, 2 * 4.0 * many * 128),
        "scatter": KindStep(lambda x: jnp.zeros_like(x).at[_counted(x)].add(x), (many, 128), jnp.float32, 4 * 4.0 * many * 128),
        "cumulative reduction": KindStep(lambda x: jnp.cumsum(x, 0), (many, 128), jnp.float32, 3 * 4.0 * many * 128),
        "pooling gradient": KindStep(jax.grad(lambda x: _pooled(x).sum()), photo, jnp.float32, 4.0 * pooled * (2 + 11 / 4)),
        "fft": KindStep(lambda x: jnp.fft.fft(x), (side, side), jnp.complex64, 2.0 * 8 * side**2),
        "cholesky": KindStep(lambda x: jnp.linalg.cholesky(_definite(x)), (side, side), jnp.float32, side**3 / 3),
        "triangular solve of a vector": KindStep(_solved, (side, side), jnp.float32, 4.0 * side**2),
        "reduction": KindStep(lambda x: jnp.exp(x[:, None] - x[None]).sum(1), (points, 1), jnp.float32, float(points**2)),
        "2D convolution": KindStep(_convolve, photo, jnp.float32, 2.0 * math.prod(photo) * 9 * 64),
        "3D convolution": KindStep(_convolve, image, jnp.float32, windows),
        "3D weight gradient": KindStep(_kernel_gradient, image, jnp.float32, windows),
    }  # fmt: skip


def kind_rate(kind: str, work: float, seconds: float, chip: Chip) -> float:
    """The part of the chip's rate that a kind reached: `Chip.kind_rates`.

    Args:
      kind: of `KINDS`.
      work: bytes, FLOPs, or rounds of a bitonic sort.
      seconds: measured.
      chip: its rates.
    """
    return work / seconds / base_rate(kind, chip)
