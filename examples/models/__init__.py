"""Small model programs in plain JAX: what the tests, benchmarks and examples shard.

`NAMES` lists the modules. Each has `make(**sizes)`, which returns `(fn, args)` with `fn(*args)` ready to run;
`abstract` gives the same pair on shapes alone, for sizes that no memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

NAMES = (
    "mlp",
    "attention",
    "gpt2",
    "decoder",
    "convnet",
    "batchnorm",
    "embedding",
    "moe",
    "stencil",
    "cholesky",
)


def abstract(make: Callable[..., tuple[Callable, tuple]], *args: Any, **sizes: Any) -> tuple[Callable, Any]:
    """Return what `make` returns, with `ShapeDtypeStruct`s in place of arrays: nothing is allocated."""
    functions = []

    def arguments() -> tuple:
        function, made = make(*args, **sizes)
        functions.append(function)
        return made

    shapes = jax.eval_shape(arguments)
    return functions[0], shapes


def quick_key(seed: int = 0) -> jax.Array:
    """A key of the generator that compiles fastest: these programs need numbers, not the best of them."""
    return jax.random.key(seed, impl="unsafe_rbg")
