"""How a loss function uses the ids of tables and the rows of a batch: rows at ids, and nothing else, is what a step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from shardfn.frontend.paths import join, tidy
from shardfn.train.flat_jaxpr import flatten_jaxpr

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "custom_jvp_call"})


def other_uses(
    loss: Callable[..., Any],
    params: Any,
    batch: tuple[Any, ...],
    places: Mapping[str, tuple[int, tuple[int, ...] | None]],
) -> Iterator[str]:
    """Uses of ids and rows whose value differs from that with the whole table.

    Ids are positions in a step: their values are followed through integers and truths, to the first floating-point number
    that is no row. Bodies of loops and branches are not looked into.

    Args:
      loss: the loss function.
      params: its parameters or their shapes, with arrays of rows in place of the tables.
      batch: its batch or the shapes of it.
      places: the argument of the batch with the ids of each table, and the columns of it.

    Yields:
      What the loss does, for each argument and each table once.

    >>> rows, ids = jnp.ones((8, 2)), jnp.zeros(4, int)
    >>> list(other_uses(lambda p, ids: p["a"][ids].sum(), {"a": rows}, (ids,), {"a": (0, None)}))
    []
    >>> list(other_uses(lambda p, ids: (p["a"][ids].sum(-1) * (ids != 0)).sum(), {"a": rows}, (ids,), {"a": (0, None)}))
    ['computes with the ids in argument 0 of the batch (`convert_element_type`)']
    >>> list(other_uses(lambda p, ids: p["a"][jnp.arange(4)].sum(), {"a": rows}, (ids,), {"a": (0, None)}))
    ['reads rows of `a` that are not those at its ids']
    """
    flat = flatten_jaxpr(jax.make_jaxpr(loss)(params, *batch), 0, lambda eqn: eqn.primitive.name in _INLINED)
    inputs = tree_util.tree_flatten_with_path((params, *batch))[0]
    path_of = {i: tidy(join("", key[1:])) for i, (key, _) in enumerate(inputs) if key[0].idx == 0}
    at = {i: key[0].idx - 1 for i, (key, _) in enumerate(inputs)}
    tables = {i: path for i, path in path_of.items() if path in places}  # values that are the rows of a table
    rows = set(tables)  # values that are computed from rows
    arguments = {argument for argument, _ in places.values()}
    ids = {i: argument for i, argument in at.items() if argument in arguments}  # integers that are computed from ids
    mixed = {
        argument for argument, columns in places.values() if columns is not None
    }  # with other columns beside the ids
    said = set()
    for one in flat.equations:
        name, reads = one.eqn.primitive.name, one.reads
        from_ids = [ids[v] for v in reads if v in ids]
        is_lookup = name == "gather" and one.inputs[0] in rows and one.inputs[1] in ids
        if name == "gather" and one.inputs[0] in tables and one.inputs[1] not in ids:
            said.add(f"reads rows of `{tables[one.inputs[0]]}` that are not those at its ids")
        is_number = any(jnp.issubdtype(getattr(flat.avals[v], "dtype", None) or bool, jnp.inexact) for v in one.outputs)
        is_known = is_lookup or "jaxpr" in "".join(one.eqn.params) or "branches" in one.eqn.params
        if is_number and not is_known:
            said |= {
                f"computes with the ids in argument {x} of the batch (`{name}`)" for x in from_ids if x not in mixed
            }
        if (
            from_ids
            and not is_number
            and not (name in ("eq", "ne") and len(from_ids) == 2 and from_ids[0] == from_ids[1])
        ):
            ids |= dict.fromkeys(one.outputs, from_ids[0])
        if not rows.isdisjoint(reads):
            rows |= set(one.outputs)
            of = next((v for v in reads if v in tables), None)
            if of is not None and not is_lookup:
                same = [v for v in one.outputs if flat.avals[v].shape == flat.avals[of].shape]
                tables |= dict.fromkeys(same, tables[of])
    yield from sorted(said)
