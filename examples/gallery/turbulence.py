"""Turbulence by FFT: steps of a flow of 1,024^3 points on 16 TPU v5p.

The Navier-Stokes equations in a periodic box, solved for Fourier coefficients. The velocity and its curl are multiplied at grid
points, so a step has six inverse transforms and three forward ones, each over three dimensions. A device transforms a dimension
that it has in full: the plan reshards the arrays between the transforms.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from examples.gallery import Program, show


@dataclasses.dataclass(frozen=True)
class Config:
    points: int = 1024
    steps: int = 10
    seconds: float = 1e-3
    viscosity: float = 1e-4


TINY = Config(points=16, steps=2)


def transform(fft, x):
    """`fft` over the last three dimensions, one at a time."""
    for axis in (-1, -2, -3):
        x = fft(x, axis=axis)
    return x


def cross(a, b):
    """The vector product of fields [3, ...]."""
    return jnp.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def advance(flow, cfg):
    """One step of the coefficients [3, points, points, points] of a velocity without divergence."""
    n = cfg.points
    one = jnp.fft.fftfreq(n, 1 / n).astype(jnp.float32)
    waves = [one.reshape([-1 if d == axis else 1 for d in range(3)]) for axis in range(3)]
    squared = sum(k**2 for k in waves)
    velocity = transform(jnp.fft.ifft, flow).real
    curl = transform(jnp.fft.ifft, 1j * cross(waves, flow)).real
    force = transform(jnp.fft.fft, cross(velocity, curl).astype(flow.dtype))
    kept = functools.reduce(jnp.logical_and, [jnp.abs(k) < n / 3 for k in waves])  # without aliases
    pressure = sum(k * f for k, f in zip(waves, force, strict=True)) / jnp.maximum(squared, 1)
    force = jnp.stack([f - k * pressure for k, f in zip(waves, force, strict=True)])
    return (flow + cfg.seconds * jnp.where(kept, force, 0)) * jnp.exp(-cfg.viscosity * cfg.seconds * squared)


def simulate(flow, cfg):
    return jax.lax.scan(lambda x, _: (advance(x, cfg), None), flow, length=cfg.steps)[0]


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    flow = jax.ShapeDtypeStruct((3, *(cfg.points,) * 3), jnp.complex64)
    draw = lambda: (jnp.fft.fftn(jax.random.normal(jax.random.key(0), flow.shape), axes=(1, 2, 3)),)  # noqa: E731
    options = {"level": "time", "donate_argnums": (0,)}
    device = None if size == "tiny" else "tpu-v5p:2x2x4"
    return Program(functools.partial(simulate, cfg=cfg), (flow,), device, options, draw=draw)


if __name__ == "__main__":
    show(program)
