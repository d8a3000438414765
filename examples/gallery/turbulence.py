"""Turbulence by FFT: steps of a flow of 1,024^3 points on 16 H100.

The Navier-Stokes equations in a periodic box, solved for Fourier coefficients. The velocity and its curl are multiplied at grid
points, so a step has six inverse transforms and three forward ones, each over three dimensions. A transform is a `jax.shard_map`
with one all-to-all; the mesh is given for it, and all else is open.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from examples.gallery import Program, show


@dataclasses.dataclass(frozen=True)
class Config:
    points: int = 1024
    steps: int = 10
    seconds: float = 1e-3
    viscosity: float = 1e-4
    devices: int = 16


TINY = Config(points=16, steps=2, devices=8)


def transformed(fft, mesh, is_inverse):
    """`jax.numpy.fft.fft` or `ifft` of fields [fields, points, points, points] over the last three dimensions. Coefficients are
    sharded along dimension 2, fields at points along dimension 1; with no mesh neither."""
    coefficients, points = PartitionSpec(None, None, "slab"), PartitionSpec(None, "slab")
    full, sharded = (1, 2) if is_inverse else (2, 1)  # at the start

    def on_device(x):
        x = fft(fft(x, axis=3), axis=full)
        if mesh is not None:
            x = jax.lax.all_to_all(x, "slab", split_axis=full, concat_axis=sharded, tiled=True)
        return fft(x, axis=sharded)

    if mesh is None:
        return on_device
    specs = (coefficients, points) if is_inverse else (points, coefficients)
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1])


def cross(a, b):
    """The vector product of fields [3, ...]."""
    return jnp.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def advance(flow, cfg, mesh):
    """One step of the coefficients [3, points, points, points] of a velocity without divergence."""
    n = cfg.points
    one = jnp.fft.fftfreq(n, 1 / n).astype(jnp.float32)
    waves = [one.reshape([-1 if d == axis else 1 for d in range(3)]) for axis in range(3)]
    squared = sum(k**2 for k in waves)
    at_points, of_points = transformed(jnp.fft.ifft, mesh, True), transformed(jnp.fft.fft, mesh, False)
    velocity, curl = at_points(flow).real, at_points(1j * cross(waves, flow)).real
    force = of_points(cross(velocity, curl).astype(flow.dtype))
    kept = functools.reduce(jnp.logical_and, [jnp.abs(k) < n / 3 for k in waves])  # without aliases
    pressure = sum(k * f for k, f in zip(waves, force, strict=True)) / jnp.maximum(squared, 1)
    force = jnp.stack([f - k * pressure for k, f in zip(waves, force, strict=True)])
    return (flow + cfg.seconds * jnp.where(kept, force, 0)) * jnp.exp(-cfg.viscosity * cfg.seconds * squared)


def simulate(flow, cfg, mesh):
    return jax.lax.scan(lambda x, _: (advance(x, cfg, mesh), None), flow, length=cfg.steps)[0]


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    mesh = AbstractMesh((cfg.devices,), ("slab",), axis_types=(AxisType.Auto,))
    flow = jax.ShapeDtypeStruct((3, *(cfg.points,) * 3), jnp.complex64)
    draw = lambda: (jnp.fft.fftn(jax.random.normal(jax.random.key(0), flow.shape), axes=(1, 2, 3)),)  # noqa: E731
    options = {"level": "time", "donate_argnums": (0,)}
    device = None if size == "tiny" else "h100:16"
    run = functools.partial(simulate, cfg=cfg)
    return Program(functools.partial(run, mesh=mesh), (flow,), device, options, draw=draw,
                   unsharded=functools.partial(run, mesh=None))  # fmt: skip


NOTES = """
XLA before JAX 0.12 computes an FFT of a sharded array on each GPU or CPU in full, after an all-gather. Inside `jax.shard_map` it
transforms the shard that a device has.
"""

if __name__ == "__main__":
    show(program)
