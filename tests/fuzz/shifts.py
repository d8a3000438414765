"""Are random programs with their movement as shifts the programs that were written? On one device, so some times as fast as judging
sharded ones.

`python -m tests.fuzz.shifts --programs 5000` prints each program that differs. Numbers have 64 bits: what remains of rounding is small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.movement import shifted, with_shifts
from tests.fuzz.programs import draw_program

LONG = {"float32": "float64", "complex64": "complex128"}


def drawn(seed: int) -> tuple[str, Callable[..., Any], list[jax.Array]]:
    """A random program as text, as a function that returns its gradients too, and its arguments."""
    program = draw_program(("shifts", seed), 8)
    function = program.plain()
    args = [jnp.asarray(x.astype(LONG.get(str(x.dtype), x.dtype))) for x in program.arguments()]
    floats = tuple(i for i, x in enumerate(args) if x.dtype == "float64")

    def total(*args: Any) -> Any:
        results = [y for y in jax.tree.leaves(function(*args)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum((jnp.sin(jnp.real(y)).sum() for y in results), jnp.float64(0))

    def with_gradients(*args: Any) -> Any:
        return function(*args), jax.grad(total, floats)(*args)

    return program.source(), with_gradients if program.differentiable and floats else function, args


def differs(seed: int) -> str | None:
    """How the shifted form of a random program differs; empty where it does not, None where there is nothing to compare."""
    with jax.enable_x64(True):
        try:
            source, function, args = drawn(seed)
            closed = jax.make_jaxpr(function)(*args)
            if shifted(closed) is None:
                return None
            want = jax.jit(function)(*args)
        except (TypeError, ValueError, NotImplementedError, IndexError):  # it does not run as it is
            return None
        text = f"{source}{[(x.shape, str(x.dtype)) for x in args]}"
        try:
            got = jax.jit(with_shifts(function))(*args)
        except Exception as error:  # whatever it is, the program runs as it is
            return f"{text}\n{type(error).__name__}: {error}"
        if _same(got, want):
            return ""
        with jax.disable_jit():  # XLA on CPU reads what it has written (openxla/xla 49176)
            return "" if _same(got, function(*args)) else text


def _same(got: Any, want: Any) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.allclose(a, b, 1e-6, 1e-6, equal_nan=True) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    compared = wrong = 0
    for seed in range(options.seed, options.seed + options.programs):
        text = differs(seed)
        compared += text is not None
        if text:
            wrong += 1
            print(f"# seed {seed}\n{text}\n", flush=True)
        if seed % 100 == 99:
            jax.clear_caches()  # what XLA compiles stays in memory
    print(f"# {options.programs} programs, {compared} that move rows, {wrong} wrong")


if __name__ == "__main__":
    main()
