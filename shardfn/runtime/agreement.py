"""Whether two runs of a function agree, leaf by leaf: differences, and what rounding alone explains of them.

A difference counts beside the size of its element plus the typical size of its leaf (the median of what is not zero). The
tolerance of a leaf is the sum of two figures, both relative to that size.

- What sums in another order may change: `EPSILONS` machine epsilons of the coarsest dtype of the program, and
  `PER_SUM * sqrt(n)` epsilons of the dtype in which XLA adds, for the longest sum of `n` terms. The random part of a
  rounding error grows with the root of the number of terms.
- What the function itself makes of rounding errors: the unsharded function also runs on arguments that are changed by one
  rounding, and what that changes in the leaf counts `NOISE` times. This covers gradients that are zero but for rounding, and
  functions that enlarge errors.

Both the largest difference and the mean (the root of the mean square) have such a tolerance. Where rounding decides about
single elements, as `relu` does near zero in 16 bits, the mean still tells a wrong leaf from a right one.

Integers and booleans must be equal, unless the changed arguments change them too. NaNs and infinities must be at the same
places.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardfn.ir.rewrite import equations
from shardfn.render.cells import shape_text, table
from shardfn.render.parts import Part, Text
from shardfn.render.printed import Printed

EPSILONS = 8
"""Roundings of the coarsest dtype: an all-reduce of low precision, and elementwise functions that are fused otherwise."""

PER_SUM = 16
"""Of `sqrt(n)`: the error of a matmul of equal positive numbers on CPU, where roundings do not cancel, is up to eight."""

NOISE = 3
"""How many times the change by one rounding of the arguments a leaf may differ; more where few elements tell it."""

CHANGED_RUNS = 2
"""How often the reference runs on arguments that are changed by one rounding."""

BLIND = 0.5
"""From this tolerance of the mean on, a leaf that agrees says little."""


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One leaf of a check.

    Attributes:
      path: the leaf's path, as the report has it: of a gradient that of its argument.
      what: "result", "gradient" (`jax.grad` of the sharded function) or "gradient inside" (`shard` of the gradient).
      shape: the leaf's global shape.
      dtype: its dtype.
      difference: the largest absolute difference; of integers the number of elements that differ.
      relative: the largest difference beside the size of its element; of integers the share of elements that differ.
      tolerance: the largest `relative` that rounding explains.
      mean: the root mean square of the differences beside the sizes of the elements.
      mean_tolerance: the largest `mean` that rounding explains.
      index: where `relative` is largest.
      sharded: the value there in the sharded function.
      reference: the value there in the reference.
    """

    path: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    relative: float
    tolerance: float
    mean: float
    mean_tolerance: float
    index: tuple[int, ...]
    sharded: Any
    reference: Any

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.relative <= self.tolerance and self.mean <= self.mean_tolerance

    @property
    def excess(self) -> float:
        """How many times the tolerance the difference is."""
        least = float(np.finfo(np.float64).tiny)
        return max(self.relative / max(self.tolerance, least), self.mean / max(self.mean_tolerance, least))

    @property
    def verdict(self) -> str:
        """A word for the table."""
        return (
            "differs"
            if not self.agrees
            else "agrees"
            if self.mean_tolerance < BLIND
            else "agrees, but rounding hides much"
        )

    @property
    def name(self) -> str:
        """What the leaf is, and its path."""
        return self.path if self.what == "result" else f"{self.what} {self.path}"

    @property
    def place(self) -> str:
        """`path` with the index, as one would write it."""
        return f"{self.path}[{', '.join(map(str, self.index))}]" if self.index else self.path


@dataclasses.dataclass(frozen=True, repr=False)
class CheckResult(Printed):
    """A sharded function compared with a reference. `print` it for a table; a notebook shows it as HTML.

    Attributes:
      function: the function's name.
      reference: what it is compared with: "the unsharded function on one cpu device".
      rows: one for each leaf of results and gradients, as the function returns them.
      notes: what is not compared, and why.
    """

    function: str
    reference: str
    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether every leaf agrees."""
        return not self.differing

    @property
    def differing(self) -> tuple[CheckRow, ...]:
        """The leaves that differ, the worst first."""
        return tuple(sorted((row for row in self.rows if not row.agrees), key=lambda row: -row.excess))

    @property
    def headline(self) -> str:
        """What was compared with what, and how many leaves differ."""
        count, bad = len(self.rows), len(self.differing)
        verdict = f"{bad} of {count} arrays differ" if bad else f"{count} arrays agree"
        return f"{self.function}: {verdict}; compared with {self.reference}"

    def parts(self) -> list[Part]:
        """The table and the notes, the leaves that differ first."""
        every = (*self.differing, *(row for row in self.rows if row.agrees))
        shown = table(self.headline, _COLUMNS, [*map(_cells, every)], optional=_OPTIONAL)
        return [shown, *([Text("", self.notes)] if self.notes else [])]

    __repr__ = Printed.__str__

    def _html_title(self) -> str:
        return f"Check of {self.function}"


_COLUMNS = (
    "array", "of", "shape", "difference", "relative", "allowed", "mean", "allowed mean", "largest at", "verdict",
)  # fmt: skip
_OPTIONAL = ("largest at", "difference", "mean", "allowed mean")


def _cells(row: CheckRow) -> tuple[str, ...]:
    figures = (row.difference, row.relative, row.tolerance, row.mean, row.mean_tolerance)
    shape, at = f"{row.dtype}{shape_text(row.shape)}", str(list(row.index)) if row.index and row.relative else ""
    return (row.path, row.what, shape, *map(_short, figures), at, row.verdict)


def number_text(value: Any) -> str:
    """A number with the digits that float32 has.

    >>> number_text(1 / 3), number_text(7), number_text(True)
    ('0.33333333', '7', 'True')
    """
    return f"{value:.8g}" if isinstance(value, float | complex) else str(value)


def _short(number: float) -> str:
    return f"{number:.2g}"


def compared(
    path: str,
    what: str,
    sharded: np.ndarray,
    reference: np.ndarray,
    changed: Sequence[np.ndarray],
    tolerance: float,
    beside: float = 1.0,
) -> CheckRow:
    """Compare one leaf of two runs.

    Args:
      path: the leaf's path.
      what: as in `CheckRow`.
      sharded: the leaf of the sharded function.
      reference: the leaf of the reference.
      changed: the leaf of the reference with arguments that are changed by one rounding, once for each such run.
      tolerance: what sums in another order may change (`Rounding.tolerance`).
      beside: the size beside which a leaf is judged that is zero everywhere.

    >>> one = np.ones((2, 3), np.float32)
    >>> row = compared("y", "result", one + 1e-7, one, [one], 1e-6)
    >>> row.agrees, compared("y", "result", one * np.float32([1, 1, 2]), one, [one], 1e-6).index
    (True, (0, 2))
    """
    by_kind = _floats if jnp.issubdtype(reference.dtype, jnp.inexact) else _others
    f = (
        by_kind(sharded, reference, changed, tolerance, beside)
        if reference.size
        else _Figures(0, 0, tolerance, 0, tolerance, 0)
    )
    index = tuple(map(int, np.unravel_index(f.at, reference.shape))) if reference.size else ()
    values = (sharded[index].item(), reference[index].item()) if reference.size else (None, None)
    return CheckRow(
        path, what, reference.shape, str(reference.dtype), float(f.difference), float(f.relative), float(f.tolerance),
        float(f.mean), float(f.mean_tolerance), index, *values,
    )  # fmt: skip


class _Figures(NamedTuple):
    """Those of a `CheckRow`, and the flat index of the largest relative difference."""

    difference: float
    relative: float
    tolerance: float
    mean: float
    mean_tolerance: float
    at: int


def _others(
    sharded: np.ndarray, reference: np.ndarray, changed: Sequence[np.ndarray], tolerance: float, beside: float
) -> _Figures:
    differs = sharded != reference
    noise = max((np.mean(other != reference) for other in changed), default=0.0)
    allowed = _factor(reference.size * len(changed)) * noise
    return _Figures(differs.sum(), differs.mean(), allowed, differs.mean(), allowed, int(differs.argmax()))


def _floats(
    sharded: np.ndarray, reference: np.ndarray, changed: Sequence[np.ndarray], tolerance: float, beside: float
) -> _Figures:
    wide = np.complex128 if jnp.issubdtype(reference.dtype, jnp.complexfloating) else np.float64
    got, want, *others = (a.astype(wide).ravel() for a in (sharded, reference, *changed))
    is_finite = np.isfinite(want)
    size = np.where(is_finite, np.abs(want), 0.0)
    for other in others:
        size = np.maximum(size, np.where(np.isfinite(other), np.abs(other), 0.0))
    typical = np.median(size[size > 0]) if size.any() else beside
    size = size + typical

    def distance(a: np.ndarray) -> np.ndarray:
        """Infinite where one of the two is not finite and the other something else."""
        with np.errstate(invalid="ignore"):
            same = (a == want) | (np.isnan(a) & np.isnan(want))
            return np.where(same, 0.0, np.where(is_finite & np.isfinite(a), np.abs(a - want), np.inf))

    noise, mean_noise, is_steady = 0.0, 0.0, np.ones(want.shape, bool)
    for other in others:
        found = distance(other) / size
        is_steady &= np.isfinite(found)
        found = found[np.isfinite(found)]
        noise, mean_noise = max(noise, found.max(initial=0.0)), max(mean_noise, _mean(found))
    far = np.where(is_steady, distance(got), 0.0)
    relative, factor = far / size, _factor(want.size * len(others))
    at = int(relative.argmax())
    allowed, mean_allowed = (tolerance + factor * n for n in (noise, mean_noise))
    return _Figures(far.max(), relative[at], allowed, _mean(relative), mean_allowed, at)


def _mean(values: np.ndarray) -> float:
    return math.sqrt(np.mean(values**2)) if values.size else 0.0


def _factor(samples: int) -> float:
    """`NOISE`, and more where a few numbers are all that tells the noise."""
    return NOISE + 10 / math.sqrt(max(1, samples))


# ---- what rounding may change


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What a program rounds: the epsilon of its coarsest dtype, and the number of terms of its longest sum."""

    epsilon: float
    terms: int

    @classmethod
    def of(cls, jaxpr: Any, platform: str) -> Rounding:
        """The roundings of a program.

        Args:
          jaxpr: its jaxpr.
          platform: the platform that it runs on, as JAX lowers for it.

        >>> Rounding.of(jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((2, 64)), jnp.ones((64, 3))).jaxpr, "cpu").terms
        64
        """
        epsilon, terms = 0.0, 1
        for _, eqn, _ in equations(jaxpr):
            dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
            epsilon = max(epsilon, *(_epsilon(dtype) for dtype in dtypes), _matmul_epsilon(eqn, platform))
            terms = max(terms, TERMS.get(eqn.primitive.name, lambda eqn: 1)(eqn))
        leaves = (v.aval.dtype for v in (*jaxpr.invars, *jaxpr.outvars))
        return cls(max(epsilon, *map(_epsilon, leaves), float(np.finfo(np.float64).eps)), int(terms))

    @property
    def tolerance(self) -> float:
        """What sums in another order may change, relative to the size of a leaf."""
        adds = min(self.epsilon, float(np.finfo(np.float32).eps))  # XLA adds 16-bit numbers in float32
        return EPSILONS * self.epsilon + PER_SUM * adds * math.sqrt(self.terms)


def _epsilon(dtype: Any) -> float:
    is_number = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return float(jnp.finfo(dtype).eps) if is_number else 0.0


MATMUL_EPSILON: Mapping[str, float] = MappingProxyType({"tpu": 2.0**-7, "cuda": 2.0**-10, "rocm": 2.0**-10})
"""What a float32 matmul or convolution rounds its operands to by default: bfloat16 on TPU, TF32 on GPU."""


def _matmul_epsilon(eqn: Any, platform: str) -> float:
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return 0.0
    asked = eqn.params.get("precision") or getattr(jax.config, "jax_default_matmul_precision", None)
    return 0.0 if "HIGH" in str(asked).upper() or "FLOAT32" in str(asked).upper() else MATMUL_EPSILON.get(platform, 0.0)


def _contracted(eqn: Any) -> int:
    (dims, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[d] for d in dims)


def _reduced(eqn: Any) -> int:
    return eqn.invars[0].aval.size // max(1, eqn.outvars[0].aval.size)


def _window(eqn: Any) -> int:
    kernel, spec = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec
    return kernel.size // max(1, kernel.shape[spec[0]])


def _matrix(eqn: Any) -> int:
    return max((max(v.aval.shape, default=1) for v in eqn.invars), default=1)


TERMS: Mapping[str, Callable[[Any], int]] = MappingProxyType({
    "dot_general": _contracted, "ragged_dot_general": _matrix, "conv_general_dilated": _window,
    "reduce_sum": _reduced, "reduce_prod": _reduced, "reduce": _reduced,
    "cumsum": lambda eqn: eqn.invars[0].aval.shape[eqn.params["axis"]],
    "cumprod": lambda eqn: eqn.invars[0].aval.shape[eqn.params["axis"]],
    "cumlogsumexp": lambda eqn: eqn.invars[0].aval.shape[eqn.params["axis"]],
    "reduce_window_sum": lambda eqn: math.prod(eqn.params["window_dimensions"]),
    "scatter-add": lambda eqn: eqn.invars[2].aval.size, "scatter_add": lambda eqn: eqn.invars[2].aval.size,
    "scan": lambda eqn: eqn.params["length"],
    **dict.fromkeys(("cholesky", "lu", "qr", "geqrf", "householder_product", "triangular_solve", "tridiagonal_solve", "eigh",
                     "svd", "eig", "schur"), _matrix),
})  # fmt: skip
"""How many numbers an op adds up, at most, for one number of its result; of a loop the number of turns."""


# ---- leaves


def compared_leaves(
    paths: Sequence[str], what: str, got: Sequence[Any], want: Sequence[Any], again: Sequence[Sequence[Any]], rounding: Rounding
) -> list[CheckRow]:  # fmt: skip
    """One row for each leaf."""
    floats = [np.abs(w[np.isfinite(w)]).max(initial=0.0) for w in map(numbers, want) if is_inexact(w)]
    beside = float(max(floats, default=0.0)) or 1.0
    return [
        compared(path, what, numbers(mine), numbers(wanted), [*map(numbers, others)], rounding.tolerance, beside)
        for path, mine, wanted, *others in zip(paths, got, want, *again, strict=True)
    ]


def changed_arguments(host: Sequence[Any], rounding: Rounding) -> Iterator[list[Any]]:
    """The arguments with some of their numbers enlarged by one rounding, for each run: not made smaller, as floats may count."""
    for seed in range(CHANGED_RUNS):
        rng = np.random.default_rng(seed)
        yield [_enlarged(leaf, rounding.epsilon, rng) for leaf in host]


def _enlarged(leaf: Any, epsilon: float, rng: np.random.Generator) -> Any:
    if not isinstance(leaf, np.ndarray | float | complex) or not is_inexact(leaf):
        return leaf
    value = np.asarray(leaf)
    wide = value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        new = (wide * (1 + epsilon * rng.integers(0, 2, value.shape))).astype(value.dtype)
        new = np.where(np.isfinite(new), new, value)
    return new if isinstance(leaf, np.ndarray) else new.item()


def host_leaf(leaf: Any) -> Any:
    """A leaf as a NumPy array; keys, weakly typed arrays and Python's numbers stay as they are."""
    is_array = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return numbers(leaf) if is_array and not leaf.weak_type else leaf


def numbers(leaf: Any) -> np.ndarray:
    """A leaf as a NumPy array; of a key its numbers."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if not leaf.size:  # JAX 0.10 does not copy a sharded array without elements
        return np.zeros(leaf.shape, None if is_key else leaf.dtype)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf has a real or complex floating-point dtype."""
    return jnp.issubdtype(
        jax.dtypes.result_type(leaf) if isinstance(leaf, int | float | complex) else leaf.dtype, jnp.inexact
    )


def is_inexact_dtype(dtype: str) -> bool:
    """The same of the name of a dtype."""
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except TypeError:  # a key
        return False
