"""A weather model with halo exchange: an hour of a continent at 1 km on 64 TPU v5e.

32 layers of air flow over 16,384 x 16,384 columns. Each layer is one of shallow water: winds and a thickness, turned by the
Earth's rotation and pushed by the pressure of all layers. The mesh over rows and columns is given. `halo.exchange` fetches two
rows from each neighbour once a step, and a device computes with slices of its own region.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from examples.gallery import Program, shapes, show
from shardfn import halo


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 32
    rows: int = 16_384
    columns: int = 16_384
    steps: int = 720
    seconds: float = 5.0
    metres: float = 1000.0
    depth: float = 300.0
    rotation: float = 1e-4
    viscosity: float = 0.02
    mesh: tuple[int, int] = (8, 8)


TINY = Config(layers=2, rows=16, columns=32, steps=3, mesh=(2, 4))


def surrounded(x, axes):
    """Fields [fields, layers, rows, columns] with two rows and columns more on each side; outside the region they are zero."""
    if axes is None:
        return jnp.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
    return halo.exchange(halo.exchange(x, 2, 2, axes[0], 2), 2, 2, axes[1], 3)


def inside(x):
    return x[..., 1:-1, 1:-1]


def north(x):
    return (x[..., 2:, 1:-1] - x[..., :-2, 1:-1]) / 2


def east(x):
    return (x[..., 1:-1, 2:] - x[..., 1:-1, :-2]) / 2


def smooth(x):
    return x[..., 2:, 1:-1] + x[..., :-2, 1:-1] + x[..., 1:-1, 2:] + x[..., 1:-1, :-2] - 4 * inside(x)


def advance(state, pressures, cfg, axes):
    """One step of winds u (eastward), v (northward) and thickness h; pressures [layers, layers] has the effect of each h."""
    u, v, h = surrounded(state, axes)
    ratio, turn = cfg.seconds / cfg.metres, cfg.seconds * cfg.rotation
    h = inside(h) - ratio * (east(u * (cfg.depth + h)) + north(v * (cfg.depth + h)))
    p = jnp.einsum("kl,lrc->krc", pressures, h)
    u, v = inside(u), inside(v)

    def moved(wind):
        return inside(wind) - ratio * (inside(u) * east(wind) + inside(v) * north(wind)) + cfg.viscosity * smooth(wind)

    return jnp.stack(
        [moved(u) + turn * inside(v) - ratio * east(p), moved(v) - turn * inside(u) - ratio * north(p), inside(h)]
    )


def forecast(state, pressures, cfg, axes):
    """The state [3, layers, rows, columns] after all steps."""
    return jax.lax.scan(lambda x, _: (advance(x, pressures, cfg, axes), None), state, length=cfg.steps)[0]


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    mesh = AbstractMesh(cfg.mesh, ("row", "column"), axis_types=(AxisType.Auto,) * 2)
    region = PartitionSpec(None, None, "row", "column")

    def weather(state, pressures):
        run = lambda x, p: forecast(x, p, cfg, ("row", "column"))  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(region, PartitionSpec()), out_specs=region)(state, pressures)

    sizes = ((3, cfg.layers, cfg.rows, cfg.columns), (cfg.layers, cfg.layers))
    options = {"level": "time", "donate_argnums": (0,)}
    device = None if size == "tiny" else "tpu-v5e:8x8"
    plain = lambda x, p: forecast(x, p, cfg, None)  # noqa: E731
    return Program(weather, shapes(jnp.float32, list(sizes)), device, options, unsharded=plain)


NOTES = """
A step has four collective-permutes: two rows to each neighbour along one mesh axis, then two columns along the other, with the
corners in them.
"""

if __name__ == "__main__":
    show(program)
