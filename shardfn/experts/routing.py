"""Top-k routing: which experts each token goes to, with what weight, and which choices find their expert full."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail, raise_problems
from shardfn.frontend.notes import counted
from shardfn.frontend.value_checks import boolean, integer, is_number, option_problems

COUNTED = "tokens of each expert"
"""What `explain(..., run=True)` counts."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("experts", "weights", "load", "dropped"),
    meta_fields=("count", "capacity", "groups"),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token. A pytree of arrays.

    Attributes:
      experts: int32 [tokens, k], the experts chosen for each token, best first; `count` for a dropped choice.
      weights: [tokens, k], the share of each choice in a token's result; 0 for a dropped choice.
      load: int32 [count], the choices of each expert, dropped ones included.
      dropped: int32 scalar, the number of dropped choices.
      count: the number of experts.
      capacity: the choices that an expert takes of each group of tokens; None for all.
      groups: the number of groups into which the tokens fall, in their order.
    """

    experts: jax.Array
    weights: jax.Array
    load: jax.Array
    dropped: jax.Array
    count: int
    capacity: int | None = None
    groups: int = 1


def route(
    logits: jax.Array, k: int, *, capacity_factor: float | None = None, groups: int = 1, normalize: bool = True
) -> Routing:
    """Choose for each token the `k` experts with the highest probability.

    Args:
      logits: [tokens, experts], the router's output.
      k: experts for each token.
      capacity_factor: the choices that an expert takes of a group, as a multiple of its fair share. Choices beyond are
        dropped: first choices are kept before second ones, earlier tokens before later ones. None keeps all (dropless).
      groups: the groups of consecutive tokens in which choices are counted and dropped. The result does not depend on
        the number of devices. With as many groups as shards of the tokens, or a multiple, the least is sent.
      normalize: whether the weights of a token's `k` experts sum to 1. False leaves them the softmax over all experts.

    Returns:
      The routing. Its weights carry the router's gradient.

    Raises:
      StrategyError: the logits have other dimensions; `k` is not from 1 to the number of experts; `groups` is not from 1
        to the number of tokens; the capacity factor is not positive.

    >>> found = route(jnp.array([[2.0, 1.0, 0.0], [3.0, 0.0, 1.0], [1.0, 0.0, 2.0]]), k=1, capacity_factor=1.0)
    >>> found.experts.tolist(), found.load.tolist(), found.capacity, int(found.dropped)
    ([[0], [3], [2]], [2, 0, 1], 1, 1)
    """
    _check_types(logits, k, capacity_factor, groups, normalize)
    if logits.ndim != 2:
        fail(StrategyError, f"the logits are {list(logits.shape)}", where="route(logits, ...)",
             why="they are [tokens, experts]", fix="reshape them: logits.reshape(-1, logits.shape[-1]), and x alike")  # fmt: skip
    tokens, count = logits.shape
    _check(tokens, count, k, capacity_factor, groups)
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    best, chosen = _top_k(probabilities, k)
    weights = best / jnp.sum(best, axis=-1, keepdims=True) if normalize else best
    load = jnp.sum(_one_hot(chosen, count), axis=(0, 1), dtype=jnp.int32)
    if capacity_factor is None:
        chosen = counted(chosen, count, COUNTED)
        return Routing(chosen, weights, load, jnp.zeros((), jnp.int32), count)
    size = -(-tokens // groups)
    capacity = max(
        1, math.ceil(min(capacity_factor * k / count * max(1, size), size))
    )  # a token's experts are different
    padded = jnp.pad(chosen, ((0, groups * size - tokens), (0, 0)), constant_values=count)
    ranks = jax.vmap(lambda each: ranks_of(each.T.ravel(), count).reshape(k, size).T)(padded.reshape(groups, size, k))
    kept = ranks.reshape(-1, k)[:tokens] < capacity
    dropped = jnp.sum(~kept, dtype=jnp.int32)
    taken = counted(jnp.where(kept, chosen, count), count, COUNTED)
    return Routing(taken, jnp.where(kept, weights, 0), load, dropped, count, capacity, groups)


def _top_k(probabilities: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` in reductions: XLA partitions these, and gathers the operand of a top-k along all dimensions."""
    left, best, chosen = probabilities, [], []
    for _ in range(k):
        index = jnp.argmax(left, axis=-1).astype(jnp.int32)
        is_chosen = _one_hot(index, probabilities.shape[-1])
        best.append(jnp.sum(jnp.where(is_chosen, probabilities, 0), axis=-1))
        chosen.append(index)
        left = jnp.where(is_chosen, -1, left)
    return jnp.stack(best, axis=-1), jnp.stack(chosen, axis=-1)


def ranks_of(keys: jax.Array, count: int) -> jax.Array:
    """How many equal keys stand before each key.

    Args:
      keys: int32 [n], from 0 to `count`.
      count: the number of experts; the rank of a key that equals it has no meaning.

    >>> ranks_of(jnp.array([1, 0, 1, 1, 0]), 2).tolist()
    [0, 0, 1, 2, 1]
    """
    starts, _ = starts_of(keys, count)
    places = jnp.argsort(jnp.argsort(keys, stable=True))
    return places.astype(jnp.int32) - jnp.append(starts, 0)[keys]


def starts_of(keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Where each expert's keys begin among the sorted keys, and their number: int32 [..., count] for keys [..., n].

    >>> [x.tolist() for x in starts_of(jnp.array([1, 0, 3, 1, 0]), 3)]
    [[0, 2, 4], [2, 2, 0]]
    """
    counts = jnp.sum(_one_hot(keys, count), axis=-2, dtype=jnp.int32)
    return jnp.cumsum(counts, axis=-1) - counts, counts


def _one_hot(keys: jax.Array, count: int) -> jax.Array:
    return keys[..., None] == jnp.arange(count)


def _check_types(logits: Any, k: Any, capacity_factor: Any, groups: Any, normalize: Any) -> None:
    if not hasattr(logits, "ndim") or not jnp.issubdtype(logits.dtype, jnp.floating):
        kind = f"{logits.dtype} numbers" if hasattr(logits, "dtype") else a(logits)
        fail(StrategyTypeError, f"the logits are {kind}", where=f"route({logits!r:.40}, ...)",
             why="they are a floating array [tokens, experts]", fix="jnp.asarray(logits, float)")  # fmt: skip
    raise_problems([
        *option_problems(integer(1), "k", k),
        *option_problems(integer(1), "groups", groups),
        *option_problems(boolean, "normalize", normalize),
        *([] if capacity_factor is None or is_number(capacity_factor)
          else [Problem(f"`capacity_factor` is {a(capacity_factor)}", f"route(..., capacity_factor={capacity_factor!r:.40})",
                        "it is a multiple of an expert's fair share", "give a number such as 1.25, or None to keep all choices",
                        is_type=True)]),
    ])  # fmt: skip


def _check(tokens: int, count: int, k: int, capacity_factor: float | None, groups: int) -> None:
    if not 1 <= k <= count:
        fail(StrategyError, f"`k` = {k} experts for each token, and there are {count}", where=f"route(..., k={k})",
             why="a token's experts are different", fix=f"give k from 1 to {count}")  # fmt: skip
    if not 1 <= groups <= max(1, tokens):
        fail(StrategyError, f"{tokens} tokens in {groups} groups", where=f"route(..., groups={groups})",
             why="a group has at least one token", fix=f"give groups from 1 to {tokens}")  # fmt: skip
    if capacity_factor is not None and not capacity_factor > 0:
        fail(StrategyError, f"`capacity_factor` = {capacity_factor} leaves the experts no room",
             where=f"route(..., capacity_factor={capacity_factor})", why="it is a multiple of an expert's fair share",
             fix="give a positive number, 1.25 for example, or None to keep all choices")  # fmt: skip
