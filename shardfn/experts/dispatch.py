"""Tokens to their experts and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardfn.errors import StrategyError, StrategyTypeError, a, fail
from shardfn.experts.exchange import Exchange
from shardfn.experts.placement import Placement, placement
from shardfn.experts.routing import Routing, ranks_of, starts_of
from shardfn.experts.rows import packed, packed_starts, slotted, taken


@dataclasses.dataclass(frozen=True)
class _How:
    """What the shards of a dispatch agree on, hashable."""

    placement: Placement
    count: int
    """The number of experts."""
    k: int
    tokens: int
    """Of one source, padded up."""
    slots: int | None
    """Rows for each expert and source; None packs the rows (dropless)."""

    @property
    def sources(self) -> int:
        """The sources whose tokens one device selects rows from."""
        return self.placement.size(self.placement.gathered)

    @property
    def experts(self) -> int:
        """The experts for which one device selects rows: all before an all-to-all, else its own."""
        return self.count if self.placement.alltoall else self.count // self.placement.size(self.placement.experts)

    @property
    def first(self) -> Any:
        """The first of these experts. For use inside the region."""
        return 0 if self.placement.alltoall else lax.axis_index(self.placement.experts) * self.experts

    @property
    def selected(self) -> int:
        """The packed rows that one device selects: a token's experts are different."""
        return self.sources * self.tokens * min(self.k, self.experts)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("rows", "sizes", "routing", "ranks"), meta_fields=("_how",)
)
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Tokens at their experts. A pytree of arrays.

    Attributes:
      rows: the tokens, sharded as the experts: [experts, rows, width] with a capacity; dropless [rows, width], in which
        each device has the rows of its own experts one after the other. Rows that nobody fills are zero.
      sizes: dropless, int32 [experts, groups of devices], the rows of each expert; None with a capacity.
      routing: the routing.
      ranks: int32 [tokens, k], the rank of a choice among those of its expert and source.
    """

    rows: jax.Array
    sizes: jax.Array | None
    routing: Routing
    ranks: jax.Array
    _how: _How

    def dot(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """The product of each row with the matrix of its expert.

        Args:
          x: `rows`, or what was made of them row by row: [..., width].
          weights: [experts, width, width_out], the experts' matrices.

        Returns:
          [..., width_out], sharded as `rows`. Dropless rows are multiplied by `jax.lax.ragged_dot`.

        Raises:
          StrategyError: rows and matrices that do not fit each other.

        >>> from shardfn import experts
        >>> sent = experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.eye(4, 3), k=1))
        >>> sent.dot(sent.rows, jnp.arange(6.0).reshape(3, 2, 1)).ravel().tolist()
        [1.0, 1.0, 5.0, 9.0]
        """
        self._check(weights)
        if x.shape[:-1] != self.rows.shape[:-1] or weights.ndim != 3 or x.shape[-1] != weights.shape[1]:
            fail(StrategyError, f"the rows {list(x.shape)} do not go with the matrices {list(weights.shape)}",
                 where="dot(x, weights)", why=f"x has the rows that were dispatched, {list(self.rows.shape[:-1])}, and each "
                 "matrix as many rows as x has columns", fix="pass weights [experts, width, width_out]")  # fmt: skip
        if self._how.slots is not None:
            return jnp.einsum("erw,ewv->erv", x, weights)
        at = self._how.placement
        return _region(at, _ragged_dot, (_rows_spec(self._how), _spec(at.experts), _spec(at.experts, at.apart)),
                       _rows_spec(self._how))(x, weights, self.sizes)  # fmt: skip

    def spread(self, values: jax.Array) -> jax.Array:
        """The value of its expert for each row, such as a bias.

        Args:
          values: [experts, width].

        Returns:
          An array that broadcasts against `rows`.

        >>> from shardfn import experts
        >>> sent = experts.dispatch(jnp.ones((4, 2)), experts.route(jnp.eye(4, 3), k=1))
        >>> sent.spread(jnp.arange(3.0)[:, None]).ravel().tolist()
        [0.0, 0.0, 1.0, 2.0]
        """
        self._check(values)
        if self._how.slots is not None:
            return values[:, None]
        at = self._how.placement
        return _region(at, _spread, (_spec(at.experts), _spec(at.experts, at.apart)), _rows_spec(self._how),
                       length=self._local_rows)(values, self.sizes)  # fmt: skip

    def _check(self, values: jax.Array) -> None:
        """Check that there is one of `values` for each expert; another number would be clamped to the last."""
        if values.shape[0] != self.routing.count:
            fail(StrategyError, f"an array of {values.shape[0]} experts, and the routing is for {self.routing.count}",
                 where=f"{values.dtype}{list(values.shape)}", why="dimension 0 has the experts",
                 fix=f"pass it as [{self.routing.count}, ...]")  # fmt: skip

    @property
    def _local_rows(self) -> int:
        at = self._how.placement
        return self.rows.shape[0] // at.size((*at.experts, *at.apart))


def dispatch(
    x: jax.Array,
    routing: Routing,
    *,
    layout: Any = None,
    axes: str | tuple[str, ...] | None = None,
    alltoall: bool | None = None,
) -> Dispatched:
    """Bring each token to its experts.

    With sharded tokens or experts it is a `jax.shard_map` region with one all-to-all of the rows. Each device then has
    the rows of its experts from all devices along the experts' axes. Without a capacity the all-to-all is ragged on TPUs
    and GPUs. XLA on CPU has none: there each device sends blocks that hold the largest possible load.

    Args:
      x: [tokens, width].
      routing: the routing of these tokens.
      layout: the sharding of `x`, a NamedSharding or a Layout that shards its tokens; None if nothing is sharded. A loss that is
        called on a part of the batch (`shardfn.train`) runs without it.
      axes: the mesh axes over which the experts are sharded; those of the tokens if None.
      alltoall: False gathers the tokens on all devices along `axes`, and each takes those of its experts. None is the
        context's `enable_alltoall` where it is set, else True.

    Returns:
      The rows of each expert, with `dot` for products with the experts' weights.

    Raises:
      StrategyError: `x` and the routing have different numbers of tokens; axes that do not divide the experts; a layout
        that shards the width.
      StrategyTypeError: a layout, a routing or axes of another type.

    >>> from shardfn import experts
    >>> x, gate, up = jnp.ones((6, 4)), jnp.ones((4, 3)), jnp.ones((3, 4, 8))
    >>> sent = dispatch(x, experts.route(x @ gate, k=2))
    >>> sent.rows.shape, sent.dot(sent.rows, up).shape, sent.sizes.ravel().tolist()
    ((12, 4), (12, 8), [6, 6, 0])
    """
    _check_is(routing, Routing, "routing", "dispatch(x, routing)", "what `route` returns")
    tokens, k = routing.experts.shape
    if getattr(x, "ndim", None) is None:
        fail(StrategyTypeError, f"x is {a(x)}", where="dispatch(x, routing)", why="it is an array [tokens, width]",
             fix="jnp.asarray(x)")  # fmt: skip
    if x.ndim != 2 or x.shape[0] != tokens:
        fail(StrategyError, f"x is {list(x.shape)}, and the routing is for {tokens} tokens", where="dispatch(x, routing)",
             why="each token has its own experts", fix=f"pass x as [{tokens}, width]")  # fmt: skip
    if axes is not None and layout is None:
        fail(StrategyError, f"`axes` = {axes!r} names axes of a mesh, and `layout` gives none",
             where=f"dispatch(x, routing, axes={axes!r})", why="the experts are sharded over axes of the layout's mesh",
             fix="pass the sharding of x as `layout`")  # fmt: skip
    at = placement(layout, axes, routing.count, alltoall)
    local = max(1, -(-tokens // at.size(at.sources)))
    how = _How(at, routing.count, k, local, _slots(routing, local, tokens))
    chosen = _padded(routing.experts, how, routing.count)
    rows, sizes, ranks = _region(
        at, _dispatch, (_spec(at.sources), _spec(at.sources)),
        (_rows_spec(how), _spec(at.experts, at.apart) if how.slots is None else None, _spec(at.sources)), how=how,
    )(_padded(x, how), chosen)  # fmt: skip
    return Dispatched(rows, sizes, routing, ranks[:tokens], how)


def combine(y: jax.Array, dispatched: Dispatched) -> jax.Array:
    """Bring the experts' results back and sum them for each token, by the weights of the routing.

    Args:
      y: what the experts made of `dispatched.rows`, row by row: [..., width_out].
      dispatched: what `dispatch` returned.

    Returns:
      [tokens, width_out], sharded as the tokens; zeros for a token whose choices were all dropped.

    Raises:
      StrategyError: `y` has not the rows of `dispatched`.

    >>> from shardfn import experts
    >>> x = jnp.arange(8.0).reshape(4, 2)
    >>> sent = experts.dispatch(x, experts.route(x, k=1))
    >>> combine(3 * sent.rows, sent).tolist()
    [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0], [18.0, 21.0]]
    """
    _check_is(dispatched, Dispatched, "dispatched", "combine(y, dispatched)", "what `dispatch` returns")
    how, routing = dispatched._how, dispatched.routing
    if y.shape[:-1] != dispatched.rows.shape[:-1]:
        fail(StrategyError, "the experts' results do not have the rows that were dispatched",
             where=f"y: {list(y.shape)}, rows: {list(dispatched.rows.shape)}", why="each row belongs to one token",
             fix="return one result for each row, in their order")  # fmt: skip
    at, tokens = how.placement, routing.experts.shape[0]
    arrays = (_padded(routing.experts, how, how.count), _padded(routing.weights, how), _padded(dispatched.ranks, how))
    out = _region(at, _combine, (_rows_spec(how), *(_spec(at.sources),) * 3),
                  _spec(at.sources if at.alltoall else at.tokens), how=how)(y, *arrays)[:tokens]  # fmt: skip
    if at.mesh is None or (tokens % at.size(at.tokens) and not isinstance(out, Tracer)):  # an array shards evenly alone
        return out
    return _constrained(out, at.sharding())


_constrained = jax.jit(lax.with_sharding_constraint, static_argnums=1)
"""In a gradient of an eager call `out` is a tracer, and only a compiled function may shard it unevenly."""


def _slots(routing: Routing, local: int, tokens: int) -> int | None:
    """Rows for an expert and a source: as many as the groups that meet in one source can fill."""
    if routing.capacity is None:
        return None
    group = max(1, -(-tokens // routing.groups))
    is_aligned = local % group == 0 or group % local == 0
    groups = max(1, local // group) if is_aligned else min(routing.groups, local // group + 2)
    return min(local, routing.capacity * groups)


# ---- on one device


def _dispatch(x: jax.Array, chosen: jax.Array, how: _How) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """x [tokens, width] and its experts [tokens, k] to this device's rows, their number by expert, and the ranks."""
    at = how.placement
    ranks = ranks_of(chosen.ravel(), how.count).reshape(chosen.shape)
    every = _gathered(x, at), _gathered(chosen, at).reshape(how.sources, -1)
    order = jnp.argsort(every[1], axis=-1, stable=True).astype(jnp.int32)
    starts, counts = (_own(each, how) for each in starts_of(every[1], how.count))
    rows = packed(counts, how.selected) if how.slots is None else slotted(counts, how.slots)
    place = order[rows.source, jnp.where(rows.filled, starts[rows.source, rows.expert] + rows.rank, 0)]
    found = taken(every[0], rows.source * how.tokens + place // how.k, rows.filled)
    is_sent = at.alltoall and at.experts
    if how.slots is not None:
        found = found.reshape(how.experts, -1, x.shape[-1])
        return lax.all_to_all(found, at.experts, 0, 1, tiled=True) if is_sent else found, None, ranks
    if not is_sent:
        return found, counts.sum(0)[:, None], ranks
    exchange = _exchange(counts[0], how)
    return exchange.there(found), exchange.own.sum(0)[:, None], ranks


def _combine(y: jax.Array, chosen: jax.Array, weights: jax.Array, ranks: jax.Array, how: _How) -> jax.Array:
    """This device's rows to the results of its tokens."""
    at = how.placement
    chosen, weights, ranks = (_gathered(each, at).reshape(how.sources, -1, how.k) for each in (chosen, weights, ranks))
    _, counts = starts_of(chosen.reshape(how.sources, -1), how.count)
    counts = _own(counts, how)
    if at.alltoall and at.experts:
        if how.slots is None:
            y = _exchange(counts[0], how).back(y, how.selected)
        else:
            y = lax.all_to_all(y, at.experts, 1, 0, tiled=True)
    expert, source = chosen - how.first, jnp.arange(how.sources, dtype=jnp.int32)[:, None, None]
    here = (expert >= 0) & (expert < how.experts)
    expert = jnp.where(here, expert, 0)
    if how.slots is None:
        place = packed_starts(counts)[source, expert] + ranks
    else:
        place = (expert * how.sources + source) * how.slots + ranks
    found = taken(y.reshape(-1, y.shape[-1]), place, here)
    out = jnp.einsum("stkw,stk->stw", found, weights, preferred_element_type=jnp.float32).astype(y.dtype)
    out = out.reshape(-1, y.shape[-1])
    out = lax.psum_scatter(out, at.gathered, tiled=True) if at.gathered else out
    return lax.psum(out, at.summed) if at.summed else out


def _ragged_dot(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, weights, sizes[:, 0])


def _spread(values: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    return values[packed(sizes.T, length).expert]


def _exchange(counts: jax.Array, how: _How) -> Exchange:
    at = how.placement
    own = how.count // at.size(at.experts)
    return Exchange.of(counts, at.experts, how.tokens * min(how.k, own))


def _gathered(x: jax.Array, at: Placement) -> jax.Array:
    return lax.all_gather(x, at.gathered, tiled=True) if at.gathered else x


def _own(counts: jax.Array, how: _How) -> jax.Array:
    """Of counts [sources, all experts] those of the experts for which this device selects rows."""
    return lax.dynamic_slice_in_dim(counts, how.first, how.experts, axis=1)


# ---- regions


def _region(
    at: Placement, function: Callable[..., Any], in_specs: Any, out_specs: Any, **static: Any
) -> Callable[..., Any]:
    """The function on each device's shards, compiled also where the call is not: JAX runs a `shard_map` of an eager call, or of
    its gradient, op by op, and compiles each op."""
    if at.mesh is None:
        return functools.partial(function, **static)
    return _compiled(at, function, in_specs, out_specs, tuple(static.items()))


@functools.lru_cache(maxsize=256)
def _compiled(at: Placement, function: Any, in_specs: Any, out_specs: Any, static: tuple[tuple[str, Any], ...]) -> Any:
    sharded = functools.partial(function, **dict(static))
    return jax.jit(jax.shard_map(sharded, mesh=at.mesh, in_specs=in_specs, out_specs=out_specs))


def _check_is(given: Any, kind: type, name: str, where: str, what: str) -> None:
    if not isinstance(given, kind):
        fail(StrategyTypeError, f"`{name}` is {a(given)}", where=where, why=f"it is {what}", fix=f"pass {what}")


def _spec(*dims: Sequence[str]) -> PartitionSpec:
    return PartitionSpec(*(tuple(dim) or None for dim in dims))


def _rows_spec(how: _How) -> PartitionSpec:
    at = how.placement
    return _spec((*at.experts, *at.apart)) if how.slots is None else _spec(at.experts, at.apart)


def _padded(x: jax.Array, how: _How, value: int = 0) -> jax.Array:
    """An array of the tokens, with as many as the sources divide."""
    rows = how.tokens * how.placement.size(how.placement.sources)
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)), constant_values=value)
