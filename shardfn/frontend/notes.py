"""Notes that a library function leaves in a traced program, for the report of a plan."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardfn.ir.rewrite import equations

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
