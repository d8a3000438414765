"""The programs of `examples/gallery/stencils.py` for one device of a `jax.shard_map`, which fetches its halo with `ppermute`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from examples.gallery.stencils import MOVES, OPPOSITE, collide, repeated


def fetched(last, first, axis):
    """The last rows of the device before, and the first rows of the one after; the two ends are neighbours."""
    count = lax.axis_size(axis)
    before = lax.ppermute(last, axis, [(i, (i + 1) % count) for i in range(count)])
    return before, lax.ppermute(first, axis, [((i + 1) % count, i) for i in range(count)])


def ends(axis):
    """Whether this device is the first, and whether it is the last."""
    place = lax.axis_index(axis)
    return place == 0, place == lax.axis_size(axis) - 1


def heat(u):
    """Heat in a plate that is sharded along rows and columns."""
    above, below = fetched(u[-1:], u[:1], "rows")
    left, right = fetched(u[:, -1:], u[:, :1], "columns")
    tall, wide = jnp.concatenate([above, u, below]), jnp.concatenate([left, u, right], 1)
    new = u + 0.2 * (tall[2:] + tall[:-2] + wide[:, 2:] + wide[:, :-2] - 4 * u)
    is_edge = jnp.zeros(u.shape, bool)
    for dim, axis in enumerate(("rows", "columns")):
        place, (is_first, is_last) = lax.broadcasted_iota("int32", u.shape, dim), ends(axis)
        is_edge |= (is_first & (place == 0)) | (is_last & (place == u.shape[dim] - 1))
    return jnp.where(is_edge, u, new)


def bilateral(image):
    """An image that is sharded along rows."""
    (rows, columns, _), (is_first, is_last) = image.shape, ends("rows")
    above, below = fetched(image[-2:], image[:2], "rows")
    above, below = jnp.where(is_first, image[2:0:-1], above), jnp.where(is_last, image[-2:-4:-1], below)
    wide = jnp.pad(jnp.concatenate([above, image, below]), ((0, 0), (2, 2), (0, 0)), mode="reflect")
    total, weights = 0.0, 0.0
    for i in range(5):
        for j in range(5):
            near = wide[i : i + rows, j : j + columns]
            far = ((near - image) ** 2).sum(-1, keepdims=True) / 0.02 + ((i - 2) ** 2 + (j - 2) ** 2) / 8
            total, weights = total + jnp.exp(-far) * near, weights + jnp.exp(-far)
    return total / weights


def life(cells):
    """Cells that are sharded along rows."""
    (rows, columns), (is_first, is_last) = cells.shape, ends("rows")
    above, below = fetched(cells[-1:], cells[:1], "rows")
    above, below = jnp.where(is_first, 0, above), jnp.where(is_last, 0, below)
    wide = jnp.pad(jnp.concatenate([above, cells, below]), ((0, 0), (1, 1)))
    near = sum(wide[i : i + rows, j : j + columns] for i in range(3) for j in range(3)) - cells
    return ((near == 3) | ((cells == 1) & (near == 2))).astype(cells.dtype)


DOWN, UP = ([k for k, (row, _) in enumerate(MOVES) if row == way] for way in (1, -1))


def flow(f):
    """A fluid that is sharded along rows."""
    f, (is_first, is_last) = collide(f), ends("rows")
    turned = jnp.stack([jnp.roll(f[k], column, 1) for k, (_, column) in enumerate(MOVES)])
    above, below = fetched(jnp.stack([turned[k, -1] for k in DOWN]), jnp.stack([turned[k, 0] for k in UP]), "rows")
    moved = list(turned)
    for at, k in enumerate(DOWN):
        row = jnp.where(is_first, f[OPPOSITE[k], 0], above[at])
        moved[k] = jnp.concatenate([row[None], turned[k, :-1]])
    for at, k in enumerate(UP):
        row = jnp.where(is_last, f[OPPOSITE[k], -1], below[at])
        moved[k] = jnp.concatenate([turned[k, 1:], row[None]])
    return jnp.stack(moved)


HELPERS = (fetched, ends)
STEPS = {"heat": heat, "bilateral": bilateral, "life": life, "flow": flow}
SPECS = {"heat": P("rows", "columns"), "bilateral": P("rows"), "life": P("rows"), "flow": P(None, "rows")}


def on_devices(name, steps, strategy):
    """The program over all devices, and the sharding of its array."""
    spec = SPECS[name]
    shards = {axis: k for axis, k in zip(spec, strategy, strict=False) if axis}
    mesh = jax.make_mesh(tuple(shards.values()), tuple(shards), (jax.sharding.AxisType.Auto,) * len(shards))
    run = repeated(STEPS[name], steps)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)), jax.sharding.NamedSharding(mesh, spec)
