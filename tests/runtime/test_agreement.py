"""What counts as a difference: sums in another order do not, a wrong number does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardfn.runtime.agreement import (
    CheckResult,
    Rounding,
    changed_arguments,
    compared,
    compared_leaves,
    host_leaf,
)

RNG = np.random.default_rng(0)
F32 = float(np.finfo(np.float32).eps)
BF16 = float(jnp.finfo(jnp.bfloat16).eps)
ONE = RNG.normal(size=(4, 8)).astype(np.float32)


def row(sharded, reference, changed=(), tolerance=1e-6, **options):
    return compared(
        "y", "result", np.asarray(sharded), np.asarray(reference), [*map(np.asarray, changed)], tolerance, **options
    )


def changed_at(array, index, value):
    new = np.array(array)
    new[index] = value
    return new


@pytest.mark.parametrize(
    ("sharded", "reference", "agrees"),
    [
        pytest.param(ONE, ONE, True, id="equal"),
        pytest.param(ONE * (1 + F32), ONE, True, id="a rounding"),
        pytest.param(changed_at(ONE, (2, 3), ONE[2, 3] + 0.01), ONE, False, id="one element"),
        pytest.param(changed_at(ONE, (2, 3), np.nan), ONE, False, id="a NaN"),
        pytest.param(changed_at(ONE, 0, np.nan), changed_at(ONE, 0, np.nan), True, id="NaNs at the same places"),
        pytest.param(changed_at(ONE, 0, np.nan), changed_at(ONE, 0, np.inf), False, id="a NaN for an infinity"),
        pytest.param(changed_at(ONE, 0, -np.inf), changed_at(ONE, 0, np.inf), False, id="the sign of an infinity"),
        pytest.param(ONE, changed_at(ONE, 0, np.inf), False, id="a number for an infinity"),
        pytest.param([1, 2, 3], [1, 2, 3], True, id="integers"),
        pytest.param([1, 2, 4], [1, 2, 3], False, id="another integer"),
        pytest.param([True, False], [True, True], False, id="another bool"),
        pytest.param(np.float32(0.3), np.float32(0.3), True, id="a scalar"),
        pytest.param(np.zeros((0, 3)), np.zeros((0, 3)), True, id="no elements"),
        pytest.param(ONE + 1j * ONE, ONE + 1j * ONE, True, id="complex"),
        pytest.param(ONE - 1j * ONE, ONE + 1j * ONE, False, id="its conjugate"),
        pytest.param(ONE.astype(jnp.bfloat16), ONE.astype(jnp.bfloat16), True, id="bfloat16"),
        pytest.param(changed_at(ONE * 0, 0, 1e-3), ONE * 0, False, id="zeros everywhere"),
    ],
)
def test_one_leaf(sharded, reference, agrees):
    assert row(sharded, reference, [reference]).agrees == agrees


def test_a_row_names_the_place_and_both_values():
    found = row(changed_at(ONE, (2, 3), 9), ONE, [ONE])
    assert (found.index, found.sharded, found.reference, found.place) == ((2, 3), 9.0, float(ONE[2, 3]), "y[2, 3]")
    assert found.difference == pytest.approx(9 - ONE[2, 3])


def test_large_numbers_hide_no_small_ones():
    masked = changed_at(ONE, 0, -1e9)  # as attention masks its logits
    assert not row(changed_at(masked, (2, 3), masked[2, 3] + 0.01), masked, [masked]).agrees


def test_what_rounding_changes_is_no_difference():
    noise = [1e-9 * RNG.normal(size=64) for _ in range(4)]  # the gradient of a bias before a normalisation
    assert row(noise[0], noise[1], noise[2:]).agrees
    assert "rounding hides" in row(noise[0], noise[1], noise[2:]).verdict
    assert not row(np.ones(64), noise[1], noise[2:]).agrees
    tokens, other = np.arange(100), changed_at(np.arange(100), 3, 0)  # an argmax of nearly equal numbers
    assert row(changed_at(tokens, 4, 0), tokens, [other]).agrees
    assert not row(tokens[::-1], tokens, [other]).agrees


def test_single_flips_do_not_hide_a_wrong_leaf():
    size = (64, 64)
    want = RNG.normal(size=size)
    flipped = [np.where(RNG.random(size) < 0.002, 0, want) for _ in range(3)]  # relu near zero
    assert row(flipped[0], want, flipped[1:]).agrees
    assert not row(np.where(np.arange(64) < 16, 0, want), want, flipped[1:]).agrees


@pytest.mark.parametrize(
    ("function", "args", "epsilon", "terms"),
    [
        pytest.param(lambda x, w: x @ w, (jnp.ones((2, 64)), jnp.ones((64, 3))), F32, 64, id="matmul"),
        pytest.param(lambda x: x.sum(0), (jnp.ones((32, 3)),), F32, 32, id="sum"),
        pytest.param(lambda x: jnp.cumsum(x, 1), (jnp.ones((32, 3)),), F32, 3, id="cumsum"),
        pytest.param(lambda x: jnp.zeros(3).at[jnp.zeros(16, int)].add(x), (jnp.ones(16),), F32, 16, id="scatter-add"),
        pytest.param(
            lambda x: jax.lax.scan(lambda c, r: (c + r, None), x[0], x)[0], (jnp.ones((9, 2)),), F32, 9, id="scan"
        ),
        pytest.param(
            lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype), (jnp.ones(4),), BF16, 1, id="bfloat16 inside"
        ),
        pytest.param(lambda x: jax.lax.map(lambda r: r @ r, x), (jnp.ones((4, 50)),), F32, 50, id="inside a loop"),
        pytest.param(lambda x: x + 1, (jnp.arange(4),), float(np.finfo(np.float64).eps), 1, id="integers"),
    ],
)
def test_the_roundings_of_a_program(function, args, epsilon, terms):
    found = Rounding.of(jax.make_jaxpr(function)(*args).jaxpr, "cpu")
    assert (found.epsilon, found.terms) == (epsilon, terms)


def test_a_matmul_of_an_accelerator_rounds_its_operands():
    jaxpr = jax.make_jaxpr(lambda x: x @ x)(jnp.ones((4, 4))).jaxpr
    assert Rounding.of(jaxpr, "tpu").epsilon == BF16 > Rounding.of(jaxpr, "cuda").epsilon > F32
    exact = jax.make_jaxpr(lambda x: jnp.matmul(x, x, precision="highest"))(jnp.ones((4, 4))).jaxpr
    assert Rounding.of(exact, "tpu").epsilon == F32


def test_changed_arguments_are_a_rounding_away():
    given = [ONE, jnp.arange(3), 2.0, 3, np.float32([np.inf, np.nan, np.finfo(np.float32).max, 3.0])]
    for new in changed_arguments([*map(host_leaf, given)], Rounding(F32, 1)):
        assert 0 < np.abs(new[0] / ONE - 1).max() < 2 * F32 and new[0].dtype == ONE.dtype
        assert (new[1] == given[1]).all() and new[3] == 3 and 2 <= new[2] < 2 + 1e-6
        assert np.isinf(new[4][0]) and np.isnan(new[4][1]) and new[4][2] == given[4][2] and int(new[4][3]) == 3


def test_the_table_lists_what_differs_first(golden):
    wrong = changed_at(ONE, (2, 3), 9)
    rows = compared_leaves(["a", "b"], "result", [ONE, wrong], [ONE, ONE], [[ONE, ONE]], Rounding(F32, 4))
    result = CheckResult(
        "f", "the unsharded function on one CPU device", tuple(rows), ("gradients are not compared: no rule",)
    )
    assert not result.agrees and [r.path for r in result.differing] == ["b"]
    assert result._repr_html_().startswith("<section") and "b" in repr(result)
    golden("check", str(result))
