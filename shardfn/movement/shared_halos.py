"""One halo for the rotations of all arrays that come from one array.

A 3 x 3 stencil rotates an array along its first dimension, and then the array and its two rotations along the second. Where the
second is sharded, each of the three would send its own columns. They are the same columns, moved and masked.

The rows that each shard receives are the strips of an array. Ops on elements and rotations along other dimensions make the
strips of their results of the strips of their operands. So one array's strips are exchanged, and the strips of all that comes
from it are computed. Of corners a shard receives what the rotations of strips move.

How many shards there are decides how an array is divided, and its values do not depend on it.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import tree_util
from jax.extend import core, source_info_util

from shardfn.ir.rewrite import OPEN, RebindRules, bind_one, inner
from shardfn.movement.strips import Halo, Node, Rotation, joined, on_strips, operands_of, received, rotation_of
from shardfn.movement.values import with_rows

Shards = Mapping[tuple[tuple[int, ...], int], int]
"""The number of shards of a rotated dimension, by the shape of the array and the dimension."""


def with_shared_halos(
    function: Callable[..., Any], shards: Shards, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`function`, whose rotations are those of `with_shifts`, with one halo for arrays that come from one array.

    Args:
      function: the function, of positional arguments.
      shards: the numbers of shards of its rotated dimensions.
      static_argnums: as in `jax.jit`.

    >>> import jax.numpy as jnp
    >>> from shardfn.movement.rotation import rotated
    >>> def corners(x):
    ...     return rotated(x, 1, 1) + rotated(rotated(x, 1, 0), 1, 1)
    >>> x = jnp.arange(8).reshape(2, 4)
    >>> bool((with_shared_halos(corners, {((2, 4), 1): 2})(x) == corners(x)).all())
    True
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, static_argnums=static_argnums, return_shape=True)(*args)
        dynamic = [a for i, a in enumerate(args) if i not in static_argnums]
        rules = RebindRules(lambda eqn, number: False, lambda eqn, xs, number: [], lambda eqn: None, None,
                            functools.partial(_evaluate, shards))  # fmt: skip
        flat = _evaluate(shards, closed.jaxpr, closed.consts, tree_util.tree_leaves(dynamic), rules, 0)
        return tree_util.tree_unflatten(tree_util.tree_structure(shape), flat)

    return run


def shares_halos(jaxpr: Any, shards: Shards) -> bool:
    """Whether `with_shared_halos` changes a jaxpr."""
    return bool(_halos(jaxpr, shards)) or any(_opens(eqn, shards) for eqn in jaxpr.eqns)


def _opens(eqn: Any, shards: Shards) -> bool:
    return eqn.primitive.name in OPEN and any(shares_halos(one, shards) for one in inner(eqn))


def _evaluate(
    shards: Shards, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rules: RebindRules, number: int
) -> list[Any]:
    halos = _halos(jaxpr, shards)
    wanted = _wanted(jaxpr, halos)
    lines = {halos[v][1]: eqn.source_info for eqn in reversed(jaxpr.eqns) for v in eqn.outvars if v in halos}
    env: dict[Any, Any] = {}
    strips: dict[tuple[Node, Halo], Any] = {}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    def write(variables: Sequence[Any], arrays: Sequence[Any], eqn: Any = None) -> None:
        env.update(zip(variables, arrays, strict=True))
        for node, halo in (one for v in variables for one in wanted.get(v, ())):
            if node == halo.source:
                with _at(lines[halo]):
                    strips[node, halo] = received(env[node.var], halo)
            else:
                strips[node, halo] = on_strips(eqn, node, halo, read, strips)

    def outputs(eqn: Any) -> list[Any]:
        if eqn.outvars and eqn.outvars[0] in halos:
            rotation, halo = halos[eqn.outvars[0]]
            return [joined(read(rotation.operand), strips[rotation.node, halo], rotation, halo)]
        inputs = [read(v) for v in eqn.invars]
        return OPEN[eqn.primitive.name](eqn, inputs, rules, 0) if _opens(eqn, shards) else bind_one(eqn, inputs)

    write([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    for eqn in jaxpr.eqns:
        with _at(eqn.source_info):
            write(eqn.outvars, outputs(eqn), eqn)
    return [read(v) for v in jaxpr.outvars]


def _at(source: Any) -> AbstractContextManager[None]:
    """What is made stands at a line of the user's program."""
    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


# ---- which rotations share a halo


def _halos(jaxpr: Any, shards: Shards) -> dict[Any, tuple[Rotation, Halo]]:
    """By the results of rotations, the rotations (`_in_all`) and their halos; none if no two arrays share one.

    If two do, no rotation stays as it is: of one whose result is divided, libtpu (0.0.42) would send the rows twice.
    """
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found: dict[Any, tuple[Rotation, int]] = {}
    for rotation, (out, *_) in ((_in_all(eqn, makers), eqn.outvars) for eqn in jaxpr.eqns if rotation_of(eqn)):
        size, count = out.aval.shape[rotation.dim], shards.get((out.aval.shape, rotation.dim), 1)
        if count > 1 and size % count == 0 and abs(rotation.shift) < size // count:
            found[out] = rotation, count
    if len(found) < 2:
        return {}
    sources, groups = _Sources(jaxpr), collections.defaultdict[Any, dict[Node, int]](dict)
    for rotation, count in found.values():
        rows = groups[sources.root(rotation.node), count, rotation.is_next]
        rows[rotation.node] = max(rows.get(rotation.node, 0), abs(rotation.shift))
    halos, is_shared = dict[tuple[Node, bool], Halo](), False
    for (_, count, is_next), rows in groups.items():
        source = functools.reduce(sources.common, rows)
        assert source is not None
        one = Halo(source, count, max(rows.values()), is_next)
        is_less = _bytes(one.source, one.rows) < sum(_bytes(node, n) for node, n in rows.items())
        halos |= {(node, is_next): one if is_less else Halo(node, count, n, is_next) for node, n in rows.items()}
        is_shared |= is_less
    return {out: (own, halos[own.node, own.is_next]) for out, (own, _) in found.items()} if is_shared else {}


def _in_all(eqn: Any, makers: Mapping[Any, Any]) -> Rotation:
    """A rotation of an array that is rotated the same way, as one rotation."""
    found = rotation_of(eqn)
    assert found is not None
    maker = makers.get(found.operand)
    if maker is not None and maker.primitive.name == "optimization_barrier":
        maker = makers.get(maker.invars[maker.outvars.index(found.operand)])
    before = None if maker is None else rotation_of(maker)
    if before is None or (before.dim, before.is_next) != (found.dim, found.is_next):
        return found
    before = _in_all(maker, makers)
    return before._replace(shift=before.shift + found.shift)


def _bytes(node: Node, rows: int) -> int:
    shape = with_rows(node.var.aval.shape, node.dim, rows)
    return math.prod(shape) * node.var.aval.dtype.itemsize


class _Sources:
    """For what is computed from one array, strip by strip, the nearest such array: a tree.

    `depth` counts the arrays above a node. What is computed from no array, as a mask of positions, has none.
    """

    def __init__(self, jaxpr: Any):
        self.above: dict[Node, Node] = {}
        self.depth: dict[Node, int] = {}
        makers = [(v, None) for v in (*jaxpr.constvars, *jaxpr.invars)]
        makers += [(v, eqn) for eqn in jaxpr.eqns for v in eqn.outvars]
        for v, eqn in makers:
            for node in (Node(v, d) for d in range(len(getattr(v.aval, "shape", ())))):
                operands = None if eqn is None else operands_of(eqn, node)
                sources = [one for one in operands or () if one in self.depth]
                source = functools.reduce(self.common, sources) if sources else None
                if source is not None:
                    self.above[node], self.depth[node] = source, self.depth[source] + 1
                elif sources or operands is None:
                    self.depth[node] = 0

    def common(self, one: Node | None, other: Node | None) -> Node | None:
        """The nearest array that two nodes are both computed from, or None."""
        while one != other and one is not None and other is not None:
            if self.depth[one] >= self.depth[other]:
                one = self.above.get(one)
            else:
                other = self.above.get(other)
        return one if one == other else None

    def root(self, node: Node) -> Node:
        """The array that a node is computed from and that is computed from no other."""
        while node in self.above:
            node = self.above[node]
        return node


def _wanted(jaxpr: Any, halos: Mapping[Any, tuple[Rotation, Halo]]) -> Mapping[Any, Iterable[tuple[Node, Halo]]]:
    """By variable the strips that its rotations, and strips of others, are made of."""
    found: dict[Any, dict[tuple[Node, Halo], None]] = collections.defaultdict(dict)
    for rotation, halo in halos.values():
        found[rotation.operand][rotation.node, halo] = None
    for eqn in reversed(jaxpr.eqns):
        for node, halo in [one for v in eqn.outvars for one in found.get(v, ())]:
            if node != halo.source:
                for one in operands_of(eqn, node) or ():
                    found[one.var][one, halo] = None
    return found
