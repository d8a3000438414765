"""What kinds of kernels reach of a chip's rates, measured: sorts, FFTs, solvers, convolutions, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardfn.cost.backends.gpu_sorts import radix_passes
from shardfn.cost.backends.library_call import KINDS
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
    points = math.isqrt(elements // 32)
    return {
        "sort": KindStep(lambda x: jnp.sort(x, -1), (rows, row), jnp.int32, 4.0 * rows * row * passes * (1 + reads)),
        "bitonic sort": KindStep(lambda x: jnp.sort(x, -1), (16384,), jnp.int32, 105.0),
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
    rates = {
        "memory": chip.memory_bytes_s,
        "elements": chip.vector_flops or chip.flops,
        "matmul": chip.rate("f32"),
        "launches": 1 / (chip.launch_s or 1e-6),
    }
    return work / seconds / rates[KINDS[kind]]
