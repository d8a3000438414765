"""Stencils: heat, an image filter, Game of Life and a flow on 8 H100.

Each program reads its neighbours and is written as on one device: slices, `jnp.pad`, `jnp.roll` and `.at[...]`. Integers shard
it. The library writes these ops as shifts of evenly sharded arrays, so that a device sends what its neighbours read.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.gallery import Program, show

SIZES = ("heat", "bilateral", "life", "flow")


def heat(u):
    """Heat in a plate [rows, columns] whose edges keep their temperature."""
    near = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    return u.at[1:-1, 1:-1].add(0.2 * (near - 4 * u[1:-1, 1:-1]))


def bilateral(image):
    """An image [rows, columns, colours] smoothed over 5 x 5 pixels of similar colour; its edges are mirrored."""
    (rows, columns, _), wide = image.shape, jnp.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    total, weights = 0.0, 0.0
    for i in range(5):
        for j in range(5):
            near = wide[i : i + rows, j : j + columns]
            far = ((near - image) ** 2).sum(-1, keepdims=True) / 0.02 + ((i - 2) ** 2 + (j - 2) ** 2) / 8
            total, weights = total + jnp.exp(-far) * near, weights + jnp.exp(-far)
    return total / weights


def life(cells):
    """Conway's Game of Life; cells outside are dead."""
    (rows, columns), wide = cells.shape, jnp.pad(cells, 1)
    near = sum(wide[i : i + rows, j : j + columns] for i in range(3) for j in range(3)) - cells
    return ((near == 3) | ((cells == 1) & (near == 2))).astype(cells.dtype)


MOVES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
OPPOSITE = (0, 3, 4, 1, 2, 7, 8, 5, 6)
WEIGHTS = np.array([4 / 9] + 4 * [1 / 9] + 4 * [1 / 36], "float32").reshape(9, 1, 1)


def collide(f):
    """Populations [9, rows, columns] of a lattice Boltzmann fluid, on the way to equilibrium, with a force along the columns."""
    density = f.sum(0)
    down = sum(r * f[k] for k, (r, _) in enumerate(MOVES) if r) / density
    right = sum(c * f[k] for k, (_, c) in enumerate(MOVES) if c) / density + 1e-5
    along = jnp.stack([r * down + c * right for r, c in MOVES])
    equilibrium = WEIGHTS * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * (down**2 + right**2))
    return f - (f - equilibrium) / 0.8


def flow(f):
    """A fluid between a wall before the first row and one behind the last; the columns are periodic."""
    f = collide(f)
    moved = jnp.stack([jnp.roll(f[k], move, (0, 1)) for k, move in enumerate(MOVES)])
    for k, (row, _) in enumerate(MOVES):
        if row:  # what would come out of the wall is what went into it
            wall = slice(0, 1) if row > 0 else slice(-1, None)
            moved = moved.at[k, wall].set(f[OPPOSITE[k], wall])
    return moved


PROGRAMS = {
    "heat": (heat, (32_768, 32_768), jnp.float32, (2, 4), 1000),
    "bilateral": (bilateral, (16_384, 24_576, 3), jnp.float32, (8, 1, 1), 1),
    "life": (life, (65_536, 65_536), jnp.uint8, (8, 1), 1000),
    "flow": (flow, (9, 16_384, 8_192), jnp.float32, (1, 8, 1), 1000),
}
"""Function, shape, dtype, strategy, steps."""
TINY = {"heat": (16, 32), "bilateral": (32, 16, 3), "life": (16, 24), "flow": (9, 16, 8)}


def repeated(step, steps):
    def run(x):
        return lax.fori_loop(0, steps, lambda _, now: step(now), x)

    run.__name__ = step.__name__
    return run


def start(name, shape):
    """Where a program begins."""
    random = np.random.default_rng(0).random(shape)
    values = random > 0.6 if name == "life" else WEIGHTS * (1 + 0.01 * random) if name == "flow" else random
    return jnp.asarray(values, PROGRAMS[name][2])


def program(size: str) -> Program:
    if size != "tiny":
        function, shape, dtype, strategy, steps = PROGRAMS[size]
        options = {"in_strategy": (strategy,), "donate_argnums": (0,)}
        return Program(repeated(function, steps), (jax.ShapeDtypeStruct(shape, dtype),), "h100:8", options)

    def every(*arrays):
        return [repeated(PROGRAMS[name][0], 3)(x) for name, x in zip(SIZES, arrays, strict=True)]

    shapes = tuple(jax.ShapeDtypeStruct(TINY[name], PROGRAMS[name][2]) for name in SIZES)
    options = {"in_strategy": tuple(PROGRAMS[name][3] for name in SIZES)}
    return Program(every, shapes, None, options, draw=lambda: tuple(start(name, TINY[name]) for name in SIZES))


NOTES = """
![The halo of one shard](../images/halo-light.svg)

The rows and columns that a device receives in a step are its halo. Heat, the filter and life send theirs and nothing else.

The flow sends a row to each neighbour, of the three populations that move there, as XLA's CPU and GPU compilers compile it.

`benchmarks/RESULTS.md` compares these programs with the same by hand, with `jax.shard_map` and `ppermute`: lines of code, bytes
and time on eight virtual CPU devices. [Shard a stencil](../how-to/shard-a-stencil.md) explains what is sent when.
"""

if __name__ == "__main__":
    show(program)
