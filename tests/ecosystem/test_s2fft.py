"""s2fft: transforms on the sphere."""

import s2fft

from tests.ecosystem.rows import Row, check, normal, table

L = 8


def forward():
    return Row(
        lambda f: s2fft.forward_jax(f, L, spin=0, sampling="mw", reality=False),
        (normal(L, 2 * L - 1) + 1j * normal(L, 2 * L - 1, seed=1),),
        gradient=False,
        tolerance=1e-3,
    )


def inverse():
    return Row(
        lambda f: s2fft.inverse_jax(f, L, sampling="mw"),
        (normal(L, 2 * L - 1) + 1j * normal(L, 2 * L - 1, seed=1),),
        gradient=False,
        tolerance=1e-3,
    )


ROWS = {"forward": forward, "inverse": inverse}


@table(__name__, ROWS)
def test_s2fft_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)
