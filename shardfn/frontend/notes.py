"""What a library function leaves in a traced program for a report: notes for that of a plan, and counts for that of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardfn.ir.rewrite import bind_one, equation_line, equations, inner, rebind

PREFIX = "shardfn-note:"
"""Begins the name that JAX keeps for a note, so that no user's checkpoint policy matches it."""


def noted(x: jax.Array, text: str) -> jax.Array:
    """An array, unchanged, with a note on it. It computes nothing and goes through every JAX transformation.

    Args:
      x: the array.
      text: what a report says of it, with the fix.

    >>> import jax.numpy as jnp
    >>> notes_of(jax.make_jaxpr(lambda x: noted(x, "half of x is padding"))(jnp.ones(3)).jaxpr)
    ('half of x is padding',)
    """
    return checkpoint_name(x, PREFIX + text)


def notes_of(jaxpr: Any) -> tuple[str, ...]:
    """The notes in a program, each once."""
    names = (eqn.params.get("name") for _, eqn, _ in equations(jaxpr) if eqn.primitive.name == "name")
    texts = (name for name in names if isinstance(name, str) and name.startswith(PREFIX))
    return tuple(dict.fromkeys(text.removeprefix(PREFIX) for text in texts))


_COUNT = "shardfn-count:"


class Counted(NamedTuple):
    """How often each number stood in an array in one run.

    Attributes:
      what: what is counted.
      where: `file:line` of the user's code.
      counts: of the numbers from 0; empty where a derivative rule of its own, or a `shard_map`, hides the array.
      left_out: how many elements were none of these numbers.
    """

    what: str
    where: str
    counts: tuple[int, ...] = ()
    left_out: int = 0


def counted(x: jax.Array, count: int, what: str) -> jax.Array:
    """An array of integers, unchanged, in which `counting` counts those from 0 to below `count`. Else it costs nothing.

    Args:
      x: the array.
      count: how many numbers are counted.
      what: what they are.
    """
    return checkpoint_name(x, f"{_COUNT}{count}:{what}")


def counting(
    function: Callable[..., Any], tell: Callable[[Counted], None], static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """The function, which tells what it counts whenever it runs; positional arguments only.

    Args:
      function: the function.
      tell: gets what was counted, in a loop each time.
      static_argnums: as in `jax.jit`.

    >>> found = []
    >>> twice = lambda x: 2 * counted(x, 3, "numbers")
    >>> _ = jax.jit(counting(twice, found.append))(jnp.array([0, 2, 2, 7]))
    >>> jax.effects_barrier()
    >>> found[0].counts, found[0].left_out
    ((1, 0, 2), 1)
    """

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        count, what = _counts(eqn)
        (x,), where = inputs, equation_line(eqn)
        each = (x[..., None] == jnp.arange(count)).sum(tuple(range(x.ndim)), dtype=jnp.int32)

        def found(each: Any) -> None:
            counts = tuple(map(int, each))
            tell(Counted(what, where, counts, x.size - sum(counts)))

        jax.debug.callback(found, each)
        return bind_one(eqn, inputs)

    def hidden(eqn: Any) -> None:
        for jaxpr in inner(eqn):
            for _, inside, _ in equations(jaxpr):
                if is_counted(inside, -1):
                    tell(Counted(_counts(inside)[1], equation_line(inside)))

    def is_counted(eqn: Any, number: int) -> bool:
        name = eqn.params.get("name") if eqn.primitive.name == "name" else None
        return isinstance(name, str) and name.startswith(_COUNT) and number not in again

    again = set[int]()
    """What a gradient computes a second time, rather than keep it."""

    def run(*args: Any) -> Any:
        jaxpr = jax.make_jaxpr(function, static_argnums=static_argnums)(*args).jaxpr
        for number, eqn, _ in equations(jaxpr):
            if eqn.params.get("differentiated") and "jaxpr" in eqn.params:
                again.update(number + 1 + n for n, *_ in equations(eqn.params["jaxpr"]))
        return rebind(function, is_counted, bind, static_argnums, hidden)(*args)

    return run


def _counts(eqn: Any) -> tuple[int, str]:
    count, _, what = eqn.params["name"].removeprefix(_COUNT).partition(":")
    return int(count), what
