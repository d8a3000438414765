"""Packed rows to the devices of their experts and back: a ragged all-to-all, or a padded one where a backend has none.

For use inside `jax.shard_map`. A device sends the rows of its choices sorted by expert, and receives the rows of its own
experts, packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from shardfn.experts.rows import packed, packed_starts, taken


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of one set of choices among the devices along some mesh axes.

    Attributes:
      counts: int32 [devices, experts], the choices of every device.
      axes: the mesh axes.
      most: the most rows that one device sends to another, whatever the load.
    """

    counts: jax.Array
    axes: tuple[str, ...]
    most: int

    @staticmethod
    def of(counts: jax.Array, axes: tuple[str, ...], most: int) -> Exchange:
        """The exchange where this device has `counts`, int32 [experts]. The devices tell each other their counts."""
        return Exchange(lax.all_gather(counts, axes), axes, most)

    @property
    def own(self) -> jax.Array:
        """The choices of every device for the experts of this one: int32 [devices, experts of a device]."""
        devices = self.counts.shape[0]
        return self._by_device(self.counts)[:, lax.axis_index(self.axes)].reshape(devices, -1)

    def there(self, x: jax.Array) -> jax.Array:
        """Rows [choices, width] sorted by expert, to the rows of this device's experts: [devices * most, width]."""
        return _where_ragged(self._ragged_there, self._padded_there, x)

    def back(self, y: jax.Array, choices: int) -> jax.Array:
        """The way back: rows of this device's experts to the `choices` rows that this device sent."""
        return _where_ragged(lambda y: self._ragged_back(y, choices), lambda y: self._padded_back(y, choices), y)

    # ---- padded: a block of `most` rows for each device, right for every load

    def _padded_there(self, x: jax.Array) -> jax.Array:
        firsts, ends = self._blocks()
        at = firsts[:, None] + jnp.arange(self.most, dtype=jnp.int32)
        blocks = lax.all_to_all(taken(x, at, at < ends[:, None]), self.axes, 0, 0)
        return taken(blocks.reshape(-1, x.shape[-1]), *self._in_blocks())

    def _padded_back(self, y: jax.Array, choices: int) -> jax.Array:
        at, filled = self._in_blocks()
        length = self.counts.shape[0] * self.most
        blocks = jnp.zeros_like(y, shape=(length, y.shape[-1])).at[jnp.where(filled, at, length)].set(y, mode="drop")
        blocks = lax.all_to_all(blocks.reshape(-1, self.most, y.shape[-1]), self.axes, 0, 0)
        firsts, ends = self._blocks()
        row = jnp.arange(choices, dtype=jnp.int32)
        device = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(firsts) - 1)
        return taken(blocks.reshape(length, -1), device * self.most + row - firsts[device], row < ends[-1])

    def _blocks(self) -> tuple[jax.Array, jax.Array]:
        """Where the rows for each device begin and end among the sorted rows of this device."""
        here = self._by_device(self.counts)[lax.axis_index(self.axes)].sum(-1)
        return jnp.cumsum(here) - here, jnp.cumsum(here)

    def _in_blocks(self) -> tuple[jax.Array, jax.Array]:
        """For each packed row of this device's experts its place among the received blocks, and whether there is one."""
        own = self.own
        rows = packed(own, own.shape[0] * self.most)
        before = jnp.cumsum(own, axis=1) - own
        return rows.source * self.most + before[rows.source, rows.expert] + rows.rank, rows.filled

    # ---- ragged: a slice for each expert, straight to its packed place

    def _ragged_there(self, x: jax.Array) -> jax.Array:
        out = jnp.zeros_like(x, shape=(self.counts.shape[0] * self.most, x.shape[-1]))
        sent, here = self._sent()
        return lax.ragged_all_to_all(x, out, *(each.ravel() for each in (sent, here, self._landing(), self.own)),
                                     axis_name=self.axes)  # fmt: skip

    def _ragged_back(self, y: jax.Array, choices: int) -> jax.Array:
        out = jnp.zeros_like(y, shape=(choices, y.shape[-1]))
        me, own = lax.axis_index(self.axes), self.own
        firsts = self._by_device(jnp.cumsum(self.counts, axis=1) - self.counts)[:, me]
        _, here = self._sent()
        return lax.ragged_all_to_all(y, out, *(each.ravel() for each in (packed_starts(own), own, firsts, here)),
                                     axis_name=self.axes)  # fmt: skip

    def _sent(self) -> tuple[jax.Array, jax.Array]:
        """Where each expert's rows begin among the sorted rows of this device, and their number: int32 [experts]."""
        here = self.counts[lax.axis_index(self.axes)]
        return jnp.cumsum(here) - here, here

    def _landing(self) -> jax.Array:
        """The packed row of each expert's device at which this device's rows begin: int32 [experts]."""
        devices = self.counts.shape[0]
        starts = jax.vmap(packed_starts, in_axes=1, out_axes=1)(self._by_device(self.counts))
        return starts.reshape(devices, -1)[lax.axis_index(self.axes)]

    @staticmethod
    def _by_device(counts: jax.Array) -> jax.Array:
        """Counts [devices, experts] as [devices, the experts' devices, experts of a device]."""
        return counts.reshape(counts.shape[0], counts.shape[0], -1)


def _where_ragged(
    ragged: Callable[[jax.Array], jax.Array], padded: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """The ragged form on the backends that have it."""
    return lax.platform_dependent(x, tpu=ragged, cuda=ragged, rocm=ragged, default=padded)
